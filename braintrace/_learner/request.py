"""A call of one of a learner's methods, from its arguments."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from jax.typing import ArrayLike

from .._typing import PyTree
from .arguments import PLAIN, Options
from .body import Arguments, Body
from .parts import LearnerParts
from .updates import Update


@dataclasses.dataclass(frozen=True)
class Request:
    """A call of one of a learner's methods.

    Attributes
    ----------
    method
        Its name.
    make
        Makes the body of such calls, given checked arguments as an example.
    sequences, options, functions, mask, reset
        What the user gives; see `Learner.etrace_grad`.
    updating
        Returns for options what is done with gradients, for methods that learn.
    """

    method: str
    make: Callable[[LearnerParts, Request, Arguments], Body]
    sequences: tuple[PyTree, ...]
    options: Options = PLAIN
    functions: Mapping[str, Callable[..., PyTree]] = dataclasses.field(default_factory=dict)
    mask: ArrayLike | None = None
    reset: ArrayLike | None = None
    updating: Callable[[Options], Update] | None = None
