"""The first generated page of the evidence: relative gain, cost and method."""

import statistics
from collections.abc import Sequence

from ..markdown import machine_lines
from . import advice, literature, networks, study, tables, ways, wide, words
from .findings import ERRORS, EXACT, Findings, Run, twin_ratios

HEAD = """# Evidence: all results

Written by `python -m benchmarks learning --page` from the records in `benchmarks/results/learning`,
numbers in sentences included; do not edit. [The short answer](../evidence.md) comes first.
"""
LINKS = """Details:

- [scores, gradients and costs](evidence_details.md) of every rule on {core}, with all failures
- [other tasks and cells](evidence_wide.md), with fewer rules
- [statements of the literature](evidence_literature.md), case by case
- [gradients while the parameters change](online_updates.md)
"""
WHAT = """## Experiments

Every run trains one network (a cell with {units} hidden units and a linear readout) on one task,
with one method for the gradient. All methods use the same initial parameters, samples, order and
optimizer (Adam, gradients clipped to norm 1), with one update per batch of whole sequences.

| Setting | Value |
|---|---|
| learning rates | {rates}; each method uses the rate with the best final mean in validation |
| seeds | {seeds} per learning rate |
| score | accuracy, explained variance or mean reward on the test set; 1 is best |
| truncated BPTT | windows of the [length in the table](evidence_details.md#tasks); states are \
carried over, and an update uses the sum of the gradients of all windows |
| `SnAp(n=2)` | not run: in a dense network it equals `RTRL` |
| initial time constants | {fastest:g} to {slowest:g} steps for leaky units (fixed), \
{shortest:.0f} to {longest:.0f} steps for LRU and RTU, class defaults for other cells |
| decay of `ES_D_RTRL` and `OTTT` | {decay:g}, not tuned |

## How to read the tables

| Entry | Meaning |
|---|---|
| `a ± b` | mean and standard deviation over seeds |
| *clear*, *yes*, *no* | the difference exceeds {errors:g} times its standard error, pooled over \
the seeds of both sides; *clear* also requires {close:g} of the gain |
| *undecided* | any smaller difference |
| ▾, ▴ | the learning rate is the lowest or highest of the grid, so another rate might be better |
| *reaches the threshold* | the mean score is at least the threshold of the \
[task](evidence_details.md#tasks) |
| ✗n | n of {lanes} networks (learning rates times seeds) diverged to NaN or infinity |
| *refused* | the rule does not support such networks |
| dash | not run |
| temporary memory | the peak temporary memory of the compiled gradient |
| traces | arrays that are stored between steps, besides parameters and hidden states |

With {seeds} seeds, these are weak tests: if many cases are compared, some differences are chance.
"""
LIMITS = """## Limits of these experiments

- **Scale.** Networks are small, sequences have {shortest} to {longest} steps, and runs have at most
  {updates} updates. The results do not cover large networks, long training, learning rate schedules
  or other optimizers.
- **Learning rates.** {edges}
- **Random rules.** Clipping and Adam make the updates of unbiased rules (`UORO`, `KF_RTRL`) biased.
- **Update schedule.** One update per batch of whole sequences favours BPTT, whose gradient is
  exact. These scores do not use updates *during* a sequence.
- **Times.** They are from one thread and small networks, with much overhead. [The
  benchmarks](../benchmarks.md) have larger ones.
- **Memory.** Ratios depend on the length of the sequence: the temporary memory of BPTT grows with
  it, and so does the memory of rules with `chunk_size="auto"`, but not [with chunks of a fixed
  length](../notebooks/10_performance.ipynb).
{apart}"""


def render(findings: Findings, studies: Sequence[study.Study]) -> list[str]:
    """Return the page."""
    core = findings.of("core")
    lines = [HEAD, *_machines(findings), ""]
    if core.runs:
        lines += ["## Summary", "", *short(findings), *_pareto(core)]
    lines += wide.summary(findings)
    if studies:
        lines += study.summary(list(studies))
    counted = words.counted(len(list(core.pairs())), "pair") + " of task and cell"
    lines += [*literature.summary(findings), LINKS.format(core=counted)]
    return [*lines, _what(findings), _limits(findings)]


def _machines(findings: Findings) -> list[str]:
    machines = dict.fromkeys(machine_lines(run.record.machine)[0] for run in findings.runs)
    ran = [run for run in findings.runs if run.ran]
    hours = sum(run.record.seconds.get("all", 0.0) for run in ran) / 3600
    lanes = sum(len(run.record.settings.rates) * len(run.record.settings.seeds) for run in ran)
    lost = sum(len(run.record.failed) for run in ran)
    listed = " ([list](evidence_details.md#failures))" if lost else ""
    return [
        f"{len(ran):,} runs trained {lanes:,} networks (several learning rates and seeds each) in "
        f"{hours:.1f} processor hours; {lost or 'none'} diverged to NaN or infinity{listed}. "
        f"Machine: {' and '.join(machines)}"
    ]


def short(findings: Findings) -> list[str]:
    """Return the summary: the gain relative to the exact gradient, and the cost."""
    core = findings.of("core")
    whole = core.complete()
    pairs, open_pairs = (len(list(runs.pairs())) for runs in (whole, core))
    if not pairs:
        return ["No pair of task and cell has been run with every method yet.", ""]
    missing = open_pairs - pairs
    left = f" ({missing} without runs of every method are left out)" if missing else ""
    return [
        "The *relative gain* of a method is its gain over chance divided by the mean gain of "
        f"{words.listed([words.way(way) for way in EXACT])}, at most 1. These methods have equal "
        f"gradients up to rounding. Differences of more than {ERRORS:g} standard errors are "
        "*clear*, smaller ones *undecided* ([more](evidence.md#how-to-read-the-tables)).",
        "",
        *advice.lines(whole),
        "",
        f"The table covers {words.counted(pairs, 'pair')} of task and cell{left}; the exact "
        f"gradient learns {len(whole.kept('bptt').parts)} of them. Time and temporary memory are "
        "medians relative to BPTT. `EProp` computes here what `D_RTRL` computes, and `RFLO` what "
        "`D_RTRL` with random feedback computes, so equal rows are not independent evidence. "
        f"{errors_of_prices(findings)}",
        "",
        *tables.summary(whole),
    ]


def errors_of_prices(findings: Findings) -> str:
    """Return the difference between two timings of one program."""
    ratios = twin_ratios(findings)
    if not ratios:
        return ""
    apart = statistics.median(max(ratio, 1 / ratio) for ratio in ratios)
    return (
        "Times are the shortest of several calls on one processor: repeated timings of a program "
        f"have ratios of {words.between(ratios)}, and half of "
        f"{words.counted(len(ratios), 'pair')} agree within a factor of {words.times(apart)}."
    )


def _pareto(core: Findings) -> list[str]:
    if not core.complete().runs:
        return []
    text = (
        "Points are medians over tasks, with lines from the worst to the best task. Grey steps "
        "join the Pareto-optimal methods, without regard to timing errors. "
        "[Costs by task](evidence_details.md#cost)."
    )
    return [
        *words.picture("pareto", "Relative gain over cost"),
        text,
        "",
    ]


def _settings(findings: Findings, name: str) -> str:
    values = dict.fromkeys(getattr(run.record.settings, name) for run in findings.runs)
    return words.listed([f"{value:,}" for value in sorted(values)])


def _what(findings: Findings) -> str:
    grids = dict.fromkeys(run.record.settings.rates for run in findings.runs)
    seeds = dict.fromkeys(len(run.record.settings.seeds) for run in findings.runs)
    lanes = dict.fromkeys(
        len(run.record.settings.rates) * len(run.record.settings.seeds) for run in findings.runs
    )
    return WHAT.format(
        units=_settings(findings, "units"),
        rates="; or ".join(words.listed([f"{rate:g}" for rate in grid]) for grid in grids),
        seeds=words.listed([str(count) for count in seeds]),
        lanes=words.listed([str(count) for count in lanes]),
        fastest=networks.FASTEST,
        slowest=networks.SLOWEST,
        shortest=1 / (1 - networks.LONG["r_min"]),
        longest=1 / (1 - networks.LONG["r_max"]),
        decay=ways.DECAY,
        errors=ERRORS,
        close=advice.CLOSE,
    )


def _limits(findings: Findings) -> str:
    lengths = [run.record.settings.length for run in findings.runs]
    return LIMITS.format(
        shortest=min(lengths),
        longest=max(lengths),
        updates=f"{max(run.record.settings.updates for run in findings.runs):,}",
        edges=_edges([run for run in findings.runs if run.record.best_rate is not None]),
        apart=_apart(findings.of("core")),
    )


def _edges(ran: Sequence[Run]) -> str:
    """Return how often the grid of rates is too narrow."""
    lowest, highest = (sum(run.at_edge == edge for run in ran) for edge in (-1, 1))
    clear = sum(run.leads_at_edge for run in ran)
    return (
        f"The grid is coarse. In {lowest} of {words.counted(len(ran), 'run')} the best learning "
        f"rate is the lowest, in {highest} the highest{_often_at_edges(ran)}. In {clear} of these "
        f"{lowest + highest} it is clearly better than the adjacent rate, so a rate outside the "
        "grid may be better still."
    )


def _often_at_edges(ran: Sequence[Run]) -> str:
    """Return the methods with a best rate at an edge of the grid in most runs."""
    counts: dict[str, list[bool]] = {}
    for run in ran:
        counts.setdefault(run.key[2], []).append(run.at_edge != 0)
    found = [
        f"{words.way(way)} ({sum(edges)} of {len(edges)})"
        for way, edges in counts.items()
        if 2 * sum(edges) > len(edges)
    ]
    return f", in most runs of {words.listed(found)}" if found else ""


def _apart(core: Findings) -> str:
    """Return the largest difference between runs with equal gradients."""
    found = []
    for task, cell in core.pairs():
        runs = [core.find(task, cell, way) for way in EXACT]
        scores = [run.mean for run in runs if run is not None and run.mean is not None]
        if len(scores) > 1:
            found.append((max(scores) - min(scores), task, cell))
    if not found:
        return ""
    most, task, cell = max(found)
    names = words.listed([words.way(way) for way in EXACT])
    return (
        f"- **Rounding.** {names} have equal gradients up to rounding, but their scores differ by "
        f"up to {words.digits(most)} ({words.pair(task, cell)}). Smaller differences between other "
        "methods, and relative gains above 1, are not meaningful there.\n"
    )
