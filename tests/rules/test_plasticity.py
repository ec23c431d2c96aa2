"""Plasticity equals its literal sums over pairs and triplets of spikes."""

import brainstate
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace

STEPS, BATCH, INPUTS, UNITS, BETA, RATE = 40, 2, 3, 2, 0.8, 0.5
XS = np.asarray(np.random.default_rng(1).random((STEPS, BATCH, INPUTS)) < 0.3, float)
MODULATORS = np.random.default_rng(2).normal(size=(STEPS, BATCH))
WEIGHT = np.random.default_rng(0).uniform(0.3, 0.8, (INPUTS, UNITS))

pytestmark = pytest.mark.usefixtures("float64")


class Net(brainstate.nn.Module):
    def __init__(self):
        super().__init__()
        start = {"w_init": jnp.asarray(WEIGHT), "b_init": jnp.zeros(UNITS)}
        self.synapses = braintrace.nn.Linear(INPUTS, UNITS, **start)
        self.neurons = braintrace.nn.Leaky(UNITS, beta=BETA)

    def update(self, x):
        return self.neurons(self.synapses(x))


def spikes_of(currents):
    """The spikes of one neuron after each step, with its bias of zero."""
    membrane, spikes = 0.0, []
    for current in currents:
        membrane = BETA * membrane + current - (membrane >= 1)
        spikes.append(float(membrane >= 1))
    return spikes


def pairs(rule, x, z, t):
    """The change of a weight in a step, summed over the pairs of spikes that end there."""
    up = sum(x[s] * z[t] * np.exp(-(t - s) / rule.tau_plus) for s in range(t + 1))
    down = sum(z[s] * x[t] * np.exp(-(t - s) / rule.tau_minus) for s in range(t))
    return rule.a_plus * up - rule.a_minus * down


def triplets(rule, x, z, t):
    """The same with the pairs before it."""
    slow_z = sum(z[s] * np.exp(-(t - s) / rule.tau_y) for s in range(t))
    slow_x = sum(x[s] * np.exp(-(t - s) / rule.tau_x) for s in range(t))
    up = sum(x[s] * z[t] * np.exp(-(t - s) / rule.tau_plus) for s in range(t + 1))
    down = sum(z[s] * x[t] * np.exp(-(t - s) / rule.tau_minus) for s in range(t))
    a_plus = rule.a_plus + rule.a3_plus * slow_z
    return a_plus * up - (rule.a_minus + rule.a3_minus * slow_x) * down


def eligibility(rule, x, z, t):
    return sum(np.exp(-(t - s) / rule.tau_eligibility) * pairs(rule, x, z, s) for s in range(t + 1))


RULES = {
    pairs: braintrace.PairSTDP(state="mem", tau_plus=5.0, tau_minus=8.0),
    triplets: braintrace.TripletSTDP(state="mem", a_plus=2e-3),
    eligibility: braintrace.RewardSTDP(state="mem", tau_plus=4.0, tau_eligibility=10.0),
}


@pytest.mark.parametrize("literal", RULES, ids=lambda f: f.__name__)
def test_a_stream_with_a_modulator_changes_weights_by_the_sum_over_spikes(literal):
    """Weights change after every step, and with them the spikes of the next ones."""
    rule, net = RULES[literal], Net()
    learner = braintrace.compile(net, rule, XS[0], batch_size=BATCH)

    def step_fn(x, modulator):
        learner(x)
        return braintrace.three_factor_loss(net.neurons.mem.value, -modulator)

    learner.etrace_online(XS, MODULATORS, step_fn=step_fn, optimizer=optax.sgd(RATE))
    found = net.synapses.weight.value

    weight, weights = WEIGHT.copy(), []
    for t in range(STEPS):
        weights.append(weight.copy())
        for b, j in np.ndindex(BATCH, UNITS):
            z = spikes_of([XS[s, b] @ weights[s][:, j] for s in range(t + 1)])
            for i in range(INPUTS):
                change = literal(rule, XS[:, b, i], z, t)
                weight[i, j] += RATE * MODULATORS[t, b] * change
    assert np.abs(weight - WEIGHT).max() > 1e-3
    np.testing.assert_allclose(found["weight"], weight, atol=1e-10)
    np.testing.assert_array_equal(found["bias"], 0.0)


def test_a_state_that_the_operation_does_not_reach_is_refused():
    with pytest.raises(braintrace.OptionError, match="neurons/mem"):
        braintrace.compile(Net(), braintrace.PairSTDP(), XS[0], batch_size=BATCH)
