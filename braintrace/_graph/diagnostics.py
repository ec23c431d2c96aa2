"""What the compiler found out that a user should know."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from .short_names import plain_names, shortened

Level = Literal["info", "warning"]

DiagnosticKind = Literal[
    "plain-mixing",
    "mixed-positions",
    "recurrent-mixing",
    "layer-to-layer",
    "not-a-linear-readout",
    "plain-in-readout",
    "nested-weights",
    "also-untagged",
    "partly-coupled",
    "operand-not-parameters",
    "inside-custom-rule",
    "not-marked",
    "no-hidden-state",
    "backward-not-linear",
    "untraced-state",
    "no-trace",
    "between-layers",
    "unused-parameter",
]
"""What a finding is about. ``docs/diagnostics.md`` says of each what it means and what to do."""


@dataclasses.dataclass(frozen=True)
class Diagnostic:
    """One finding.

    Attributes
    ----------
    level
        ``'warning'`` for what costs the user accuracy, ``'info'`` for the rest.
    kind
        What it is about, such as ``'plain-mixing'``; the page *What the compiler reports* has all.
    message
        What, where, why and what to do, in full sentences.
    paths
        Printed paths of the parameters and states concerned.
    source
        ``file:line (function)`` of the operation, where there is one.
    """

    level: Level
    kind: DiagnosticKind
    message: str
    paths: tuple[str, ...] = ()
    source: str | None = None

    def __str__(self) -> str:
        told = shortened(self.message, plain_names(self.paths))
        return told + (f" [{self.source}]" if self.source else "")


class ApproximationWarning(UserWarning):
    """A part of the model's gradient is approximated more coarsely than the user may expect."""


def quoted(names: Sequence[str]) -> str:
    """Print names, each in quotes."""
    return ", ".join(f"'{name}'" for name in names)
