"""The page with every score, cosine and cost of the core tasks."""

from collections.abc import Callable

from . import front, tables, words
from .findings import Findings, Run, price_of

TIME, LONE = "seconds_per_step", "seconds_per_lone_step"
MEMORY, LONE_MEMORY = "peak_bytes", "lone_peak_bytes"

HEAD = """# Evidence: scores, gradients and costs

This page belongs to [the evidence](evidence.md) and is generated with it; do not edit. Symbols are
explained in [How to read the tables](evidence.md#how-to-read-the-tables).

## Tasks
"""


def render(findings: Findings) -> list[str]:
    """Return the page."""
    core, other = findings.of("core"), findings.of("core", "rmsprop")
    lines = [HEAD, *tables.tasks(findings)]
    if core.runs:
        lines += _learned(core) + _prices(findings)
    if other.runs:
        text = "Scores of some methods with RMSprop instead of Adam."
        lines += ["## RMSprop", "", text, "", *_by_cell(other, words.score)]
    return lines + _failures(findings)


def _by_cell(core: Findings, entry: Callable[[Run | None], str]) -> list[str]:
    return [line for cell in core.cells for line in tables.by_task(core, cell, entry)]


def _learned(core: Findings) -> list[str]:
    return [
        "## Scores",
        "",
        "Final score on the test set.",
        "",
        *_by_cell(core, words.score),
        *words.picture("learning", "Scores on the validation set during training"),
        "Mean score on the validation set during training, at the best learning rate.",
        "",
        "## Updates until the threshold",
        "",
        "Mean over the seeds that reach the threshold on the validation set at the best learning "
        "rate. Brackets contain their number if some seeds do not reach it.",
        "",
        *_by_cell(core, words.to_threshold),
        "## Gradients during training",
        "",
        "Cosine between the gradient of a method and of BPTT on one fixed batch, at the parameters "
        "of the method: at the start → at the end of training. Only parameters of the cell count, "
        "because the gradient of the readout is exact in every method. The cosine is of one seed, "
        "and of one draw for random rules.",
        "",
        *_by_cell(core, tables.cosine),
        *words.picture("cosine", "Cosine to the gradient of BPTT during training"),
    ]


def _prices(findings: Findings) -> list[str]:
    """Return the section on the cost of a gradient."""
    core = findings.of("core")
    return [
        "## Cost",
        "",
        "Time per step of one gradient for the whole batch, compiled alone; brackets contain the "
        "ratio to BPTT. " + front.errors_of_prices(findings),
        "",
        *_by_cell(core, tables.price(core, TIME, words.duration)),
        *_lone_steps(core),
        *words.picture("price", "Score against the time of a step, by task and cell"),
        "Temporary memory of the compiled gradient; brackets contain the ratio to BPTT, whose "
        "memory grows with the length of a sequence:",
        "",
        *_by_cell(core, tables.price(core, MEMORY, words.size)),
        *_lone_memory(core),
        "Traces, which are stored between steps besides parameters and hidden states:",
        "",
        *_by_cell(core, tables.price(core, "trace_bytes", words.traces)),
    ]


def _lone_steps(core: Findings) -> list[str]:
    """Return the times of rules step by step, if they were measured."""
    if not any(price_of(run, LONE) for run in core.runs):
        return []
    text = (
        "Time of single steps, as in online updates (by default, rules process many steps at "
        "once); brackets contain the ratio to BPTT, which has to wait for the end:"
    )
    return [text, "", *_by_cell(core, tables.price(core, LONE, words.duration, base=TIME))]


def _lone_memory(core: Findings) -> list[str]:
    """Return the temporary memory of rules step by step, if it was measured."""
    if not any(price_of(run, LONE_MEMORY) for run in core.runs):
        return []
    text = "Temporary memory of single steps; brackets contain the ratio to BPTT:"
    return [text, "", *_by_cell(core, tables.price(core, LONE_MEMORY, words.size, base=MEMORY))]


def _failures(findings: Findings) -> list[str]:
    lost, refused = tables.failures(findings.runs), tables.refusals(findings.runs)
    lines = ["## Failures", ""]
    lines += lost or ["No network diverged.", ""]
    if refused:
        lines += [
            "These combinations are not supported, and do not count as failures:",
            "",
            *refused,
        ]
    return lines
