"""Plain tables."""

import dataclasses
import html
from collections.abc import Iterable, Sequence


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


def as_text(parts: Iterable[Table | str]) -> str:
    """Format tables and paragraphs as lines of text."""
    return "\n".join(map(str, parts))


def as_html(parts: Iterable[Table | str]) -> str:
    """Format tables and paragraphs for a notebook."""
    return f"<pre>{html.escape(as_text(parts))}</pre>"


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
