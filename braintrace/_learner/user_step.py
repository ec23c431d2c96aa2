"""User's step function: its calls of the learner, and checks of its result.

A step function calls the learner, and the call must run the step that is being traced instead of a
step on the States. The replacement is bound to a context: another thread may trace pure functions
of the same learner meanwhile.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, TypeAlias

import brainstate
import jax
import jax.numpy as jnp
import saiunit

from .._checks import is_quantity, named, parameter_names, shown
from .._core.steps import Inputs
from .._core.traces import examples
from .._errors import OptionError, in_words
from .._jax import Var, trace_state
from .._model import read_states, write_states
from .._typing import Path, PyTree, path_name
from .arguments import read_arguments, unwrap
from .base import BaseLearner

Interceptor: TypeAlias = Callable[..., PyTree]
"""Receives the arguments of a learner call, and returns its result."""

_interceptors: ContextVar[tuple[tuple[BaseLearner, Interceptor], ...]] = ContextVar(
    "braintrace_interceptors", default=()
)


@contextlib.contextmanager
def intercepting(learner: BaseLearner, interceptor: Interceptor) -> Iterator[None]:
    """Let an interceptor handle the calls of an learner's learner inside the context."""
    token = _interceptors.set((*_interceptors.get(), (learner, interceptor)))
    try:
        yield
    finally:
        _interceptors.reset(token)


def interceptor_of(learner: BaseLearner) -> Interceptor | None:
    """Return the innermost interceptor of an learner's learner, or ``None``."""
    for owner, interceptor in reversed(_interceptors.get()):
        if owner is learner:
            return interceptor
    return None


Run: TypeAlias = Callable[[Inputs], tuple[list[Any], dict[Var, Any], Any]]
"""``values of the program's inputs -> (outputs, new states, records)`` of one step."""

LOOPS = (
    "`step_fn` calls the learner inside a compiled function, branch or loop. Call the learner "
    "directly, since the whole step is compiled, and return results with `has_aux=True`."
)

Reset: TypeAlias = jax.Array | None
"""Flags of the samples that were reset before the step; ``None``: none."""


Values = dict[Path, list[Any]]
"""Leaves of the values of States, by path."""


def values_of(states: Mapping[Path, brainstate.State]) -> Values:
    """Return the current values of States."""
    return {path: jax.tree.leaves(state.value) for path, state in states.items()}


def traced_values(learner: BaseLearner) -> Values:
    """Return the values of the hidden states that traces follow."""
    states = learner.states_of_step
    paths = dict.fromkeys(state.path for state in learner.graph.traced_states)
    return values_of({path: states[path] for path in paths})


def first_written(before: Values, now: Values) -> Path | None:
    """Return the first State whose value has changed, or ``None``."""
    for path, leaves in now.items():
        if any(leaf is not then for leaf, then in zip(leaves, before[path], strict=True)):
            return path
    return None


@dataclasses.dataclass
class Recorder:
    """Replacement of the learner during one call of the step function.

    Attributes
    ----------
    learner
        The learner.
    run
        Runs the step.
    calls
        Number of learner calls by the step function.
    records
        Residuals of the step.
    """

    learner: BaseLearner
    run: Run
    calls: int = 0
    records: Any = None

    def __post_init__(self) -> None:
        self._left = traced_values(self.learner)
        self._trace = trace_state()

    def __call__(self, *arguments: Any) -> Any:
        """Run one step, which reads and writes the model's States.

        Raises
        ------
        OptionError
            Inside a transformation in the step function, or if a State was written.
        """
        if trace_state() != self._trace:
            raise OptionError(LOOPS)
        self.check_states()
        graph = self.learner.graph
        states = self.learner.states_of_step
        inputs = {
            **read_arguments(graph, unwrap(arguments)),
            **read_states(graph, states),
        }
        outputs, new_states, self.records = self.run(inputs)
        write_states(graph, states, new_states)
        self._left = traced_values(self.learner)
        self.calls += 1
        return jax.tree.unflatten(graph.traced.output_tree, outputs)

    def check_states(self) -> None:
        """Refuse traced hidden states that have changed since the last step.

        Raises
        ------
        OptionError
            If other code has written one.
        """
        path = first_written(self._left, traced_values(self.learner))
        if path is not None:
            raise OptionError(
                f"`step_fn` writes the hidden State '{path_name(path)}', and traces do not follow "
                "this write. Change it in `update` of the model; to start a new sequence, use "
                "`reset`."
            )


def call_step_function(
    step_fn: Callable[..., PyTree],
    recorder: Recorder,
    slices: tuple[PyTree, ...],
    has_aux: bool,
) -> tuple[PyTree, PyTree]:
    """Return the loss of a step and its auxiliary results.

    Parameters
    ----------
    step_fn
        The user's function.
    recorder
        Runs the learner's step.
    slices
        The function's arguments.
    has_aux
        Whether it returns auxiliary results; otherwise they are ``None``.

    Raises
    ------
    OptionError
        If it is not a function of the slices, does not call the learner exactly once, writes a
        hidden state, or returns no floating-point number.
    """
    return _loss_and_aux(run_step_function(step_fn, recorder, slices), has_aux)


def run_step_function(
    step_fn: Callable[..., PyTree], recorder: Recorder, slices: tuple[PyTree, ...]
) -> PyTree:
    """Return the result of a step function, which calls the learner exactly once."""
    call = f"`step_fn` fails for {_called_with(step_fn, slices)}"
    with intercepting(recorder.learner, recorder), in_words(lambda: call):
        result = step_fn(*slices)
    if recorder.calls != 1:
        raise OptionError(
            f"`step_fn` called the learner {recorder.calls} times; it must call it exactly once "
            "per step, and not inside another compiled function."
        )
    recorder.check_states()
    return result


def _loss_and_aux(result: PyTree, has_aux: bool) -> tuple[PyTree, PyTree]:
    if has_aux and not (isinstance(result, tuple) and len(result) == 2):
        raise OptionError("With `has_aux=True`, `step_fn` must return a pair `(loss, aux)`.")
    loss, aux = result if has_aux else (result, None)
    is_pair = isinstance(loss, tuple) and len(loss) == 2
    hint = " With `has_aux=True` it returns a pair `(loss, aux)`." if is_pair else ""
    check_loss(loss, hint)
    return loss, aux


def check_loss(loss: PyTree, hint: str = "") -> None:
    """Refuse a loss of a step that is not a floating-point number.

    Raises
    ------
    OptionError
        If it is not; the message ends with the hint.
    """
    if not _is_number(loss):
        raise OptionError(
            "`step_fn` must return a scalar loss, a floating-point number; it returned "
            f"{shown(loss)}.{hint}"
        )


def _is_number(loss: object) -> bool:
    """Test whether a loss can be differentiated: one real floating-point number."""
    try:
        aval = jax.typeof(saiunit.get_mantissa(loss) if is_quantity(loss) else loss)
    except TypeError:
        return False
    return aval.shape == () and jnp.issubdtype(aval.dtype, jnp.floating)


def _called_with(function: Callable[..., PyTree], arguments: tuple[PyTree, ...]) -> str:
    return named(parameter_names(function, len(arguments)), arguments)


def update_parameters(update_fn: Callable[..., PyTree], *results: PyTree) -> None:
    """Call the user's function of the gradients, and with ``has_aux`` of the auxiliary results."""
    with in_words(lambda: f"`update_fn` fails for {_called_with(update_fn, results)}"):
        update_fn(*results)


def example_slices(sequences: PyTree) -> PyTree:
    """Return zeros like the slices of one step."""

    def of_step(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(jnp.shape(leaf)[1:], jnp.result_type(leaf))

    return examples(jax.tree.map(of_step, sequences))
