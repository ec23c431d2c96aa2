"""A call of one of a learner's methods, from its arguments."""

from __future__ import annotations

import dataclasses

from ..._typing import PyTree
from ..calls.arguments import Chosen
from ..calls.options import Options


@dataclasses.dataclass(frozen=True)
class Request:
    """A call of one of a learner's methods.

    Attributes
    ----------
    method
        Its name.
    sequences, options
        The user's arguments; see `Learner.etrace_grad`.
    chosen
        The parameters whose gradients are requested; ``None``: all.
    start
        Index of its first step in the user's call.
    """

    method: str
    sequences: tuple[PyTree, ...]
    options: Options
    chosen: Chosen | None = None
    start: int = 0
