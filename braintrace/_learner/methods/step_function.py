"""Step function: calls of the user's function of one step, and checks of its result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import saiunit

from ..._checks import is_quantity, named, parameter_names, shown
from ..._core.traces import examples
from ..._errors import OptionError, in_words
from ..._typing import PyTree
from ..calls.interceptor import intercepting
from .recorder import Recorder


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
    with intercepting(recorder.algorithm, recorder), in_words(lambda: call):
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
