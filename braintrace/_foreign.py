"""Errors of JAX, brainstate and saiunit, rewritten in terms of the user's call.

Wrong arguments of a function often raise an error deep inside a dependency while the function is
traced. Such an error mentions neither the function nor the argument. Errors that the function
itself raises pass through unchanged.
"""

import contextlib
import dis
import os
import pathlib
import re
import traceback
from collections.abc import Callable, Iterator

import brainstate
import jax
import jaxlib
import numpy
import saiunit

from ._errors import BraintraceError, NotInitializedError, OptionError, UnitError

DEPENDENCIES = ("jax", "jaxlib", "brainstate", "saiunit", "numpy", "braintrace")
_RAISED = (
    AssertionError,
    AttributeError,
    TypeError,
    ValueError,
    IndexError,
    KeyError,
    NotImplementedError,
    OverflowError,
    RuntimeError,
    ZeroDivisionError,
)
_ABOUT_STATES = re.compile(r"\b\w+State\b|\ba State\b|of State\b")
_ABOUT_JAX = re.compile(
    r"abstract array|[Tt]racer|JAX|jax\b|\b(scan|cond|while_loop|fori_loop|switch|vmap) (got|\w+ )"
)
_OF_TRACERS = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


@contextlib.contextmanager
def in_words(kind: type[BraintraceError], call: Callable[[], str]) -> Iterator[None]:
    """Rewrite errors of dependencies in terms of a call.

    Parameters
    ----------
    kind
        The error that replaces them; unit errors become a `UnitError`.
    call
        Returns the failed call as text, as in "`LSTMCell.update` fails for `x` float32 (2, 3)".
    """
    try:
        yield
    except BraintraceError:
        raise
    except Exception as error:
        told = _of_attribute(error, call) if isinstance(error, AttributeError) else None
        if told is None and not is_foreign(error):
            raise
        chosen = UnitError if type(error).__name__.startswith("Unit") else kind
        words = f"{call()}: {_first_lines(error)}{_hint(error)}{_line(error)}"
        raise (chosen(words) if told is None else told) from error


@contextlib.contextmanager
def loops_in_words() -> Iterator[None]:
    """Rewrite the error about reverse mode through a ``while`` loop of ``step_fn``.

    Loops in the model have a separate error; see `one_way`.
    """
    try:
        yield
    except ValueError as error:
        if not str(error).startswith("Reverse-mode differentiation does not work for lax.while"):
            raise
        place = _line(error.__cause__ or error)
        raise OptionError(
            "The loss of a step depends on a `while` loop of unknown length in `step_fn`, which "
            "has no reverse-mode derivative. Use a loop of known length (`scan`, `for_loop`, or "
            f"`fori_loop` with static bounds), or `jax.lax.stop_gradient` on its inputs.{place}"
        ) from error


def is_foreign(error: BaseException) -> bool:
    """Test whether a dependency raised an error, rather than the called function."""
    if _package_of(type(error).__module__) in DEPENDENCIES:
        return True
    if type(error) not in _RAISED:
        return False
    end = error.__traceback__
    while end is not None and end.tb_next is not None:
        end = end.tb_next
    if end is None:
        return False
    code = end.tb_frame.f_code
    if _is_of_dependency(code.co_filename):
        return True
    # JAX removes its frames from a traceback, so the user's line is the last one.
    text = str(error)
    is_raised_there = dis.opname[code.co_code[end.tb_lasti]] == "RAISE_VARARGS"
    is_told = _ABOUT_JAX.search(text) or _ABOUT_STATES.search(text)
    return bool(is_told and not is_raised_there)


def _of_attribute(error: AttributeError, call: Callable[[], str]) -> NotInitializedError | None:
    """Return the error about an attribute that is missing before a module's ``init_state``."""
    owner = error.obj
    if not isinstance(owner, brainstate.nn.Module):
        return None
    has_own = type(owner).init_state is not brainstate.nn.Module.init_state
    if not has_own or owner.states(brainstate.ShortTermState):
        return None
    return NotInitializedError(
        f"{call()}: `{type(owner).__name__}` has no '{error.name}', because its `init_state` has "
        "not been called. Call `brainstate.nn.init_all_states(model)` first, with `batch_size` "
        "for a batch."
    )


_VALUE = " A State is used as a value: append `.value`."


def _hint(error: BaseException) -> str:
    if isinstance(error, _OF_TRACERS):
        return (
            " A step is traced once, for all values: use `jnp.where` or "
            "`brainstate.transform.cond` where it depends on one."
        )
    return _VALUE if _ABOUT_STATES.search(str(error)) else ""


def _first_lines(error: BaseException) -> str:
    """Return the first paragraph of an error's message."""
    text = re.sub(r" at 0x[0-9a-f]+", "", str(error).strip()) or type(error).__name__
    paragraph = " ".join(text.split("\n\n")[0].split())
    paragraph = paragraph if len(paragraph) <= 400 else f"{paragraph[:400]}…"
    return paragraph if paragraph.endswith(".") else f"{paragraph}."


def _line(error: BaseException) -> str:
    """Return the last line of a traceback outside of dependencies, in brackets."""
    frames = reversed(traceback.extract_tb(error.__traceback__))
    own = next((frame for frame in frames if not _is_of_dependency(frame.filename)), None)
    return f" [{own.filename}:{own.lineno} ({own.name})]" if own else ""


def _package_of(module: str) -> str:
    return module.partition(".")[0]


_FILES = (__file__, *(package.__file__ for package in (jax, jaxlib, brainstate, saiunit, numpy)))
_HOMES = tuple(f"{pathlib.Path(file or '').parent}{os.sep}" for file in _FILES)


def _is_of_dependency(filename: str) -> bool:
    return filename.startswith(_HOMES)
