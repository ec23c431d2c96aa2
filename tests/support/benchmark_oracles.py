"""Expected gradients of the timed tasks of the benchmarks, and their comparison."""

import functools

import brainstate
import jax
import jax.numpy as jnp
import network_oracles
import numpy as np
import optax
import spiking_oracle
import stack_oracles

from benchmarks.handwritten_steps import BY_HAND
from benchmarks.questions import saving, training_loop
from benchmarks.spiking import SpikingTask
from benchmarks.stack import StackTask
from benchmarks.subjects import ALPHA, learner_of, named

COMPARED = 20_000
"""Synapses that are compared with the oracle, which computes each one separately."""

CARRYING = ", carrying on"
"""End of the name of a rule whose traces continue from the same sequence."""
WINDOWS = ", windows of "
"""In the name of a rule, before the length of its windows."""


def expected(task, rule):
    """Return the result that a rule must have on a task."""
    if WINDOWS in rule:
        name, _, length = rule.partition(WINDOWS)
        gradient = network_oracles.windows(task.network, int(length), name == "d_rtrl")
        return jax.jit(gradient)(task.parameters, *task.data)
    if isinstance(task, StackTask):
        return of_stack(task, rule.removesuffix(CARRYING), rule.endswith(CARRYING))
    if isinstance(task, SpikingTask):
        return of_spiking(task, rule.endswith(CARRYING)).get(rule.removesuffix(CARRYING))
    rules = {"bptt": bptt, "d_rtrl": d_rtrl, "es_d_rtrl": es_d_rtrl}
    return (rules | {"descent": descent, "saved": saved})[rule](task)


def bptt(task):
    return jax.jit(network_oracles.bptt(task.network))(task.parameters, *task.data)[1]


def d_rtrl(task):
    gradient = jax.jit(network_oracles.bptt(task.network, cut_mixing=True))
    return gradient(task.parameters, *task.data)[1]


def es_d_rtrl(task):
    return jax.jit(network_oracles.es_d_rtrl(task.network, ALPHA))(task.parameters, *task.data)


def descent(task):
    """Return how far the parameters move, by the hand-written step."""
    step, traces = BY_HAND[task.network.name](task.network, task.batch)
    optimizer = optax.sgd(training_loop.RATE, momentum=training_loop.MOMENTUM)

    def one_step(carry, now):
        parameters, moments, states, traces = carry
        states, traces, gradients = step(parameters, states, traces, *now)
        changes, moments = optimizer.update(gradients, moments, parameters)
        return (jax.tree.map(jnp.add, parameters, changes), moments, states, traces), None

    moments = optimizer.init(task.parameters)
    start = task.parameters, moments, task.network.start(task.batch), traces
    (after, *_), _ = jax.lax.scan(one_step, start, task.data)
    return jax.tree.map(jnp.subtract, after, task.parameters)


def saved(task):
    learner = learner_of(task, "d_rtrl")
    learner.init_optimizer(optax.adam(1e-3))
    return saving.arrays_of(learner.functional().state())


@functools.cache
def of_stack(task, rule, carrying):
    """Return the gradient of a stack; with ``carrying``, of a second pass over the sequence."""
    stack = stack_oracles.Stack(task.stack.cell, task.stack.layers, task.stack.hidden)
    gradient = {
        "bptt": stack_oracles.bptt,
        "rtrl": stack_oracles.bptt,
        "d_rtrl": stack_oracles.d_rtrl,
        "es_d_rtrl": functools.partial(stack_oracles.es_d_rtrl, alpha=ALPHA),
    }[rule](stack)
    data, mask = task.data, jnp.ones(task.steps)
    if carrying:
        data = jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf]), data)
        mask = jnp.concatenate([jnp.zeros(task.steps), mask])
    states = task.model().states(brainstate.ParamState)
    parameters = {path: state.value for path, state in states.items()}
    return flat(jax.jit(gradient)(parameters, *data, mask))


@functools.cache
def of_spiking(task, carrying):
    """Return the gradients of some synapses of a sparse net, by rule."""
    readout = task.model().out.weight.value
    oracle = spiking_oracle.Oracle(
        task.net.connections,
        has_adaptation=task.net.neuron == "ALIF",
        readout={name: np.asarray(value) for name, value in readout.items()},
        compared=chosen(task),
    )
    return oracle.gradients(*map(np.asarray, task.data), 2 if carrying else 1)


def chosen(task):
    """Return the synapses that are compared, drawn at random."""
    entries = task.net.entries
    return np.random.default_rng(1).choice(entries, min(entries, COMPARED), replace=False)


def comparable(task, found):
    """Return a result in the form of the oracle."""
    if isinstance(task, StackTask):
        return flat(found)
    if isinstance(task, SpikingTask):
        weights = np.asarray(found["recurrent", "weight"]["weight"])
        return {"recurrent": weights[chosen(task)], **found["out", "weight"]}
    return named(found)


def flat(gradients):
    leaves = jax.tree_util.tree_flatten_with_path(dict(gradients))[0]
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def tolerance(task, rule):
    """Return the largest deviation from the oracle in float32, where round-off moves spikes."""
    if rule == "saved":
        return 0.0
    if isinstance(task, StackTask):
        return 1e-3  # a unit of relu that round-off moves across zero
    if isinstance(task, SpikingTask) or task.network.name == "alif":
        return 1e-2
    return 1e-2 if rule == "descent" else 1e-4


def deviation(found, expected):
    """Return the largest relative deviation of an array; for a zero oracle, the absolute one."""
    assert set(found) == set(expected)
    return max(_relative(found[name], expected[name]) for name in expected)


def _relative(found, expected):
    if not np.any(np.asarray(expected)):
        return float(np.abs(found).max())
    return network_oracles.deviation({"": found}, {"": expected})
