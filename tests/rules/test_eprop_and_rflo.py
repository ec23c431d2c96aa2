"""e-prop and RFLO equal the equations of their papers.

RFLO refuses networks without random feedback.
"""

import functools

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import assert_close

import braintrace
from braintrace import nn

INPUTS, UNITS, OUTPUTS, BATCH, STEPS = 3, 6, 2, 2, 8
ALPHA, RHO, BETA, KAPPA, THRESHOLD, GAMMA = 0.8, 0.95, 0.4, 0.7, 0.6, 0.5

pytestmark = pytest.mark.usefixtures("float64")

# --- e-prop: a recurrent network of adaptive units with a leaky readout --------------------------


def draw(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape)


XS, TARGETS = draw(0, STEPS, BATCH, INPUTS), draw(1, STEPS, BATCH, OUTPUTS)
W_IN, W_REC = draw(2, INPUTS, UNITS), draw(3, UNITS, UNITS) / 2
W_OUT, BIAS, B = draw(4, UNITS, OUTPUTS), draw(5, OUTPUTS), draw(6, UNITS, OUTPUTS)


def pseudo_derivative(v, a):
    """ψ of the paper."""
    distance = jnp.abs((v - THRESHOLD - BETA * a) / THRESHOLD)
    return GAMMA / THRESHOLD * jnp.maximum(0.0, 1.0 - distance)


@jax.custom_jvp
def spikes(v, a):
    return (v > THRESHOLD + BETA * a).astype(v.dtype)


@spikes.defjvp
def _(primals, tangents):
    v_dot, a_dot = tangents
    return spikes(*primals), pseudo_derivative(*primals) * (v_dot - BETA * a_dot)


class Network(brainstate.nn.Module):
    """Adaptive units, their reset held constant, and a leaky readout."""

    def __init__(self, random):
        super().__init__()
        self.w_in, self.w_rec = map(brainstate.ParamState, map(jnp.asarray, (W_IN, W_REC)))
        values = {"w_init": W_OUT, "b_init": BIAS}
        own = functools.partial(nn.FeedbackLinear, feedback_init=B) if random else nn.Linear
        self.readout = own(UNITS, OUTPUTS, **values)

    def init_state(self, batch_size=None, **_):
        batch = () if batch_size is None else (batch_size,)
        for name, units in {"v": UNITS, "a": UNITS, "y": OUTPUTS}.items():
            setattr(self, name, brainstate.HiddenState(jnp.zeros((*batch, units))))

    def update(self, x):
        v, a = self.v.value, self.a.value
        z = spikes(v, a)
        drive = braintrace.matmul(x, self.w_in.value) + braintrace.matmul(z, self.w_rec.value)
        self.v.value = ALPHA * v + drive - THRESHOLD * jax.lax.stop_gradient(z)
        self.a.value = RHO * a + z
        now = self.readout(spikes(self.v.value, self.a.value))
        self.y.value = KAPPA * self.y.value + now
        return self.y.value


@functools.partial(jax.jit, static_argnums=1)
def literal_eprop(feedback, kappa):
    """Gradients by the equations of the paper, sample by sample, and how often units spike."""

    def of_sample(xs, targets):
        def step(carry, now):
            v, a, z, y, x_bar, z_bar, eps_a_in, eps_a_rec, e_bar, filtered_z, ones = carry
            x, target = now
            psi = pseudo_derivative(v, a)

            # eligibility vectors: of v the filtered presynaptic signals, of a one for each synapse
            def adaptation(eps_a, presynaptic):
                return psi * presynaptic[:, None] + (RHO - psi * BETA) * eps_a

            eps_a_in, eps_a_rec = adaptation(eps_a_in, x_bar), adaptation(eps_a_rec, z_bar)
            x_bar, z_bar = ALPHA * x_bar + x, ALPHA * z_bar + z
            v, a = ALPHA * v + x @ W_IN + z @ W_REC - THRESHOLD * z, RHO * a + z
            z, psi = spikes(v, a), pseudo_derivative(v, a)
            e_bar = {
                "w_in": kappa * e_bar["w_in"] + psi * (x_bar[:, None] - BETA * eps_a_in),
                "w_rec": kappa * e_bar["w_rec"] + psi * (z_bar[:, None] - BETA * eps_a_rec),
            }
            filtered_z, ones = kappa * filtered_z + z, kappa * ones + 1.0
            y = kappa * y + z @ W_OUT + BIAS
            error = y - target
            gradients = {name: (feedback @ error) * e for name, e in e_bar.items()}
            gradients["weight"], gradients["bias"] = jnp.outer(filtered_z, error), ones * error
            after = (v, a, z, y, x_bar, z_bar, eps_a_in, eps_a_rec, e_bar, filtered_z, ones)
            return after, (gradients, z)

        units, to_in, to_rec = jnp.zeros(UNITS), jnp.zeros_like(W_IN), jnp.zeros_like(W_REC)
        start = (units, units, units, jnp.zeros(OUTPUTS), jnp.zeros(INPUTS), units)
        filters = (to_in, to_rec, {"w_in": to_in, "w_rec": to_rec}, units, 0.0)
        return jax.lax.scan(step, (*start, *filters), (xs, targets))[1]

    gradients, z = jax.vmap(of_sample, in_axes=1)(XS, TARGETS)
    return jax.tree.map(lambda leaf: leaf.sum((0, 1)), gradients), z.mean()


def loss_of(y, target):
    return 0.5 * jnp.sum((y - target) ** 2)


def expected(random, kappa=KAPPA):
    gradients, rate = literal_eprop(B if random else W_OUT, kappa)
    assert 0.1 < rate < 0.5
    found = {(name,): gradients[name] for name in ("w_in", "w_rec")}
    return {**found, ("readout", "weight"): {name: gradients[name] for name in ("weight", "bias")}}


def of_sequence(learner, chunk_size):
    found = learner.etrace_grad(
        XS,
        TARGETS,
        step_fn=lambda x, target: loss_of(learner(x), target),
        reduction="sum",
        chunk_size=chunk_size,
    )
    return dict(found)


@pytest.mark.parametrize(("random", "mapped"), [(False, False), (True, True)])
def test_eprop_equals_its_definition(random, mapped):
    network = Network(random)
    options = {"batch_size": BATCH, "vmap": mapped}
    learner = braintrace.compile(network, "eprop", jnp.asarray(XS[0]), **options)
    found = of_sequence(learner, 3)
    assert_close(found, expected(random), 1e-12, "chunks of 3")
    learner.reset_state(BATCH)
    loss = brainstate.transform.grad(
        lambda x, target: loss_of(learner(x), target), network.states(brainstate.ParamState)
    )
    each = brainstate.transform.for_loop(loss, jnp.asarray(XS), jnp.asarray(TARGETS))
    summed = jax.tree.map(lambda leaf: np.asarray(leaf).sum(0), each)
    assert_close(summed, expected(random), 1e-12, "step by step")


def test_eprop_without_the_filter_of_the_readout_is_something_else():
    with pytest.raises(AssertionError, match="off by"):
        assert_close(expected(True, kappa=0.0), expected(True), 0.1)


# --- RFLO -----------------------------------------------------------------------------------------

TAU = 4.0


class LeakyTanh(brainstate.nn.Module):
    """A leaky tanh RNN with a linear readout, of which the error goes back by ``B``."""

    def __init__(self, readout=None):
        super().__init__()
        weights = {"W": (UNITS, UNITS), "W_in": (INPUTS, UNITS)}
        for seed, (name, shape) in enumerate(weights.items()):
            value = jnp.asarray(draw(seed + 2, *shape) / np.sqrt(shape[0]))
            setattr(self, name, brainstate.ParamState(value))
        matrices = {"w_init": draw(4, UNITS, OUTPUTS), "feedback_init": draw(5, UNITS, OUTPUTS)}
        own = nn.FeedbackLinear(UNITS, OUTPUTS, b_init=None, **matrices)
        self.readout = own if readout is None else readout

    def init_state(self, batch_size=None, **_):
        batch = () if batch_size is None else (batch_size,)
        self.h = brainstate.HiddenState(jnp.broadcast_to(draw(6, UNITS), (*batch, UNITS)))

    def update(self, x):
        recurrent = braintrace.matmul(self.h.value, self.W.value)
        u = recurrent + braintrace.matmul(x, self.W_in.value)
        self.h.value = (1 - 1 / TAU) * self.h.value + jnp.tanh(u) / TAU
        return self.readout(self.h.value)


def literal_rflo(network):
    """Gradients by the equations of the paper, sample by sample, in NumPy."""
    W, W_in = (np.asarray(network.states()[(name,)].value) for name in ("W", "W_in"))
    W_out = np.asarray(network.readout.weight.value["weight"])
    B = np.asarray(network.readout.feedback.value)
    to_W, to_W_in, to_W_out = (np.zeros_like(w) for w in (W, W_in, W_out))
    for sample in range(BATCH):
        h, p, q = draw(6, UNITS), np.zeros_like(W), np.zeros_like(W_in)
        for x, target in zip(XS[:, sample], TARGETS[:, sample], strict=True):
            u = h @ W + x @ W_in
            slope = 1 - np.tanh(u) ** 2
            p = (1 - 1 / TAU) * p + np.outer(h, slope) / TAU
            q = (1 - 1 / TAU) * q + np.outer(x, slope) / TAU
            h = (1 - 1 / TAU) * h + np.tanh(u) / TAU
            error = h @ W_out - target
            to_W += (B @ error) * p
            to_W_in += (B @ error) * q
            to_W_out += np.outer(h, error)
    return {("W",): to_W, ("W_in",): to_W_in, ("readout", "weight"): {"weight": to_W_out}}


def test_rflo_equals_its_definition():
    network = LeakyTanh()
    options = {"batch_size": BATCH, "vmap": True}
    learner = braintrace.compile(network, "rflo", jnp.asarray(XS[0]), **options)
    expected = literal_rflo(network)

    def loss(x, target):
        return loss_of(learner(x), target)

    found = learner.etrace_grad(XS, TARGETS, step_fn=loss, reduction="sum", chunk_size=4)
    assert_close(found, expected, 1e-12, "chunks of 4")
    learner.reset_state(BATCH)
    step = brainstate.transform.grad(loss, network.states(brainstate.ParamState))
    each = brainstate.transform.for_loop(step, jnp.asarray(XS), jnp.asarray(TARGETS))
    summed = jax.tree.map(lambda leaf: leaf.sum(0), each)
    assert_close(summed, expected, 1e-12, "step by step")


class Leaky(brainstate.nn.Module):
    """A readout with a memory."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def init_state(self, batch_size=None, **_):
        self.o = brainstate.HiddenState(jnp.zeros((batch_size, OUTPUTS)))

    def update(self, h):
        self.o.value = 0.8 * self.o.value + self.layer(h)
        return jax.nn.softmax(self.o.value)


class Hidden(brainstate.nn.Module):
    """Another layer before the readout."""

    def __init__(self, first, last):
        super().__init__()
        self.first, self.last = first, last

    def update(self, h):
        return self.last(jnp.tanh(self.first(h)))


class WithRates(brainstate.nn.Module):
    """An output that has the rates as well."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def update(self, h):
        return self.layer(h), h.mean()


def fed_back(inputs=UNITS):
    return nn.FeedbackLinear(inputs, OUTPUTS)


@pytest.mark.parametrize(
    "readout",
    [
        lambda: Leaky(fed_back()),
        lambda: Hidden(nn.Linear(UNITS, 4), fed_back(4)),
        lambda: WithRates(fed_back()),
    ],
    ids=["leaky", "after another layer", "with rates"],
)
def test_rflo_accepts_readouts_with_random_feedback(readout):
    braintrace.compile(LeakyTanh(readout()), "rflo", jnp.asarray(XS[0]), batch_size=BATCH)


def test_rflo_refuses_a_model_without_random_feedback():
    network = LeakyTanh(nn.Linear(UNITS, OUTPUTS))
    with pytest.raises(braintrace.CompilationError, match=r"`RFLO`.*`feedback_matmul`"):
        braintrace.compile(network, braintrace.RFLO, jnp.asarray(XS[0]), batch_size=BATCH)
