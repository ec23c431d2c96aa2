"""A modulator is the learning signal under every rule."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u
from oracle import assert_close

import braintrace
from braintrace import three_factor_loss

INPUTS, UNITS, BATCH, STEPS, LEAK, ALPHA = 3, 4, 2, 5, 0.8, 0.7

pytestmark = pytest.mark.usefixtures("float64")


def draw(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape)


XS, W = draw(0, STEPS, BATCH, INPUTS), draw(1, INPUTS, UNITS)


class Leaky(brainstate.nn.Module):
    """Leaky units, in some unit."""

    def __init__(self, unit=1.0):
        super().__init__()
        self.w, self.unit = brainstate.ParamState(jnp.asarray(W)), unit

    def init_state(self, batch_size=None, **_):
        batch = () if batch_size is None else (batch_size,)
        self.h = brainstate.HiddenState(jnp.zeros((*batch, UNITS)) * self.unit)

    def update(self, x):
        drive = jnp.tanh(braintrace.matmul(x, self.w.value)) * self.unit
        self.h.value = LEAK * self.h.value + drive
        return self.h.value


def eligibilities(rule):
    """The trace of the weight after each step, (steps, batch, inputs, units), in NumPy."""
    found, trace = [], np.zeros((BATCH, INPUTS, UNITS))
    filtered_x = np.zeros((BATCH, INPUTS))
    for x in XS:
        slope = 1 - np.tanh(x @ W) ** 2
        now = x[:, :, None] * slope[:, None]
        trace = LEAK * trace + now
        filtered_x = ALPHA * filtered_x + x
        each = {"immediate": now, "ottt": filtered_x[:, :, None] * slope[:, None]}
        found.append(each.get(rule, trace))
    return np.array(found)


MODULATORS = {
    "per unit": draw(2, STEPS, BATCH, UNITS),
    "per sample": draw(3, STEPS, BATCH),
    "for all": draw(4, STEPS),
    "same for all samples": draw(5, STEPS, 1, UNITS),
}
RULES = {"d_rtrl": {}, "three_factor": {}, "immediate": {}, "ottt": {"decay": ALPHA}, "rtrl": {}}


@pytest.mark.parametrize(
    ("rule", "name"),
    [
        ("d_rtrl", "per unit"),
        ("three_factor", "same for all samples"),
        ("immediate", "per sample"),
        ("ottt", "for all"),
        ("rtrl", "per unit"),
    ],
)
def test_the_gradient_is_the_modulator_times_the_eligibility(rule, name):
    """Nothing mixes units: what the other rules carry is the trace of D_RTRL."""
    learner = braintrace.compile(Leaky(), rule, XS[0], batch_size=BATCH, **RULES[rule])
    modulator = MODULATORS[name]
    each = modulator.reshape(*modulator.shape, *(1,) * (3 - modulator.ndim))
    each = np.broadcast_to(each, (STEPS, BATCH, UNITS))
    expected = np.einsum("tbj,tbij->ij", each, eligibilities(rule))
    found = learner.etrace_grad(
        XS,
        modulator,
        step_fn=lambda x, m: three_factor_loss(learner(x), m),
        reduction="sum",
        chunk_size=2,
    )
    assert_close(found, {("w",): expected}, 1e-12, rule)


def test_a_sample_without_a_batch():
    learner = braintrace.compile(Leaky(), "d_rtrl", XS[0, 0])
    modulator = draw(6, STEPS, UNITS)
    expected = np.einsum("tj,tij->ij", modulator, eligibilities("d_rtrl")[:, 0])
    found = learner.etrace_grad(
        XS[:, 0],
        modulator,
        step_fn=lambda x, m: three_factor_loss(learner(x), m),
        reduction="sum",
    )
    assert_close(found, {("w",): expected}, 1e-12)


def test_units_multiply():
    h, modulator = jnp.ones((BATCH, UNITS)) * u.mV, jnp.asarray([2.0, 3.0])
    found = three_factor_loss(h, modulator * u.pA)
    assert u.get_unit(found).has_same_dim(u.mV * u.pA)
    assert float(found / (u.mV * u.pA)) == 5 * UNITS
    assert float(three_factor_loss(h, modulator / u.volt)) == pytest.approx(5e-3 * UNITS)
    model = Leaky(u.mV)
    learner = braintrace.compile(model, "d_rtrl", XS[0], batch_size=BATCH)

    def loss(x):
        return three_factor_loss(learner(x), modulator / u.mV)

    found = learner.etrace_grad(XS, step_fn=loss, reduction="sum")
    expected = np.einsum("b,tbij->ij", modulator, eligibilities("d_rtrl"))
    assert_close(found, {("w",): expected}, 1e-12)


def test_the_modulator_has_no_gradient():
    """It may be computed from what learns: a prediction of reward, for example."""
    h, m = draw(7, BATCH, UNITS), draw(8, BATCH)
    to_h, to_m = jax.grad(three_factor_loss, (0, 1))(h, m)
    np.testing.assert_array_equal(to_h, np.repeat(m[:, None], UNITS, axis=1))
    np.testing.assert_array_equal(to_m, 0)


H = np.ones((BATCH, UNITS))
WRONG = {
    "features alone": (H, np.ones(UNITS)),
    "another batch": (H, np.ones(3)),
    "more axes": (H, np.ones((1, 2, 4))),
    "one sample": (H[0], np.ones(BATCH)),
}


@pytest.mark.parametrize("name", WRONG)
def test_refuses_what_does_not_fit(name):
    with pytest.raises(ValueError, match="broadcast"):
        three_factor_loss(*WRONG[name])
