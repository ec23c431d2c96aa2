"""A learner on a mesh gives the numbers of one device, and the batch is never gathered."""

import collections
import functools
import json
import os
import re
import socket
import subprocess
import sys

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import repository
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

import braintrace
from braintrace import nn
from braintrace._jax import on_host
from braintrace.sharding import DataAxis, placement_of

BATCH, STEPS, INPUTS, UNITS = 8, 6, 3, 8
OPTIMIZER = optax.adam(1e-2)
CELLS = {"IndRNN": nn.IndRNN, "GRU": nn.GRUCell, "LSTM": nn.LSTMCell}
CASES = [("LSTM", "es_d_rtrl"), ("GRU", "rtrl"), ("IndRNN", "d_rtrl")]
KINDS = "all-gather|all-to-all|collective-permute|reduce-scatter|all-reduce"


def draws(*shape):
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def build(cell, rule):
    brainstate.random.seed(0)
    with jax.default_matmul_precision("highest"):
        return braintrace.compile(
            CELLS[cell](INPUTS, UNITS), rule, jnp.ones((BATCH, INPUTS)), batch_size=BATCH
        )


def mesh_of(*lengths):
    names, auto = ("data", "model")[: len(lengths)], (AxisType.Auto,) * len(lengths)
    return jax.make_mesh(lengths, names, axis_types=auto)


def results_of(learner, between=lambda: None, gradients_alone=False):
    """Every method on one sequence, with a mask, resets and an optimizer."""
    xs, mask = draws(STEPS, BATCH, INPUTS), np.asarray([1, 1, 0, 1, 0, 1], np.float32)
    reset = np.zeros((STEPS, BATCH), bool)
    reset[3, 2:5] = True

    def step_fn(x):
        return jnp.mean(learner(x) ** 2)

    options = {"step_fn": step_fn, "mask": mask, "reset": reset}
    found = {"first": learner.etrace_grad(xs, **options, chunk_size=3)}
    between()
    found["grad"] = learner.etrace_grad(xs, **options, chunk_size=3)
    if gradients_alone:
        return found
    learner.reset_state(where=np.arange(BATCH) % 2 == 0)
    found["online"] = learner.etrace_online(xs, **options, optimizer=OPTIMIZER)
    own = brainstate.transform.grad(lambda: step_fn(xs[0]), learner.param_states)
    found["own"] = own()
    found["state"] = learner.functional().state()
    learner.reset_state()
    found["predict"] = learner.predict(xs)
    return found


def gathered(results):
    return {name: [*map(on_host, jax.tree.leaves(tree))] for name, tree in results.items()}


def deviations(found, expected):
    """Largest deviation of each gathered result."""

    def far(found, expected):
        pairs = zip(found, expected, strict=True)
        return max(float(np.max(np.abs(a - b), initial=0)) for a, b in pairs)

    return {name: far(found[name], expected[name]) for name in expected}


def deviations_of(cell, rule, learner, shard, **options):
    """The same of a learner, sharded on the way, from one that is not."""
    expected = results_of(build(cell, rule), **options)
    return deviations(gathered(results_of(learner, shard, **options)), gathered(expected))


def collectives(learner):
    """Collectives of the program of a gradient, inside and outside of its loops."""
    pure = learner.functional()
    xs = draws(STEPS, BATCH, INPUTS)

    def run(state, xs):
        return pure.grad(state, xs, step_fn=lambda x: jnp.mean(learner(x) ** 2))

    text = jax.jit(run).lower(pure.state(), xs).compile().as_text()
    found = collections.Counter(re.findall(rf" ({KINDS})\(", text))
    entry = text[text.index("ENTRY") :]
    return dict(found), len(re.findall(r" all-reduce\(", entry))


def parts(array):
    return array.size // array.addressable_shards[0].data.size


def check_placement(learner):
    state = learner.functional().state()
    for name, leaf in jax.tree_util.tree_leaves_with_path((state.hidden, state.traces)):
        assert parts(leaf) == jax.device_count() or leaf.shape[:1] != (BATCH,), name
    assert all(leaf.is_fully_replicated for leaf in jax.tree.leaves(state.parameters))


def on_devices():
    for cell, rule in CASES:
        learner, far = build(cell, rule), {"weights": 0.0}
        shard = functools.partial(braintrace.shard, learner, mesh_of(8))
        if rule == "d_rtrl":  # its numbers are those with split weights, below
            shard()
        else:
            far = deviations_of(cell, rule, learner, shard, gradients_alone=rule == "rtrl")
        learner.etrace_evolve(draws(STEPS, BATCH, INPUTS))
        check_placement(learner)
        print(
            json.dumps({"case": f"{cell} {rule}", "far": far, "sent": collectives(learner)}),
            flush=True,
        )
    learner = build("IndRNN", "d_rtrl")
    mesh = mesh_of(4, 2)

    def along_units(w):
        names = *[None] * (w.ndim - 1), "model"
        return jax.device_put(w, NamedSharding(mesh, PartitionSpec(*names)))

    def shard():
        for weight in learner.param_states.values():
            weight.value = jax.tree.map(along_units, weight.value)
        braintrace.shard(learner, mesh)

    far = deviations_of("IndRNN", "d_rtrl", learner, shard, gradients_alone=True)
    (weight, *_) = jax.tree.leaves([state.value for state in learner.param_states.values()])
    print(json.dumps({"case": "weights", "far": far, "parts": parts(weight)}))


def in_processes(index, port, folder):
    """Two processes share a learner, save it, and continue from the checkpoint."""
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(index), initialization_timeout=300)
    learner, mesh = build("IndRNN", "d_rtrl"), Mesh(np.asarray(jax.devices()), ("data",))
    shard = functools.partial(braintrace.shard, learner, mesh)
    found = gathered(results_of(learner, shard))
    if index == "0":
        far = deviations(found, gathered(results_of(build("IndRNN", "d_rtrl"))))
        print(json.dumps({"case": "processes", "far": far}))
    other = build("IndRNN", "d_rtrl")
    braintrace.shard(other, mesh)
    other.init_optimizer(OPTIMIZER)
    braintrace.save(folder, learner, extra={"step": 3})
    assert braintrace.restore(folder, other) == {"step": 3}
    xs = draws(STEPS, BATCH, INPUTS)
    continued = (on_host(own.etrace_evolve(xs)) for own in (learner, other))
    np.testing.assert_array_equal(*continued)


def started(*arguments, devices):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    environment = {
        **os.environ,
        **{"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": repository.SEARCHED},
        **{"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},  # compilation takes nearly all of the time
    }
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, __file__, *arguments], env=environment, **pipes)


def lines_of(process):
    with process:
        out, errors = process.communicate()
    assert process.returncode == 0, errors[-3000:]
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")]


def test_eight_devices_give_the_numbers_of_one():
    """Shard in the middle of a sequence; gradients need all-reduces outside of loops alone."""
    *cases, weights = lines_of(started("devices", devices=8))
    assert len(cases) == len(CASES)
    for found in (*cases, weights):
        assert max(found["far"].values()) < 1e-5, found
    assert weights["parts"] == 2
    for found in cases:
        counts, in_entry = found["sent"]
        assert counts == {"all-reduce": in_entry}, found


def test_two_processes_give_the_numbers_of_one_device(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    both = [started("processes", str(i), port, str(tmp_path), devices=2) for i in range(2)]
    (found,), _ = map(lines_of, both)
    assert max(found["far"].values()) < 1e-5, found


def mesh_of_one(*names, kind=AxisType.Auto):
    axes = [1] * len(names)
    return jax.make_mesh(axes, names, devices=jax.devices()[:1], axis_types=(kind,) * len(names))


def test_explicit_axes_are_refused():
    with pytest.raises(braintrace.OptionError, match=r"axis_types=.*Auto"):
        braintrace.shard(build("IndRNN", "d_rtrl"), mesh_of_one("data", kind=AxisType.Explicit))


def test_a_batch_is_a_multiple_of_its_parts():
    graph = build("IndRNN", "d_rtrl").graph
    data = DataAxis(AbstractMesh((3,), ("data",)), "data")
    with pytest.raises(braintrace.ShapeError, match="batch of 8"):
        placement_of(graph, graph.trace_specs, data)
    one = braintrace.compile(nn.IndRNN(3, 4), "d_rtrl", jnp.ones(3)).graph
    with pytest.raises(braintrace.OptionError, match="no batch axis"):
        placement_of(one, one.trace_specs, data)


if __name__ == "__main__":
    {"devices": on_devices, "processes": in_processes}[sys.argv[1]](*sys.argv[2:])
