"""Neurons, synapses and surrogate gradients follow their equations, units and errors included."""

import functools
import math

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u

import braintrace
from braintrace import nn
from braintrace.nn import surrogate

DT = 0.5 * u.ms


@pytest.fixture(autouse=True)
def time_step(float64):
    with brainstate.environ.context(dt=DT):
        yield


def run(module, inputs, *states):
    """Outputs of a module over a sequence, and the course of its states."""
    module.init_state()

    def step(x):
        return [module(x), *(getattr(module, name).value for name in states)]

    return jax.tree.map(np.asarray, brainstate.transform.for_loop(step, inputs))


def constant(current, unit=u.mA, steps=1):
    """An input that stays."""
    return np.full((steps, 1), current) * unit


def pulse(unit, steps=41):
    """One at time zero."""
    return (np.arange(steps) == 0).astype(float)[:, None] * unit


def test_a_membrane_relaxes_exponentially_below_threshold():
    neuron = nn.LIF(1, R=2 * u.ohm, tau=5 * u.ms, V_th=9 * u.mV, V_rest=1 * u.mV)
    z, V = run(neuron, constant(1.0, steps=8), "V")
    t = np.arange(1, 9) * 0.5
    # V starts at 0 and relaxes to V_rest + R I = 3 mV.
    np.testing.assert_allclose(V[:, 0].to_decimal(u.mV), 3 - 3 * np.exp(-t / 5), rtol=1e-12)
    assert not z.any()


@pytest.mark.parametrize("reset", ["soft", "hard"])
def test_the_rate_of_a_lif_neuron(reset):
    """One spike every tau log((V_inf - V_reset) / (V_inf - V_th)) with a hard reset."""
    tau, V_inf, V_th, V_reset = 20.0, 30.0, 20.0, 5.0
    neuron = nn.LIF(
        1,
        tau=tau * u.ms,
        V_th=V_th * u.mV,
        V_reset=V_reset * u.mV,
        V_initializer=V_reset * u.mV,
        spk_reset=reset,
    )
    with brainstate.environ.context(dt=0.02 * u.ms):
        z, V = run(neuron, constant(V_inf, steps=4000), "V")
    interval = tau * np.log((V_inf - V_reset) / (V_inf - V_th))
    assert float(z.sum()) == pytest.approx(80 / interval, abs=1)
    after = V[1:][np.asarray(z[:-1]) > 0].to_decimal(u.mV)
    assert np.all(np.abs(after - V_reset) < 0.1)


def test_soft_and_hard_resets_differ_by_the_overshoot():
    after = {}
    for reset in ("soft", "hard"):
        neuron = nn.LIF(1, tau=1e9 * u.ms, spk_reset=reset, V_initializer=1.4 * u.mV)
        _, V = run(neuron, constant(0.0), "V")
        after[reset] = float(V[0, 0].to_decimal(u.mV))
    assert after == pytest.approx({"soft": 0.4, "hard": 0.0}, abs=1e-6)


def test_an_adaptive_threshold_makes_intervals_longer():
    neuron = nn.ALIF(1, tau_a=200 * u.ms, beta=0.3 * u.mV)
    z, a = run(neuron, constant(4.0, steps=200), "a")
    times = np.flatnonzero(np.asarray(z))
    assert len(times) > 4
    assert np.diff(times)[-1] > 2 * np.diff(times)[0]
    decay = np.exp(-0.5 / 200)
    expected = [sum(decay ** (k - s - 1) for s in times if s < k) for k in range(len(z))]
    np.testing.assert_allclose(a[:, 0], expected, atol=1e-12)


def test_a_generalised_neuron_adapts_through_its_current():
    plain, adapting = nn.GIF(1), nn.GIF(1, A2=-0.2 * u.mA)
    strong = constant(2.0, steps=400)
    (often,), (seldom, current) = run(plain, strong), run(adapting, strong, "I2")
    assert 2 < seldom.sum() < 0.8 * often.sum()
    quiet = np.flatnonzero(np.asarray(seldom))[0]
    assert not np.any(current[: quiet + 1].mantissa)
    after = current[quiet + 1, 0].to_decimal(u.mA)
    np.testing.assert_allclose(after, -0.2 * np.exp(-0.02 * 0.5), rtol=1e-12)


def test_the_threshold_of_a_generalised_neuron_follows_the_potential():
    neuron = nn.GIF(1, a=0.05 / u.ms, b=0.1 / u.ms, V_initializer=-60 * u.mV, tau=1e9 * u.ms)
    _, V_th = run(neuron, constant(0.0, steps=20), "V_th")
    t = np.arange(1, 21) * 0.5
    # It relaxes from -50 to V_th_inf + a / b (V - V_rest) = -45 mV with rate b.
    expected = -45 - 5 * np.exp(-0.1 * t)
    np.testing.assert_allclose(V_th[:, 0].to_decimal(u.mV), expected, rtol=1e-9)


def test_a_spike_raises_a_low_threshold_of_a_generalised_neuron_to_where_it_is_reset():
    neuron = nn.GIF(1, V_th_reset=-45 * u.mV, V_initializer=-40 * u.mV, b=1e-9 / u.ms)
    _, V_th = run(neuron, constant(0.0, steps=1), "V_th")
    np.testing.assert_allclose(V_th[0].to_decimal(u.mV), -45, rtol=1e-6)


def impulse(synapse):
    """The response to one input at time zero, and the times."""
    (g,) = run(synapse, pulse(u.mS))
    return g[:, 0].to_decimal(u.mS), np.arange(41) * 0.5


def test_an_exponential_synapse_decays_by_its_time_constant():
    g, t = impulse(nn.Expon(1, tau=4 * u.ms))
    np.testing.assert_allclose(g, np.exp(-t / 4), rtol=1e-12)


def test_alpha_synapse():
    g, t = impulse(nn.Alpha(1, tau=4 * u.ms))
    np.testing.assert_allclose(g, t / 4 * np.exp(-t / 4), atol=1e-12)


def test_a_dual_exponential_synapse_is_the_difference_of_two():
    with brainstate.environ.context(dt=0.01 * u.ms):
        peak = impulse(nn.DualExpon(1, tau_decay=0.1 * u.ms, tau_rise=0.05 * u.ms))[0].max()
    assert peak == pytest.approx(1.0, abs=0.01)
    g, t = impulse(nn.DualExpon(1, tau_decay=4 * u.ms, tau_rise=2 * u.ms))
    np.testing.assert_allclose(g, 4 * (np.exp(-t / 4) - np.exp(-t / 2)), atol=1e-12)


def test_currents_keep_their_units():
    conductance, V = jnp.ones(2) * u.mS, jnp.array([-70.0, 10.0]) * u.mV
    into = nn.COBA(E=0 * u.mV)(conductance, V)
    np.testing.assert_allclose(into.to_decimal(u.uA), [70.0, -10.0], rtol=1e-6)
    fixed = nn.CUBA(E=0 * u.mV, V_rest=-65 * u.mV)(conductance)
    np.testing.assert_allclose(fixed.to_decimal(u.uA), [65.0, 65.0], rtol=1e-6)


def test_a_leaky_readout_filters():
    readout = nn.LeakyRateReadout(1, 1, tau=2 * u.ms, w_init=jnp.full((1, 1), 3.0))
    (r,) = run(readout, pulse(1.0, steps=6))
    np.testing.assert_allclose(r[:, 0], 3 * np.exp(-np.arange(6) / 4), rtol=1e-12)


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.LIF(3, V_initializer=brainstate.nn.init.Uniform(0.0, 1.0, unit=u.mV)),
        lambda: nn.GIF((2, 3)),
        lambda: nn.DualExpon(3),
        lambda: nn.LeakySpikeReadout(2, 3),
    ],
    ids=["LIF", "GIF", "DualExpon", "LeakySpikeReadout"],
)
def test_states_are_created_and_reset(build):
    module = build()
    for batch in (None, 4):
        brainstate.nn.init_all_states(module, batch_size=batch)
        with_batch = () if batch is None else (batch,)
        states = module.states(brainstate.HiddenState).values()
        assert all(s.value.shape == (*with_batch, *module.out_size) for s in states)
        before = [state.value for state in states]
        for state in states:
            state.value = jax.tree.map(
                lambda leaf: jax.device_put(-3 * np.asarray(leaf)), state.value
            )
        brainstate.nn.reset_all_states(module, batch_size=batch)
        for state, value in zip(states, before, strict=True):
            assert state.value.shape == value.shape
            assert u.get_unit(state.value) == u.get_unit(value)


def test_the_derivative_of_a_hard_reset_takes_the_fall_as_constant():
    """The neuron has spiked: its potential falls to V_reset, with the derivative of the decay."""

    @functools.partial(jax.jit, static_argnums=1)
    @jax.value_and_grad
    def after(V, reset):
        neuron = nn.LIF(1, tau=4 * u.ms, V_th=1 * u.mV, spk_reset=reset)
        neuron.init_state()
        neuron.V.value = V[None] * u.mV
        neuron(jnp.zeros(1) * u.mA)
        return neuron.V.value.to_decimal(u.mV)[0]

    V, left, surrogate = np.asarray(1.5), np.exp(-0.5 / 4), 0.3 * 0.5
    # dV'/dV = 1 - fall * dz/dV; the fall is 1.5 mV by a hard reset, 1 mV by a soft one.
    for reset, (rest, fall) in {"hard": (0.0, 1.5), "soft": (0.5 * left, 1.0)}.items():
        value, derivative = after(V, reset)
        assert value == pytest.approx(rest)
        assert derivative == pytest.approx(left * (1 - fall * surrogate)), reset


def test_a_neuron_waits_after_a_spike():
    """Its potential stays where the reset has put it, for 3 steps; one spike every 4 steps."""
    neuron = nn.LIF(1, tau=1e9 * u.ms, R=1e9 * u.ohm, tau_ref=1.5 * u.ms, spk_reset="hard")
    z, V = run(neuron, constant(10.0, steps=9), "V")
    np.testing.assert_array_equal(z[:, 0], [1, 0, 0, 0, 1, 0, 0, 0, 1])
    np.testing.assert_allclose(V[[1, 2, 3], 0].to_decimal(u.mV), 0)


def membranes(x, m, beta, threshold, reset):
    z = surrogate.arctan(m - threshold)
    fall = jax.lax.stop_gradient(z)
    grown = beta * m + x
    lowered = {"subtract": grown - fall * threshold, "zero": grown * (1 - fall), "none": grown}
    return lowered[reset]


@pytest.mark.parametrize("reset", ["subtract", "zero", "none"])
def test_a_leaky_neuron_and_its_constants(reset):
    """The equations of snnTorch; the constants learn by the gradient of plain JAX."""
    xs, weights = np.random.default_rng(0).normal(0.5, 1.0, (2, 9, 3, 4))
    start = {("beta",): jnp.linspace(0.5, 0.9, 4), ("threshold",): jnp.linspace(0.5, 1.5, 4)}
    beta, threshold = map(brainstate.ParamState, start.values())
    neuron = nn.Leaky(4, beta, threshold, reset=reset)

    def loss(constants):
        beta, threshold = constants.values()
        m, total, spikes = jnp.zeros((3, 4)), 0.0, []
        for x, weight in zip(xs, weights, strict=True):
            m = membranes(x, m, beta, threshold, reset)
            spikes.append(surrogate.arctan(m - threshold))
            total += jnp.sum(weight * (spikes[-1] + m))
        return total, jnp.stack(spikes)

    expected, spikes = jax.grad(loss, has_aux=True)(start)
    learner = braintrace.compile(neuron, "d_rtrl", xs[0], batch_size=3)
    np.testing.assert_array_equal(learner.predict(xs), spikes)
    learner.reset_state()
    found = learner.etrace_grad(
        *(xs, weights),
        step_fn=lambda x, weight: jnp.sum(weight * (learner(x) + neuron.mem.value)),
        reduction="sum",
    )
    assert found.keys() == expected.keys()
    for path, gradient in expected.items():
        np.testing.assert_allclose(found[path], gradient, rtol=1e-10, atol=1e-10)


def adaptive(constants, V, a, wait, x):
    """One step of refractory adaptive neurons, without units."""

    def spikes(V, a):
        above = V - constants["V_th",] - constants["beta",] * a
        return surrogate.triangle(above / constants["V_th",])

    z, left = spikes(V, a), jnp.exp(-0.5 / constants["tau",])
    lowered, end = V - constants["V_th",] * z, constants["R",] * x
    a = jnp.exp(-0.5 / constants["tau_a",]) * a + z
    wait = jnp.where(z > 0, 2, jnp.maximum(wait - 1, 0))
    V = jnp.where(wait > 0, lowered, end + (lowered - end) * left)
    return V, a, wait, spikes(V, a)


def test_constants_of_neurons_learn():
    """By the gradient of plain JAX, in their units."""
    values = {"R": 1.5, "tau": 6.0, "tau_a": 30.0, "V_th": 0.3, "beta": 0.2}
    units = {"R": u.ohm, "tau": u.ms, "tau_a": u.ms, "V_th": u.mV, "beta": u.mV}
    numbers = {(k,): jnp.linspace(0.8, 1.2, 4) * value for k, value in values.items()}
    states = {k: brainstate.ParamState(numbers[k,] * units[k]) for k in values}
    neuron = nn.ALIF(4, **states, tau_ref=1 * u.ms)
    xs, weights = np.random.default_rng(0).normal(0.5, 1.0, (2, 9, 3, 4))

    def loss(numbers):
        V, a, wait, total = jnp.zeros((3, 4)), jnp.zeros((3, 4)), jnp.zeros((3, 4), int), 0.0
        for x, weight in zip(xs, weights, strict=True):
            V, a, wait, z = adaptive(numbers, V, a, wait, x)
            total += jnp.sum(weight * z)
        return total

    expected = jax.grad(loss)(numbers)
    learner = braintrace.compile(neuron, "d_rtrl", xs[0] * u.mA, batch_size=3)
    found = learner.etrace_grad(
        *(xs * u.mA, weights),
        step_fn=lambda x, weight: jnp.sum(weight * learner(x)),
        reduction="sum",
    )
    for path, gradient in expected.items():
        magnitude = u.get_magnitude(found[path])
        np.testing.assert_allclose(magnitude, gradient, rtol=1e-9, atol=1e-10, err_msg=str(path))


def learning(value, unit):
    return brainstate.ParamState(jnp.linspace(0.8, 1.2, 4) * value * unit)


MS, MV = u.ms, u.mV
WITH_CONSTANTS = {
    "GIF": lambda: nn.GIF(
        4,
        tau=learning(2.0, MS),
        b=learning(0.1, 1 / MS),
        k2=learning(0.2, 1 / MS),
        R2=learning(0.5, 1),
        A2=learning(2.0, u.mA),
        V_th_inf=learning(-55.0, MV),
    ),
    "Expon": lambda: nn.Expon(4, learning(5.0, MS), 0 * u.mA),
    "Alpha": lambda: nn.Alpha(4, learning(5.0, MS), 0 * u.mA),
    "DualExpon": lambda: nn.DualExpon(4, learning(5.0, MS), learning(2.0, MS), 0 * u.mA),
    "LeakyRateReadout": lambda: nn.LeakyRateReadout(4, 4, learning(5.0, MS), jnp.eye(4)),
    "LeakySpikeReadout": lambda: nn.LeakySpikeReadout(
        *(4, 4, learning(5.0, MS), learning(2.0, 1), learning(0.1, 1)), w_init=jnp.eye(4)
    ),
}


@pytest.mark.parametrize("name", WITH_CONSTANTS)
def test_constants_learn_as_by_backpropagation(name):
    module = WITH_CONSTANTS[name]()
    xs = np.abs(np.random.default_rng(0).normal(2.0, 1.0, (9, 3, 4)))
    xs = xs if "Readout" in name else xs * u.mA
    weights = np.random.default_rng(1).normal(size=xs.shape)
    brainstate.nn.init_all_states(module, batch_size=3)

    def loss(run, x, weight):
        return jnp.sum(weight * u.get_mantissa(run(x)))

    def total():
        step = functools.partial(loss, module)
        return brainstate.transform.for_loop(step, xs, weights).sum()

    constants = module.states(brainstate.ParamState)
    expected = brainstate.transform.jit(brainstate.transform.grad(total, constants))()
    learner = braintrace.compile(module, "d_rtrl", xs[0], batch_size=3)
    found = learner.etrace_grad(
        xs, weights, step_fn=lambda x, weight: loss(learner, x, weight), reduction="sum"
    )
    assert found.keys() == expected.keys()
    for path, gradient in expected.items():
        pairs = zip(jax.tree.leaves(found[path]), jax.tree.leaves(gradient), strict=True)
        for own, wanted in pairs:
            assert np.abs(wanted).max() > 1e-6, path
            np.testing.assert_allclose(own, wanted, rtol=1e-8, atol=1e-10, err_msg=str(path))


@pytest.mark.parametrize("option", ["tau", "tau_ref"])
def test_a_time_without_a_unit_is_refused(option):
    neuron = nn.LIF(2, **{option: 2.0})
    neuron.init_state()
    with pytest.raises(braintrace.UnitError, match="give both a unit of time"):
        neuron(jnp.ones(2) * u.mA)


# --- surrogate gradients: spikes forward, the formulas of the literature backward -----------------


def gaussian_cdf(x):
    return np.array([math.erf(value / math.sqrt(2)) / 2 + 0.5 for value in np.ravel(x)])


POTENTIALS = np.array([-1.7, -0.6, -0.1, 0.0, 0.05, 0.4, 0.99, 2.5])

# Where a surrogate is the derivative of a smooth step, that step is differentiated numerically.
SMOOTH_STEPS = {
    "sigmoid": (lambda x: 1 / (1 + np.exp(-4.0 * x)), {}),
    "arctan": (lambda x: np.arctan(np.pi * x) / np.pi + 0.5, {}),
    "gaussian": (lambda x: gaussian_cdf(x / 0.5), {}),
    "multi_gaussian": (
        lambda x: (
            1.15 * gaussian_cdf(x / 0.5)
            - 0.15 * gaussian_cdf((x - 0.5) / 3.0)
            - 0.15 * gaussian_cdf((x + 0.5) / 3.0)
        ),
        {},
    ),
    # The rest are steep or kinked at x = 0 or at the edge of their window.
    "super_spike": (lambda x: x / (1 + 10.0 * np.abs(x)), {}),
    "triangle": (
        lambda x: 0.3 * (np.clip(x, -1, 1) - np.sign(x) * np.clip(x, -1, 1) ** 2 / 2),
        {},
    ),
    "rectangle": (lambda x: np.clip(x / 2.0, -0.5, 0.5), {"width": 2.0}),
}


@pytest.mark.core
@pytest.mark.parametrize("name", SMOOTH_STEPS)
def test_the_derivative_of_a_surrogate_is_the_documented_one(name):
    step, options = SMOOTH_STEPS[name]
    spike = functools.partial(getattr(surrogate, name), **options)
    z, dz = jax.jvp(spike, (jnp.asarray(POTENTIALS),), (jnp.ones(len(POTENTIALS)),))
    np.testing.assert_array_equal(z, POTENTIALS >= 0)
    epsilon = 1e-6
    expected = (step(POTENTIALS + epsilon) - step(POTENTIALS - epsilon)) / (2 * epsilon)
    np.testing.assert_allclose(dz, expected, atol=1e-4)
    assert np.abs(dz).max() > 0.1


def test_all_surrogates_are_compared():
    public = {n for n, f in vars(surrogate).items() if not n.startswith("_") and callable(f)}
    assert {n for n in public if getattr(surrogate, n).__module__ == surrogate.__name__} == set(
        SMOOTH_STEPS
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", SMOOTH_STEPS)
def test_the_dtype_of_a_surrogate_stays(name, dtype):
    z, vjp = jax.vjp(getattr(surrogate, name), jnp.asarray(POTENTIALS, dtype))
    assert z.dtype == vjp(z)[0].dtype == dtype


def test_reverse_and_second_derivatives_of_surrogates_exist():
    x = jnp.asarray([-0.2, 0.3])
    s = jax.nn.sigmoid(4.0 * x)
    first = jax.grad(lambda x: surrogate.sigmoid(x).sum())
    np.testing.assert_allclose(first(x), 4 * s * (1 - s), rtol=1e-6)
    second = jax.grad(lambda x: first(x).sum())(x)
    np.testing.assert_allclose(second, 16 * s * (1 - s) * (1 - 2 * s), rtol=1e-5)
