"""What a picture of a compiled model shows, as plain data.

A weight is an edge from all that it reads to all that it drives, with a label in its middle: the
label is a `Node` of its own, and `Arrow` s lead to it and from it.
"""

import dataclasses
from typing import Literal

from .._graph.diagnostics import Level

Kind = Literal["argument", "weight", "plain weight", "group", "state", "output"]
"""What a node stands for: an argument of the step, a weight with a trace or without one, a hidden
group, a state of no group, or what the step returns."""


@dataclasses.dataclass(frozen=True)
class Node:
    """One box.

    Attributes
    ----------
    key
        Names it.
    kind
        What it stands for.
    lines
        What is written in it; for a group, a line for each of its states.
    level
        That of the finding that its gradient is one of the current step only; ``None``: there is
        no such finding.
    """

    key: str
    kind: Kind
    lines: tuple[str, ...]
    level: Level | None = None


@dataclasses.dataclass(frozen=True)
class Arrow:
    """What one node takes from another.

    Attributes
    ----------
    source, target
        Keys of the nodes.
    is_past
        Whether it takes the values from before the step.
    level
        That of the finding that no trace follows this way; ``None``: there is no such finding.
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
    """Print a size.

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
