"""Layers of `brainstate.nn` without a twin in `braintrace.nn` learn unmarked, or are reported."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nn_swaps import SWAPS

import braintrace

BATCH, STEPS = 2, 5
nn = brainstate.nn
pytestmark = [
    pytest.mark.usefixtures("float64"),
    pytest.mark.filterwarnings("ignore:brainevent.* is deprecated:DeprecationWarning"),
]


def drawn(shape):
    return jnp.asarray(np.random.default_rng(3).standard_normal(shape))


class Leaky(brainstate.nn.Module):
    """A leaky state behind a layer, with parameters that are drawn anew."""

    def __init__(self, layer, shape):
        super().__init__()
        self.layer, self.shape = layer, shape
        for state in self.states(brainstate.ParamState).values():
            state.value = jax.tree.map(lambda leaf: drawn(leaf.shape) / 2, state.value)

    def init_state(self, batch_size, **_):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, *self.shape)))

    def update(self, x):
        self.h.value = 0.8 * self.h.value + jnp.tanh(self.layer(x))
        return self.h.value


class Scaled(brainstate.nn.Module):
    """Inputs times a positive parameter."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Param(jnp.ones(4), t=nn.SoftplusT(0.0))

    def update(self, x):
        return x * self.scale.value()


LEARNING = {
    "ConvTranspose1d": (
        lambda: nn.ConvTranspose1d((4, 2), 2, 3, b_init=nn.init.Constant(0.1)),
        (4, 2),
    ),
    "BatchNorm1d": (lambda: nn.BatchNorm1d((3, 2)), (3, 2)),
    "LayerNorm": (lambda: nn.LayerNorm((4,)), (4,)),
    "PReLU": (lambda: nn.PReLU(4), (4,)),
    "Param": (Scaled, (4,)),
    "EventLinear": (lambda: nn.EventLinear(4, 4, drawn, float_as_event=False), (4,)),
    "FixedNumConn": (lambda: nn.FixedNumConn(4, 4, 2, drawn, seed=1), (4,)),
}
REPORTED = {
    "EventLinear": lambda: nn.EventLinear(4, 4, drawn),
    "EventFixedNumConn": lambda: nn.EventFixedNumConn(4, 4, 2, drawn, seed=1),
}
"""Kernels that are no operation."""


@pytest.mark.parametrize("name", LEARNING)
def test_a_layer_learns_as_by_backpropagation(name):
    build, shape = LEARNING[name]
    xs = drawn((STEPS, BATCH, *shape))
    with brainstate.environ.context(fit=True, precision=64):
        model = Leaky(build(), shape)
        learner = braintrace.compile(model, "d_rtrl", xs[0], batch_size=BATCH, mark="auto")

        def step(run):
            return lambda x: jnp.sum(run(x) ** 2)

        found = learner.etrace_grad(xs, step_fn=step(learner), reduction="sum", chunk_size=2)
        model = Leaky(build(), shape)  # statistics start anew as well
        brainstate.nn.init_all_states(model, batch_size=BATCH)

        def total():
            return brainstate.transform.for_loop(step(model), xs).sum()

        weights = model.states(brainstate.ParamState)
        expected = brainstate.transform.jit(brainstate.transform.grad(total, weights))()
    assert found.keys() == expected.keys()
    for path, tree in expected.items():
        pairs = zip(jax.tree.leaves(found[path]), jax.tree.leaves(tree), strict=True)
        for own, wanted in pairs:
            assert np.abs(wanted).max() > 1e-3
            np.testing.assert_allclose(own, wanted, atol=1e-10 * np.abs(wanted).max())


@pytest.mark.parametrize("name", REPORTED)
def test_a_kernel_that_is_no_operation_is_named(name):
    with pytest.raises(braintrace.CompilationError, match="layer/weight"):
        braintrace.compile(
            Leaky(REPORTED[name](), (4,)), "d_rtrl", jnp.ones((2, 4)), batch_size=2, mark="auto"
        )


def test_layers_without_a_product_have_the_same_names():
    names = [name for name in nn.__all__ if isinstance(getattr(nn, name), type)]
    others = [name for name in names if name not in braintrace.nn.__all__]
    shared = [name for name in others if hasattr(braintrace.nn, name)]
    assert {"Dropout", "LayerNorm", "MaxPool2d", "ReLU", "Sequential"} <= {*shared}
    assert all(getattr(braintrace.nn, name) is getattr(nn, name) for name in shared)
    twins = {row.id.partition(",")[0] for row in SWAPS}
    assert {*names} & {*braintrace.nn.__all__} <= twins | {"Embedding"}
