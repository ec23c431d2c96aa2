"""The functions that are compared: calls that learn a sequence as users write them, and BPTT."""

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any

import brainstate
import jax
import jax.numpy as jnp

import braintrace

from .case import Subject, Subjects
from .networks import Network, Plain, sequence_loss, squared_error

OPTIONS: dict[str, dict[str, Any]] = {"es_d_rtrl": {"decay_or_rank": 0.9}}


@dataclasses.dataclass(frozen=True)
class Task:
    """A network (`networks.Network`, `modules.Layers` or `modules.Net`), and its sequences."""

    network: Any
    steps: int
    batch: int

    @functools.cached_property
    def data(self) -> tuple[Any, Any]:
        found: tuple[Any, Any] = self.network.data(self.steps, self.batch)
        return found

    @functools.cached_property
    def learners(self) -> dict[str, Any]:
        """Learners that several calls share, by the label of a call."""
        return {}


def by_hand(task: Task, make: Callable[[Network], Any], rule: str = "d_rtrl") -> Subject:
    """Compile ``make(network)``, a gradient ``(parameters, xs, targets) -> (loss, gradients)``."""
    gradient = jax.jit(make(task.network))
    parameters, data = task.network.parameters(), task.data
    return Subject(lambda: gradient(parameters, *data), rule=rule, found=lambda result: result[1])


def plain_bptt(network: Network) -> Any:
    """Return BPTT in plain JAX, in the form of a hand-written gradient."""
    return jax.value_and_grad(functools.partial(sequence_loss, network, Plain()))


def compiled(model: brainstate.nn.Module, algorithm: str, x: Any, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that recurrent mixing is left out is the point
        return braintrace.compile(model, algorithm, x, **options)


def learner_of(task: Task, algorithm: str = "d_rtrl", **options: Any) -> Any:
    given = {"batch_size": task.batch, **OPTIONS.get(algorithm, {}), **options}
    return compiled(task.network.model(), algorithm, task.data[0][0], **given)


def step_function(learner: Any) -> Callable[[Any, Any], Any]:
    """Return the loss of one step, by a learner or a model."""
    return lambda x, target: squared_error(learner(x), target)


def gradient_of_step(learner: Any) -> Callable[[Any, Any], Any]:
    """Return the gradient of one step that a user takes around a call."""
    weights = learner.algorithm.model.states(brainstate.ParamState)
    return brainstate.transform.grad(step_function(learner), weights)


def named(gradients: Any) -> Any:
    """Return gradients by the names of the parameters."""
    return {path[-1] if isinstance(path, tuple) else path: g for path, g in gradients.items()}


def wait_for_states(learner: Any) -> None:
    """Wait until the hidden states are there; traces are left alone."""
    jax.block_until_ready([s.value for s in learner.states(brainstate.HiddenState).values()])


def without_states(
    function: Callable[..., Any], *arguments: Any
) -> tuple[Callable[..., Any], list[brainstate.State]]:
    """Return a function of the values of States, and these; it gives back ``(new, result)``.

    The new value of a State that is only read is ``None``.
    """
    stateful = brainstate.transform.StatefulFunction(function, return_only_write=True)
    stateful.make_jaxpr(*arguments)
    return stateful.jaxpr_call, list(stateful.get_states(*arguments))


def bytes_of_call(call: Callable[..., Any], *arguments: Any) -> float:
    """Return the bytes of the temporary buffers of a call that reads and writes States."""
    pure, states = without_states(call, *arguments)
    return temporary_bytes(jax.jit(pure).lower([state.value for state in states], *arguments))


def temporary_bytes(lowered: Any) -> float:
    """Return the bytes of the temporary buffers of a program."""
    return float(lowered.compile().memory_analysis().temp_size_in_bytes)


def sequence_gradient(task: Task, learner: Any, chunk: int | str = "auto", **window: int) -> Any:
    """Return what takes the gradient of the sequence, from the states and traces that are there."""
    step = step_function(learner)
    return lambda: learner.etrace_grad(*task.data, step_fn=step, chunk_size=chunk, **window)


def _of_model(task: Task, rule: str, make: Callable[..., Any]) -> Subject:
    """Compile ``make(losses, parameters)(xs, targets)`` of a model whose states begin anew."""
    model = task.network.model()
    brainstate.nn.init_all_states(model, batch_size=task.batch)

    def losses(xs: Any, targets: Any) -> Any:
        return brainstate.transform.for_loop(step_function(model), xs, targets)

    run = make(losses, model.states(brainstate.ParamState))

    @brainstate.transform.jit
    def call(xs: Any, targets: Any) -> Any:
        brainstate.nn.init_all_states(model, batch_size=task.batch)
        return run(xs, targets)

    return Subject(lambda: call(*task.data), rule=rule)


def bptt(task: Task) -> Subject:
    def make(losses: Any, parameters: Any) -> Any:
        return lambda *data: brainstate.transform.grad(lambda: losses(*data).mean(), parameters)()

    return _of_model(task, "bptt", make)


def truncated_bptt(task: Task, window: int) -> Subject:
    """Compile truncated BPTT: one gradient for each window, which the sequence fills exactly."""
    windows = task.steps // window

    def make(losses: Any, parameters: Any) -> Any:
        def one_window(total: Any, now: Any) -> Any:
            loss = lambda: losses(*now).mean() / windows  # noqa: E731
            found = brainstate.transform.grad(loss, parameters)()
            return jax.tree.map(jnp.add, total, found), None

        def gradient(*data: Any) -> Any:
            zero = {path: jax.tree.map(jnp.zeros_like, s.value) for path, s in parameters.items()}
            return brainstate.transform.scan(one_window, zero, windows_of(data, window))[0]

        return gradient

    return _of_model(task, f"truncated BPTT, windows of {window}", make)


def windows_of(arrays: Any, window: int) -> Any:
    """Return arrays with a leading axis of windows, which the sequence fills exactly."""
    return jax.tree.map(lambda leaf: leaf.reshape(-1, window, *leaf.shape[1:]), arrays)


def forward(task: Task) -> Subject:
    return _of_model(task, "", lambda losses, parameters: losses)


def online(
    task: Task,
    algorithm: str = "d_rtrl",
    chunk: int | str = "auto",
    count_reset: bool = True,
    **window: int,
) -> Subject:
    """Compile a sequence gradient that begins with a reset, which may be part of the time."""
    label = f"{algorithm.upper()}, auto"
    if label not in task.learners:
        task.learners[label] = learner_of(task, algorithm)
    learner = task.learners[label]
    gradient = sequence_gradient(task, learner, chunk, **window)
    rule = algorithm + "".join(f", windows of {length}" for length in window.values())

    def reset() -> None:
        learner.reset_state(task.batch)
        wait_for_states(learner)

    def reset_and_gradient() -> Any:
        learner.reset_state(task.batch)
        return gradient()

    if count_reset:
        return Subject(reset_and_gradient, rule=rule)
    return Subject(gradient, before=reset, rule=rule)


def carrying_on(task: Task, algorithm: str) -> Subject:
    """Compile a sequence gradient whose states and traces are those that the last call left.

    A first sequence has gone through the learner, so that no trace is zero.
    """
    task.learners[f"{algorithm.upper()}, carrying on"] = learner = learner_of(task, algorithm)
    run = sequence_gradient(task, learner)
    jax.block_until_ready(run())
    return Subject(run, rule=f"{algorithm}, carrying on")


def chosen_chunks(task: Task, algorithm: str) -> dict[str, Callable[[], float]]:
    """Return what gives the last chunk size that the library chose for a shared learner."""

    def chosen(way: str) -> float:
        rows = task.learners[way].report().sequences
        return float([row.chunk_size for row in rows if row.budget is not None][-1])

    ways = f"{algorithm.upper()}, auto", f"{algorithm.upper()}, carrying on"
    return {f"steps of a chunk, {way}": functools.partial(chosen, way) for way in ways}


def automatic(task: Task, algorithm: str) -> Subjects:
    """Return sequence gradients in chunks that the library chooses."""
    return {
        f"{algorithm.upper()}, auto": functools.partial(online, task, algorithm),
        f"{algorithm.upper()}, carrying on": functools.partial(carrying_on, task, algorithm),
    }
