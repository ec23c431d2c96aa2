"""Divide small learners over eight CPU devices; print how far they are from one device.

Run by `test_sharding.py` in a process of its own, for the number of devices is fixed when JAX
starts. The argument says which rows: of the day, or, with a share such as ``3/12``, of the night.
Each line: case, deviation.
"""

import contextlib
import itertools
import sys
import tempfile
import warnings

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
import saiunit
from jax.sharding import AxisType, Mesh

import braintrace

LENGTH, BATCH, INPUTS, UNITS = 5, 8, 8, 16
RANDOM = np.random.default_rng(0)


def random(*shape):
    return np.float32(RANDOM.normal(size=shape) / 4)


def matrix(rows, columns):
    """Return a matrix of units by units, whose entries keep their order."""
    places = jnp.asarray(rows, jnp.int32), jnp.asarray(columns, jnp.int32)
    return saiunit.sparse.COO((jnp.ones(len(rows)), *places), shape=(UNITS, UNITS))


def draw(count, most):
    return np.sort(RANDOM.integers(0, most, count))


BY_SOURCE = matrix(draw(31, UNITS), RANDOM.integers(0, UNITS, 31))
BY_TARGET = matrix(RANDOM.integers(0, UNITS, 48), np.repeat(np.arange(UNITS), 3))
IS_PADDING, OF_PART = np.arange(40) % 5 == 4, np.arange(40) // 5 * 2  # eight parts of two units
PADDED = matrix(
    np.where(IS_PADDING, UNITS, RANDOM.integers(0, UNITS, 40)),
    np.where(IS_PADDING, UNITS, OF_PART + RANDOM.integers(0, 2, 40)),
)


class Cell(brainstate.nn.Module):
    """Leaky units, of one state or two; what drives them is a function.

    With a weight ``o``, a product of their states is the output.
    """

    def __init__(self, drive, states, shape, **weights):
        super().__init__()
        self.drive, self.states_of_unit, self.shape = drive, states, shape
        self.params = {k: brainstate.ParamState(jnp.asarray(v)) for k, v in weights.items()}

    def init_state(self, batch_size=None, **kwargs):
        shape = self.shape if batch_size is None else (batch_size, *self.shape)
        self.h = brainstate.HiddenState(jnp.zeros(shape))
        if self.states_of_unit == 2:
            self.a = brainstate.HiddenState(jnp.zeros(shape))

    def update(self, x):
        values = {name: state.value for name, state in self.params.items()}
        readout = values.pop("o", None)
        new = 0.8 * self.h.value + jnp.tanh(self.drive(x, self.h.value, **values))
        if self.states_of_unit == 2:
            new = new - 0.3 * self.a.value
            self.a.value = 0.9 * self.a.value + 0.1 * jnp.sin(self.h.value)
        self.h.value = new
        return new if readout is None else braintrace.matmul(new, readout)


def dense(x, h, w, b):
    return braintrace.matmul(x, w, b)


def recurrent(x, h, w, b, r):
    return braintrace.matmul(x, w, b) + braintrace.matmul(h, r)


def masked(x, h, w, r):
    return braintrace.matmul(x, w.T, weight_fn=jnp.abs) + braintrace.matmul(h, jnp.tanh(r))


def conv(x, h, w, b):
    rows = x.reshape(-1, *x.shape[-2:])  # one sample is a batch of one to `conv`
    y = braintrace.conv(rows, w, b, dimension_numbers=("NWC", "WIO", "NWC"))
    return y.reshape(*x.shape[:-1], -1)


def by_source(x, h, w, s):
    return braintrace.matmul(x, w) + braintrace.sparse_matmul(h, s, sparse_mat=BY_SOURCE)


def by_target(x, h, w, s):
    return braintrace.matmul(x, w) + braintrace.sparse_matmul(h, s, sparse_mat=BY_TARGET)


def padded(x, h, w, s):
    return braintrace.matmul(x, w) + braintrace.sparse_matmul(h, s, sparse_mat=PADDED)


def mixed(x, h, w, b, r, s):
    return recurrent(x, h, w, b, r) + braintrace.sparse_matmul(h, s, sparse_mat=PADDED)


def lora(x, h, left, right):
    return braintrace.lora_matmul(x, left, right)


def element_wise(x, h, u):
    return x * braintrace.element_wise(u)


def embedding(x, h, w):
    return braintrace.embedding(x, w)


WEIGHTS = {
    "w": random(INPUTS, UNITS),
    "b": random(UNITS),
    "r": random(UNITS, UNITS),
    "o": random(UNITS, 3),
    "u": random(UNITS),
    "left": random(INPUTS, 2),
    "right": random(2, UNITS),
}
XS = random(LENGTH, BATCH, INPUTS)


def cell(drive, names, xs=XS, shape=(UNITS,), **others):
    weights = {**{name: WEIGHTS[name] for name in names.split()}, **others}
    return lambda states: Cell(drive, states, shape, **weights), xs


MODELS = {
    "dense": cell(dense, "w b"),
    "recurrent": cell(recurrent, "w b r"),
    "masked": cell(masked, "r", w=random(UNITS, INPUTS)),
    "conv": cell(conv, "b", random(LENGTH, BATCH, 5, 2), (5, UNITS), w=random(3, 2, UNITS)),
    "by_source": cell(by_source, "w", s=random(31)),
    "by_target": cell(by_target, "w", s=random(48)),
    "padded": cell(padded, "w", s=random(40)),
    "mixed": cell(mixed, "w b r", s=random(40)),
    "lora": cell(lora, "left right"),
    "element_wise": cell(element_wise, "u", random(LENGTH, BATCH, UNITS)),
    "embedding": cell(embedding, "", RANDOM.integers(0, 9, (LENGTH, BATCH)), w=random(9, UNITS)),
    "readout": cell(dense, "w b o"),
    "gru": (lambda states: braintrace.nn.GRUCell(INPUTS, UNITS), XS),
    "lstm": (lambda states: braintrace.nn.LSTMCell(INPUTS, UNITS), XS),
}
WHOLE = ("by_source",)
"""Models whose units no mesh divides: their entries are in the order of the inputs."""
MESHES = [(8, 1), (4, 2), (1, 8)]


def mesh_of(parts, kind="Auto"):
    devices = np.asarray(jax.devices()).reshape(parts)
    return Mesh(devices, ("data", "model"), axis_types=(AxisType[kind],) * 2)


def learner_of(name, rule="d_rtrl", states=1, vmap=False):
    build, xs = MODELS[name]
    brainstate.random.seed(0)
    options = {"decay_or_rank": 0.9} if rule == "es_d_rtrl" else {}
    example = (build(states), rule, jnp.asarray(xs[0]))
    return braintrace.compile(*example, batch_size=BATCH, vmap=vmap, **options), xs


def loss_of(learner):
    return lambda x: jnp.mean(learner(x) ** 2)


def chunks(learner, xs):
    return learner.etrace_grad(xs, step_fn=loss_of(learner), chunk_size=2)


def windows(learner, xs):
    return learner.etrace_grad(xs, step_fn=loss_of(learner), window=2, chunk_size=4)


def stream(learner, xs):
    """One sample is NaN in the last step, if not an index: it starts anew, without its update."""
    xs, skipped = jnp.asarray(xs), learner.skipped_updates
    has_nan = jnp.issubdtype(xs.dtype, jnp.floating)
    with warnings.catch_warnings(action="ignore", category=braintrace.NonFiniteWarning):
        losses = learner.etrace_online(
            xs.at[-1, 0].set(jnp.nan) if has_nan else xs,
            step_fn=loss_of(learner),
            optimizer=OPTIMIZER,
        )
    assert learner.skipped_updates == skipped + has_nan and jnp.isnan(losses[-1]) == has_nan
    return losses[:-1]


OPTIMIZER = optax.adam(0.01)


def own_loop(learner, xs):
    weights = learner.algorithm.model.states(brainstate.ParamState)
    step = brainstate.transform.jit(brainstate.transform.grad(loss_of(learner), weights))
    return [step(x) for x in xs[:2]], learner(xs[2])


def pure(learner, xs):
    functional = learner.functional()
    run = jax.jit(lambda state: functional.grad(state, xs, step_fn=loss_of(learner)))
    state, gradients = run(functional.state())
    state, output = functional.step(functional.reset(state), xs[0])
    functional.restore(jax.device_get(state))
    return gradients, output


DRIVES = {drive.__name__: drive for drive in (chunks, windows, stream, own_loop, pure)}


def all_of(learner):
    return learner.functional().unsharded_state()


def results(learner, xs, drive, divide=None):
    """Return what a way of learning gives, before a reset and after; it is divided meanwhile."""
    before = drive(learner, xs)
    if divide is not None:
        divide(learner)
    between = drive(learner, xs)
    learner.reset_state(where=jnp.arange(BATCH) % 2 == 0)
    learner.predict(xs)
    learner.reset_state()
    return before, between, drive(learner, xs), all_of(learner)


def deviation(found, expected):
    worst = 0.0
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        worst = max(worst, float(np.abs(a - b).max() / max(1e-3, np.abs(b).max())))
    return worst


def numbers(name, drive, *places, **options):
    """Print deviations from one device of a learner that is divided in the middle of its work."""
    expected = results(*learner_of(name, **options), DRIVES[drive])
    for parts, kind in places:
        mesh = mesh_of(parts, kind)
        learner, xs = learner_of(name, **options)

        def divide(learner, mesh=mesh):
            braintrace.shard(learner, mesh, model="model")

        # JAX works with and without a mesh in its context.
        with jax.set_mesh(mesh) if parts == (1, 8) else contextlib.nullcontext():
            found = results(learner, xs, DRIVES[drive], divide)
        check_places(learner, mesh, is_whole=name in WHOLE)
        print(label(name, drive, parts, kind, options), deviation(found, expected), flush=True)


def label(*parts):
    return "".join(str(part).replace(" ", "") + "," for part in parts)[:-1]


def check_places(learner, mesh, is_whole=False):
    """What is held lies on all devices, samples and units divided; or its units whole."""
    state = all_of(learner)
    for leaf in jax.tree.leaves((state.parameters, state.hidden, state.traces, state.optimizer)):
        assert leaf.sharding.mesh == mesh, leaf.sharding
    hidden = jax.tree.leaves(state.hidden)[0]
    parts = mesh.shape["data"] if is_whole else mesh.size
    assert hidden.addressable_shards[0].data.size * parts == hidden.size, hidden.sharding


def saved_elsewhere():
    """Save a learner on one mesh, restore it on another, whose parts have other units.

    Its gates have traces of their own on both, and lie side by side in what is saved.
    """
    first, xs = learner_of("lstm")
    second, _ = learner_of("lstm")
    braintrace.shard(first, mesh_of((4, 2)), model="model")
    braintrace.shard(second, mesh_of((1, 8)), model="model")
    stream(first, xs)
    with tempfile.TemporaryDirectory() as folder:
        braintrace.save(folder, first)
        braintrace.restore(folder, second)
    found = [(stream(learner, xs), all_of(learner)) for learner in (second, first)]
    check_places(second, mesh_of((1, 8)))
    print("restored", deviation(*found), flush=True)


class Gated(brainstate.nn.Module):
    """Two coupled states and two gates, no unit reading another: D_RTRL is exact."""

    def __init__(self, weights):
        super().__init__()
        self.w, self.b = map(brainstate.ParamState, weights)

    def init_state(self, batch_size=None, **kwargs):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, UNITS)))
        self.a = brainstate.HiddenState(jnp.zeros((batch_size, UNITS)))

    def update(self, x):
        y = braintrace.matmul(x, self.w.value, self.b.value)
        self.h.value, self.a.value = step_of_gated(y, self.h.value, self.a.value)
        return self.h.value


def step_of_gated(y, h, a):
    keep, new = jnp.split(y, 2, axis=-1)
    return jax.nn.sigmoid(keep) * h + jnp.tanh(new) - 0.3 * a, 0.9 * a + 0.1 * jnp.sin(h)


STARTS = np.zeros((LENGTH, BATCH), bool)
STARTS[LENGTH // 2, ::3] = True
COUNTED = np.arange(LENGTH) != LENGTH // 2


def interrupted_windows(learner, xs):
    """Some samples start anew within a window, at a step whose loss does not count."""
    options = {"window": 2, "chunk_size": 4, "reset": STARTS, "mask": COUNTED}
    return learner.etrace_grad(xs, step_fn=loss_of(learner), **options)


def backpropagated(weights, xs, starts, counted):
    """Return the gradient of the mean counted loss, by the chain rule through all steps."""

    def loss(weights):
        w, b = weights
        h, a, total = jnp.zeros((BATCH, UNITS)), jnp.zeros((BATCH, UNITS)), 0.0
        for x, start, counts in zip(xs, starts, counted, strict=True):
            h, a = (jnp.where(start[:, None], 0.0, state) for state in (h, a))
            h, a = step_of_gated(x @ w + b, h, a)
            total = total + counts * jnp.mean(h**2) / sum(counted)
        return total

    return jax.grad(loss)(weights)


def against_backpropagation():
    """Compare the gradients of divided learners with those of plain JAX on one device."""
    with jax.enable_x64(True):
        weights = RANDOM.normal(size=(INPUTS, 2 * UNITS)), RANDOM.normal(size=2 * UNITS)
        weights, xs = tuple(map(jnp.asarray, weights)), XS.astype(np.float64)
        whole = backpropagated(weights, xs, np.zeros_like(STARTS), np.ones_like(COUNTED))
        interrupted = backpropagated(weights, xs, STARTS, COUNTED)
        drives = {chunks: whole, windows: whole, interrupted_windows: interrupted}
        for parts in ((4, 2), (1, 8)):
            learner = braintrace.compile(Gated(weights), "d_rtrl", xs[0], batch_size=BATCH)
            braintrace.shard(learner, mesh_of(parts), model="model")
            for drive, expected in drives.items():
                learner.reset_state()
                found = drive(learner, xs)
                found = [found[name,] for name in ("w", "b")]
                assert found[0].dtype == np.float64
                off = deviation(found, expected)
                assert off < 1e-13, (parts, drive, off)
    print("backpropagation", 0.0, flush=True)


def refusals():
    """Print what is said of sizes that a mesh does not divide."""
    learner, _ = learner_of("dense")
    mesh = Mesh(np.asarray(jax.devices())[:3], ("data",))
    try:
        braintrace.shard(learner, mesh)
    except braintrace.ShapeError as error:
        assert "batch of 8" in str(error), error
        assert "3 devices" in str(error), error
    else:
        raise AssertionError("a batch of 8 has been divided into three parts")
    braintrace.shard(learner, mesh_of((4, 2)))
    try:
        learner.reset_state(6)
    except braintrace.ShapeError as error:
        assert "batch of 6" in str(error), error
    else:
        raise AssertionError("a batch of 6 has been divided into four parts")
    learner.reset_state(12)
    assert all_of(learner).hidden[("h",)].sharding.spec == jax.sharding.PartitionSpec("data")
    braintrace.shard(learner, mesh_of((1, 8)), model="model")
    assert learner.report().replicated == ()
    braintrace.shard(learner, Mesh(np.asarray(jax.devices())[:3], "model"), None, "model")
    assert "h" in learner.report().replicated, learner.report().replicated
    gated, _ = learner_of("gru")
    braintrace.shard(gated, mesh_of((2, 4)), model="model")
    report = gated.report()
    assert report.replicated == ("Wrz/weight", "Wrz/weight#1"), (
        report.replicated
    )  # divided in traces alone
    assert "Sharded over 8 devices, 2 'data' x 4 'model'" in str(report), report
    print("refusals", 0.0, flush=True)


def day():
    numbers("mixed", "chunks", ((4, 2), "Explicit"), states=2)
    numbers("gru", "pure", ((1, 8), "Explicit"), vmap=True)
    saved_elsewhere()
    refusals()
    against_backpropagation()


def has_states(name, states):
    """Cells of the library have the states that they have."""
    return states == 1 or name not in ("gru", "lstm")


def share_of(rows, share):
    """Return one of equal shares of rows: of ``"0/3"``, every third from the first on."""
    number, shares = map(int, share.split("/"))
    return rows[number::shares]


def night(share):
    rules, kinds = ("d_rtrl", "es_d_rtrl", "immediate"), ("Auto", "Explicit")
    styles = ((1, False), (2, False), (1, True))
    rows = [
        (name, drive, rule, states, vmap)
        for name, drive, rule, (states, vmap) in itertools.product(MODELS, DRIVES, rules, styles)
        if has_states(name, states)
    ]
    for name, drive, rule, states, vmap in share_of(rows, share):
        places = itertools.product(MESHES, kinds)
        numbers(name, drive, *places, rule=rule, states=states, vmap=vmap)


if __name__ == "__main__":
    {"day": day, "night": night}[sys.argv[1]](*sys.argv[2:])
