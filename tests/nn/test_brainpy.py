"""Neurons have the numbers of `brainpy.state`, whose networks learn as they are.

It, and `braintools` with its surrogates, are imported when a test needs them: it takes seconds.
"""

import brainstate
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u

import braintrace
from braintrace import nn

INPUTS, UNITS, STEPS = 3, 4, 12
pytestmark = pytest.mark.usefixtures("float64", "time_step")


@pytest.fixture
def state():
    return pytest.importorskip("brainpy").state


def drive():
    return np.abs(np.random.default_rng(1).standard_normal((4 * STEPS, UNITS)))


ADAPTING = {"A1": 0.1 * u.mA, "A2": -0.2 * u.mA, "a": 0.01 / u.ms}
PAIRS = {"LIF": ("LIF", {}, 8.0 * u.mA), "GIF": ("Gif", ADAPTING, 4.0 * u.mA)}


@pytest.mark.parametrize("reset", ["soft", "hard"])
@pytest.mark.parametrize("name", PAIRS)
def test_neurons_give_the_numbers_of_brainpy(name, reset, state):
    of_brainpy, options, current = PAIRS[name]
    courses = []
    for build in (getattr(nn, name), getattr(state, of_brainpy)):
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


def test_projections_learn_without_a_mark(state):
    """D_RTRL is exact, so that it follows the finite difference of a loss in its readout."""
    braintools = pytest.importorskip("braintools")
    xs = np.abs(np.random.default_rng(2).standard_normal((STEPS, 2, INPUTS)))

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


def _leaves(tree):
    return tree.values() if isinstance(tree, dict) else [tree]
