"""The page of all tasks and cells, and what the first page says of it."""

from . import tables, words
from .findings import PART, REFERENCE, Findings

SAME = 0.999
"""Gradients whose cosine is larger all along are the same but for rounding."""

EXACT_ONLINE = "d_rtrl"

HEAD = """# Evidence: other tasks and cells

A part of [the evidence](evidence.md), written with it from the same records; do not edit. The signs
are explained [there](evidence.md#how-to-read-the-tables).
"""
KEPT = """Each entry is of the tasks that BPTT learns: the part of its gain over chance that a way
keeps, in the median and (in brackets) at worst; then in how many of them this is at least {part}:
yes/undecided/no.
"""
PRICES = """Time of a step and working memory, over those of BPTT, in the median over tasks:
"""


def runs_of(findings: Findings) -> Findings:
    """Return the runs of the wide table, and those of the core by the same ways."""
    ways = findings.of("wide").ways
    return findings.where(lambda run: run.key[2] in ways)


def summary(findings: Findings) -> list[str]:
    """Return the section of the first page; nothing before any run of the wide table."""
    if not findings.of("wide").runs:
        return []
    whole = runs_of(findings)
    text = (
        f"The same over {words.counted(len(whole.tasks), 'task')} and "
        f"{words.counted(len(whole.cells), 'cell')}, where not all ways were tried "
        "([all scores](evidence_wide.md))."
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
        return [HEAD, "No run of it has been made so far."]
    whole = runs_of(findings)
    lines = [HEAD, KEPT.format(part=PART), *_kept(whole), *_same(whole)]
    lines += [PRICES, *tables.of_cells(whole, tables.price_of_cell)]
    for cell in whole.cells:
        lines += [f"## {words.cell(cell)[0].upper()}{words.cell(cell)[1:]}", ""]
        lines += tables.by_way(whole, cell)
    return lines


def _kept(whole: Findings) -> list[str]:
    described = "The part of the gain of BPTT that each way keeps, by task and cell"
    below = f"{described}; grey: BPTT has not learned; empty: not run."
    return [
        *tables.of_cells(whole, tables.part_of_cell),
        *words.picture("tasks", described),
        below,
        "",
    ]


def _same(whole: Findings) -> list[str]:
    """Return how far two ways end apart whose gradients are the same in a network."""
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
        f"({words.listed(list(dict.fromkeys(cells)))}) the gradient of {words.way(EXACT_ONLINE)} "
        f"is that of BPTT all along (cosine above {SAME}): there, equal scores are no finding, and "
        f"what lies between them is the luck of rounding: {words.digits(most)} at most ({where}).",
        "",
    ]
