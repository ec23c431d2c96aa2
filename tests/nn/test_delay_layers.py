"""Delays deliver values later, and those of connections learn by the gradient of the whole past."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import saiunit as u
from learners import squared_error
from paths import PATHS
from random_models import BATCH, INPUTS, STEPS, UNITS
from toys import request_of

import braintrace
from braintrace.nn._delays import delayed_primitives

pytestmark = pytest.mark.usefixtures("float64")
XS = np.random.default_rng(0).normal(size=(STEPS, BATCH, INPUTS))
LONGEST = 3


@pytest.mark.parametrize("steps", [2, 0, np.arange(6).reshape(2, 3) % 4])
def test_every_element_arrives_after_its_steps(steps):
    size, unit = (2, 3), u.mV
    xs = np.arange(1.0, 8 * 5 * 6 + 1).reshape(8, 5, *size)
    layer = braintrace.nn.Delay(size, steps, state_init=0.0 * unit)
    layer.init_state(5)
    found = np.stack([layer(jnp.asarray(x) * unit).to_decimal(unit) for x in xs])
    for place in np.ndindex(size):
        late = np.broadcast_to(steps, size)[place]
        arrived = np.concatenate([np.zeros((late, 5)), xs[: 8 - late, :, *place]])
        np.testing.assert_array_equal(found[:, :, *place], arrived)


class Leak(brainstate.nn.Module):
    def init_state(self, batch_size=None, **_):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, UNITS)))

    def update(self, x):
        self.h.value = 0.8 * self.h.value + jnp.tanh(x)
        return self.h.value


@pytest.mark.filterwarnings("ignore::braintrace.ApproximationWarning")
@pytest.mark.parametrize("steps", [2, np.arange(UNITS) % 3 + 1])
def test_a_weight_before_two_delays_in_a_row_is_reported(steps):
    rng, layers = np.random.default_rng(2), []
    for inputs in (INPUTS, UNITS, UNITS):
        weights = rng.normal(size=(inputs, UNITS))
        layers += [braintrace.nn.Linear(inputs, UNITS, weights, None), Leak()]
        layers += [braintrace.nn.Delay(UNITS, steps)]
    model = brainstate.nn.Sequential(*layers[:-1])
    learner = braintrace.compile(model, "d_rtrl", XS[0], batch_size=BATCH)
    gradients = learner.etrace_grad(XS, step_fn=lambda x: jnp.sum(learner(x) ** 2))
    reported = [d.paths[0] for d in learner.report().diagnostics if "gets no gradient" in str(d)]
    assert reported == ["layers/0/weight"]
    assert [bool(jnp.any(g["weight"])) for g in gradients.values()] == [False, True, True]


def test_delays_that_are_no_steps_are_refused():
    for steps in (1.5, -1):
        with pytest.raises(braintrace.OptionError, match="steps"):
            braintrace.nn.Delay(3, steps)
    with pytest.raises(braintrace.OptionError, match="max_delay"):
        braintrace.nn.DelayedLinear(3, 2, 0)


class Network(braintrace.nn.DelayedLinear):
    """Leaky units behind connections with delays, some of which are out of bounds."""

    def __init__(self, per_input):
        rng = np.random.default_rng(1)
        delays = rng.uniform(-0.6, LONGEST + 0.6, (INPUTS, UNITS))
        delays = delays[:, 0] if per_input else delays
        weights = rng.normal(size=(INPUTS, UNITS))
        super().__init__(INPUTS, UNITS, LONGEST, weights, delays, per_input)

    def init_state(self, batch_size=None, **_):
        super().init_state(batch_size)
        lead = () if batch_size is None else (batch_size,)
        self.h = brainstate.HiddenState(jnp.zeros((*lead, UNITS)))

    def update(self, x):
        self.h.value = jnp.tanh(0.6 * self.h.value + super().update(x))
        return self.h.value


def interpolated(line, delays):
    """Inputs (inputs, units, samples) at some delays, from those of the last steps."""
    delays = jnp.broadcast_to(delays.reshape(INPUTS, -1), (INPUTS, UNITS))
    delays = delays + oracle.stop(jnp.clip(delays, 0, LONGEST) - delays)
    before = jnp.clip(jnp.floor(oracle.stop(delays)), 0, LONGEST - 1).astype(int)
    near, far = (jnp.stack(line)[before + k, :, np.arange(INPUTS)[:, None]] for k in (0, 1))
    return near + (delays - before)[..., None] * (far - near)


def bptt(per_input, mask, reset):
    def total(weights, delays):
        h, value = jnp.zeros((BATCH, UNITS)), 0.0
        line = [jnp.zeros((BATCH, INPUTS))] * (LONGEST + 1)
        for t, x in enumerate(XS):
            keep = 1.0 - reset[t][:, None]
            h, line = keep * h, [x, *(keep * old for old in line[:-1])]
            h = jnp.tanh(0.6 * h + jnp.einsum("iub,iu->bu", interpolated(line, delays), weights))
            value += mask[t] * squared_error(h, 0.3)
        return value

    layer = Network(per_input)
    weights, delays = jax.jit(jax.grad(total, (0, 1)))(layer.weight.value, layer.delay.value)
    return {"weight": weights, "delay": delays}


CASES = [
    ("by_chunks", False, "d_rtrl", False),
    ("by_own_gradient", True, "d_rtrl", False),
    ("by_two_calls", False, "d_rtrl", True),
    ("by_chunks", True, "rtrl", False),
]


@pytest.mark.parametrize(("path", "per_input", "rule", "vmap"), CASES)
def test_delays_and_weights_have_the_gradient_of_bptt(path, per_input, rule, vmap):
    mask, reset = np.arange(STEPS) % 3 > 0, np.zeros((STEPS, BATCH), bool)
    reset[2, 0] = reset[4, 1] = True
    network, options = Network(per_input), {"batch_size": BATCH, "vmap": vmap, "strict": True}
    learner = braintrace.compile(network, rule, XS[0], **options)
    expected = bptt(per_input, mask, reset)
    assert all(np.abs(value).min() > 0 for value in expected.values())
    found = PATHS[path](learner, request_of(XS, mask=mask, reset=reset), squared_error)
    oracle.assert_close(found, expected, 1e-10)


def test_the_rules_of_the_operation_follow_from_its_function():
    """Also that its gradient is linear in the line, which ES-D-RTRL filters."""
    rng = np.random.default_rng(2)
    line, weight = rng.normal(size=(BATCH, LONGEST + 1, INPUTS)), rng.normal(size=(INPUTS, UNITS))
    delays = rng.uniform(-0.5, LONGEST + 0.5, weight.shape)
    for primitive, x in zip(delayed_primitives(), (line[0], line), strict=True):
        report = braintrace.check_primitive(primitive, *map(jnp.asarray, (x, weight, delays)))
        assert report.ok, str(report)


def test_units_of_inputs_and_weights_multiply():
    options = {"d_init": np.linspace(0, LONGEST, INPUTS * UNITS).reshape(INPUTS, UNITS)}
    weight, found = np.random.default_rng(3).normal(size=(INPUTS, UNITS)), []
    for w, x in ((1.0, 1.0), (u.siemens, u.mV)):
        start = {"state_init": 0.0 * x, "w_init": weight * w}
        layer = braintrace.nn.DelayedLinear(INPUTS, UNITS, LONGEST, **options, **start)
        layer.init_state(BATCH)
        found.append([layer(jnp.asarray(step) * x) for step in XS])
    np.testing.assert_allclose([y.to_decimal(u.mA) for y in found[1]], found[0], rtol=1e-12)
