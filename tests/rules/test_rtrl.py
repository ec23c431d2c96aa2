"""RTRL and what is between it and D-RTRL: SnAp-n is RTRL with a mask, OSTL is D-RTRL by layers.

Rules that follow all states refuse samples that mix.
"""

import dataclasses

import brainstate
import jax
import jax.numpy as jnp
import oracle
import pytest
from paths import PATHS
from random_models import BATCH, INPUTS, UNITS, Layer, RandomModel
from test_gradients import TARGETS, XS, Case, expected_of, learner_of, squared_error
from toys import clipped

import braintrace

SPARSE = RandomModel((Layer("bias", "sparse", "leak"),))
FEEDFORWARD = RandomModel((Layer("bias", "gain", "adapting", "spike"), Layer("heads", cell="leak")))
SYNAPSE = RandomModel((Layer("function", "sparse", "synapse"),), "late")
CASES = [
    (SPARSE, "by_chunks", {"mask": "some", "reset": "each", "chunk_size": 4}),
    (RandomModel((Layer("bias", "masked", "leak"),)), "by_chunks", {"mask": "end"}),
    (SYNAPSE, "by_stream", {"reset": "one sample", "vmap": True}),
    (RandomModel((Layer("sparse", "sparse", "plain"),)), "by_own_gradient", {"reset": "all"}),
]

pytestmark = pytest.mark.usefixtures("float64")


def loss(t, y, sample):
    return squared_error(y, jnp.asarray(TARGETS)[t, sample])


@pytest.mark.parametrize(("model", "path", "options"), CASES)
def test_snap_keeps_what_weights_reach_within_two_steps(model, path, options):
    case = Case(model, "snap2", path, **options)
    asked, params = case.request(), model.params()
    found = PATHS[path](learner_of(case), asked, squared_error)
    expected = oracle.snap_n(model, params, XS, loss, 2, asked.mask, asked.reset)
    oracle.assert_close(found, expected, 1e-9, str(case))


def test_snap_of_enough_steps_is_rtrl():
    case = Case(SPARSE, "rtrl", reset="each")
    asked = case.request()
    bptt, rest = expected_of(case), (SPARSE, SPARSE.params(), XS, loss)
    oracle.assert_close(oracle.snap_n(*rest, 3, reset=asked.reset), bptt, 1e-9)
    with pytest.raises(AssertionError, match="off by"):
        oracle.assert_close(oracle.snap_n(*rest, 2, reset=asked.reset), bptt, 1e-3)


def test_a_sequence_goes_on_in_checkpoints():
    found, expected = (learner_of(Case(SPARSE, "rtrl")) for _ in range(2))
    for learner, options in ((found, {"checkpoint": True}), (expected, {})):
        for _ in range(2):
            learner.etrace_grad(XS, step_fn=lambda x, own=learner: jnp.sum(own(x) ** 2), **options)
    oracle.assert_close(found.traces.value, expected.traces.value, 1e-9)


class Population(brainstate.nn.Module):
    """A state changed by some function of all samples."""

    def __init__(self, change):
        super().__init__()
        self.w, self.change = brainstate.ParamState(jnp.ones((INPUTS, UNITS))), change

    def init_state(self, batch_size=None, **_):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, UNITS)))

    def update(self, x):
        self.h.value = 0.5 * self.change(self.h.value) + braintrace.matmul(x, self.w.value)
        return self.h.value


REFUSED = {"a mean over samples": lambda h: h - h.mean(0), "a gradient that is bent": clipped}


@pytest.mark.parametrize("rule", ["rtrl", "ostl_recurrent", "uoro"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_follow_from_single_samples_is_refused(rule, name):
    with pytest.raises(braintrace.CompilationError, match="h"):
        braintrace.compile(Population(REFUSED[name]), rule, XS[0], batch_size=BATCH)


def test_a_mean_that_no_gradient_passes_is_accepted():
    model = Population(lambda h: h - jax.lax.stop_gradient(h.mean(0)))
    learner = braintrace.compile(model, "rtrl", XS[0], batch_size=BATCH)
    (found,) = learner.etrace_grad(XS, step_fn=lambda x: learner(x).sum()).values()
    assert jnp.abs(found).max() > 0


def test_a_cable_of_each_sample_is_followed():
    """Implicit Euler: a linear system whose matrix the samples share couples compartments alone."""
    below = jnp.array([0, -0.3, -0.4, -0.5])
    matrix = below, 1.2 - below - jnp.roll(below, -1), jnp.roll(below, -1)

    def step(p, v, x):
        v = jax.lax.linalg.tridiagonal_solve(*matrix, (v + x @ p["w"])[:, None])[:, 0]
        return v, v[:1]

    def total(p):
        v, value = jnp.zeros((BATCH, UNITS)), 0.0
        for x in XS:
            v, y = jax.vmap(step, (None, 0, 0))(p, v, x)
            value += jnp.sum(y**2)
        return value

    params = {"w": jnp.full((INPUTS, UNITS), 0.3)}
    model = braintrace.from_function(step, params, jnp.zeros(UNITS))
    learner = braintrace.compile(model, "rtrl", XS[0], vmap=True)
    found = learner.etrace_grad(XS, step_fn=lambda x: jnp.sum(learner(x) ** 2), reduction="sum")
    oracle.assert_close(found, jax.grad(total)(params), 1e-9)


def test_parameters_meet_what_samples_share():
    """A time step, a counter, a row of a table, and a weight that a number of the step scales."""

    def step(p, states, x, dt, row):
        h, count = states
        drive = jnp.tanh(x @ (dt * p["w"]) + p["table"][row] + jnp.cos(count) * p["phase"])
        h = h * jnp.exp(-dt * p["decay"]) + drive
        return (h, count + 1), h

    shapes = {"w": (INPUTS, UNITS), "table": (3, UNITS), "phase": UNITS, "decay": UNITS}
    params = {name: jnp.full(shape, 0.3) for name, shape in shapes.items()}
    given = jnp.linspace(1, 0.2, len(XS)), jnp.arange(len(XS)) % 3
    start = jnp.zeros((BATCH, UNITS)), jnp.zeros(())

    def total(p):
        states, value = start, 0.0
        for x, *others in zip(XS, *given, strict=True):
            states, y = step(p, states, x, *others)
            value += jnp.sum(y**2)
        return value

    model = braintrace.from_function(step, params, start)
    learner = braintrace.compile(model, "rtrl", XS[0], given[0][0], given[1][0], batch_size=BATCH)

    def loss_of(*now):
        return jnp.sum(learner(*now) ** 2)

    options = {"step_fn": loss_of, "reduction": "sum", "chunk_size": 4}
    oracle.assert_close(learner.etrace_grad(XS, *given, **options), jax.grad(total)(params), 1e-9)


def forgets(p, states, x):
    """No later step reads a state."""
    h = jnp.tanh(x @ p["w"])
    return (h, h @ p["out"]), h


def keeps_a_log(p, states, x):
    """No later step reads the second state."""
    h = 0.7 * states[0] + jnp.tanh(x @ p["w"])
    return (h, h @ p["out"]), h


@pytest.mark.parametrize(
    ("rule", "step"),
    [
        ("rtrl", forgets),
        ("kf_rtrl", forgets),
        ("ostl_recurrent", keeps_a_log),
        ("snap", keeps_a_log),
    ],
)
def test_states_that_no_later_step_reads(rule, step):
    params = {"w": jnp.full((INPUTS, UNITS), 0.3), "out": jnp.ones((UNITS, 2))}
    start = jnp.zeros((BATCH, UNITS)), jnp.zeros((BATCH, 2))

    def total(p):
        states, value = start, 0.0
        for x in XS:
            states, y = step(p, states, x)
            value += jnp.sum(y**2)
        return value

    model = braintrace.from_function(step, params, start)
    learner = braintrace.compile(model, rule, XS[0], batch_size=BATCH)
    found = learner.etrace_grad(XS, step_fn=lambda x: jnp.sum(learner(x) ** 2), reduction="sum")
    if rule != "kf_rtrl":  # a random draw
        oracle.assert_close(found, jax.grad(total)(params), 1e-9)


# --- OSTL of feed-forward networks ----------------------------------------------------------------


def test_ostl_of_feedforward_networks_is_d_rtrl():
    case = Case(FEEDFORWARD, "ostl_feedforward", mask="some", reset="each", chunk_size=4)
    found = PATHS[case.path](learner_of(case), case.request(), squared_error)
    oracle.assert_close(found, expected_of(dataclasses.replace(case, rule="d_rtrl")), 1e-9)
