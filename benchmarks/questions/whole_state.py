"""Exact RTRL.

One layer of ``braintrace.nn`` with an ordinary readout and a loss at every step; 64 inputs, 10
outputs, float32. "By hand" is RTRL step by step in plain JAX, with ``jax.jacrev`` of one sample,
mapped over the batch. In "carrying on", states and traces continue from the previous sequence;
after a reset, a sequence that fits into one chunk needs no trace.
"""

from functools import partial
from typing import Any

import brainstate
import jax
import jax.numpy as jnp

from .. import subjects
from ..case import Case, Subject, Subjects, Target
from ..modules import INPUTS, Layers
from ..networks import squared_error
from ..subjects import Task, without_states

CHUNKS = (8, 16, 32, 64, 128)
BY_HAND = "RTRL step by step, by hand"
FACTORS = "KF-RTRL, carrying on"
OVER_HAND = 0.5
"""A trace of states times outputs instead of states times weights, moved on at every step."""
BEST = "RTRL, carrying on / best fixed chunk"
COMPARED = (
    Task(Layers("LeakyRNN", 1, 64), 256, 8),
    Task(Layers("GRUCell", 1, 64), 256, 8),
)
REPORTED = (
    *(
        Task(Layers(cell, 1, hidden), 256, 8)
        for cell in ("GRUCell", "LSTMCell")
        for hidden in (16, 32, 64, 128)
        if (cell, hidden) != ("GRUCell", 64)
    ),
    *(Task(Layers(cell, 1, 256), 256, 1) for cell in ("GRUCell", "LSTMCell")),
)


def by_hand(task: Task) -> Subject:
    r"""Compile :math:`\epsilon^t = J^t \epsilon^{t-1} + \partial h^t / \partial w`, step by step.

    For a layer with one hidden state that is its output.
    """
    model = task.network.model()
    layer, readout = model.layers[0], model.out.weight
    brainstate.nn.init_all_states(layer, batch_size=1)
    cell, states = without_states(layer, jnp.zeros((1, INPUTS)))
    (place,) = (i for i, s in enumerate(states) if isinstance(s, brainstate.HiddenState))
    weights = [state.value for state in states[:place] + states[place + 1 :]]

    def new(weights: list[Any], h: Any, x: Any) -> Any:
        values = [*weights[:place], h[None], *weights[place:]]
        return cell(values, x[None])[0][place][0]

    def loss(readout: Any, h: Any, target: Any) -> Any:
        return squared_error(h @ readout["weight"] + readout["bias"], target)

    @partial(jax.vmap, in_axes=(None, 0, 0, 0))
    def advance(weights: Any, h: Any, traces: Any, x: Any) -> Any:
        F, J = jax.jacrev(new, (0, 1))(weights, h, x)
        return new(weights, h, x), jax.tree.map(lambda f, e: jnp.tensordot(J, e, 1) + f, F, traces)

    @jax.jit
    def gradient(weights: Any, readout: Any, xs: Any, targets: Any) -> Any:
        def step(carry: Any, now: Any) -> Any:
            (h, traces, total), (x, target) = carry, now
            h, traces = advance(weights, h, traces, x)
            direct, signal = jax.grad(loss, (0, 1))(readout, h, target)
            own = jax.tree.map(lambda e: jnp.einsum("bh,bh...->...", signal, e), traces)
            return (h, traces, jax.tree.map(jnp.add, total, (own, direct))), None

        h = jnp.zeros((task.batch, task.network.hidden))
        traces = jax.tree.map(lambda w: jnp.zeros((*h.shape, *w.shape)), weights)
        zero = jax.tree.map(jnp.zeros_like, (weights, readout))
        total = jax.lax.scan(step, (h, traces, zero), (xs, targets))[0][-1]
        return jax.tree.map(lambda value: value / task.steps, total)

    def found(result: Any) -> Any:
        paths = {id(state): path for path, state in model.states(brainstate.ParamState).items()}
        others = states[:place] + states[place + 1 :]
        by_path = {paths[id(s)]: g for s, g in zip(others, result[0], strict=True)}
        return by_path | {paths[id(readout)]: result[1]}

    return Subject(lambda: gradient(weights, readout.value, *task.data), rule="rtrl", found=found)


def case(task: Task, compare: bool = False, quick: bool = False) -> Case:
    """Return the case of one layer."""
    compared: Subjects = {
        "BPTT": partial(subjects.bptt, task),
        **subjects.automatic(task, "rtrl"),
    }
    targets = [Target("RTRL, auto", "BPTT", None), Target("RTRL, carrying on", "BPTT", None)]
    fixed: Subjects = {
        f"RTRL, chunks of {chunk}": partial(subjects.carrying_on, task, "rtrl", chunk)
        for chunk in CHUNKS
        if compare and chunk < task.steps
    }
    if compare:
        compared[BY_HAND] = partial(by_hand, task)
        compared[FACTORS] = partial(subjects.carrying_on, task, "kf_rtrl")
        targets += [
            Target("RTRL, carrying on", BY_HAND, 0.35),
            Target(FACTORS, BY_HAND, OVER_HAND),
            Target("RTRL, auto", BY_HAND, None),
            Target(BEST, None, 1.1),
            *(Target(label, BY_HAND, None) for label in fixed),
        ]
    network = task.network
    return Case(
        f"whole_state/{network.cell},H={network.hidden},B={task.batch},T={task.steps}",
        compared | fixed,
        tuple(targets),
        subjects.chosen_chunks(task, "rtrl"),
        subjects.over_best(BEST, "RTRL, carrying on", fixed),
        quick=quick,
        task=task,
    )


def cases(platform: str) -> list[Case]:
    """Return the layers that are compared with the recursion by hand, and those without it."""
    first, *more = COMPARED
    compared = [case(first, True, True), *(case(task, True) for task in more)]
    return compared + [case(task) for task in REPORTED]
