"""The page on what the literature says, and what the first page says of it."""

from . import statements, tables
from .findings import ERRORS, Findings
from .statements import Case, Statement

HEAD = """# Evidence: what the literature says

A part of [the evidence](evidence.md), written with it from the same records; do not edit. The signs
are explained [there](evidence.md#how-to-read-the-tables).

Statements of the literature that these runs can test, judged by the records whatever comes out.
Networks, tasks and budgets are not those of the papers: what does not hold here may hold there. The
limits of the criteria were fixed before the runs. That a case is undecided which is no further from
the limit than {errors:g} times its standard error was added when the first of them had been seen,
and so was that prices are judged over all tasks of a cell, not task by task. Standard errors are
over seeds, but for prices (over tasks) and cosines (over points of training).

Cases are left out where there is nothing to compare with: the other way has not come half the way
from chance to the threshold of the task. A statement is then judged on the easier tasks alone.
"""


def _judged(findings: Findings) -> list[tuple[Statement, list[Case]]]:
    return [(one, list(one.cases(findings))) for one in statements.ALL]


def summary(findings: Findings) -> list[str]:
    """Return the section of the first page."""
    text = (
        "Statements of the literature on networks, tasks and budgets of these runs, which are not "
        "those of the papers. Numbers are of cases, most of them a task and a cell; a case is "
        "undecided where the spread leaves it open, and left out where there is nothing to compare "
        "with. [Sources, criteria and all cases](evidence_literature.md)."
    )
    return ["## What the literature says", "", text, "", *tables.verdicts(_judged(findings))]


def render(findings: Findings) -> list[str]:
    """Return the page."""
    judged = _judged(findings)
    return [
        HEAD.format(errors=ERRORS),
        *tables.verdicts(judged),
        "## How they are judged",
        "",
        *tables.criteria(judged),
        "## Cases",
        "",
        *tables.cases(judged),
    ]
