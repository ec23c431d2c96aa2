"""The page of all tasks and cells, and its summary on the first page."""

from . import tables, words
from .findings import PART, REFERENCE, Findings

SAME = 0.999
"""Gradients with a larger cosine throughout training are equal up to rounding."""

EXACT_ONLINE = "d_rtrl"

HEAD = """# Evidence: other tasks and cells

This page belongs to [the evidence](evidence.md) and is generated with it; do not edit. Symbols are
explained in [How to read the tables](evidence.md#how-to-read-the-tables).
"""
KEPT = """Entries cover the tasks that BPTT learns: the median gain relative to BPTT, in brackets
the worst case, and the number of tasks with at least {part}: yes/undecided/no.
"""
PRICES = """Time of a step and temporary memory relative to BPTT, in the median over tasks:
"""


def runs_of(findings: Findings) -> Findings:
    """Return the runs of the wide table, and the core runs of the same methods."""
    ways = findings.of("wide").ways
    return findings.where(lambda run: run.key[2] in ways)


def summary(findings: Findings) -> list[str]:
    """Return the section of the first page; nothing before any run of the wide table."""
    if not findings.of("wide").runs:
        return []
    whole = runs_of(findings)
    text = (
        f"Some methods were run on {words.counted(len(whole.tasks), 'task')} and "
        f"{words.counted(len(whole.cells), 'cell')} ([all scores](evidence_wide.md))."
    )
    return [
        "## Other tasks and cells",
        "",
        text,
        KEPT.format(part=PART),
        *_kept(whole),
        *_same(whole),
    ]


def render(findings: Findings) -> list[str]:
    """Return the page."""
    if not findings.of("wide").runs:
        return [HEAD, "This table has no runs yet."]
    whole = runs_of(findings)
    lines = [HEAD, KEPT.format(part=PART), *_kept(whole), *_same(whole)]
    lines += [PRICES, *tables.of_cells(whole, tables.price_of_cell)]
    for cell in whole.cells:
        lines += [f"## {words.cell(cell)[0].upper()}{words.cell(cell)[1:]}", ""]
        lines += tables.by_way(whole, cell)
    return lines


def _kept(whole: Findings) -> list[str]:
    described = "Gain of each method relative to BPTT, by task and cell"
    below = f"{described}. Grey: BPTT does not learn the task. Empty: not run."
    return [
        *tables.of_cells(whole, tables.part_of_cell),
        *words.picture("tasks", described),
        below,
        "",
    ]


def _same(whole: Findings) -> list[str]:
    """Return the largest difference between two methods with equal gradients."""
    apart, cells = [], []
    for task, cell in whole.pairs():
        own, other = (whole.find(task, cell, way) for way in (EXACT_ONLINE, REFERENCE))
        if own is None or other is None or own.mean is None or other.mean is None:
            continue
        if own.cosine and min(value for _, value in own.cosine) > SAME:
            apart.append((abs(own.mean - other.mean), words.pair(task, cell)))
            cells.append(words.cell(cell))
    if not apart:
        return []
    most, where = max(apart)
    return [
        f"In {words.counted(len(apart), 'pair')} of task and cell "
        f"({words.listed(list(dict.fromkeys(cells)))}) the gradients of {words.way(EXACT_ONLINE)} "
        f"and BPTT are equal throughout training (cosine above {SAME}). Equal scores are expected "
        f"there, and differences are due to rounding: {words.digits(most)} at most ({where}).",
        "",
    ]
