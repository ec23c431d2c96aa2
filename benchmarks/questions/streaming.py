"""Streaming step relative to one pass over the trace.

The network runs one step at a time, with a gradient after every step. A pass reads and writes
arrays of the shapes of the traces, ``e * a + b``, in place. Both are timed as single calls and in a
compiled loop over many steps, without call overhead. The same step written by hand shows the result
of XLA.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any

import brainstate
import jax
import jax.numpy as jnp

import braintrace

from ..case import Case, Prepared, Subject, Target
from ..handwritten_steps import BY_HAND
from ..networks import NETWORKS, squared_error
from ..subjects import (
    OPTIONS,
    Model,
    Task,
    learner_of,
    named,
    step_function,
    wait_for_states,
    without_states,
)

LIMITS = {"cpu": 2.5, "gpu": 1.5}
OVER_HAND = 1.15
STEPS, MANY_STEPS = 64, 512
"""A step of one sample is so short that what the loop costs once would show in 64."""

CALL, LOOP = "D_RTRL step, single calls", "D_RTRL step, in a loop"
PASS_CALL, PASS_LOOP = "one pass, single calls", "one pass, in a loop"
HAND_CALL, HAND_LOOP = "hand-written step, single calls", "hand-written step, in a loop"
JIT = "D_RTRL step, single calls, transform.jit"
DRIVER = "D_RTRL step, single calls, etrace_online"
ES_LOOP = "ES_D_RTRL step, in a loop"

ALGORITHMS: dict[str, Any] = {"d_rtrl": braintrace.D_RTRL, "es_d_rtrl": braintrace.ES_D_RTRL}

Step = Callable[[Any, Any], Any]
Begin = Callable[[], None]


class Stream:
    """A model that learns one step at a time, as users write it.

    Parameters
    ----------
    task
        The network and its sequence.
    algorithm
        A name of `subjects.OPTIONS`.
    **options
        Of the algorithm.
    """

    def __init__(self, task: Task, algorithm: str = "d_rtrl", **options: Any) -> None:
        self.task = task
        self.model = Model(task.network, jnp.dtype(task.dtype))
        brainstate.nn.init_all_states(self.model, batch_size=task.batch)
        self.algorithm = ALGORITHMS[algorithm](self.model, **OPTIONS[algorithm], **options)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what is left out is the point
            self.algorithm.compile_graph(task.data[0][0])
        weights = self.model.states(brainstate.ParamState)
        self._gradient = brainstate.transform.grad(self._loss, weights)

    def _loss(self, x: Any, target: Any) -> Any:
        return squared_error(self.algorithm(x), target)

    def step(self, x: Any, target: Any) -> Any:
        """Return the gradient of one step; states and traces move on."""
        return self._gradient(x, target)

    def only_step(self, xs: Any, targets: Any) -> Any:
        """Return the gradient of sequences of length 1, as a stream gives them."""
        return self.step(xs[0], targets[0])

    def reset(self) -> None:
        """Begin a new sequence, with traces that are there already."""
        self.algorithm.reset_state(self.task.batch)
        wait_for_states(self.algorithm)
        jax.block_until_ready(self.algorithm.traces.value)


def plainly(task: Task) -> tuple[Step, Begin]:
    """Compile a step as most users do, and return it with what begins a sequence."""
    stream = Stream(task)
    return brainstate.transform.jit(stream.only_step), stream.reset


def through_driver(task: Task) -> tuple[Step, Begin]:
    """Return a step by `etrace_online`, whose update keeps the gradient."""
    learner = learner_of(task, "d_rtrl")
    step_fn = step_function(learner)
    weights = learner.algorithm.model.states(brainstate.ParamState)
    kept = brainstate.State({path: state.value for path, state in weights.items()})

    def keep(gradients: Any) -> None:
        kept.value = gradients

    def step(x: Any, target: Any) -> Any:
        learner.etrace_online(x, target, step_fn=step_fn, update_fn=keep)
        return kept.value

    def begin() -> None:
        learner.reset_state(task.batch)
        wait_for_states(learner.algorithm)

    return step, begin


@dataclasses.dataclass(frozen=True)
class PureStep:
    """A step as a function ``run(moving, still, x, target) -> (moving, gradients)``.

    Attributes
    ----------
    run
        The function, of the values of States.
    moving, still
        The States that a step writes, and those that it only reads.
    """

    run: Callable[..., Any]
    moving: list[brainstate.State]
    still: list[brainstate.State]

    def values(self) -> tuple[list[Any], list[Any]]:
        """Return the first two arguments of ``run`` as they are now."""
        return [state.value for state in self.moving], [state.value for state in self.still]


def pure_step(step: Step, x: Any, target: Any) -> PureStep:
    """Return a step of a stream without its side effects."""
    function, states = without_states(step, x, target)
    values = [state.value for state in states]
    written = [new is not None for new in jax.eval_shape(function, values, x, target)[0]]

    def run(moving: list[Any], still: list[Any], x: Any, target: Any) -> Any:
        moving, still = list(moving), list(still)
        values = [(moving if moves else still).pop(0) for moves in written]
        new, found = function(values, x, target)
        return [value for value, moves in zip(new, written, strict=True) if moves], found

    pairs = list(zip(states, written, strict=True))
    return PureStep(
        run,
        [state for state, moves in pairs if moves],
        [state for state, moves in pairs if not moves],
    )


def donated(task: Task) -> tuple[Step, Begin]:
    """Compile a step whose states and traces are updated in place."""
    stream = Stream(task)
    pure = pure_step(stream.only_step, *(sequence[:1] for sequence in task.data))
    run = jax.jit(pure.run, donate_argnums=0)

    def step(x: Any, target: Any) -> Any:
        new, found = run(*pure.values(), x, target)
        for state, value in zip(pure.moving, new, strict=True):
            state.value = value
        return found

    def reset() -> None:
        stream.reset()
        for state in pure.moving:  # fresh traces may share one buffer: it cannot be given twice
            state.value = jax.tree.map(jnp.copy, state.value)

    return step, reset


def single_calls(task: Task, compile_step: Callable[[Task], tuple[Step, Begin]]) -> Subject:
    """Time steps that are called one by one."""
    step, begin = compile_step(task)
    pairs = [tuple(sequence[t : t + 1] for sequence in task.data) for t in range(task.steps)]

    def run() -> Any:
        found = None
        for x, target in pairs:
            found = step(x, target)
        return found

    def mean(_: Any) -> Any:
        begin()
        steps = [named(step(x, target)) for x, target in pairs]
        return jax.tree.map(lambda *found: sum(found) / task.steps, *steps)

    return Subject(run, before=begin, work=task.steps, rule="d_rtrl", found=mean)


def loop(task: Task, algorithm: str = "d_rtrl", **options: Any) -> Subject:
    """Time steps in one compiled loop, which keeps the gradient of the last."""
    stream = Stream(task, algorithm, **options)
    zero = jax.tree.map(jnp.zeros_like, task.parameters)

    def over_steps(combine: Callable[[Any, Any], Any]) -> Callable[..., Any]:
        def run(xs: Any, targets: Any) -> Any:
            def step(held: Any, now: Any) -> Any:
                return jax.tree.map(combine, held, named(stream.step(*now))), None

            return brainstate.transform.scan(step, zero, (xs, targets))[0]

        return brainstate.transform.jit(run)

    last, total = over_steps(lambda _, found: found), over_steps(jnp.add)

    def mean(_: Any) -> Any:
        stream.reset()
        return {name: value / task.steps for name, value in total(*task.data).items()}

    return Subject(
        lambda: last(*task.data),
        before=stream.reset,
        work=task.steps,
        rule=algorithm,
        found=mean,
    )


def hand_calls(task: Task) -> Subject:
    """Time hand-written steps that are called one by one."""
    step, zeros = BY_HAND[task.network.name](task.network, task.batch)
    run = jax.jit(step, donate_argnums=(1, 2))
    held: list[Any] = []

    def begin() -> None:
        held[:] = [task.network.start(task.batch), jax.tree.map(jnp.copy, zeros)]
        jax.block_until_ready(held)

    def steps() -> Any:
        gradients = None
        for x, target in zip(*task.data, strict=True):
            held[0], held[1], gradients = run(task.parameters, *held, x, target)
        return gradients

    def mean(_: Any) -> Any:
        begin()
        total = jax.tree.map(jnp.zeros_like, task.parameters)
        for x, target in zip(*task.data, strict=True):
            held[0], held[1], gradients = run(task.parameters, *held, x, target)
            total = jax.tree.map(jnp.add, total, gradients)
        return {name: value / task.steps for name, value in total.items()}

    return Subject(steps, before=begin, work=task.steps, rule="d_rtrl", found=mean)


def hand_loop(task: Task) -> Subject:
    """Time hand-written steps in one compiled loop, which keeps the gradient of the last."""
    step, zeros = BY_HAND[task.network.name](task.network, task.batch)
    zero = jax.tree.map(jnp.zeros_like, task.parameters)

    # Parameters that change after every step are no constants of the program.
    @functools.partial(jax.jit, donate_argnums=(1, 2))
    def run(parameters: Any, states: Any, traces: Any, xs: Any, targets: Any) -> Any:
        def body(carry: Any, now: Any) -> Any:
            return step(parameters, *carry[:2], *now), None

        return jax.lax.scan(body, (states, traces, zero), (xs, targets))[0]

    held: list[Any] = []

    def begin() -> None:
        held[:] = [task.network.start(task.batch), jax.tree.map(jnp.copy, zeros)]
        jax.block_until_ready(held)

    def last() -> Any:
        held[0], held[1], gradients = run(task.parameters, *held, *task.data)
        return gradients

    return Subject(last, before=begin, work=task.steps)


def traces_of(task: Task) -> Any:
    """Return real arrays like a learner's traces, whether it packs them in complex ones or not."""
    found = learner_of(task).states(braintrace.EligibilityTraces)
    leaves = jax.tree.leaves([state.value for state in found.values()])
    return [
        jnp.zeros_like(part)
        for leaf in leaves
        for part in ((leaf.real, leaf.imag) if jnp.iscomplexobj(leaf) else (leaf,))
    ]


def _pass(traces: Any, a: Any, b: Any) -> Any:
    return jax.tree.map(lambda e: e * a + b, traces)


def one_pass_calls(task: Task) -> Subject:
    """Time single read-and-write passes."""
    run = jax.jit(_pass, donate_argnums=0)
    held = [traces_of(task)]
    a, b = jnp.float32(0.9), jnp.float32(1e-3)

    def passes() -> Any:
        for _ in range(task.steps):
            held[0] = run(held[0], a, b)
        return held[0]

    return Subject(passes, work=task.steps)


def one_pass_loop(task: Task) -> Subject:
    """Time read-and-write passes in one compiled loop."""
    held = [traces_of(task)]
    values = jnp.full(task.steps, 0.9), jnp.full(task.steps, 1e-3)

    @functools.partial(jax.jit, donate_argnums=0)
    def run(traces: Any, a: Any, b: Any) -> Any:
        return jax.lax.scan(lambda e, now: (_pass(e, *now), None), traces, (a, b))[0]

    def passes() -> Any:
        held[0] = run(held[0], *values)
        return held[0]

    return Subject(passes, work=task.steps)


def prepare(task: Task) -> Prepared:
    """Return everything that is compared on a task."""
    return Prepared(
        {
            PASS_CALL: lambda: one_pass_calls(task),
            CALL: lambda: single_calls(task, donated),
            JIT: lambda: single_calls(task, plainly),
            DRIVER: lambda: single_calls(task, through_driver),
            PASS_LOOP: lambda: one_pass_loop(task),
            LOOP: lambda: loop(task),
            HAND_CALL: lambda: hand_calls(task),
            HAND_LOOP: lambda: hand_loop(task),
            ES_LOOP: lambda: loop(task, "es_d_rtrl"),
        }
    )


def case(network: str, hidden: int, batch: int, limit: float, steps: int | None = None) -> Case:
    """Return the case of one size; one with a number of steps is for ``--quick``."""
    is_quick = steps is not None
    steps = steps or (MANY_STEPS if batch == 1 else STEPS)
    task = Task(NETWORKS[network](hidden=hidden), steps, batch)
    return Case(
        name=f"streaming/{network},H={hidden},B={batch},T={steps}",
        parameters={
            "network": network,
            "hidden": hidden,
            "batch": batch,
            "steps": steps,
        },
        build=lambda: prepare(task),
        targets=(
            Target(LOOP, PASS_LOOP, limit),
            Target(CALL, PASS_CALL, limit),
            Target(LOOP, HAND_LOOP, OVER_HAND),
            Target(CALL, HAND_CALL, OVER_HAND),
            Target(HAND_LOOP, PASS_LOOP, None),
            Target(HAND_CALL, PASS_CALL, None),
            Target(JIT, PASS_CALL, None),
            Target(DRIVER, PASS_CALL, None),
            Target(DRIVER, JIT, None),
            Target(ES_LOOP, PASS_LOOP, None),
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
