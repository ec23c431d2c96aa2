"""Calls that learn a sequence with a brainstate module, as users write them."""

import functools
from collections.abc import Callable
from typing import Any

import brainstate
import jax
import jax.numpy as jnp

from .case import Subject
from .handwritten_windows import windows_of
from .networks import squared_error
from .subjects import ModuleTask, learner_of, step_function, wait_for_states


def sequence_gradient(
    task: ModuleTask, learner: Any, chunk: int | None = None, window: int | None = None
) -> Any:
    """Return what takes the gradient of the sequence, from the states and traces that are there.

    Parameters
    ----------
    task, learner
        The sequences and the learner.
    chunk, window
        ``chunk_size`` and ``window``; ``None``: as the library chooses.
    """
    step = step_function(learner)
    sizes = {"chunk_size": chunk, "window": window}
    sizes = {name: size for name, size in sizes.items() if size is not None}
    return lambda: learner.etrace_grad(*task.data, step_fn=step, **sizes)


def _losses(model: brainstate.nn.Module, xs: Any, targets: Any) -> Any:
    def step(x: Any, target: Any) -> Any:
        return squared_error(model(x), target)

    return brainstate.transform.for_loop(step, xs, targets)


def bptt(task: ModuleTask) -> Subject:
    """Compile backpropagation through time of the same model."""
    model = task.model()
    brainstate.nn.init_all_states(model, batch_size=task.batch)
    parameters = model.states(brainstate.ParamState)

    @brainstate.transform.jit
    def gradient(xs: Any, targets: Any) -> Any:
        brainstate.nn.init_all_states(model, batch_size=task.batch)
        loss = functools.partial(_losses, model, xs, targets)
        return brainstate.transform.grad(lambda: loss().mean(), parameters)()

    return Subject(lambda: gradient(*task.data), rule="bptt")


def truncated_bptt(task: ModuleTask, window: int) -> Subject:
    """Compile truncated BPTT: one gradient for each window, which the sequence fills exactly."""
    model = task.model()
    brainstate.nn.init_all_states(model, batch_size=task.batch)
    parameters = model.states(brainstate.ParamState)
    windows = task.steps // window

    @brainstate.transform.jit
    def gradient(xs: Any, targets: Any) -> Any:
        brainstate.nn.init_all_states(model, batch_size=task.batch)

        def one_window(total: Any, now: Any) -> Any:
            loss = functools.partial(_losses, model, *now)
            found = brainstate.transform.grad(lambda: loss().mean() / windows, parameters)()
            return jax.tree.map(jnp.add, total, found), None

        zero = {path: jax.tree.map(jnp.zeros_like, s.value) for path, s in parameters.items()}
        cut = windows_of((xs, targets), window)
        return brainstate.transform.scan(one_window, zero, cut)[0]

    return Subject(lambda: gradient(*task.data), rule=f"truncated BPTT, windows of {window}")


def forward(task: ModuleTask) -> Subject:
    """Compile the losses of the sequence, without gradients."""
    model = task.model()
    brainstate.nn.init_all_states(model, batch_size=task.batch)

    @brainstate.transform.jit
    def losses(xs: Any, targets: Any) -> Any:
        brainstate.nn.init_all_states(model, batch_size=task.batch)
        return _losses(model, xs, targets)

    return Subject(lambda: losses(*task.data))


def online(
    task: ModuleTask,
    algorithm: str = "d_rtrl",
    chunk: int | None = None,
    count_reset: bool = True,
    window: int | None = None,
) -> Subject:
    """Compile a sequence gradient that begins with a reset, which may be part of the time."""
    if algorithm not in task.learners:
        task.learners[algorithm] = learner_of(task, algorithm)
    learner = task.learners[algorithm]
    gradient = sequence_gradient(task, learner, chunk, window)
    rule = algorithm if window is None else f"{algorithm}, windows of {window}"

    def reset() -> None:
        learner.reset_state(task.batch)
        wait_for_states(learner)

    def reset_and_gradient() -> Any:
        learner.reset_state(task.batch)
        return gradient()

    if count_reset:
        return Subject(reset_and_gradient, rule=rule)
    return Subject(gradient, before=reset, rule=rule)


def carrying_on(task: ModuleTask, algorithm: str = "d_rtrl", chunk: int | None = None) -> Subject:
    """Compile a sequence gradient whose states and traces are those that the last call left.

    A first sequence has gone through the learner, so that no trace is zero.
    """
    learner = learner_of(task, algorithm)
    if chunk is None:
        task.learners[f"{algorithm}, carrying on"] = learner
    run = sequence_gradient(task, learner, chunk)
    jax.block_until_ready(run())
    return Subject(run, rule=f"{algorithm}, carrying on")


def chosen_chunk(task: ModuleTask, way: str) -> float:
    """Return the chunk size that the library chose for the last call of a shared learner."""
    rows = task.learners[way].report().sequences
    return float([row.chunk_size for row in rows if row.budget is not None][-1])


def chosen_chunks(
    task: ModuleTask, name: str = "D_RTRL", algorithm: str = "d_rtrl"
) -> dict[str, Callable[[], float]]:
    """Return facts: the chunks that the library chose."""
    return {
        f"steps of a chunk, {what}": functools.partial(chosen_chunk, task, way)
        for what, way in (
            (f"{name}, auto", algorithm),
            (f"{name}, carrying on", f"{algorithm}, carrying on"),
        )
    }
