"""Step function: calls of the user's function of one step, and checks of its result."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import saiunit

from ..._checks import is_quantity, named, parameter_names, shown
from ..._core.zero import examples
from ..._errors import OptionError
from ..._foreign import in_words
from ..._typing import PyTree
from ..calls.interceptor import intercepting
from .recorder import LOOPS, Recorder


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
    call = f"`step_fn` fails for {_called_with(step_fn, slices)}"
    with (
        intercepting(recorder.algorithm, recorder),
        in_words(lambda: call),
        no_loops_in_step_function(),
    ):
        result = step_fn(*slices)
    if recorder.calls != 1:
        raise OptionError(
            f"`step_fn` called the learner {recorder.calls} times; it must call it exactly once "
            "per step, and not inside another compiled function."
        )
    recorder.check_states()
    return _loss_and_aux(result, has_aux)


def call_loss_function(
    loss_fn: Callable[..., PyTree], arguments: tuple[PyTree, ...], has_aux: bool
) -> PyTree:
    """Call the user's loss of an output and its labels, and check its result.

    Raises
    ------
    OptionError
        If it is not a function of them, fails, or returns no floating-point number.
    """
    with in_words(lambda: f"`loss_fn` fails for {_called_with(loss_fn, arguments)}"):
        result = loss_fn(*arguments)
    _loss_and_aux(result, has_aux, "loss_fn")
    return result


def _loss_and_aux(result: PyTree, has_aux: bool, name: str = "step_fn") -> tuple[PyTree, PyTree]:
    if has_aux and not (isinstance(result, tuple) and len(result) == 2):
        raise OptionError(f"With `has_aux=True`, `{name}` must return a pair `(loss, aux)`.")
    loss, aux = result if has_aux else (result, None)
    is_pair = isinstance(loss, tuple) and len(loss) == 2
    hint = " With `has_aux=True` it returns a pair `(loss, aux)`." if is_pair else ""
    check_loss(loss, hint, name)
    return loss, aux


def check_loss(loss: PyTree, hint: str = "", name: str = "step_fn") -> None:
    """Refuse a loss of a step that is not a floating-point number.

    Raises
    ------
    OptionError
        If it is not, with the hint and the name of the function.
    """
    if not _is_number(loss):
        raise OptionError(
            f"`{name}` must return a scalar loss, a floating-point number; it returned "
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


@contextlib.contextmanager
def no_loops_in_step_function() -> Iterator[None]:
    """Replace the error for a leaked tracer.

    Raises
    ------
    OptionError
        If the learner is called inside a transformation in the step function.
    """
    try:
        yield
    except jax.errors.UnexpectedTracerError as error:
        raise OptionError(LOOPS) from error


def example_slices(sequences: PyTree) -> PyTree:
    """Return zeros like the slices of one step."""

    def of_step(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(jnp.shape(leaf)[1:], jnp.result_type(leaf))

    return examples(jax.tree.map(of_step, sequences))
