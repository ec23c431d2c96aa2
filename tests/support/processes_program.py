"""Learn in several processes, of which this is one.

    processes_program.py CASE FOLDER --coordinator ADDRESS --processes N --process I

Run by `test_processes.py`. The state at the end is written to ``FOLDER/state.npz`` as one process
would have it, and the losses with it.
"""

import functools
import pathlib
import sys

import brainstate
import example_scripts
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh

import braintrace
from braintrace._sharding import on_host

PART, PARTS = 30, 1
"""Steps of a part of the stream, and how many parts are learned."""

STEPS, SAMPLES = 20, 8
PLACES = {
    "both": ("Auto", (2, 2)),
    "explicit": ("Explicit", (2, 2)),
    "units": ("Auto", (1, 4)),
}


def stream(example, folder):
    """Learn a short stream of the example."""
    example.resume.PART = PART
    return example.train(example.Stream(), folder, PARTS)


def digits(example, folder, parts=1):
    """Learn the digits for one epoch more than there is."""
    task = example.Digits()
    task.HIDDEN = 16
    return example.train(task, folder, parts)


def endless(example, folder):
    """Learn until somebody stops it."""
    example.resume.PART = PART
    return example.train(example.Stream(), folder, 10**6)


def everything(example, folder, kind, parts):
    """Print how far every method of a divided learner is from one that is not."""
    divided, elsewhere = learner(), learner()
    braintrace.shard(divided, mesh_of(kind, parts), model="model")
    found = results(divided)
    expected = results(learner())
    far = deviation(found, expected)  # all processes have parts of it
    if jax.process_index() == 0:
        print("deviation", far, flush=True)
    first_loss = found[1]
    braintrace.save(folder, divided, extra={"losses": first_loss, "done": 1})
    braintrace.shard(elsewhere, mesh_of("Auto", (1, 4)), data=None, model="model")
    extra = braintrace.restore(folder, elsewhere)
    assert extra["done"] == 1
    np.testing.assert_array_equal(extra["losses"], first_loss)
    for one, other in zip(whole(divided), whole(elsewhere), strict=True):
        np.testing.assert_array_equal(one, other)
    return divided, np.zeros(0)


def mesh_of(kind, parts):
    devices = np.asarray(jax.devices()).reshape(parts)
    return Mesh(devices, ("data", "model"), axis_types=(AxisType[kind],) * 2)


class Noisy(braintrace.nn.IndRNN):
    """Its noise is that of a random key, which is no array that NumPy has."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.key = brainstate.State(jax.random.key(1))

    def update(self, x):
        self.key.value, key = jax.random.split(self.key.value)
        return super().update(x + jax.random.normal(key, x.shape) / 10)


def learner():
    brainstate.random.seed(0)
    model = Noisy(3, 8)
    return braintrace.compile(model, "d_rtrl", jnp.ones((SAMPLES, 3)), batch_size=SAMPLES)


def results(learner):
    """Return what all methods give that one host reads."""
    generator = np.random.default_rng(0)
    xs, ys = (generator.normal(size=(STEPS, SAMPLES, n)).astype("f") for n in (3, 8))
    told, even = [], np.arange(STEPS) % 2 == 0

    def loss(x, y):
        return jnp.mean((learner(x) - y) ** 2)

    def with_output(x, y):
        output = learner(x)
        return jnp.mean((output - y) ** 2), output

    def on_log(step, metrics):
        told.append({name: metrics[name] for name in metrics if name != "steps_per_second"})

    watched = {"log_every": STEPS // 2, "on_log": on_log, "progress": True}
    adam = {"optimizer": optax.adam(1e-2)}
    gradients = learner.etrace_grad(xs, ys, step_fn=loss, mask=even)
    losses, _ = learner.etrace_online(
        xs, ys, step_fn=with_output, has_aux=True, nonfinite="raise", **adam, **watched
    )
    learner.reset_state(where=np.arange(SAMPLES) % 2 == 0)
    learner.etrace_online(xs, ys, step_fn=loss, reset=even, **adam)
    outputs = on_host(learner.predict(xs))
    learner.reset_state()
    learner(xs[0])
    return gradients, np.asarray(losses), told, outputs, learner.skipped_updates, whole(learner)


def whole(learner):
    """Return all that a learner is, as one process would have it."""
    return [on_host(leaf) for leaf in jax.tree.leaves(learner.functional().state())]


def deviation(found, expected):
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return max(float(np.max(np.abs(on_host(a) - on_host(b)), initial=0)) for a, b in pairs)


def main(case, folder, *connection):
    example = example_scripts.load("multi_host")
    example.connect(example.parse_options(["stream", "--devices", "2", *connection]))
    learner, losses = CASES[case](example, folder)
    leaves = whole(learner)
    if jax.process_index() == 0:
        np.savez(pathlib.Path(folder) / "state.npz", *leaves, losses=losses)


CASES = {case.__name__: case for case in (stream, digits, endless)}
CASES |= {
    place: functools.partial(everything, kind=kind, parts=parts)
    for place, (kind, parts) in PLACES.items()
}

if __name__ == "__main__":
    main(*sys.argv[1:])
