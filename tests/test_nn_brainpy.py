"""The neurons of `brainpy.state` and the surrogates of `braintools` compile as they are."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u
from assertions import assert_gradients_close

import braintrace
from braintrace import nn

needs = "needs the extra `brainpy`: pip install braintrace[brainpy]"
state = pytest.importorskip("brainpy", reason=needs).state
surrogate = pytest.importorskip("braintools", reason=needs).surrogate

BATCH, INPUTS, UNITS, STEPS = 2, 3, 4, 12
pytestmark = pytest.mark.usefixtures("float64")


@pytest.fixture(autouse=True)
def time_step():
    with brainstate.environ.context(dt=1.0 * u.ms):
        yield


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
        self.synapse = state.Expon(UNITS, tau=4.0 * u.ms, g_initializer=zero(u.mA))

    def current(self, x):
        return self.synapse(self.dense(x))


def zero(unit):
    return lambda shape: jnp.zeros(shape) * unit


def neuron(name, spike, **options):
    return lambda: getattr(state, name)(UNITS, spk_fun=getattr(surrogate, spike)(), **options)


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
    return jnp.asarray(np.random.default_rng(1).standard_normal((STEPS, BATCH, INPUTS)))


@pytest.mark.parametrize("name", NETWORKS)
def test_d_rtrl_equals_bptt(name):
    xs = inputs()
    model = NETWORKS[name]()
    learner = braintrace.compile(model, "d_rtrl", xs[0], batch_size=BATCH)
    assert not [d for d in learner.graph.diagnostics if d.level == "warning"]
    found = learner.etrace_grad(xs, step_fn=lambda x: (learner(x) ** 2).sum(), reduction="sum")

    brainstate.nn.reset_all_states(model, batch_size=BATCH)
    parameters = model.states(brainstate.ParamState)

    def sequence_loss():
        return (brainstate.transform.for_loop(model, xs) ** 2).sum()

    loss = brainstate.transform.grad(sequence_loss, parameters, return_value=True)
    expected, value = brainstate.transform.jit(loss)()
    assert value > 0.01  # they spike
    assert all(np.abs(leaf).max() > 1e-6 for leaf in jax.tree.leaves(expected))
    assert_gradients_close(found, expected, 1e-9, name)


PAIRS = {
    "LIF": (lambda **o: nn.LIF(UNITS, **o), lambda **o: state.LIF(UNITS, **o), 8.0 * u.mA),
    "GIF": (
        lambda **o: nn.GIF(UNITS, A1=0.1 * u.mA, A2=-0.2 * u.mA, a=0.01 / u.ms, **o),
        lambda **o: state.Gif(UNITS, A1=0.1 * u.mA, A2=-0.2 * u.mA, a=0.01 / u.ms, **o),
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
