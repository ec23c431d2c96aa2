"""Train small models on a mesh of four CPU devices; print how far they are from one device.

Run by `test_meshes.py` in a process of its own, for the number of devices is fixed when JAX starts.
With `night`: the cases of the night. With other arguments: the drivers under other rules, of
which these are the names.
Each line: case, largest deviation of any number relative to the largest one.
"""

import contextlib
import sys
import tempfile

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from matrices import csr
from rules import RULES

import braintrace

LENGTH, BATCH, INPUTS, UNITS = 5, 8, 3, 4
RANDOM = np.random.default_rng(0)


def random(*shape):
    return np.float32(RANDOM.normal(size=shape) / 2)


MATRIX = csr(np.float32(np.eye(UNITS) + np.eye(UNITS, k=1)))


class Cell(brainstate.nn.Module):
    """A leaky state; what drives it is the subclass's."""

    shape: tuple = (UNITS,)

    def __init__(self, weights):
        super().__init__()
        self.params = {name: brainstate.ParamState(value) for name, value in weights.items()}

    def init_state(self, batch_size=None, **kwargs):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, *self.shape)))

    def update(self, x):
        weights = {name: state.value for name, state in self.params.items()}
        self.h.value = 0.8 * self.h.value + jnp.tanh(self.drive(x, **weights))
        return self.h.value


class Products(Cell):
    """Every operation whose output is a vector."""

    def drive(self, x, w, b, r, u, left, right, entries):
        y = braintrace.matmul(x, w, b) + braintrace.matmul(self.h.value, r)
        y = y + braintrace.lora_matmul(x, left, right) + braintrace.element_wise(u)
        return y + braintrace.sparse_matmul(self.h.value, entries, sparse_mat=MATRIX)


class Readout(Cell):
    """Two coupled states, and a filter of both for a leaky readout."""

    def init_state(self, batch_size=None, **kwargs):
        super().init_state(batch_size)
        self.a = brainstate.HiddenState(jnp.zeros((batch_size, *self.shape)))
        self.o = brainstate.HiddenState(jnp.zeros((batch_size, 2)))

    def update(self, x):
        w, out = (self.params[name].value for name in ("w", "out"))
        self.a.value = 0.9 * self.a.value + jnp.sin(self.h.value)
        self.h.value = 0.8 * self.h.value - 0.3 * self.a.value + braintrace.matmul(x, w)
        self.o.value = 0.7 * self.o.value + jnp.tanh(self.h.value + self.a.value) @ out
        return self.o.value


class Convolution(Cell):
    shape = (5, UNITS)

    def drive(self, x, w, b):
        return braintrace.conv(x, w, b, dimension_numbers=("NWC", "WIO", "NWC"))


P = PartitionSpec
COLUMNS = P(None, "model")
PRODUCTS = {
    "w": (random(INPUTS, UNITS), COLUMNS),
    "b": (random(UNITS), P("model")),
    "r": (random(UNITS, UNITS), COLUMNS),
    "u": (random(UNITS), P("model")),
    "left": (random(INPUTS, 2), P()),
    "right": (random(2, UNITS), COLUMNS),
    "entries": (random(2 * UNITS - 1), P()),
}
READOUT = {
    "w": (random(INPUTS, UNITS), COLUMNS),
    "out": (random(UNITS, 2), P("model")),
}
CONVOLUTION = {
    "w": (random(3, 2, UNITS), P(None, None, "model")),
    "b": (random(UNITS), P("model")),
}
MODELS = {
    "products": (Products, PRODUCTS, random(LENGTH, BATCH, INPUTS)),
    "readout": (Readout, READOUT, random(LENGTH, BATCH, INPUTS)),
    "convolution": (Convolution, CONVOLUTION, random(LENGTH, BATCH, 5, 2)),
}


def loss_of(learner):
    return lambda x: jnp.mean(learner(x) ** 2)


def chunks(learner, weights, xs):
    return learner.etrace_grad(xs, step_fn=loss_of(learner), chunk_size=2)


def stream(learner, weights, xs):
    momentum = {path: brainstate.ShortTermState(0 * w.value) for path, w in weights.items()}

    def update(gradients):
        for path, weight in weights.items():
            momentum[path].value = 0.5 * momentum[path].value + gradients[path]
            weight.value = weight.value - 0.1 * momentum[path].value

    losses = learner.etrace_online(xs, step_fn=loss_of(learner), update_fn=update)
    return losses, [w.value for w in weights.values()]


def optimised(learner, weights, xs):
    """An optimizer keeps the placement of a parameter, and logs see the mesh of the user."""
    placed, told = {path: w.value.sharding for path, w in weights.items()}, []

    def on_log(step, metrics):
        told.append({path: w.value.sharding for path, w in weights.items()})
        told.append({path: w.sharding for path, w in learner.optimizer_state[0].trace.items()})

    losses = learner.etrace_online(
        xs,
        step_fn=loss_of(learner),
        optimizer=optax.sgd(0.1, momentum=0.5),
        log_every=LENGTH,
        on_log=on_log,
    )
    assert told == 2 * [placed], told
    if isinstance(losses.sharding, NamedSharding):
        assert all(losses.sharding.mesh == sharding.mesh for sharding in placed.values())
    return losses, [w.value for w in weights.values()], learner.optimizer_state


def own_loop(learner, weights, xs):
    gradient = brainstate.transform.grad(loss_of(learner), weights)

    @brainstate.transform.jit
    def step(x):
        before = learner.algorithm.traces.value  # of the first step, they are made here
        return before, gradient(x), learner.algorithm.traces.value

    sharding = xs.sharding
    of_step = sharding
    if isinstance(sharding, NamedSharding):
        of_step = NamedSharding(sharding.mesh, P(*sharding.spec[1:]))
    return [step(jax.device_put(x, of_step)) for x in np.asarray(xs)]


def run(name, algorithm, drive, place):
    """Return all numbers that a way of learning gives, with arrays placed as ``place`` says."""
    build, weights, xs = MODELS[name]
    xs, weights = place(xs, weights)
    model = build(weights)
    rule = RULES[algorithm]
    learner = braintrace.compile(model, rule.algorithm, xs[0], batch_size=BATCH, **rule.options)
    found = drive(learner, model.states(brainstate.ParamState), xs)
    return jax.device_get((found, learner.algorithm.traces.value, model.h.value))


def one_device(xs, weights):
    return jnp.asarray(xs), {name: jnp.asarray(value) for name, (value, _) in weights.items()}


def on(mesh, divided):
    def place(xs, weights):
        def put(value, spec):
            return jax.device_put(value, NamedSharding(mesh, spec))

        if divided == "batch":
            return put(xs, P(None, "data")), {k: put(v, P()) for k, (v, _) in weights.items()}
        return put(xs, P()), {name: put(value, spec) for name, (value, spec) in weights.items()}

    return place


CASES = [
    ("products", "d_rtrl", chunks, [("Auto", "batch"), ("Explicit", "output")]),
    ("products", "es_d_rtrl", stream, [("Explicit", "batch")]),
    ("convolution", "es_d_rtrl", chunks, [("Explicit", "batch")]),
    ("readout", "d_rtrl", own_loop, [("Auto", "batch")]),
    ("readout", "d_rtrl", optimised, [("Explicit", "output")]),
]
OF_THE_NIGHT = [
    ("products", "d_rtrl", chunks, [("Explicit", "batch")]),
    ("products", "es_d_rtrl", stream, [("Auto", "output")]),
    ("products", "d_rtrl", own_loop, [("Explicit", "output")]),
    ("convolution", "d_rtrl", own_loop, [("Explicit", "batch")]),
    ("readout", "d_rtrl", own_loop, [("Explicit", "output")]),
]


EVERY_PLACE = [(kind, divided) for kind in ("Auto", "Explicit") for divided in ("batch", "output")]


def cases_of(argument):
    if argument == "night":
        return OF_THE_NIGHT
    return [("products", argument, drive, EVERY_PLACE) for drive in (chunks, stream, own_loop)]


def deviation(found, expected):
    worst = 0.0
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        worst = max(worst, float(np.abs(a - b).max() / max(1e-3, np.abs(b).max())))
    return worst


def saved(places):
    """Save a learner that lies in one way, restore it into one that lies in another."""
    build, weights, xs = MODELS["readout"]
    first, second = (
        braintrace.compile(build(placed), "d_rtrl", sequence[0], batch_size=BATCH)
        for sequence, placed in (place(xs, weights) for place in places)
    )
    pure, other = first.functional(), second.functional()
    scaled = jax.tree.map(lambda leaf: (1.5 * leaf + 1).astype(leaf.dtype), pure.state())
    pure.restore(scaled)
    before = [leaf.sharding for leaf in jax.tree.leaves(other.state())]
    with tempfile.TemporaryDirectory() as folder:
        braintrace.save(folder, first)
        braintrace.restore(folder, second)
    after = [leaf.sharding for leaf in jax.tree.leaves(other.state())]
    assert after == before, (before, after)
    return jax.device_get((other.state(), pure.state()))


def main():
    devices = np.asarray(jax.devices()).reshape(2, 2)
    chosen = [case for argument in sys.argv[1:] for case in cases_of(argument)]
    for number, (name, algorithm, drive, places) in enumerate(chosen or CASES):
        expected = run(name, algorithm, drive, one_device)
        for kind, divided in places:
            axes = (AxisType[kind],) * 2
            mesh = Mesh(devices, ("data", "model"), axis_types=axes)
            # JAX works with and without a mesh in its context.
            with jax.set_mesh(mesh) if number % 2 else contextlib.nullcontext():
                found = run(name, algorithm, drive, on(mesh, divided))
            label = f"{name} {algorithm} {drive.__name__} {kind} {divided}"
            print(label.replace(" ", ","), deviation(found, expected), flush=True)
    mesh = Mesh(devices, ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    ways = {
        "saved,on,a,mesh": (on(mesh, "output"), one_device),
        "restored,on,a,mesh": (one_device, on(mesh, "output")),
    }
    for name, places in ({} if chosen else ways).items():
        print(name, deviation(*saved(places)), flush=True)


if __name__ == "__main__":
    main()
