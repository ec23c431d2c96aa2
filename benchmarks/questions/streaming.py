"""Streaming step relative to one pass over the trace.

The network runs one step at a time, with a gradient after every step. A pass reads and writes
arrays of the shapes of the traces, ``e * a + b``, in place. Both are timed in a compiled loop over
many steps, without call overhead. The same step written by hand shows the result of XLA.
"""

import functools
from collections.abc import Callable
from typing import Any

import brainstate
import jax
import jax.numpy as jnp

import braintrace

from ..case import Case, Subject, Target
from ..handwritten_steps import BY_HAND
from ..networks import NETWORKS
from ..subjects import Task, gradient_of_step, learner_of, named, wait_for_states

LIMITS = {"cpu": 2.5, "gpu": 1.5}
OVER_HAND = 1.15
STEPS, MANY_STEPS = 64, 512
"""In 64 steps of one sample, the fixed cost of the loop would show."""

LOOP, ES_LOOP = "D_RTRL step, in a loop", "ES_D_RTRL step, in a loop"
PASS, HAND = "one pass, in a loop", "hand-written step, in a loop"


def loop(task: Task, algorithm: str = "d_rtrl") -> Subject:
    """Time steps in one compiled loop, which keeps the gradient of the last."""
    learner = learner_of(task, algorithm)
    gradient = gradient_of_step(learner)
    zero = jax.tree.map(jnp.zeros_like, task.network.parameters())

    def over_steps(combine: Callable[[Any, Any], Any]) -> Callable[..., Any]:
        def step(held: Any, now: Any) -> Any:
            return jax.tree.map(combine, held, named(gradient(*now))), None

        return brainstate.transform.jit(
            lambda *data: brainstate.transform.scan(step, zero, data)[0]
        )

    last, total = over_steps(lambda _, found: found), over_steps(jnp.add)

    def reset() -> None:
        learner.reset_state(task.batch)
        wait_for_states(learner)
        jax.block_until_ready(learner.algorithm.traces.value)

    def mean(_: Any) -> Any:
        reset()
        return {name: value / task.steps for name, value in total(*task.data).items()}

    work = task.steps
    return Subject(lambda: last(*task.data), reset, work, rule=algorithm, found=mean)


def by_hand(task: Task) -> Subject:
    """Time hand-written steps in one compiled loop, which keeps the gradient of the last."""
    step, zeros = BY_HAND[task.network.name](task.network, task.batch)
    zero = jax.tree.map(jnp.zeros_like, task.network.parameters())

    def over_steps(combine: Callable[[Any, Any], Any]) -> Callable[..., Any]:
        # Parameters that change after every step are no constants of the program.
        @functools.partial(jax.jit, donate_argnums=(1, 2))
        def run(parameters: Any, states: Any, traces: Any, xs: Any, targets: Any) -> Any:
            def body(carry: Any, now: Any) -> Any:
                *new, gradients = step(parameters, *carry[:2], *now)
                return (*new, jax.tree.map(combine, carry[2], gradients)), None

            return jax.lax.scan(body, (states, traces, zero), (xs, targets))[0]

        return run

    last, total = over_steps(lambda _, found: found), over_steps(jnp.add)
    held: list[Any] = []

    def begin() -> None:
        held[:] = [task.network.start(task.batch), jax.tree.map(jnp.copy, zeros)]
        jax.block_until_ready(held)

    def run() -> Any:
        held[0], held[1], gradients = last(task.network.parameters(), *held, *task.data)
        return gradients

    def mean(_: Any) -> Any:
        begin()
        gradients = total(task.network.parameters(), *held, *task.data)[2]
        return {name: value / task.steps for name, value in gradients.items()}

    return Subject(run, begin, task.steps, rule="d_rtrl", found=mean)


def traces_of(task: Task) -> Any:
    """Return real arrays like a learner's traces, whether it packs them in complex ones or not."""
    found = learner_of(task).states(braintrace.EligibilityTraces)
    leaves = jax.tree.leaves([state.value for state in found.values()])
    return [
        jnp.zeros_like(part)
        for leaf in leaves
        for part in ((leaf.real, leaf.imag) if jnp.iscomplexobj(leaf) else (leaf,))
    ]


def one_pass(task: Task) -> Subject:
    """Time read-and-write passes in one compiled loop."""
    held = [traces_of(task)]
    values = jnp.full(task.steps, 0.9), jnp.full(task.steps, 1e-3)

    @functools.partial(jax.jit, donate_argnums=0)
    def run(traces: Any, a: Any, b: Any) -> Any:
        def step(traces: Any, now: Any) -> Any:
            return jax.tree.map(lambda e: e * now[0] + now[1], traces), None

        return jax.lax.scan(step, traces, (a, b))[0]

    def passes() -> Any:
        held[0] = run(held[0], *values)
        return held[0]

    return Subject(passes, work=task.steps)


def case(network: str, hidden: int, batch: int, limit: float, steps: int | None = None) -> Case:
    """Return the case of one size; one with a number of steps is for ``--quick``."""
    is_quick = steps is not None
    steps = steps or (MANY_STEPS if batch == 1 else STEPS)
    task = Task(NETWORKS[network](hidden=hidden), steps, batch)
    return Case(
        f"streaming/{network},H={hidden},B={batch},T={steps}",
        {
            PASS: lambda: one_pass(task),
            LOOP: lambda: loop(task),
            HAND: lambda: by_hand(task),
            ES_LOOP: lambda: loop(task, "es_d_rtrl"),
        },
        (
            Target(LOOP, PASS, limit),
            Target(LOOP, HAND, OVER_HAND),
            Target(HAND, PASS, None),
            Target(ES_LOOP, PASS, None),
        ),
        quick=is_quick,
        full=not is_quick,
        task=task,
    )


def cases(platform: str) -> list[Case]:
    """Return traces that fit into the caches and traces that do not, of one and two states."""
    sizes = [("dense", hidden, batch) for hidden in (256, 1024) for batch in (1, 32)]
    sizes += [("alif", 256, 32), ("alif", 1024, 32), ("lstm", 256, 32)]
    if platform != "cpu":
        sizes += [("dense", 1024, 128), ("dense", 4096, 32)]
    limit = LIMITS.get(platform, LIMITS["gpu"])
    return [*(case(*size, limit) for size in sizes), case("dense", 256, 32, limit, steps=8)]
