"""Layers of `brainstate.nn` that have no twin in `braintrace.nn` learn without marks."""

import re
from collections.abc import Callable
from dataclasses import dataclass

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_gradients_close
from backpropagation import of_squares
from brainstate.nn import _normalizations as normalizations
from nn_swaps import SWAPS

import braintrace

BATCH, STEPS = 2, 5
pytestmark = pytest.mark.usefixtures("float64")


@dataclass(frozen=True)
class Alone:
    """One layer, with outputs of the shape of its inputs.

    build: makes it.
    shape: of one input.
    cut: what D_RTRL takes for a constant where the layer sees the state: the ``input`` of a
        product, the ``statistics`` of a norm, nothing.
    """

    build: Callable
    shape: tuple[int, ...] = (4,)
    cut: str | None = None

    def model(self, recurrent):
        """It in front of a leaky state; its parameters are drawn anew."""
        model = Leaky(self.build(), self.shape, 0.4 if recurrent else None)
        generator = np.random.default_rng(5)
        for state in model.states(brainstate.ParamState).values():
            state.value = jax.tree.map(
                lambda leaf: jnp.asarray(leaf + generator.standard_normal(leaf.shape) / 2),
                state.value,
            )
        return model


class Leaky(brainstate.nn.Module):
    """A leaky state behind a layer that sees the input, and maybe a part of the state."""

    def __init__(self, layer, shape, feedback):
        super().__init__()
        self.layer, self.shape, self.feedback, self.is_cut = layer, shape, feedback, False
        self.w_out = brainstate.ParamState(jnp.linspace(-1.0, 1.0, int(np.prod(shape))))

    def init_state(self, batch_size, **_):
        values = np.linspace(-0.4, 0.6, batch_size * int(np.prod(self.shape)))
        self.h = brainstate.HiddenState(jnp.asarray(values.reshape(batch_size, *self.shape)))

    def update(self, x):
        h = self.h.value
        if self.feedback is not None:
            x = x + self.feedback * (jax.lax.stop_gradient(h) if self.is_cut else h)
        self.h.value = 0.8 * h + jnp.tanh(self.layer(x))
        return jnp.tanh(self.h.value).reshape(len(x), -1) @ self.w_out.value


class Scaled(brainstate.nn.Module):
    """Inputs times a positive parameter."""

    def __init__(self):
        super().__init__()
        self.scale = brainstate.nn.Param(jnp.ones(4), t=brainstate.nn.SoftplusT(0.0))

    def update(self, x):
        return x * self.scale.value()


def drawn(shape):
    return jnp.asarray(np.random.default_rng(3).standard_normal(shape))


nn = brainstate.nn
BIAS = {"b_init": nn.init.Constant(0.1)}
ALONE = {
    "ConvTranspose1d": Alone(lambda: nn.ConvTranspose1d((4, 2), 2, 3, **BIAS), (4, 2), "input"),
    "ConvTranspose2d": Alone(
        lambda: nn.ConvTranspose2d((3, 2, 2), 2, 2, groups=2), (3, 2, 2), "input"
    ),
    "ConvTranspose3d": Alone(
        lambda: nn.ConvTranspose3d((1, 2, 2, 2), 1, 2, channel_first=True), (1, 2, 2, 2), "input"
    ),
    "BatchNorm0d": Alone(lambda: nn.BatchNorm0d((4,))),
    "BatchNorm1d": Alone(lambda: nn.BatchNorm1d((3, 2)), (3, 2)),
    "BatchNorm2d": Alone(lambda: nn.BatchNorm2d((2, 2, 2)), (2, 2, 2)),
    "BatchNorm3d": Alone(lambda: nn.BatchNorm3d((2, 1, 2, 2)), (2, 1, 2, 2)),
    "LayerNorm": Alone(lambda: nn.LayerNorm((4,)), cut="statistics"),
    "RMSNorm": Alone(lambda: nn.RMSNorm((4,)), cut="statistics"),
    "GroupNorm": Alone(lambda: nn.GroupNorm((4,), num_groups=2), cut="statistics"),
    "PReLU": Alone(lambda: nn.PReLU(4)),
    "Param": Alone(Scaled),
    "EventLinear": Alone(lambda: nn.EventLinear(4, 4, drawn, float_as_event=False), cut="input"),
    "FixedNumConn": Alone(lambda: nn.FixedNumConn(4, 4, 2, drawn, seed=1), cut="input"),
}
REPORTED = {
    "EventLinear, events": (lambda: nn.EventLinear(4, 4, drawn), "`binary_densemm`"),
    "EventFixedNumConn": (lambda: nn.EventFixedNumConn(4, 4, 2, drawn, seed=1), "`binary_fcnmm`"),
}
"""Kernels that are no operation, and the primitive that is named."""

WAYS = ["d_rtrl", "d_rtrl, recurrent", "rtrl, recurrent"]


@pytest.mark.parametrize(("name", "way"), [("FixedNumConn", "d_rtrl")])
@pytest.mark.filterwarnings("ignore::braintrace.ApproximationWarning")
@pytest.mark.filterwarnings("ignore:brainevent.* is deprecated:DeprecationWarning")
def test_a_layer_learns_as_by_backpropagation(name, way, monkeypatch):
    """As far as D_RTRL follows the states."""
    rule, _, recurrent = way.partition(", ")
    cut = ALONE[name].cut if way == "d_rtrl, recurrent" else None
    xs = jnp.asarray(np.random.default_rng(1).standard_normal((STEPS, BATCH, *ALONE[name].shape)))
    with brainstate.environ.context(fit=not recurrent, precision=64):
        model = ALONE[name].model(bool(recurrent))
        learner = braintrace.compile(model, rule, xs[0], batch_size=BATCH, mark="auto")
        found = learner.etrace_grad(
            xs, step_fn=lambda x: jnp.sum(learner(x) ** 2), reduction="sum", chunk_size=2
        )
        model.is_cut = cut == "input"
        if cut == "statistics":
            statistics = normalizations._compute_stats
            monkeypatch.setattr(
                normalizations,
                "_compute_stats",
                lambda *given, **options: jax.lax.stop_gradient(statistics(*given, **options)),
            )
        assert_gradients_close(found, of_squares(model, xs, batch_size=BATCH), 1e-10, name)


@pytest.mark.filterwarnings("ignore:brainevent.* is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", REPORTED)
def test_a_kernel_that_is_no_operation_is_named(name):
    build, words = REPORTED[name]
    xs = jnp.ones((BATCH, 4))
    with pytest.raises(braintrace.CompilationError, match=f"'layer/weight' .*{words}"):
        braintrace.compile(Leaky(build(), (4,), None), "d_rtrl", xs, batch_size=BATCH, mark="auto")


WITHOUT_PARAMETERS = r"""
Const|Delay|Dropout\w*|Dynamics|ElementWiseBlock|EnvironContext|Flatten|Identity|Map
|Module|RNNCell|Sequential|SpikeBitwise|StateWithDelay|Unflatten|Vmap|(Feature)?AlphaDropout
|\w*(Pool|Unpool|Pad)\dd|\w+Reg|Regularization
|CELU|ELU|GELU|GLU|Hardshrink|Hardsigmoid|Hardswish|Hardtanh|LeakyReLU|LogSigmoid|LogSoftmax|Mish
|RReLU|ReLU6?|SELU|SiLU|Sigmoid|Softmax(2d)?|Softmin|Softplus|Softshrink|Softsign|Tanh|Tanhshrink
|Threshold
"""
"""Names of the layers that have no weight."""


def test_every_layer_of_brainstate_has_a_row_or_no_parameters():
    public = {getattr(nn, name) for name in nn.__all__}
    layers = {k.__name__ for k in public if isinstance(k, type) and issubclass(k, nn.Module)}
    rows = {row.partition(",")[0] for row in (*(swap.id for swap in SWAPS), *ALONE, *REPORTED)}
    others = re.compile(WITHOUT_PARAMETERS, re.VERBOSE)
    assert {name for name in layers - rows if not others.fullmatch(name)} == set()
