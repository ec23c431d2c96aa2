"""Expected gradients of the timed tasks of the benchmarks, and their comparison.

Of plain networks, D_RTRL is BPTT without the paths through the mixing of states. ES_D_RTRL, and
the rules on modules of `braintrace.nn`, are compared with the library's own gradient in chunks of
one step, which other tests compare with oracles: here the question is whether what is timed is it.
"""

import functools

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.handwritten_steps import BY_HAND
from benchmarks.networks import Network, Plain, sequence_loss, squared_error
from benchmarks.questions import saving, training_loop
from benchmarks.subjects import learner_of, step_function

CARRYING = ", carrying on"
"""End of the name of a rule whose traces continue from the same sequence."""
WINDOWS = ", windows of "
"""In the name of a rule, before the length of its windows."""


def expected(task, rule):
    """Return the result that a rule must have on a task."""
    name, _, window = rule.partition(WINDOWS)
    if window:
        gradient = windows(task.network, int(window), name == "d_rtrl")
        return jax.jit(gradient)(task.network.parameters(), *task.data)
    name, repeats = rule.removesuffix(CARRYING), 1 + rule.endswith(CARRYING)
    if name in ("descent", "saved"):
        return {"descent": descent, "saved": saved}[name](task)
    if isinstance(task.network, Network) and name in ("bptt", "d_rtrl"):
        return bptt(task, Plain() if name == "bptt" else WithoutMixing())
    is_exact = name in ("bptt", "rtrl")
    return bptt_of_model(task, repeats) if is_exact else own(task, name, repeats)


class WithoutMixing(Plain):
    """Plain JAX without the paths through inputs of operations: those of D_RTRL."""

    def matmul(self, name, x, weight):
        return jax.lax.stop_gradient(x) @ weight


def bptt(task, ops):
    loss = functools.partial(sequence_loss, task.network, ops)
    return jax.jit(jax.grad(loss))(task.network.parameters(), *task.data)


@functools.cache
def bptt_of_model(task, repeats):
    """Return the gradient of the last of some equal sequences, after a reset before the first."""
    model = task.network.model()
    brainstate.nn.init_all_states(model, batch_size=task.batch)
    data = jax.tree.map(lambda leaf: jnp.concatenate([leaf] * repeats), task.data)

    @brainstate.transform.jit
    def gradient():
        def loss():
            losses = brainstate.transform.for_loop(step_function(model), *data)
            return losses[-task.steps :].mean()

        return brainstate.transform.grad(loss, model.states(brainstate.ParamState))()

    return gradient()


@functools.cache
def own(task, rule, repeats):
    learner = learner_of(task, rule)
    for _ in range(repeats):
        found = learner.etrace_grad(*task.data, step_fn=step_function(learner), chunk_size=1)
    return found


def windows(network, window, with_traces):
    """Return ``(parameters, xs, targets) -> gradients`` of windows.

    Each window is differentiated from its first states. With traces, the derivative with respect
    to these states meets the traces of D_RTRL: BPTT without mixing of all steps before.
    """

    def last(parameters, states, xs, ops):
        def step(states, x):
            return network.step(ops, parameters, states, x)[0], None

        return jax.lax.scan(step, states, xs)[0]

    def loss(parameters, states, xs, targets):
        def step(states, now):
            states, output = network.step(Plain(), parameters, states, now[0])
            return states, squared_error(output, now[1])

        return jnp.sum(jax.lax.scan(step, states, (xs, targets))[1])

    def gradients(parameters, xs, targets):
        zeros = network.start(xs.shape[1])
        total = jax.tree.map(jnp.zeros_like, parameters)
        for first in range(0, len(xs), window):
            now = slice(first, first + window)
            start = last(parameters, zeros, xs[:first], Plain())
            found, mu = jax.grad(loss, (0, 1))(parameters, start, xs[now], targets[now])
            total = jax.tree.map(jnp.add, total, found)
            if with_traces and first:
                before = functools.partial(last, states=zeros, xs=xs[:first], ops=WithoutMixing())
                (past,) = jax.vjp(before, parameters)[1](mu)
                total = jax.tree.map(jnp.add, total, past)
        return {name: value / len(xs) for name, value in total.items()}

    return gradients


def descent(task):
    """Return how far the parameters move, by the hand-written step."""
    step, traces = BY_HAND[task.network.name](task.network, task.batch)
    optimizer = optax.sgd(training_loop.RATE, momentum=training_loop.MOMENTUM)

    def one_step(carry, now):
        parameters, moments, states, traces = carry
        states, traces, gradients = step(parameters, states, traces, *now)
        changes, moments = optimizer.update(gradients, moments, parameters)
        return (jax.tree.map(jnp.add, parameters, changes), moments, states, traces), None

    parameters = task.network.parameters()
    start = parameters, optimizer.init(parameters), task.network.start(task.batch), traces
    (after, *_), _ = jax.lax.scan(one_step, start, task.data)
    return jax.tree.map(jnp.subtract, after, parameters)


def saved(task):
    learner = learner_of(task, "d_rtrl")
    learner.init_optimizer(optax.adam(1e-3))
    return saving.arrays_of(learner.functional().state())


def flat(gradients):
    """Return gradients by one name each, whatever the keys and the trees of parameters."""
    paths = {p if isinstance(p, tuple) else (p,): g for p, g in dict(gradients).items()}
    return {jax.tree_util.keystr(p): g for p, g in jax.tree_util.tree_leaves_with_path(paths)}


def tolerance(task, rule):
    """Return the largest deviation from the oracle in float32, where round-off moves spikes."""
    if rule == "saved":
        return 0.0
    name = getattr(task.network, "name", "")
    if name == "alif" or hasattr(task.network, "neuron") or rule == "descent":
        return 1e-2
    return 1e-4 if name else 1e-3  # of layers: a unit of relu that round-off moves across zero


def deviation(found, expected):
    """Return the largest relative deviation of an array; for a zero oracle, the absolute one."""
    found, expected = flat(found), flat(expected)
    assert set(found) == set(expected)
    return max(_relative(found[name], expected[name]) for name in expected)


def _relative(found, expected):
    found, expected = np.asarray(found, float), np.asarray(expected, float)
    assert found.shape == expected.shape
    size = np.linalg.norm(expected) or 1.0
    return float(np.linalg.norm(found - expected) / size)
