"""The page `docs/evidence.md`: its tables and figures are made from the CSV files.

The text of the page is written by hand. `write` fills the tables between its markers, writes
``docs/_generated/evidence_tables.md`` with all further tables, and draws the figures. A test
compares the pages with the stored rows.
"""

import re
from collections.abc import Callable
from pathlib import Path

from . import figures, online_updates, rows, runs, tables
from .results import Results, place_of, sort
from .tables import Streams

DOCS = Path(__file__).parent.parent.parent / "docs"
PAGE, ALL_TABLES = "evidence.md", "_generated/evidence_tables.md"
MARKED = re.compile(r"<!-- table (\w+) -->\n.*?<!-- /table -->", re.DOTALL)
HEAD = """# Evidence: all tables

Written by `python -m benchmarks learning --page` from `benchmarks/results/learning.csv` and
`online_updates.csv`. [Evidence](../evidence.md#how-to-read-the-tables) explains the entries and has
the conclusions.
"""


def load(folder: Path = rows.FOLDER) -> Results:
    """Return all runs in the order of the page."""
    return sort(rows.read(folder / rows.FILE.name, rows.Row))


def load_streams(folder: Path = rows.FOLDER) -> Streams:
    found = rows.read(folder / online_updates.FILE.name, rows.StreamRow)
    return Streams(sorted(found, key=lambda row: place_of(row.identity)))


def core_of(results: Results) -> Results:
    """Return the runs of the core table, with Adam."""
    return results.where(lambda run: runs.is_core(*run.key[:2]) and "rmsprop" not in run.key[2])


def wide_of(results: Results) -> Results:
    """Return the runs of all tasks and cells, by the methods of the wide table."""
    wide = results.where(lambda run: not runs.is_core(*run.key[:2])).methods
    return results.where(lambda run: run.key[2] in wide)


def marked(results: Results, streams: Streams) -> dict[str, list[str]]:
    """Return the tables of the first page by the names of their markers."""
    return {
        "summary": tables.summary(core_of(results)),
        "cells": tables.of_cells(wide_of(results)),
        "streams": tables.at_best_rate(streams),
        "comparisons": tables.comparisons(results),
    }


def with_tables(text: str, found: dict[str, list[str]]) -> str:
    """Return a page with new tables between its markers."""

    def one(match: re.Match[str]) -> str:
        lines = "\n".join(found[match[1]]).strip()
        return f"<!-- table {match[1]} -->\n{lines}\n<!-- /table -->"

    return MARKED.sub(one, text)


def all_tables(results: Results, streams: Streams) -> str:
    found = {task: tables.of_task(results, task) for task in results.tasks}
    for every in streams.every:
        title = f"Updates during a sequence, steps per update: {every}"
        found[title] = tables.by_rate(streams, every)
    sections = ("\n".join([f"## {title}", "", *lines]) for title, lines in found.items())
    return "\n".join([HEAD, *sections]).rstrip() + "\n"


def write() -> list[Path]:
    """Write pages and figures; return their paths."""
    results, streams = load(), load_streams()
    page = DOCS / PAGE
    texts = {
        page: with_tables(page.read_text(), marked(results, streams)),
        DOCS / ALL_TABLES: all_tables(results, streams),
    }
    for path, text in texts.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return [*texts, *draw(results, DOCS / "_static" / "evidence")]


def draw(results: Results, folder: Path) -> list[Path]:
    core = core_of(results)
    drawn: dict[str, Callable[[Path], None]] = {
        "learning": lambda path: figures.over_training(core, path, "curve", "score"),
        "cosine": lambda path: figures.over_training(core, path, "cosine", "cosine to BPTT"),
        "pareto": lambda path: figures.pareto(core, path),
        "windows": lambda path: figures.windows(core, path),
    }
    paths = [folder / f"{name}.png" for name in drawn]
    for path, one in zip(paths, drawn.values(), strict=True):
        one(path)
    return paths
