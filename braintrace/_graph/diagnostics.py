"""Diagnostics of the compiler: approximations, and unusual parts of a model."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

Level = Literal["info", "warning"]

DiagnosticKind = Literal[
    "truncated", "no-trace", "not-marked", "untraced-state", "nonlinear-gradient"
]
"""Kinds of diagnostics. ``docs/compiler.md`` has an example and the remedy of each."""


@dataclasses.dataclass(frozen=True)
class Diagnostic:
    """One diagnostic of the compiler.

    Attributes
    ----------
    level
        ``'warning'`` for a loss of accuracy, ``'info'`` for anything else.
    kind
        The kind, such as ``'truncated'``; the page *Marks and diagnostics* has all five.
    message
        The approximation, its place, its cause and its remedy, in full sentences.
    paths
        Printed paths of the parameters and states concerned.
    source
        ``file:line (function)`` of the operation, if there is one.
    """

    level: Level
    kind: DiagnosticKind
    message: str
    paths: tuple[str, ...] = ()
    source: str | None = None

    def __str__(self) -> str:
        return self.message + (f" [{self.source}]" if self.source else "")


class ApproximationWarning(UserWarning):
    """Warn that a part of the gradient is approximated more coarsely than expected."""


def quoted(names: Sequence[str]) -> str:
    """Print names, each in quotes."""
    return ", ".join(f"'{name}'" for name in names)
