"""Shard a sparse net over all devices, and print the results as one line of JSON.

Run by `test_large_sparse_net.py`: on one device and then on all, a stream and a sequence gradient,
and the memory and communication of their compiled programs.
"""

import argparse
import collections
import dataclasses
import functools
import json
import resource

import collectives as messages
import jax
import jax.numpy as jnp
import numpy as np
import optax
import saiunit

import braintrace
from benchmarks.modules import Net, Spiking
from benchmarks.subjects import OPTIONS, Task, compiled, step_function

CHUNK = 4


def deviation(found, expected):
    """Return the largest deviation within an array, over the largest number there."""

    def of_leaf(a, b):
        farthest, largest = float(np.abs(a - b).max()), float(np.abs(b).max())
        return farthest / largest if largest else farthest

    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return max(of_leaf(np.asarray(a), np.asarray(b)) for a, b in pairs)


def by_target(network):
    """Return the synapses of a network sorted by the neurons that read them."""
    weights, sources, ends = network.synapses
    arrays = jnp.asarray(weights, float), jnp.asarray(sources), jnp.asarray(ends)
    return saiunit.sparse.CSC(arrays, shape=(network.neurons, network.neurons))


def learner_on(task, rule, devices):
    """Return a learner of a net that is divided over so many devices."""
    model = Spiking(task.network, by_target(task.network))
    example = task.data[0][0]
    learner = compiled(model, rule, example, batch_size=task.batch, **OPTIONS.get(rule, {}))
    places = np.asarray(jax.devices()[:devices]).reshape(1, devices)
    mesh = jax.sharding.Mesh(places, ("data", "model"))
    braintrace.shard(learner, mesh, model="model")
    return learner


def run(task, learner):
    """Return what a stream and then a gradient give, and what is known of their programs."""
    step, results, programs = step_function(learner), {}, {}
    methods = {
        "etrace_online": {"step_fn": step, "optimizer": optax.sgd(0.1)},
        "etrace_grad": {"step_fn": step, "chunk_size": CHUNK},
    }
    for method, options in methods.items():
        program = learner.lower(method, *task.data, **options).compile()
        call = functools.partial(getattr(learner, method), *task.data, **options)
        results[method] = jax.device_get(call())
        jax.block_until_ready(call())
        programs[method] = {**memory_of(program), **sent_by(program)}
    state = learner.functional().state()
    results["state"] = jax.device_get((state.parameters, state.hidden, state.traces))
    return results, programs


def memory_of(program):
    """Return the bytes that a program takes of each device."""
    found = program.memory_analysis()
    arguments, results = found.argument_size_in_bytes, found.output_size_in_bytes
    total = arguments + results - found.alias_size_in_bytes + found.temp_size_in_bytes
    return {"arguments": arguments, "results": results, "total": total}


def sent_by(program):
    """Return how many messages of each kind a program sends, and their bytes."""
    found = collections.Counter()
    for message in messages.sent(program):
        when = "a step" if message.is_by_step else "once"
        found[f"{message.kind} {when}"] += 1
        found[f"bytes {when}"] += message.size
    return dict(found)


def held(learner):
    """Return the bytes of synapses and their traces on the device that has most of them."""
    state = learner.functional().state()
    synapses = state.parameters["recurrent", "weight"]

    def most(tree):
        leaves = jax.tree.leaves(tree)
        by_device = [{s.device: s.data.nbytes for s in a.addressable_shards} for a in leaves]
        return float(max(sum(a[d] for a in by_device) for d in by_device[0]))

    return {"synapses": most(synapses), "traces": most(state.traces)}


def planned(task, rule, devices):
    """Return what is planned that the programs take of a device."""
    example, matrix = task.data[0][0], by_target(task.network)
    methods = {
        "etrace_online": {"optimizer": optax.sgd(0.1)},
        "etrace_grad": {"chunk_size": CHUNK, "from_zero": False},
    }
    found = {}
    for method, options in methods.items():
        plan = braintrace.plan(
            lambda: Spiking(task.network, matrix),
            rule,
            jax.ShapeDtypeStruct(example.shape, example.dtype),
            batch_size=task.batch,
            method=method,
            steps=task.steps,
            mesh={"data": 1, "model": devices},
            model="model",
            **options,
            **OPTIONS.get(rule, {}),
        )
        sizes = dataclasses.asdict(plan)
        found[method] = {name: sizes[name] for name in ("arguments", "results", "total")}
    return found


def facts(task, rule):
    """Return everything that is found out about a net."""
    found = {}
    results = {}
    for name, devices in (("one", 1), ("every", jax.device_count())):
        learner = learner_on(task, rule, devices)
        results[name], programs = run(task, learner)
        found[name] = {"held": held(learner), "programs": programs}
    expected, divided = results["one"], results["every"]
    return {
        **found,
        "deviation": {name: deviation(divided[name], expected[name]) for name in expected},
        "plans": planned(task, rule, jax.device_count()),
        "peak bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rule", help="'d_rtrl' or 'es_d_rtrl'")
    parser.add_argument("neuron", help="'LIF' or 'ALIF'")
    parser.add_argument("sizes", type=int, nargs=4, help="neurons, inputs of each, steps, batch")
    arguments = parser.parse_args()
    neurons, inputs, steps, batch = arguments.sizes
    with jax.enable_x64(True):  # a spike that round-off moves would move others
        task = Task(Net(arguments.neuron, neurons, inputs), steps, batch)
        print(json.dumps(facts(task, arguments.rule)))


if __name__ == "__main__":
    main()
