"""The first page of the evidence: what is kept at what price, and what that rests on."""

import statistics
from collections.abc import Sequence

from ..markdown import machine_lines
from . import advice, literature, networks, study, tables, ways, wide, words
from .findings import ERRORS, EXACT, Findings, Run, twin_ratios

HEAD = """# Evidence: which rule learns what, at what price

Written by `python -m benchmarks learning --page` from the records in `benchmarks/results/learning`,
numbers in sentences included; do not edit.
"""
LINKS = """The numbers behind this page:

- [scores, gradients and prices](evidence_details.md) of every rule on {core}, and what failed
- [other tasks and cells](evidence_wide.md), under fewer rules
- [what the literature says](evidence_literature.md), case by case
- [gradients while the parameters change](online_updates.md)
"""
WHAT = """## What was run

Every run trains one network (a cell with {units} hidden units and a linear readout) on one task, by
one way of finding the gradient. All ways start from the same parameters, see the same samples in
the same order, and go down their gradients by the same optimizer (Adam, gradients clipped to norm
1), with one update for a batch of whole sequences. Each is tried at the learning rates {rates},
with {seeds} seeds each; the rate with the best mean on the validation set at the end is chosen for
each way by itself, and reported on the test set. A score is the accuracy, for values the part of
the variance that is explained, for rewards their mean; higher is better, 1 is best. Truncated BPTT
goes back within windows of the [length in the table](evidence_details.md#tasks), the states go on
from one to the next, and the gradients of all windows are added for the one update. `SnAp(n=2)` was
not run: in a dense network it keeps all that `RTRL` keeps.

What an approximation leaves out depends on how a cell begins. Leaky units have time constants of
{fastest:g} to {slowest:g} steps, which are not learned; LRU and RTU begin with {shortest:.0f} to
{longest:.0f} steps, the others as their classes draw them. The filter of `ES_D_RTRL` and `OTTT` has
the decay {decay:g} everywhere, which nobody has tuned.

## How to read the tables

- `a ± b` is the mean over seeds and their standard deviation.
- A difference counts, as *clear* or *yes* or *no*, if it is larger than {errors:g} times its
  standard error, pooled over the seeds of both sides; else it is *undecided*. To be *clear*, it
  has to be {close:g} of the gain as well. With {seeds} seeds this is no strict test, and where many
  cases are compared, some will count by luck.
- ▾ and ▴ mark scores whose rate is the lowest or the highest of those that were tried: they might
  be better with another rate.
- *reaches the threshold*: the mean score is at least that of the
  [task](evidence_details.md#tasks).
- ✗n: n of the {lanes} lanes (rates times seeds) of the run ended in numbers that are not finite.
- *refused*: the library does not take such networks for the rule. A dash: not run.
- Working memory is what the compiler sets aside for the gradient, and traces are what is kept
  between steps besides parameters and hidden states.
"""
LIMITS = """## What these runs can show, and what not

- Small networks, sequences of {shortest} to {longest} steps, {updates} updates at most. Nothing is
  said of large networks, of long training, of schedules or of other optimizers.
- {edges}
- An estimate that is right in the mean (`UORO`, `KF_RTRL`) is so no more when it has been clipped
  and gone through Adam.
- There is one update for a batch of whole sequences, and its gradient by BPTT is exact. That rules
  can update *while* a sequence runs is not used in these scores.
- Times are of one thread and of networks of this size, where much of a step is not arithmetic.
  [The benchmarks](benchmarks.md) have larger ones.
- The working memory of BPTT grows with the length of a sequence, and so does that of rules here,
  which take many steps at once (`chunk_size="auto"`); [in chunks of a fixed
  length](notebooks/10_performance.ipynb) it does not. Their ratios are of the lengths here.
{apart}"""


def render(findings: Findings, studies: Sequence[study.Study]) -> list[str]:
    """Return the page."""
    core = findings.of("core")
    lines = [HEAD, *_machines(findings), ""]
    if core.runs:
        lines += ["## In short", "", *short(findings), *_pareto(core)]
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
    listed = "; [they are listed](evidence_details.md#what-failed)" if lost else ""
    return [
        f"{len(ran):,} runs of {lanes:,} networks (several rates and seeds each), {hours:.1f} "
        f"hours of one processor, on {' and on '.join(machines)} Of the networks, "
        f"{lost or 'none'} ended in numbers that are not finite{listed}."
    ]


def short(findings: Findings) -> list[str]:
    """Return the summary: what is kept of the exact gradient's gain, and at what price."""
    core = findings.of("core")
    whole = core.complete()
    pairs, open_pairs = (len(list(runs.pairs())) for runs in (whole, core))
    if not pairs:
        return ["No pair of task and cell has been tried by every way so far.", ""]
    missing = open_pairs - pairs
    left = f" ({missing} that not every way has been tried on are left out)" if missing else ""
    return [
        f"What a way *keeps* is its gain over chance as a part, 1 at most, of the mean gain of "
        f"{words.listed([words.way(way) for way in EXACT])}, whose gradients are the same but for "
        f"rounding. *Clear* are differences of more than {ERRORS:g} standard errors, *undecided* "
        "those of less ([more](evidence.md#how-to-read-the-tables)).",
        "",
        *advice.lines(whole),
        "",
        f"Over {words.counted(pairs, 'pair')} of task and cell{left}, of which the exact gradient "
        f"learns {len(whole.kept('bptt').parts)}, each way keeps so much (in the median, and at "
        "worst), and takes so many times the time and the working memory of BPTT (in the median). "
        "`EProp`, and `RFLO` next to `D_RTRL` with random feedback, compute here what `D_RTRL` "
        f"computes: equal rows are no second witness. {errors_of_prices(findings)}",
        "",
        *tables.summary(whole),
    ]


def errors_of_prices(findings: Findings) -> str:
    """Return how far two prices of one program are apart."""
    ratios = twin_ratios(findings)
    if not ratios:
        return ""
    apart = statistics.median(max(ratio, 1 / ratio) for ratio in ratios)
    return (
        "Times are the shortest of several calls on one processor: a program that was timed twice "
        f"took {words.between(ratios)} times as long the other time, half of "
        f"{words.counted(len(ratios), 'pair')} within a factor of {words.times(apart)}."
    )


def _pareto(core: Findings) -> list[str]:
    if not core.complete().runs:
        return []
    text = (
        "A point is the median over tasks, its line goes from the worst to the best task; the grey "
        "steps join what nothing else beats in both, be it by less than the error of prices. "
        "[By task](evidence_details.md#price)."
    )
    return [
        *words.picture("pareto", "Part of the gain that is kept, against the price"),
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
        f"The grid of rates is coarse. In {lowest} of {words.counted(len(ran), 'run')} the best "
        f"rate is the lowest of it, in {highest} the highest{_often_at_edges(ran)}. In {clear} of "
        f"these {lowest + highest} it is clearly better than the rate next to it, so that another "
        "outside of the grid may be better still."
    )


def _often_at_edges(ran: Sequence[Run]) -> str:
    """Return whose best rate is at an edge of the grid in most runs."""
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
    """Return how far runs with the same gradient end from each other."""
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
        f"- {names} have the same gradient but for rounding, and still end up to "
        f"{words.digits(most)} apart in score ({words.pair(task, cell)}): smaller differences "
        "between others say nothing there, nor do parts that are kept above 1.\n"
    )
