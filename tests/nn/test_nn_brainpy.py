"""Neurons, synapses and networks of `brainpy.state` learn as they are.

It, and `braintools` with its surrogates, are imported when a test needs them: it takes seconds.
"""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u
from assertions import assert_gradients_close
from backpropagation import of_squares

import braintrace
from braintrace import nn

needs = 'needs the extra `brainpy`: pip install -e ".[brainpy]"'

BATCH, INPUTS, UNITS, STEPS = 2, 3, 4, 12
pytestmark = pytest.mark.usefixtures("float64")


def brainpy_state():
    return pytest.importorskip("brainpy", reason=needs).state


def surrogate(name):
    return getattr(pytest.importorskip("braintools", reason=needs).surrogate, name)()


@pytest.fixture(autouse=True)
def time_step():
    with brainstate.environ.context(dt=1.0 * u.ms, precision=64):
        yield


def gradients(learner, xs):
    learner.reset_state()
    return learner.etrace_grad(
        xs,
        step_fn=lambda x: (learner(x) ** 2).sum(),
        reduction="sum",
        chunk_size=5,
        return_value=True,
    )


def loss_after_descent(learner, xs, rate=0.005):
    for _ in range(5):
        for path, gradient in gradients(learner, xs)[0].items():
            weight = learner.algorithm.states_of_model[path]
            weight.value = jax.tree.map(lambda w, g: w - rate * g, weight.value, gradient)
    return gradients(learner, xs)[1].sum()


class Network(brainstate.nn.Module):
    """Inputs, neurons of brainpy, a plain readout."""

    def __init__(self, neuron, gain):
        super().__init__()
        weight = gain * np.random.default_rng(3).standard_normal((INPUTS, UNITS))
        self.dense = nn.Linear(INPUTS, UNITS, w_init=weight * u.mA, b_init=None)
        self.neuron = neuron
        self.w_out = brainstate.ParamState(jnp.linspace(-0.5, 1.0, UNITS)[:, None])

    def update(self, x):
        return self.neuron(self.current(x)) @ self.w_out.value

    def current(self, x):
        return self.dense(x)


class Synaptic(Network):
    """With an exponential synapse of brainpy in front of the neurons."""

    def __init__(self, neuron, gain):
        super().__init__(neuron, gain)
        self.synapse = brainpy_state().Expon(UNITS, tau=4.0 * u.ms, g_initializer=zero(u.mA))

    def current(self, x):
        return self.synapse(self.dense(x))


def zero(unit):
    return lambda shape: jnp.zeros(shape) * unit


def neuron(name, spike, **options):
    return lambda: getattr(brainpy_state(), name)(UNITS, spk_fun=surrogate(spike), **options)


NETWORKS = {
    "LIF, ReluGrad": lambda: Network(neuron("LIF", "ReluGrad")(), 10.0),
    "LIF, hard reset": lambda: Network(neuron("LIF", "Arctan", spk_reset="hard")(), 10.0),
    "LIF, Sigmoid": lambda: Network(neuron("LIF", "Sigmoid")(), 10.0),
    "LIF, MultiGaussianGrad": lambda: Network(neuron("LIF", "MultiGaussianGrad")(), 10.0),
    "ALIF": lambda: Network(neuron("ALIF", "ReluGrad", V_initializer=zero(u.mV))(), 10.0),
    "Gif": lambda: Network(neuron("Gif", "ReluGrad", A2=-0.5 * u.mA)(), 20.0),
    "Expon": lambda: Synaptic(neuron("LIF", "ReluGrad")(), 8.0),
}


def inputs():
    return jax.device_put(np.random.default_rng(1).standard_normal((STEPS, BATCH, INPUTS)))


@pytest.mark.parametrize("name", ["LIF, hard reset", "LIF, MultiGaussianGrad"])
def test_d_rtrl_equals_bptt(name):
    xs = inputs()
    model = NETWORKS[name]()
    learner = braintrace.compile(model, "d_rtrl", xs[0], batch_size=BATCH)
    assert not [d for d in learner.graph.diagnostics if d.level == "warning"]
    found = learner.etrace_grad(xs, step_fn=lambda x: (learner(x) ** 2).sum(), reduction="sum")

    expected, value = of_squares(model, xs, batch_size=BATCH, return_value=True)
    assert value > 0.01  # they spike
    assert all(np.abs(leaf).max() > 1e-6 for leaf in jax.tree.leaves(expected))
    assert_gradients_close(found, expected, 1e-9, name)


def theirs(name, **options):
    return getattr(brainpy_state(), name)(UNITS, **options)


PAIRS = {
    "LIF": (
        lambda **o: nn.LIF(UNITS, **o),
        lambda **o: brainpy_state().LIF(UNITS, **o),
        8.0 * u.mA,
    ),
    "GIF": (
        lambda **o: nn.GIF(UNITS, A1=0.1 * u.mA, A2=-0.2 * u.mA, a=0.01 / u.ms, **o),
        lambda **o: theirs("Gif", A1=0.1 * u.mA, A2=-0.2 * u.mA, a=0.01 / u.ms, **o),
        4.0 * u.mA,
    ),
}


@pytest.mark.parametrize("reset", ["soft", "hard"])
@pytest.mark.parametrize("name", PAIRS)
def test_our_neurons_give_the_numbers_of_brainpy(name, reset):
    ours, theirs, current = PAIRS[name]
    found, expected = [], []
    for build, course in ((ours, found), (theirs, expected)):
        module = build(spk_reset=reset)
        module.init_state()
        drive = jnp.abs(inputs()[:, 0, :1] + jnp.linspace(0, 1, UNITS)) * current
        spikes = brainstate.transform.for_loop(module, u.math.concatenate([drive] * 4))
        course += [spikes, *(s.value for s in module.states(brainstate.HiddenState).values())]
    assert 0.02 < found[0].mean() < 0.9
    for wanted, got in zip(expected, found, strict=True):
        np.testing.assert_allclose(
            u.get_mantissa(got), u.get_mantissa(wanted), rtol=1e-6, atol=1e-9
        )


# --- projections --------------------------------------------------------------------------


def constant(value):
    return brainstate.nn.init.Constant(value)


class Projected(brainstate.nn.Module):
    """Neurons with exponential synapses from inputs and from each other, by plain layers.

    currents: the synapses give currents; otherwise conductances, those within inhibitory.
    cut: whether derivatives pass the product from spikes to synapses back to the step before.
    """

    def __init__(self, currents, cut=False):
        super().__init__()
        state, rest = brainpy_state(), (0 if currents else -60) * u.mV
        self.neurons = state.LIF(
            UNITS,
            R=(1.0 * u.ohm if currents else 1.0 * u.kohm),
            tau=10.0 * u.ms,
            V_rest=rest,
            V_reset=rest,
            V_th=rest + 1.0 * u.mV,
            V_initializer=constant(rest),
            spk_fun=surrogate("ReluGrad"),
        )
        draw = np.random.default_rng(5).random
        unit = u.mA if currents else 0.02 * u.mS
        outputs = (state.CUBA.desc(scale=1.0),) * 2
        if not currents:
            outputs = tuple(state.COBA.desc(E=e) for e in (0 * u.mV, -80 * u.mV))

        def projection(count, tau, output, label):
            weight = 2 * draw((count, UNITS)) * unit
            return state.AlignPostProj(
                comm=brainstate.nn.Linear(count, UNITS, w_init=weight, b_init=None),
                syn=state.Expon.desc(UNITS, tau=tau, g_initializer=constant(0 * unit)),
                out=output,
                post=self.neurons,
                label=label,
            )

        self.from_inputs = projection(INPUTS, 5.0 * u.ms, outputs[0], "input")
        self.within = projection(UNITS, 8.0 * u.ms, outputs[1], "within")
        self.w_out = brainstate.ParamState(jnp.linspace(-0.5, 1.0, UNITS)[:, None])
        self.cut = cut

    def update(self, x):
        self.from_inputs(x)
        spikes = self.neurons.get_spike()
        self.within(jax.lax.stop_gradient(spikes) if self.cut else spikes)
        return self.neurons() @ self.w_out.value


@pytest.mark.parametrize(("currents", "rule"), [(True, "d_rtrl")])
@pytest.mark.filterwarnings("ignore::braintrace.ApproximationWarning")
def test_projections_learn_unmarked(currents, rule, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    xs = jnp.abs(inputs())
    model = Projected(currents)
    learner = braintrace.compile(model, rule, xs[0], batch_size=BATCH, mark="auto")
    printed = str(learner.report())
    assert "from_inputs/…/within(…) // (…)/syn/g" in printed and "<class" not in printed

    found, before = gradients(learner, xs)
    expected, value = of_squares(
        Projected(currents, cut=rule == "d_rtrl"), xs, batch_size=BATCH, return_value=True
    )
    assert value > 0.1  # they spike
    np.testing.assert_allclose(before.sum(), value)
    assert_gradients_close(found, expected, 1e-9)

    assert loss_after_descent(learner, xs, 0.01) < 0.9 * before.sum()
