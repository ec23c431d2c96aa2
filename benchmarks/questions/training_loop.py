"""Training loop: checks, logs, single steps.

Descent with momentum updates the parameters at every step of a stream. Checks of NaN and infinity,
and a logged call, are compared with the call without them. Single steps are compared with a jitted
loop by hand.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import optax

from ..case import Case, Subject, Target
from ..networks import NETWORKS
from ..subjects import Task, learner_of, named, step_function

GIVEN, IGNORE, LOGGED = "optimizer", "nonfinite='ignore'", "log_every"
OWN, PURE, STEP = "own jitted loop, step", "pure function, jitted, step", "etrace_online, step"
RATE, MOMENTUM = 1e-3, 0.9
TARGETS = (
    Target(GIVEN, IGNORE, 1.03),
    Target(LOGGED, GIVEN, 1.02),
    Target(STEP, OWN, 1.2),
    Target(PURE, OWN, 1.0),
    Target(STEP, GIVEN, None),
)


class Loop:
    """A learner that learns a task, and an optimizer."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.optimizer = optax.sgd(RATE, momentum=MOMENTUM)
        self.learner = learner_of(task, "d_rtrl")
        self.step_fn = step_function(self.learner)
        self.weights = self.learner.algorithm.model.states(brainstate.ParamState)
        self.own = brainstate.State(self.optimizer.init(self.values()))
        self.learner.init_optimizer(self.optimizer)
        self.pure = self.learner.functional(own=self.own)
        self.start = jax.tree.map(jnp.copy, self.pure.state())

    def values(self) -> dict[Any, Any]:
        return {path: weight.value for path, weight in self.weights.items()}

    def begin(self) -> None:
        """Let everything be as in the beginning."""
        self.pure.restore(jax.tree.map(jnp.copy, self.start))

    def write(self, gradients: Any) -> None:
        """Change the parameters, as people write it out."""
        values = self.values()
        changes, self.own.value = self.optimizer.update(gradients, self.own.value, values)
        for path, value in jax.tree.map(jnp.add, values, changes).items():
            self.weights[path].value = value

    def subject(self, run: Callable[[], Any], after: Callable[[], Any] | None = None) -> Subject:
        """Time a function that learns the whole sequence; the tests compare the parameters."""

        def found(_: Any) -> Any:
            self.begin()
            run()
            values, before = (after or self.values)(), self.start.parameters
            return named({path: values[path] - before[path] for path in before})

        return Subject(run, before=self.begin, work=self.task.steps, rule="descent", found=found)


def stream(task: Task, **options: Any) -> Subject:
    """Time a whole stream."""
    loop = Loop(task)
    call = {"step_fn": loop.step_fn, "optimizer": loop.optimizer, **options}
    return loop.subject(lambda: loop.learner.etrace_online(*task.data, **call))


def one_by_one(task: Task, step: Callable[[Any, Any], Any]) -> Callable[[], Any]:
    """Return a function that takes all steps of a sequence, as sequences of one step."""
    pairs = [tuple(part[t : t + 1] for part in task.data) for t in range(task.steps)]

    def run() -> Any:
        loss = None
        for x, target in pairs:
            loss = step(x, target)
        return loss

    return run


def own_loop(task: Task) -> Subject:
    """Time steps of a loop that its user writes and compiles."""
    loop = Loop(task)
    take = brainstate.transform.grad(loop.step_fn, loop.weights, return_value=True)

    @brainstate.transform.jit
    def step(x: Any, target: Any) -> Any:
        gradients, loss = take(x[0], target[0])
        loop.write(gradients)
        return loss

    return loop.subject(one_by_one(task, step))


def pure_step(task: Task) -> Subject:
    """Time steps of the learner's pure function, compiled and given its buffers."""
    loop = Loop(task)
    options = {"step_fn": loop.step_fn, "optimizer": loop.optimizer}

    def move(state: Any, x: Any, target: Any) -> Any:
        return loop.pure.online(state, x, target, **options)

    run, held = jax.jit(move, donate_argnums=0), [loop.start]

    def step(x: Any, target: Any) -> Any:
        held[0], losses = run(held[0], x, target)
        return losses

    subject = one_by_one(task, step)

    def all_steps() -> Any:
        held[0] = jax.tree.map(jnp.copy, loop.start)
        return subject()

    return loop.subject(all_steps, after=lambda: held[0].parameters)


def single_calls(task: Task) -> Subject:
    """Time streams of one step."""
    loop = Loop(task)
    options = {"step_fn": loop.step_fn, "optimizer": loop.optimizer}
    step = partial(loop.learner.etrace_online, **options)
    return loop.subject(one_by_one(task, step))


def case(network: str, hidden: int, batch: int, steps: int, few: int = 200) -> Case:
    """Return the case of one network; one of few steps is for ``--quick``."""
    made = NETWORKS[network](hidden=hidden)
    task, short = Task(made, steps, batch), Task(made, min(few, steps), batch)
    every = max(1, steps // 5)
    return Case(
        f"training_loop/{network},H={hidden},B={batch},T={steps}",
        {
            GIVEN: lambda: stream(task),
            IGNORE: lambda: stream(task, nonfinite="ignore"),
            LOGGED: lambda: stream(task, log_every=every, on_log=lambda step, metrics: None),
            OWN: lambda: own_loop(short),
            PURE: lambda: pure_step(short),
            STEP: lambda: single_calls(short),
        },
        TARGETS,
        quick=steps < few,
        full=steps >= few,
        task=task,
    )


def cases(platform: str) -> list[Case]:
    """Return networks of about ten thousand steps a second on a processor, and of a thousand."""
    return [
        case("dense", 256, 4, 10_000),
        case("lstm", 128, 1, 10_000),
        case("dense", 256, 32, 1000),
        case("dense", 128, 4, 100),
    ]
