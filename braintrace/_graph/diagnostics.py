"""What the compiler found out that a user should know."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

Level = Literal["info", "warning"]


@dataclasses.dataclass(frozen=True)
class Diagnostic:
    """One finding.

    Attributes
    ----------
    level
        ``'warning'`` for what costs the user accuracy, ``'info'`` for the rest.
    kind
        ``'plain-mixing'``, ``'partly-mixed'``, ``'weight-behind-weight'``,
        ``'mixed-positions'``, ``'operand-not-parameters'``, ``'no-hidden-state'``,
        ``'inside-custom-rule'``, ``'backward-not-linear'``, ``'also-plain'``,
        ``'recurrent-mixing'``, ``'layer-to-layer'``, ``'untraced-state'`` or
        ``'unused-parameter'``.
    message
        What, where, why and what to do, in full sentences.
    paths
        Printed paths of the parameters and states concerned.
    source
        ``file:line (function)`` of the operation, where there is one.
    """

    level: Level
    kind: str
    message: str
    paths: tuple[str, ...] = ()
    source: str | None = None

    def __str__(self) -> str:
        return self.message + (f" [{self.source}]" if self.source else "")


class ApproximationWarning(UserWarning):
    """A part of the model's gradient is approximated more coarsely than the user may expect."""


def quoted(names: Sequence[str]) -> str:
    """Print names, each in quotes."""
    return ", ".join(f"'{name}'" for name in names)
