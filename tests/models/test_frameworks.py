"""Cells of Flax and Equinox, and of nobody, learn online as they are.

The frameworks are imported when a test needs them: nothing else of the suite does.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from assertions import assert_gradients_close
from every_path import loss

import braintrace

BATCH, INPUTS, UNITS, STEPS = 3, 2, 4, 7
pytestmark = pytest.mark.usefixtures("float64")

cut = jax.lax.stop_gradient


def draw(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) / 2)


class Model:
    """A step and what it starts from.

    `step` is given to the library as it is; `cut_step` passes no gradient from the states before
    the step to its products, and is what D_RTRL follows.
    """

    def __init__(self, step, cut_step, params, state, **batch):
        self.step, self.cut_step, self.params, self.state = step, cut_step, params, state
        self.batch = batch

    def gradient(self, step, xs):
        """Gradient of the summed losses over a batch, by backpropagation through `jax.lax.scan`."""

        def sequence_loss(params, xs):
            def one_step(state, x):
                state, output = step(params, state, x)
                return state, loss(output)

            return jax.lax.scan(one_step, self.state, xs)[1].sum()

        def batch_loss(params):
            if "vmap" in self.batch:
                return jax.vmap(sequence_loss, (None, 1))(params, xs).sum()
            return sequence_loss(params, xs)

        return jax.jit(jax.grad(batch_loss))(self.params)


# --- Flax ---------------------------------------------------------------------------------


def flax_cell(name, products):
    """A cell of Flax NNX, whose recurrent products are the layers of certain names."""
    from flax import nnx

    cell = getattr(nnx, name)(
        INPUTS, UNITS, dtype=jnp.float64, param_dtype=jnp.float64, rngs=nnx.Rngs(0)
    )
    graphdef, params = nnx.split(cell)
    for product in products:
        getattr(cell, product).dot_general = cut_product
    cut_graphdef, _ = nnx.split(cell)
    carry = jax.tree.map(jnp.zeros_like, cell.initialize_carry((BATCH, INPUTS), nnx.Rngs(0)))
    carry = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), carry)

    def step(graphdef, params, carry, x):
        return nnx.merge(graphdef, params)(carry, x)

    steps = (functools.partial(step, definition) for definition in (graphdef, cut_graphdef))
    return Model(*steps, params, carry, batch_size=BATCH)


def flax_network():
    """A cell with dropout and a readout; what is no parameter is carried along."""
    from flax import nnx

    class Network(nnx.Module):
        def __init__(self, rngs):
            options = {"dtype": jnp.float64, "param_dtype": jnp.float64, "rngs": rngs}
            self.cell = nnx.GRUCell(INPUTS, UNITS, **options)
            self.dropout = nnx.Dropout(0.2, rngs=rngs)
            self.readout = nnx.Linear(UNITS, 2, **options)

        def __call__(self, h, x):
            h, output = self.cell(h, x)
            return h, self.readout(self.dropout(output))

    def step(graphdef, params, state, x):
        h, rest = state
        network = nnx.merge(graphdef, params, rest)
        h, output = network(h, x)
        return (h, nnx.state(network, nnx.Not(nnx.Param))), output

    network = Network(nnx.Rngs(0))
    graphdef, params, rest = nnx.split(network, nnx.Param, ...)
    network.cell.dense_h.dot_general = cut_product
    cut_graphdef, _, _ = nnx.split(network, nnx.Param, ...)
    steps = (functools.partial(step, definition) for definition in (graphdef, cut_graphdef))
    return Model(*steps, params, (jnp.zeros((BATCH, UNITS)), rest), batch_size=BATCH)


def cut_product(h, weight, *arguments, **options):
    return jax.lax.dot_general(cut(h), weight, *arguments, **options)


# --- Equinox ------------------------------------------------------------------------------


def equinox_cell(name):
    """A cell of Equinox, written for one sample."""
    import equinox as eqx

    cell = getattr(eqx.nn, name)(INPUTS, UNITS, dtype=jnp.float64, key=jax.random.key(0))
    h = jnp.zeros(UNITS)
    state = (h, h) if name == "LSTMCell" else h

    def step(cell, state, x):
        state = cell(x, state)
        return state, state[0] if isinstance(state, tuple) else state

    def cut_step(cell, state, x):
        return step(eqx.tree_at(lambda c: c.weight_hh, cell, CutMatrix(cell.weight_hh)), state, x)

    return Model(step, cut_step, cell, state, vmap=True)


class CutMatrix:
    def __init__(self, weight):
        self.weight = weight

    def __matmul__(self, h):
        return self.weight @ cut(h)


def own_module():
    """A module of one's own: a layer below the recurrent one, a masked weight, two states."""
    import equinox as eqx

    class Cell(eqx.Module):
        embed: eqx.nn.Linear
        weight: jax.Array
        decay: jax.Array
        mask: np.ndarray
        activation: callable
        units: int = eqx.field(static=True)

        def __call__(self, state, x, mix=lambda h: h):
            fast, slow = state
            decay = jax.nn.sigmoid(self.decay)
            drive = self.embed(x) + (self.weight * self.mask) @ mix(fast)
            fast = decay * fast + self.activation(drive) - 0.2 * slow
            return (fast, 0.9 * slow + 0.1 * fast), fast

    embed = eqx.nn.Linear(INPUTS, UNITS, dtype=jnp.float64, key=jax.random.key(1))
    mask = np.triu(np.ones((UNITS, UNITS)))
    cell = Cell(embed, draw(1, UNITS, UNITS), draw(2, UNITS), mask, jnp.tanh, UNITS)
    dynamic, static = eqx.partition(cell, lambda leaf: isinstance(leaf, jax.Array))

    def step(cell, state, x, **mix):
        return eqx.combine(cell, static)(state, x, **mix)

    cut_step = functools.partial(step, mix=cut)
    return Model(step, cut_step, dynamic, (jnp.zeros(UNITS), jnp.zeros(UNITS)), vmap=True)


# --- plain JAX ----------------------------------------------------------------------------


def plain_function():
    """Fused gates, a transposed weight, a gain, a jitted step with a readout within."""
    params = {
        "w": draw(1, INPUTS, 2 * UNITS),
        "r": draw(2, 2 * UNITS, UNITS),
        "bias": draw(3, 2 * UNITS),
        "gain": draw(4, UNITS),
        "out": draw(5, UNITS, 2),
    }

    @functools.partial(jax.jit, static_argnums=3)
    def step(params, h, x, mix=lambda h: h):
        gates = x @ params["w"] + mix(h) @ params["r"].T + params["bias"]
        gate, value = jnp.split(gates, 2, axis=-1)
        gate = jax.nn.sigmoid(gate)
        h = gate * h + (1 - gate) * jnp.tanh(value) * params["gain"]
        return h, h @ params["out"]

    def cut_step(params, h, x):
        return step(params, h, x, cut)

    return Model(step, cut_step, params, jnp.zeros((BATCH, UNITS)), batch_size=BATCH)


MODELS = {
    "nnx.GRUCell": lambda: flax_cell("GRUCell", ["dense_h"]),
    "nnx.LSTMCell": lambda: flax_cell("LSTMCell", ["hi", "hf", "hg", "ho"]),
    "nnx.OptimizedLSTMCell": lambda: flax_cell("OptimizedLSTMCell", ["dense_h"]),
    "nnx.SimpleCell": lambda: flax_cell("SimpleCell", ["dense_h"]),
    "nnx, with dropout": flax_network,
    "eqx.nn.GRUCell": lambda: equinox_cell("GRUCell"),
    "eqx.nn.LSTMCell": lambda: equinox_cell("LSTMCell"),
    "an Equinox module": own_module,
    "a function": plain_function,
}


# --- the same cells by hand, as the oracle of ES_D_RTRL reads them -------------------------


class Twin:
    """A step of a model, written with operations that have names; see `oracles`.

    names: the leaves of the model's parameters by the names that `step` has for them.
    step: ``(ops, params, states, x) -> output``.
    states: names of the states, in the order of the model's.
    """

    name, loss = "twin", staticmethod(lambda output, target: loss(output))

    def __init__(self, names, step, operations, states=("h",), broadcast=()):
        self.names, self.step, self.broadcast = names, step, broadcast
        self.groups = {"cell": states}
        self.relations = dict.fromkeys(operations, ("cell",))

    def es_d_rtrl(self, model, xs, decay):
        """The oracle's gradient of a model, by the names of its parameters here."""
        state = jax.tree.leaves(model.state)
        if "vmap" in model.batch:
            state = [jnp.broadcast_to(h, (BATCH, *h.shape)) for h in state]
        states = dict(zip(self.groups["cell"], state, strict=True))
        return oracles.dense_es_d_rtrl(self, self.names(model.params), states, xs, xs, decay)


def flax_gru(ops, p, states, x):
    h = states["h"]
    of_x = jnp.split(ops.matmul("i", x, p["i"], p["bias"]), 3, axis=-1)
    of_h = jnp.split(ops.matmul("h", h, p["h"]), 3, axis=-1)
    r, z = (jax.nn.sigmoid(a + b) for a, b in zip(of_x[:2], of_h[:2], strict=True))
    return ops.new_state("h", (1 - z) * jnp.tanh(of_x[2] + r * of_h[2]) + z * h)


def flax_lstm(ops, p, states, x):
    gates = ops.matmul("i", x, p["i"]) + ops.matmul("h", states["h"], p["h"], p["bias"])
    return lstm(ops, gates, states["c"])


def lstm(ops, gates, c):
    i, f, g, o = jnp.split(gates, 4, axis=-1)
    c = ops.new_state("c", jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g))
    return ops.new_state("h", jax.nn.sigmoid(o) * jnp.tanh(c))


def equinox_gru(ops, p, states, x):
    h = states["h"]
    of_x = jnp.split(ops.matmul("i", x, p["i"].T, p["bias"]), 3, axis=-1)
    of_h = jnp.split(ops.matmul("h", h, p["h"].T), 3, axis=-1)
    r, z = (jax.nn.sigmoid(a + b) for a, b in zip(of_x[:2], of_h[:2], strict=True))
    new = jnp.tanh(of_x[2] + r * (of_h[2] + ops.element_wise("n", p["n"])))
    return ops.new_state("h", new + z * (h - new))


def equinox_lstm(ops, p, states, x):
    gates = ops.matmul("i", x, p["i"].T) + ops.matmul("h", states["h"], p["h"].T)
    return lstm(ops, gates + ops.element_wise("bias", p["bias"]), states["c"])


def own_step(ops, p, states, x):
    decay = ops.element_wise("decay", p["decay"], jax.nn.sigmoid)
    mask = np.triu(np.ones((UNITS, UNITS)))
    drive = ops.matmul("embed", x, p["embed"].T, p["bias"])
    drive = drive + ops.matmul("weight", states["fast"], (p["weight"] * mask).T)
    fast = ops.new_state("fast", decay * states["fast"] + jnp.tanh(drive) - 0.2 * states["slow"])
    ops.new_state("slow", 0.9 * states["slow"] + 0.1 * fast)
    return fast


def function_step(ops, p, states, x):
    gates = ops.matmul("w", x, p["w"]) + ops.matmul("r", states["h"], p["r"].T)
    gate, value = jnp.split(gates + ops.element_wise("bias", p["bias"]), 2, axis=-1)
    gate, gain = jax.nn.sigmoid(gate), ops.element_wise("gain", p["gain"])
    return ops.new_state("h", gate * states["h"] + (1 - gate) * jnp.tanh(value) * gain) @ p["out"]


def of_flax(with_bias):
    def names(params):
        kernels = {k: params[f"dense_{k}"]["kernel"][...] for k in ("i", "h")}
        return {**kernels, "bias": params[f"dense_{with_bias}"]["bias"][...]}

    return names


def of_equinox(cell):
    found = {"i": cell.weight_ih, "h": cell.weight_hh, "bias": cell.bias}
    return found if getattr(cell, "bias_n", None) is None else {**found, "n": cell.bias_n}


def of_own(cell):
    embed = {"embed": cell.embed.weight, "bias": cell.embed.bias}
    return {**embed, "weight": cell.weight, "decay": cell.decay}


TWINS = {
    "nnx.GRUCell": Twin(of_flax("i"), flax_gru, "ih"),
    "nnx.OptimizedLSTMCell": Twin(of_flax("h"), flax_lstm, "ih", ("c", "h")),
    "eqx.nn.GRUCell": Twin(of_equinox, equinox_gru, "ihn", broadcast=("n",)),
    "eqx.nn.LSTMCell": Twin(
        of_equinox, equinox_lstm, ("i", "h", "bias"), ("h", "c"), broadcast=("bias",)
    ),
    "an Equinox module": Twin(
        of_own, own_step, ("embed", "weight", "decay"), ("fast", "slow"), broadcast=("decay",)
    ),
    "a function": Twin(dict, function_step, ("w", "r", "bias", "gain"), broadcast=("bias", "gain")),
}

DECAY = 0.8
RULES = {
    "rtrl": ({}, lambda model: model.step),
    "d_rtrl": ({}, lambda model: model.cut_step),
    "es_d_rtrl": ({"mark": "auto", "decay_or_rank": DECAY}, lambda model: None),
}
PAIRS = [("a function", "d_rtrl"), ("nnx.GRUCell", "es_d_rtrl")]


@pytest.mark.filterwarnings("ignore::braintrace.ApproximationWarning")
@pytest.mark.parametrize(("name", "rule"), PAIRS)
def test_a_model_of_another_framework_learns_unchanged(name, rule):
    options, oracle = RULES[rule]
    model = MODELS[name]()
    xs = draw(9, STEPS, BATCH, INPUTS)
    module = braintrace.from_function(model.step, model.params, model.state)
    learner = braintrace.compile(module, rule, xs[0], **model.batch, **options)

    def gradients():
        learner.reset_state()
        return learner.etrace_grad(
            xs,
            step_fn=lambda x: loss(learner(x)),
            reduction="sum",
            chunk_size=3,
            return_value=True,
        )

    found, before = gradients()
    assert jax.tree.structure(found) == jax.tree.structure(model.params)
    if (step := oracle(model)) is not None:
        assert_gradients_close(found, model.gradient(step, xs), 1e-10)
    elif name in TWINS:
        twin = TWINS[name]
        assert_gradients_close(twin.names(found), twin.es_d_rtrl(model, xs, DECAY), 1e-10)
    for _ in range(10):
        descend = functools.partial(jax.tree.map, lambda p, g: p - 0.01 * g)
        module.set_params(descend(module.get_params(), gradients()[0]))
    assert gradients()[1].sum() < 0.95 * before.sum()
