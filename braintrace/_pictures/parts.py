"""Contents of the picture of a compiled model, as plain data.

A weight is an edge from all nodes that it reads to all nodes that it drives, with a label in the
middle. The label is a separate `Node`, with incoming and outgoing `Arrow` s.
"""

import dataclasses
from typing import Literal

from .._graph.diagnostics import Level

Kind = Literal["argument", "weight", "plain weight", "group", "state", "output"]
"""Meaning of a node: an argument of the step, a weight with or without a trace, a hidden group, a
state that is in no group, or the output of the step."""


@dataclasses.dataclass(frozen=True)
class Node:
    """One box.

    Attributes
    ----------
    key
        Its name.
    kind
        Its meaning.
    lines
        Its text; for a group, one line for each of its states.
    level
        Level of the diagnostic that its gradient covers the current step only; ``None``: no such
        diagnostic.
    """

    key: str
    kind: Kind
    lines: tuple[str, ...]
    level: Level | None = None


@dataclasses.dataclass(frozen=True)
class Arrow:
    """Dependence of one node on another.

    Attributes
    ----------
    source, target
        Keys of the nodes.
    is_past
        Whether the target reads the values from before the step.
    level
        Level of the diagnostic that no trace follows this path; ``None``: no such diagnostic.
    """

    source: str
    target: str
    is_past: bool = False
    level: Level | None = None


@dataclasses.dataclass(frozen=True)
class Picture:
    """The nodes, in the order of the step, and the arrows between them."""

    nodes: tuple[Node, ...]
    arrows: tuple[Arrow, ...]


def in_bytes(count: int) -> str:
    """Format a size in bytes.

    Examples
    --------
    >>> in_bytes(999), in_bytes(4_096), in_bytes(12_500_000)
    ('999 B', '4.1 kB', '12.5 MB')
    """
    size = float(count)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.3g} GB"
