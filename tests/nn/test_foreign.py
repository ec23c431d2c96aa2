"""Modules of other packages learn as they are, or are reported.

Layers of `brainstate.nn` have no twin in `braintrace.nn`; neurons have the numbers of
`brainpy.state`. It, and `braintools` with its surrogates, are imported when a test needs them: it
takes seconds.
"""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u

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


def test_every_layer_of_brainstate_has_its_name():
    names = [name for name in nn.__all__ if isinstance(getattr(nn, name), type)]
    layers = [name for name in names if issubclass(getattr(nn, name), nn.Module)]
    assert {"Conv2d", "Dropout", "LayerNorm", "MaxPool2d", "ReLU", "Sequential"} <= {*layers}
    for name in {*layers} - {"Delay"}:  # ours has arguments of its own
        layer = getattr(braintrace.nn, name)
        assert layer is getattr(braintrace.nn, name)
        assert layer.__name__ == getattr(nn, name).__name__
        assert issubclass(layer, getattr(nn, name))
    assert not hasattr(braintrace.nn, "relu")


# --- brainpy --------------------------------------------------------------------------------------

INPUTS, UNITS, LONG = 3, 4, 12


@pytest.fixture
def state():
    return pytest.importorskip("brainpy").state


def drive():
    return np.abs(np.random.default_rng(1).standard_normal((4 * LONG, UNITS)))


ADAPTING = {"A1": 0.1 * u.mA, "A2": -0.2 * u.mA, "a": 0.01 / u.ms}
PAIRS = {"LIF": ("LIF", {}, 8.0 * u.mA), "GIF": ("Gif", ADAPTING, 4.0 * u.mA)}


@pytest.mark.usefixtures("time_step")
@pytest.mark.parametrize("reset", ["soft", "hard"])
@pytest.mark.parametrize("name", PAIRS)
def test_neurons_give_the_numbers_of_brainpy(name, reset, state):
    of_brainpy, options, current = PAIRS[name]
    courses = []
    for build in (getattr(braintrace.nn, name), getattr(state, of_brainpy)):
        neuron = build(UNITS, spk_reset=reset, **options)
        neuron.init_state()
        spikes = brainstate.transform.for_loop(neuron, drive() * current)
        states = neuron.states(brainstate.HiddenState).values()
        courses.append([spikes, *(u.get_mantissa(s.value) for s in states)])
    assert 0.02 < courses[0][0].mean() < 0.9
    for found, expected in zip(*courses, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-9)


class Projected(brainstate.nn.Module):
    """Neurons behind a projection of brainpy, whose product is one of brainstate."""

    def __init__(self, state, spike):
        super().__init__()
        self.neurons = state.LIF(UNITS, tau=10.0 * u.ms, V_th=1.0 * u.mV, spk_fun=spike)
        weight = 2 * np.random.default_rng(5).random((INPUTS, UNITS)) * u.mA
        self.projection = state.AlignPostProj(
            comm=brainstate.nn.Linear(INPUTS, UNITS, w_init=weight, b_init=None),
            syn=state.Expon.desc(UNITS, tau=5.0 * u.ms, g_initializer=lambda s: np.zeros(s) * u.mA),
            out=state.CUBA.desc(scale=1.0),
            post=self.neurons,
        )
        self.w_out = brainstate.ParamState(jnp.linspace(-0.5, 1.0, UNITS)[:, None])

    def update(self, x):
        self.projection(x)
        return self.neurons() @ self.w_out.value


@pytest.mark.usefixtures("time_step")
def test_projections_learn_without_a_mark(state):
    """D_RTRL is exact, so that it follows the finite difference of a loss in its readout."""
    braintools = pytest.importorskip("braintools")
    xs = np.abs(np.random.default_rng(2).standard_normal((LONG, 2, INPUTS)))

    def step(model, x):
        return (model(x) ** 2).sum()

    model = Projected(state, braintools.surrogate.ReluGrad())
    brainstate.nn.init_all_states(model, batch_size=2)

    def total():
        return brainstate.transform.for_loop(lambda x: step(model, x), xs).sum()

    weights = model.states(brainstate.ParamState)
    expected = brainstate.transform.jit(brainstate.transform.grad(total, weights))()
    learner = braintrace.compile(model, "d_rtrl", xs[0], batch_size=2, mark="auto", strict=True)
    found = learner.etrace_grad(xs, step_fn=lambda x: step(learner, x), reduction="sum")
    assert len(expected) == 2
    for path, value in expected.items():
        value, own = (u.get_mantissa(next(iter(_leaves(tree)))) for tree in (value, found[path]))
        assert np.abs(value).max() > 1e-3
        np.testing.assert_allclose(own, value, atol=1e-9 * np.abs(value).max())


class Clocked(brainstate.nn.Module):
    """Refractory neurons, which read the time from the environment."""

    def __init__(self, state, spike):
        super().__init__()
        self.w = brainstate.ParamState(2 * np.random.default_rng(5).random((INPUTS, UNITS)) * u.mA)
        self.neurons = state.LIFRef(UNITS, tau_ref=2.5 * u.ms, V_th=1.0 * u.mV, spk_fun=spike)

    def update(self, t, x):
        with brainstate.environ.context(**({} if t is None else {"t": t})):
            return self.neurons(x @ self.w.value)


@pytest.mark.usefixtures("time_step")
def test_neurons_with_a_clock_take_the_time_as_an_argument(state):
    spike = pytest.importorskip("braintools").surrogate.ReluGrad()
    xs = 3 * np.abs(np.random.default_rng(2).standard_normal((LONG, 2, INPUTS)))
    times, model = np.arange(LONG) * 1.0 * u.ms, Clocked(state, spike)
    brainstate.nn.init_all_states(model, batch_size=2)

    def total():
        return brainstate.transform.for_loop(model, times, xs).sum()

    expected = brainstate.transform.grad(total, model.w)()
    learner = braintrace.compile(model, "d_rtrl", times[0], xs[0], batch_size=2)
    found = learner.etrace_grad(
        times, xs, step_fn=lambda t, x: learner(t, x).sum(), reduction="sum"
    )
    found, expected = (u.get_mantissa(value) for value in (found[("w",)], expected))
    assert np.abs(expected).max() > 1e-3
    np.testing.assert_allclose(found, expected, atol=1e-9 * np.abs(expected).max())
    with pytest.raises(KeyError) as caught:
        braintrace.compile(model, "d_rtrl", None, xs[0], batch_size=2)
    assert "def update(self, t, x)" in caught.value.__notes__[-1]


def _leaves(tree):
    return tree.values() if isinstance(tree, dict) else [tree]
