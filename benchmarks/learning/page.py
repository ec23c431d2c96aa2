"""The page of the evidence, written from the records: the same records give the same bytes.

`write` draws the plots, writes ``docs/evidence.md``, and puts what `short` says between the markers
of ``docs/algorithms.md``. A test holds both against the records that are stored.
"""

import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from ..markdown import machine_lines
from . import advice, figures, networks, record, statements, study, tables, ways, words
from .findings import EXACT, Findings, Run, price_of, sort
from .tasks import ALL as TASKS

DOCS = Path(__file__).parent.parent.parent / "docs"
PICTURES = "_static/evidence"
TIME, LONE = "seconds_per_step", "seconds_per_lone_step"
MEMORY, LONE_MEMORY = "peak_bytes", "lone_peak_bytes"

BEGIN, END = "<!-- evidence -->", "<!-- /evidence -->"

HEAD = """# Evidence: which rule learns what, at what price

Written by `python -m benchmarks learning --page` from the records in `benchmarks/results/learning`,
numbers in sentences included; do not edit.
"""
WHAT = """## What was run

Every run trains one network (a cell with {units} hidden units and a linear readout) on one task, by
one way of finding the gradient. All ways start from the same parameters, see the same samples in
the same order, and go down their gradients by the same optimizer (Adam, gradients clipped to norm
1), with one update for a batch of whole sequences: rule against rule, the gradient alone differs.
Each is tried at the learning rates {rates}, with {seeds} seeds each; the rate with the best mean on
the validation set at the end is reported, on the test set, which nothing else looks at. A score is
the accuracy, for values the part of the variance that is explained, for rewards their mean; higher
is better, 1 is best. `a ± b` is the mean over seeds and their standard deviation; ✗n says that n of
the {lanes} lanes (rates times seeds) of the run ended in numbers that are not finite. *Refused* are
networks that the library does not take for a rule. Truncated BPTT goes back within windows of the
length in the table, the states go on from one to the next, and the gradients of all windows are
added for the one update. `SnAp(n=2)` was not run: in a dense network it is `RTRL`, entry by entry
and many times slower.

What an approximation leaves out depends on how a cell begins. Leaky units have time constants of
{fastest:g} to {slowest:g} steps, which are not learned; LRU and RTU begin with {shortest:.0f} to
{longest:.0f} steps, the others as their classes draw them. The filter of `ES_D_RTRL` and `OTTT` has
the decay {decay:g} everywhere, and nobody has tuned it; no other way has a number of its own.
`EProp`, and `RFLO` next to `D_RTRL` with random feedback, compute here what `D_RTRL` computes:
equal rows are no second witness, and where their prices differ, it is by what else was running.
"""
LIMITS = """### What such an hour can show, and what not

- Small networks, short sequences, {updates} updates at most: this compares gradients where one can
  look at many of them. It says nothing of large networks, of long training, of schedules or of
  other optimizers.
- With {seeds} seeds, differences of less than about twice the spread say little; in the median over
  all runs of the core the spread is {spread}.
- The grid of rates is coarse. In {lowest} of {runs} runs the best rate is the lowest of it, in
  {highest} the highest, where another might be better still{often}.
- An estimate that is right in the mean (`UORO`, `KF_RTRL`) is so no more when it has been clipped
  and gone through Adam.
- One update for a batch of whole sequences is what BPTT does best. That rules can update *while* a
  sequence runs, which BPTT cannot, is not used in these tables; a stream without end has no
  other choice.
- Times are of one processor and of networks of this size, where much of a step is not arithmetic.
  [The benchmarks](benchmarks.md) have larger ones.
- Sequences of {shortest} to {longest} steps are short. The working memory of BPTT grows with their
  length, and so does that of rules here, which take many steps at once (`chunk_size="auto"`); in
  chunks of a fixed length it does not: ratios of memory are at their worst for the rules.
{apart}"""


def write(folder: Path = record.FOLDER, docs: Path | None = None) -> list[Path]:
    """Write the page and its plots; return what was written.

    Parameters
    ----------
    folder
        Of the records.
    docs
        Where the page goes: to the documentation, and ``algorithms.md`` there is written too, if
        the records are those that are stored with it; next to other records otherwise.

    Raises
    ------
    MissingPackageError
        Without matplotlib; the message names the extra that brings it.
    ValueError
        If there are no records, or ``algorithms.md`` has no markers.
    """
    findings = load(folder)
    if not findings.runs:
        raise ValueError(f"There are no records in {folder}: run `python -m benchmarks learning`.")
    docs = docs or (DOCS if folder == record.FOLDER else folder)
    studies = study.load(folder)
    texts = {docs / "evidence.md": render(findings, studies)}
    choice = docs / "algorithms.md"
    if choice.exists():
        texts[choice] = with_block(choice.read_text(), block(findings))
    for path, text in texts.items():
        path.write_text(text)
    return [*texts, *draw(findings, studies, docs / PICTURES)]


def load(folder: Path = record.FOLDER) -> Findings:
    """Return all runs of a folder in the order of the page."""
    return sort(record.read_all(folder), (TASKS, tuple(words.CELLS), tuple(words.WAYS)))


def draw(findings: Findings, studies: list[study.Study], folder: Path) -> list[Path]:
    """Draw all plots that there are records for."""
    core = findings.of("core")
    drawn: dict[str, Callable[[Path], None]] = {}
    if core.runs:
        drawn = {
            "learning": lambda path: figures.over_training(core, path, _curve, "score"),
            "cosine": lambda path: figures.over_training(core, path, _cosine, "cosine to BPTT"),
            "price": lambda path: figures.scores_against_price(core, path),
        }
    if core.complete().runs:
        drawn["pareto"] = lambda path: figures.pareto(core.complete(), path)
    if studies:
        drawn["online_updates"] = lambda path: figures.online_updates(studies, path)
    paths = {name: folder / f"{name}.png" for name in drawn}
    for name, path in paths.items():
        drawn[name](path)
    return list(paths.values())


def _curve(run: Run) -> list[tuple[int, float]]:
    return run.curve


def _cosine(run: Run) -> list[tuple[int, float]]:
    return run.cosine


def picture(name: str, words: str) -> list[str]:
    """Return the lines that show a plot."""
    return [f"```{{image}} {PICTURES}/{name}.png", f":alt: {words}", ":class: picture", "```", ""]


def render(findings: Findings, studies: Sequence[study.Study] = ()) -> str:
    """Return the page."""
    core, wide = findings.of("core"), findings.of("wide")
    lines = [HEAD, *_machines(findings), ""]
    if core.runs:
        lines += ["## In short", "", *short(core), *_pareto(core)]
    lines += [_what(findings), *tables.tasks(findings), _limits(findings)]
    if core.runs:
        lines += _core(core)
    other = findings.of("core", "rmsprop")
    if other.runs:
        text = "The scores of some ways, with RMSprop in place of Adam."
        lines += ["## By RMSprop", "", text, "", *_by_cell(other, words.score)]
    if wide.runs:
        lines += ["## Other tasks and cells", "", WIDE, "", *tables.wide(wide)]
    if studies:
        lines += study.section(list(studies), picture("online_updates", DRAWN))
    lines += _literature(findings) + _failures(findings)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


DRAWN = "Cosine to the recomputed gradient (lines) and to RTRL (dotted), by learning rate"
WIDE = "The scores at the end, as above."


def _machines(findings: Findings) -> list[str]:
    machines = dict.fromkeys(machine_lines(run.record.machine)[0] for run in findings.runs)
    ran = [run for run in findings.runs if run.ran]
    hours = sum(run.record.seconds.get("all", 0.0) for run in ran) / 3600
    lanes = sum(len(run.record.settings.rates) * len(run.record.settings.seeds) for run in ran)
    lost = sum(len(run.record.failed) for run in ran)
    listed = "; [they are listed](#what-failed)" if lost else ""
    return [
        f"{len(ran):,} runs of {lanes:,} networks, {hours:.1f} hours of one core, on "
        f"{' and on '.join(machines)} Of the networks, {lost:,} ended in numbers that are not "
        f"finite{listed}."
    ]


def short(core: Findings) -> list[str]:
    """Return the summary: what is kept of the exact gradient's gain, and at what price."""
    whole = core.complete()
    pairs, open_pairs = (len(list(runs.pairs())) for runs in (whole, core))
    if not pairs:
        return ["No pair of task and cell has been tried by every way so far.", ""]
    missing = open_pairs - pairs
    left = f" ({missing} that not every way has been tried on are left out)" if missing else ""
    return [
        f"What a way *keeps* is its gain over chance as a part, 1 at most, of the mean gain of "
        f"{words.listed([words.way(way) for way in EXACT])}, whose gradients are the same but for "
        "rounding.",
        "",
        *advice.lines(whole),
        "",
        f"Over {pairs} pairs of task and cell{left}, of which the exact gradient learns "
        f"{len(whole.kept('bptt').parts)}, each way keeps so much (in the median, and at worst), "
        "and takes so many times the time and the working memory of BPTT:",
        "",
        *tables.summary(whole),
    ]


def _pareto(core: Findings) -> list[str]:
    if not core.complete().runs:
        return []
    text = (
        "A point is the median over tasks, its line goes from the worst to the best task; the grey "
        "steps join what nothing else beats in both. [By task](#price) below."
    )
    return [
        *picture("pareto", "Part of the gain that is kept, against the price"),
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
    )


def _limits(findings: Findings) -> str:
    ran = [run for run in findings.runs if run.record.best_rate is not None]
    core = [run.spread for run in findings.of("core").runs if run.scores]
    lengths = [run.record.settings.length for run in findings.runs]
    return LIMITS.format(
        shortest=min(lengths),
        longest=max(lengths),
        updates=f"{max(run.record.settings.updates for run in findings.runs):,}",
        seeds=min(len(run.record.settings.seeds) for run in findings.runs),
        spread=f"{statistics.median(core):.3f}" if core else words.MISSING,
        lowest=sum(run.at_edge == -1 for run in ran),
        highest=sum(run.at_edge == 1 for run in ran),
        runs=len(ran),
        often=_often_at_edges(ran),
        apart=_apart(findings.of("core")),
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
    return f": most often so for {words.listed(found)}" if found else ""


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
        f"{words.digits(most)} apart in score ({task}, {words.cell(cell)}): smaller differences "
        "between others say nothing there, nor do parts that are kept above 1.\n"
    )


def _by_cell(core: Findings, entry: Callable[[Run | None], str]) -> list[str]:
    return [line for cell in core.cells for line in tables.by_task(core, cell, entry)]


def _core(core: Findings) -> list[str]:
    """Return the sections on the tasks that all ways are tried on."""
    return [
        "## Scores",
        "",
        "The score on the test set at the end.",
        "",
        *_by_cell(core, words.score),
        *picture("learning", "Scores on the validation set while learning"),
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
        *picture("cosine", "Cosine to the gradient of BPTT while learning"),
        *_prices(core),
    ]


def _prices(core: Findings) -> list[str]:
    """Return the section on what a gradient takes."""
    return [
        "## Price",
        "",
        "One gradient of one network, compiled alone: its time over the steps of a sequence, for "
        "the whole batch, the shortest of some calls; in brackets over that of BPTT. A process "
        "has one core; something else may be running on another one.",
        "",
        *_by_cell(core, tables.price(core, TIME, words.duration)),
        *_lone_steps(core),
        *picture("price", "Score against the time of a step, by task and cell"),
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


def _literature(findings: Findings) -> list[str]:
    judged = [(one, list(one.cases(findings))) for one in statements.ALL]
    text = (
        "Statements of the literature that these runs can test, each with a criterion that was "
        "fixed before the runs, and judged by the records whatever comes out. Networks, tasks and "
        "budgets are not those of the papers: what does not hold here may hold there. A case says "
        "nothing where the second has not learned the task."
    )
    return [
        "## What the literature says",
        "",
        text,
        "",
        *tables.statements(judged),
        "Each verdict rests on these cases:",
        "",
        *tables.cases(judged),
    ]


def _failures(findings: Findings) -> list[str]:
    lost, refused = tables.failures(findings.runs), tables.refusals(findings.runs)
    lines = ["## What failed", ""]
    lines += lost or ["No network ended in numbers that are not finite.", ""]
    if refused:
        lines += ["The library refuses these, which is not counted as a failure:", "", *refused]
    return lines


def block(findings: Findings) -> str:
    """Return what ``algorithms.md`` takes from the records."""
    return "\n".join(short(findings.of("core"))).rstrip()


def with_block(text: str, new: str) -> str:
    """Return a page with something else between its markers.

    Raises
    ------
    ValueError
        If it has no markers.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"The page has no markers {BEGIN} and {END}.")
    return f"{before}{BEGIN}\n{new}\n{END}{after}"
