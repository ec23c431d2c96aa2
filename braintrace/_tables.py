"""Plain tables."""

import dataclasses
import html
import json
from collections.abc import Iterable, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Table:
    """A table, which prints as lines of aligned columns below its title.

    Attributes
    ----------
    title
        Text above the table.
    heads, rows
        The cells.
    numbers
        Right-aligned columns.
    """

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: Sequence[int] = ()

    def __str__(self) -> str:
        cells = [[" ".join(cell.split()) for cell in row] for row in (self.heads, *self.rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        cells.insert(1, ["-" * width for width in widths])
        return "\n".join([self.title, *(self._line(row, widths) for row in cells)])

    def _line(self, cells: Sequence[str], widths: Sequence[int]) -> str:
        padded = (
            cell.rjust(width) if column in self.numbers else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join(padded).rstrip()


class Printed:
    """A dataclass that prints as tables and paragraphs."""

    def __str__(self) -> str:
        return "\n".join(map(str, self._parts()))

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def _parts(self) -> Iterable[Table | str]:
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as dicts, lists, strings and numbers, ready for JSON."""
        fields = dataclasses.asdict(self)  # type: ignore[call-overload]
        return json.loads(json.dumps(fields, default=int))


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
