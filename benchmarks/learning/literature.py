"""The page on statements of the literature, and its summary on the first page."""

from . import statements, tables
from .findings import ERRORS, Findings
from .statements import Case, Statement

HEAD = """# Evidence: statements of the literature

This page belongs to [the evidence](evidence.md) and is generated with it; do not edit. Symbols are
explained in [How to read the tables](evidence.md#how-to-read-the-tables).

The records test these statements of the literature. Networks, tasks and budgets differ from the
papers, so a statement that fails here may hold there.

- The limits of the criteria were fixed before the runs. Two rules were added after the first cases:
  a case is undecided if it is within {errors:g} standard errors of the limit, and costs are judged
  over all tasks of a cell.
- Standard errors are over seeds, except for costs (over tasks) and cosines (over points of
  training).
- A case is left out if the reference reaches less than half of the way from chance to the threshold
  of the task. A statement is then judged on the easier tasks alone.
"""


def _judged(findings: Findings) -> list[tuple[Statement, list[Case]]]:
    return [(one, list(one.cases(findings))) for one in statements.ALL]


def summary(findings: Findings) -> list[str]:
    """Return the section of the first page."""
    text = (
        "These runs test statements of the literature, with other networks, tasks and budgets than "
        "the papers. The table counts cases, most of them a task and a cell; a case is undecided "
        "within the spread, and left out without a reference. "
        "[Sources, criteria and all cases](evidence_literature.md)."
    )
    return ["## Statements of the literature", "", text, "", *tables.verdicts(_judged(findings))]


def render(findings: Findings) -> list[str]:
    """Return the page."""
    judged = _judged(findings)
    return [
        HEAD.format(errors=ERRORS),
        *tables.verdicts(judged),
        "## Criteria",
        "",
        *tables.criteria(judged),
        "## Cases",
        "",
        *tables.cases(judged),
    ]
