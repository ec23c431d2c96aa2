"""Tables as text and as HTML.

The text fits the width of the terminal: cells of the widest columns continue on further lines.
The HTML contains its style, uses the colours of the page (light or dark), and scrolls on narrow
pages.
"""

import dataclasses
import html
import re
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from typing import TypeAlias

_STYLE = """
div.braintrace h4 { font-size: 1em; margin: 0.8em 0 0.2em; }
div.braintrace p { margin: 0.4em 0; white-space: pre-line; }
div.braintrace .scroll { max-width: 100%; overflow-x: auto; }
div.braintrace table { border-collapse: collapse; color: inherit; font-size: 0.85em; margin: 0; }
div.braintrace table :is(th, td) {
  border-bottom: 1px solid rgb(127 127 127 / 0.35); max-width: 28em; padding: 0.2em 0.6em;
  text-align: left; vertical-align: top; white-space: normal;
}
div.braintrace table .number {
  font-variant-numeric: tabular-nums; text-align: right; white-space: nowrap;
}
"""


WITHOUT_TERMINAL = 120
"""Width of a table that is written to a file or a notebook."""

NARROWEST = 12
"""Minimum width, in characters, of a column whose cells continue on further lines."""

GAP = "  "


@dataclasses.dataclass(frozen=True)
class Table:
    """A table.

    Attributes
    ----------
    title
        Text above the table.
    heads, rows
        The cells.
    numbers
        Right-aligned columns.
    is_ruled
        Whether the text has a line below the heads.
    indent
        Prefix of each line of the text.
    """

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: Sequence[int] = ()
    is_ruled: bool = False
    indent: str = "  "


Part: TypeAlias = Table | str
"""A table or a paragraph."""


def as_text(parts: Iterable[Part]) -> str:
    """Format tables and paragraphs as lines of text, of at most the width of the terminal."""
    width = shutil.get_terminal_size(fallback=(WITHOUT_TERMINAL, 24)).columns
    return "\n".join(
        _paragraph(part, width) if isinstance(part, str) else _text_table(part, width)
        for part in parts
    )


def as_html(parts: Iterable[Part]) -> str:
    """Format tables and paragraphs as an HTML element."""
    written = (
        f"<p>{html.escape(part)}</p>" if isinstance(part, str) else _html_table(part)
        for part in parts
    )
    return f'<div class="braintrace"><style>{_STYLE}</style>{"".join(written)}</div>'


def _paragraph(text: str, width: int) -> str:
    return "\n".join(textwrap.fill(line, width) for line in text.split("\n"))


def _text_table(table: Table, width: int) -> str:
    """Format a table; columns that do not fit continue in further tables."""
    parts = _split(table, width - len(table.indent))
    return "\n".join(line for part in parts for line in _text_part(part, width))


def _text_part(table: Table, width: int) -> list[str]:
    widths = _fitting(table, width - len(table.indent))
    rule = [["-" * size for size in widths]] if table.is_ruled else []
    rows = [table.heads, *rule, *table.rows]
    lines = [line for row in rows for line in _lines(row, widths, table.numbers)]
    return [_paragraph(table.title, width), *(table.indent + line for line in lines)]


def _widths(table: Table) -> list[int]:
    return [max(map(len, column)) for column in zip(table.heads, *table.rows, strict=True)]


def _split(table: Table, free: int) -> list[Table]:
    """Split a table into parts that fit, each of which repeats the first column."""
    first, *sizes = (
        (size if column in table.numbers else min(size, NARROWEST)) + len(GAP)
        for column, size in enumerate(_widths(table))
    )
    parts: list[list[int]] = [[]]
    for column, size in enumerate(sizes, 1):
        taken = first + sum(sizes[c - 1] for c in parts[-1])
        if parts[-1] and taken + size - len(GAP) > free:
            parts.append([])
        parts[-1].append(column)
    return [_columns(table, [0, *part]) for part in parts] if len(parts) > 1 else [table]


def _columns(table: Table, chosen: Sequence[int]) -> Table:
    heads, *rows = ([line[c] for c in chosen] for line in (table.heads, *table.rows))
    numbers = [place for place, column in enumerate(chosen) if column in table.numbers]
    return dataclasses.replace(table, heads=heads, rows=rows, numbers=numbers)


def _fitting(table: Table, free: int) -> list[int]:
    """Return column widths that fit: only columns of text become narrower, the widest first."""
    found = _widths(table)
    words = [column for column in range(len(found)) if column not in table.numbers]
    while sum(found) + len(GAP) * (len(found) - 1) > free and words:
        widest = max(words, key=lambda column: found[column])
        if found[widest] <= NARROWEST:
            break
        found[widest] -= 1
    return found


def _lines(cells: Sequence[str], widths: Sequence[int], numbers: Sequence[int]) -> list[str]:
    """Return the lines of one row."""
    wrapped = list(map(_wrapped, cells, widths))
    set_in = [
        [part.rjust(width) if column in numbers else part.ljust(width) for part in parts]
        + [" " * width] * (max(map(len, wrapped)) - len(parts))
        for column, (parts, width) in enumerate(zip(wrapped, widths, strict=True))
    ]
    return [GAP.join(parts).rstrip() for parts in zip(*set_in, strict=True)]


def _wrapped(cell: str, width: int) -> list[str]:
    """Split a cell into lines, outside of parentheses (such as a shape) if possible."""
    together = re.sub(r"\([^()]*\)", lambda found: found[0].replace(" ", "\xa0"), cell)
    lines = textwrap.wrap(together, width, break_on_hyphens=False)
    return [line.replace("\xa0", " ") for line in lines] or [""]


def _html_table(table: Table) -> str:
    def row(tag: str, cells: Sequence[str]) -> str:
        return f"<tr>{''.join(cell(tag, *numbered) for numbered in enumerate(cells))}</tr>"

    def cell(tag: str, column: int, text: str) -> str:
        kind = ' class="number"' if column in table.numbers else ""
        return f"<{tag}{kind}>{html.escape(text)}</{tag}>"

    rows = "".join(row("td", cells) for cells in table.rows)
    written = f"<table><thead>{row('th', table.heads)}</thead><tbody>{rows}</tbody></table>"
    title = html.escape(table.title)
    region = f'<div class="scroll" role="region" tabindex="0" aria-label="{title}">'
    return f"<h4>{title}</h4>{region}{written}</div>"
