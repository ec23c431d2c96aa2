"""The page with every score, angle and price of the tasks that all ways are tried on."""

from collections.abc import Callable

from . import front, tables, words
from .findings import Findings, Run, price_of

TIME, LONE = "seconds_per_step", "seconds_per_lone_step"
MEMORY, LONE_MEMORY = "peak_bytes", "lone_peak_bytes"

HEAD = """# Evidence: scores, gradients and prices

A part of [the evidence](evidence.md), written with it from the same records; do not edit. The signs
are explained [there](evidence.md#how-to-read-the-tables).

## Tasks
"""


def render(findings: Findings) -> list[str]:
    """Return the page."""
    core, other = findings.of("core"), findings.of("core", "rmsprop")
    lines = [HEAD, *tables.tasks(findings)]
    if core.runs:
        lines += _learned(core) + _prices(findings)
    if other.runs:
        text = "The scores of some ways, with RMSprop in place of Adam."
        lines += ["## By RMSprop", "", text, "", *_by_cell(other, words.score)]
    return lines + _failures(findings)


def _by_cell(core: Findings, entry: Callable[[Run | None], str]) -> list[str]:
    return [line for cell in core.cells for line in tables.by_task(core, cell, entry)]


def _learned(core: Findings) -> list[str]:
    return [
        "## Scores",
        "",
        "The score on the test set at the end.",
        "",
        *_by_cell(core, words.score),
        *words.picture("learning", "Scores on the validation set while learning"),
        "The mean score on the validation set while learning, at the best rate.",
        "",
        "## Updates until the threshold",
        "",
        "The mean over the seeds that reach it on the validation set at the best rate; how many do "
        "stands behind it where not all do.",
        "",
        *_by_cell(core, words.to_threshold),
        "## The gradient while learning",
        "",
        "The cosine between the gradient of a way and that of BPTT on one batch that stays the "
        "same, at the parameters that the way's own training has come to: at the start → at the "
        "end. Of the parameters of the cell alone, since every way has the exact gradient of the "
        "readout; of one seed, and of one draw where a rule draws random numbers.",
        "",
        *_by_cell(core, tables.cosine),
        *words.picture("cosine", "Cosine to the gradient of BPTT while learning"),
    ]


def _prices(findings: Findings) -> list[str]:
    """Return the section on what a gradient takes."""
    core = findings.of("core")
    return [
        "## Price",
        "",
        "One gradient of one network, compiled alone: its time over the steps of a sequence, for "
        "the whole batch; in brackets over that of BPTT. " + front.errors_of_prices(findings),
        "",
        *_by_cell(core, tables.price(core, TIME, words.duration)),
        *_lone_steps(core),
        *words.picture("price", "Score against the time of a step, by task and cell"),
        "Working memory of the compiled gradient, and in brackets over that of BPTT, which grows "
        "with the length of a sequence:",
        "",
        *_by_cell(core, tables.price(core, MEMORY, words.size)),
        *_lone_memory(core),
        "Traces, which are kept between steps besides parameters and hidden states:",
        "",
        *_by_cell(core, tables.price(core, "trace_bytes", words.traces)),
    ]


def _lone_steps(core: Findings) -> list[str]:
    """Return the prices of rules a step at a time, where somebody has taken them."""
    if not any(price_of(run, LONE) for run in core.runs):
        return []
    text = (
        "The same, one step after the other, as where there is an update at every step (rules do "
        "many steps at once otherwise); in brackets over BPTT, which has to wait for the end:"
    )
    return [text, "", *_by_cell(core, tables.price(core, LONE, words.duration, base=TIME))]


def _lone_memory(core: Findings) -> list[str]:
    """Return the working memory of rules a step at a time, where somebody has taken it."""
    if not any(price_of(run, LONE_MEMORY) for run in core.runs):
        return []
    text = "The same, one step after the other, in brackets over that of BPTT:"
    return [text, "", *_by_cell(core, tables.price(core, LONE_MEMORY, words.size, base=MEMORY))]


def _failures(findings: Findings) -> list[str]:
    lost, refused = tables.failures(findings.runs), tables.refusals(findings.runs)
    lines = ["## What failed", ""]
    lines += lost or ["No network ended in numbers that are not finite.", ""]
    if refused:
        lines += ["The library refuses these, which is not counted as a failure:", "", *refused]
    return lines
