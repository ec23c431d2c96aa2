"""Workload of a comparison: a model, its data, and the loss of one step."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import brainstate
import jax
import numpy as np
from jax.typing import ArrayLike

from .._brainstate import is_watched, undone
from .._checks import check_model, named
from .._core.traces import examples
from .._errors import OptionError, in_words
from .._jax import struct_of
from .._learner.calls.arguments import length_of, of_numbers
from .._typing import PyTree


@dataclasses.dataclass(frozen=True, eq=False)
class Workload:
    """A model, its data, and the loss of one step.

    Attributes
    ----------
    model
        The user's model, of which copies are run.
    step_fn
        ``step_fn(model, x) -> loss``.
    xs, mask
        Sequences, and weights of the steps' losses.
    arguments
        Example arguments of the model.
    batch_size, vmap
        See `braintrace.compile`.
    """

    model: brainstate.nn.Module
    step_fn: Callable[..., PyTree]
    xs: PyTree
    mask: ArrayLike | None
    arguments: tuple[PyTree, ...]
    batch_size: int | None
    vmap: bool

    @property
    def steps(self) -> int:
        """Number of steps."""
        return int(jax.tree.leaves(self.xs)[0].shape[0])

    @property
    def first(self) -> PyTree:
        """The data of the first step."""
        return jax.tree.map(lambda leaf: leaf[0], self.xs)

    def cut(self, steps: int) -> Workload:
        """Return the workload of the first steps."""
        mask = None if self.mask is None else np.asarray(self.mask)[:steps]
        xs = jax.tree.map(lambda leaf: leaf[:steps], self.xs)
        return dataclasses.replace(self, xs=xs, mask=mask)


def checked_sequences(
    function: str, model: Any, sequences: Mapping[str, PyTree]
) -> tuple[list[PyTree], int]:
    """Check the model of a comparison; return its sequences as arrays, and the number of steps.

    Raises
    ------
    OptionError
        If ``model`` is not a model, and inside a transformation.
    ShapeError
        For sequences without arrays, or of different lengths.
    """
    check_model(model)
    if is_watched():
        raise OptionError(
            f"`{function}` compares numbers, which a transformation such as `jit` does not "
            "have: call it outside."
        )
    arrays = list(map(of_numbers, sequences.values()))
    return arrays, length_of(tuple(arrays))


class _Called(BaseException):
    """Ends a ``step_fn`` at its call of the model."""


def arguments_of(step_fn: Any, x: PyTree) -> tuple[PyTree, ...]:
    """Return zeros like the arguments with which ``step_fn`` calls the model.

    Raises
    ------
    OptionError
        If it does not call the model.
    """
    calls: list[tuple[PyTree, ...]] = []

    def call(*arguments: PyTree) -> PyTree:
        calls.append(jax.tree.map(lambda leaf: struct_of(jax.typeof(leaf)), arguments))
        raise _Called

    words = f"`step_fn` fails for {named(['x'], [x])}"
    with contextlib.suppress(_Called), undone(), in_words(lambda: words):
        step_fn(call, x)
    if not calls:
        raise OptionError(
            "`step_fn` called the model 0 times; it has to call its first argument exactly once "
            "per step."
        )
    found: tuple[PyTree, ...] = examples(calls[0])
    return found


@contextlib.contextmanager
def restored(states: Iterable[brainstate.State]) -> Iterator[Callable[[], None]]:
    """Restore the values of States at the end; yield a function that restores them earlier."""
    values = [(state, state.value) for state in states]

    def rewind() -> None:
        for state, value in values:
            state.value = value

    try:
        yield rewind
    finally:
        rewind()
