"""The loss of a step sees the whole step, and what is carried is cut between units.

The oracle carries dense derivatives E of the states by a step that is cut, and adds for each step

    d loss / d parameters, old states held  +  <d loss / d old states, E>

of a step in which only old states of the same cycle are constants where they are coupled.
"""

import functools

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from learners import squared_error
from paths import PATHS, Request

import braintrace

pytestmark = pytest.mark.usefixtures("float64")

STEPS, BATCH, INPUTS, UNITS = 8, 3, 4, 5
RNG = np.random.default_rng(0)
XS = RNG.normal(size=(STEPS, BATCH, INPUTS))
TARGETS = RNG.normal(size=(STEPS, BATCH, UNITS))
SHAPES = {"w": INPUTS, "z": INPUTS + UNITS, "r": UNITS, "u": UNITS, "v": UNITS}
WEIGHTS = {k: RNG.normal(size=(n, UNITS)) / 2 for k, n in SHAPES.items()}
EACH = np.arange(STEPS)[:, None] == [9, 2, 5]
SOME = np.array([1, 1, 0, 1, 0, 1, 1, 0.5])


# Old states of the same cycle pass `own` where they are coupled, everything else that is coupled
# and comes from a weight or from another layer passes `carried`.


def late(op, own, carried, p, h, x):
    """A layer above reads a recurrent layer one step late."""
    a = 0.7 * h["a"] + jnp.tanh(op(x, p["w"]) + op(own(h["a"]), p["r"]))
    b = 0.8 * h["b"] + jnp.tanh(op(carried(h["a"]), p["u"]))
    return {"a": a, "b": b}, b


def late_without_memory(op, own, carried, p, h, x):
    """The same of a layer that forgets, and the readout is late as well."""
    b = 0.8 * h["b"] + jnp.tanh(op(carried(h["a"]), p["u"]))
    return {"a": jnp.tanh(op(x, p["w"])), "b": b}, b + 0.3 * op(h["b"], p["v"])


def three_late(op, own, carried, p, h, x):
    """Three layers, each one step after the one below."""
    a = 0.7 * h["a"] + jnp.tanh(op(x, p["w"]))
    b = 0.8 * h["b"] + jnp.tanh(op(carried(h["a"]), p["u"]))
    c = 0.6 * h["c"] + jnp.tanh(op(carried(h["b"]), p["v"]) + op(own(h["c"]), p["r"]))
    return {"a": a, "b": b, "c": c}, b + c


def nested(op, own, carried, p, h, x):
    """A weight reaches the state by itself and behind another weight."""
    y = op(x, p["w"])
    a = 0.7 * h["a"] + jnp.tanh(y + op(carried(jnp.tanh(y)), p["u"]))
    return {"a": a}, a


def layer_norm(op, own, carried, p, h, x):
    """Mean and deviation couple units."""
    y = op(x, p["w"]) + op(own(h["a"]), p["r"])
    mean, deviation = (carried(f(y, -1, keepdims=True)) for f in (jnp.mean, jnp.std))
    a = 0.7 * h["a"] + jnp.tanh((y - mean) / deviation)
    return {"a": a}, a


def softmax(op, own, carried, p, h, x):
    """Units compete for their drive."""
    drive = jnp.exp(op(x, p["w"]))
    a = 0.7 * h["a"] + drive / carried(drive.sum(-1, keepdims=True))
    return {"a": a}, a


def reset_gate(op, own, carried, p, h, x):
    """The gate of a GRU acts before the product."""
    gate = jax.nn.sigmoid(op(jnp.concatenate([x, own(h["a"])], -1), p["z"]))
    a = 0.7 * h["a"] + 0.3 * jnp.tanh(op(x, p["w"]) + op(carried(gate * own(h["a"])), p["r"]))
    return {"a": a}, a


def in_a_circle(op, own, carried, p, h, x):
    """Two layers read each other one step late: neither is upstream."""
    a = 0.7 * h["a"] + jnp.tanh(op(x, p["w"]) + op(own(h["b"]), p["r"]))
    b = 0.8 * h["b"] + jnp.tanh(op(own(h["a"]), p["u"]))
    return {"a": a, "b": b}, a + b


MODELS = {
    late: ("wru", "ab"),
    late_without_memory: ("wuv", "ab"),
    three_late: ("wruv", "abc"),
    nested: ("wu", "a"),
    layer_norm: ("wr", "a"),
    softmax: ("w", "a"),
    reset_gate: ("wrz", "a"),
    in_a_circle: ("wru", "ab"),
}


def same(value):
    return value


class Network(brainstate.nn.Module):
    def __init__(self, step):
        super().__init__()
        self.step, (self.weights, self.names) = step, MODELS[step]
        for name in self.weights:
            setattr(self, name, brainstate.ParamState(jnp.asarray(WEIGHTS[name])))

    def init_state(self, batch_size=None):
        for name in self.names:
            setattr(self, f"h_{name}", brainstate.HiddenState(jnp.zeros((batch_size, UNITS))))

    def update(self, x):
        p = {name: getattr(self, name).value for name in self.weights}
        h = {name: getattr(self, f"h_{name}").value for name in self.names}
        new, output = self.step(braintrace.matmul, same, same, p, h, x)
        for name, value in new.items():
            getattr(self, f"h_{name}").value = value
        return output


def literal(step, mask, reset, window=None):
    stop = jax.lax.stop_gradient
    names, states = MODELS[step]
    p = {name: jnp.asarray(WEIGHTS[name]) for name in names}
    h = zero = {name: jnp.zeros((BATCH, UNITS)) for name in states}
    E = {a: {k: jnp.zeros((BATCH, UNITS, *w.shape)) for k, w in p.items()} for a in h}
    total = jax.tree.map(jnp.zeros_like, p)

    def seen(p, h, x):
        own = same if window else stop
        return step(jnp.matmul, own, same, p, h, x)

    def carried(p, h, x):
        return step(jnp.matmul, stop, stop, p, h, x)[0]

    @jax.jit
    def derivatives(p, h, x):
        return jax.jacrev(carried)(p, h, x), jax.jacrev(carried, 1)(p, h, x)

    def loss_from(p, h, t):
        """Of one step, or of the window that starts here."""
        value = 0.0
        for s in range(t, min(t + (window or 1), STEPS)):
            h = oracle.started_anew(reset[s], h, zero)
            h, y = seen(p, h, XS[s])
            value += mask[s] * squared_error(y, TARGETS[s])
        return value

    for t, x in enumerate(XS):
        if t % (window or 1) == 0:
            direct, late = jax.grad(loss_from, (0, 1))(p, h, t)
            past = [{k: jnp.tensordot(late[a], e, 2) for k, e in E[a].items()} for a in E]
            total = jax.tree.map(lambda *parts: sum(parts), total, direct, *past)
        h, E = (
            oracle.started_anew(reset[t], now, jax.tree.map(jnp.zeros_like, now)) for now in (h, E)
        )
        F, D = derivatives(p, h, x)
        E = {
            a: {k: F[a][k] + sum(jnp.tensordot(D[a][c], E[c][k], 2) for c in E) for k in p}
            for a in E
        }
        h = carried(p, h, x)
    return total


@functools.cache
def expected(step, mask, reset, window):
    """Several paths have one gradient."""
    reset = np.frombuffer(reset, bool).reshape(STEPS, BATCH)
    return literal(step, np.frombuffer(mask), reset, window)


NO_MASK, NO_RESET = np.ones(STEPS), np.zeros((STEPS, BATCH), bool)
CASES = [
    *((step, "by_chunks", Request(XS, TARGETS, SOME, EACH, chunk_size=3)) for step in MODELS),
    *(
        (step, "by_chunks", Request(XS, TARGETS, SOME, EACH, window=3))
        for step in (late, layer_norm)
    ),
    *((three_late, path, Request(XS, TARGETS, NO_MASK, EACH)) for path in PATHS),
    (nested, "by_own_gradient", Request(XS, TARGETS, SOME, NO_RESET)),
    (layer_norm, "by_own_gradient", Request(XS, TARGETS, SOME, EACH)),
]


@pytest.mark.parametrize(
    ("step", "path", "asked"), CASES, ids=[f"{step.__name__}-{path}" for step, path, _ in CASES]
)
@pytest.mark.filterwarnings("ignore::braintrace.ApproximationWarning")
def test_a_loss_sees_the_whole_step(step, path, asked):
    learner = braintrace.compile(Network(step), "d_rtrl", XS[0], batch_size=BATCH)
    found = PATHS[path](learner, asked, squared_error)
    mask, reset = asked.mask.astype(float).tobytes(), asked.reset.tobytes()
    oracle.assert_close(found, expected(step, mask, reset, asked.window), 1e-10)
