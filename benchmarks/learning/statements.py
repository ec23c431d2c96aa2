"""Statements of the literature, each with a criterion that was fixed before the runs.

A case is a task and a cell. A statement holds or fails in a case if the numbers are further from
the limit of the criterion than `findings.ERRORS` times their standard error, and is undecided
otherwise. Cases without a reference that learns, and refused cases, are left out with the reason.
"""

import dataclasses
import enum
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator

from . import words
from .findings import PART, Findings, Run, beyond, counts, kept, standard_error

MEMORY = (
    "copy with lag",
    "adding problem",
    "evidence accumulation",
    "delayed XOR",
    "delayed match-to-sample",
    "memory chain",
)
"""Tasks that require memory and nothing else."""

DEARER = 1.1
"""Largest ratio of times at which a method is not more expensive."""


class Outcome(enum.Enum):
    """Outcome of a case, as on the page."""

    HOLDS = "yes"
    UNDECIDED = "undecided"
    FAILS = "**no**"
    LEFT_OUT = "left out"


@dataclasses.dataclass(frozen=True)
class Case:
    """Outcome of a task and cell, with the reason ``why`` they are left out."""

    name: str
    numbers: str
    outcome: Outcome
    why: str = ""


Cases = Callable[[Findings], Iterator[Case]]


@dataclasses.dataclass(frozen=True)
class Statement:
    """A statement, its source and its criterion.

    Attributes
    ----------
    claim, source
        The statement and its source.
    criterion
        The comparison, and the condition under which a case holds.
    cases
        All cases.
    """

    claim: str
    source: str
    criterion: str
    cases: Cases


def tally(cases: list[Case]) -> Counter[Outcome]:
    """Count the outcomes of cases."""
    return Counter(case.outcome for case in cases)


def verdict(cases: list[Case]) -> str:
    """Return the joint verdict of the cases."""
    found = tally(cases)
    holds, fails = found[Outcome.HOLDS], found[Outcome.FAILS]
    if not holds and not fails:
        return "undecided" if found[Outcome.UNDECIDED] else "not tested"
    if holds and fails:
        return "mixed"
    said = "holds" if holds else "fails"
    return f"{said} where decided" if found[Outcome.UNDECIDED] else said


def outcome(*answers: bool | None) -> Outcome:
    """Return the conjunction of answers; ``None`` is unknown."""
    if False in answers:
        return Outcome.FAILS
    return Outcome.UNDECIDED if None in answers else Outcome.HOLDS


Judge = Callable[[bool | None], bool | None]
"""Map from "the relative gain is at least `PART`" to the answer of the statement."""


def matches(keeps: bool | None) -> bool | None:
    """Accept a relative gain of at least `PART`."""
    return keeps


def falls_behind(keeps: bool | None) -> bool | None:
    """Accept a relative gain below `PART`."""
    return None if keeps is None else not keeps


def compare(way: str, other: str, judge: Judge, cells: tuple[str, ...] = ()) -> Cases:
    """Return cases about the gain of a method relative to another; no cells means all."""

    def cases(findings: Findings) -> Iterator[Case]:
        for task, cell in findings.pairs():
            run, reference = findings.find(task, cell, way), findings.find(task, cell, other)
            if run is not None and reference is not None and (not cells or cell in cells):
                yield _case(words.pair(task, cell), run, reference, judge)

    return cases


def _case(name: str, run: Run, reference: Run, judge: Judge) -> Case:
    """Return a case about the gain of a run relative to another."""
    text = f"{words.score(run)}, reference {words.score(reference)}"
    why = _why_left_out(run, reference)
    if why:
        return Case(name, text, Outcome.LEFT_OUT, why)
    answer = beyond(run, reference, part=PART)
    numbers = f"{text}: relative gain {words.digits(kept(run, reference))}"
    return Case(name, numbers, outcome(judge(answer)))


def _why_left_out(run: Run, reference: Run) -> str:
    """Return the reason to leave a case out, or an empty string."""
    for one in (run, reference):
        if not one.ran:
            return f"{words.way(one.key[2])} is refused"
    return "" if reference.learned else f"{words.way(reference.key[2])} does not learn"


def _long_memory(findings: Findings) -> Iterator[Case]:
    for task in _tasks_of_memory(findings):
        exact, trace, other, gated = (
            findings.find(task, cell, way) for cell in ("rtu", "gru") for way in ("bptt", "d_rtrl")
        )
        if exact is None or trace is None or other is None or gated is None:
            continue
        numbers = (
            f"RTU {words.score(trace)} (BPTT {words.score(exact)}), "
            f"GRU {words.score(gated)} (BPTT {words.score(other)})"
        )
        why = _why_left_out(trace, other) or _why_left_out(gated, other)
        if why:
            yield Case(task, numbers, Outcome.LEFT_OUT, f"GRU: {why}")
        else:
            own, others = (beyond(run, other, part=PART) for run in (trace, gated))
            yield Case(task, numbers, outcome(own, falls_behind(others)))


def _tasks_of_memory(findings: Findings) -> list[str]:
    return [task for task in findings.tasks if task in MEMORY]


def _linear_memory(findings: Findings) -> Iterator[Case]:
    for task in _tasks_of_memory(findings):
        run, best = findings.find(task, "lru", "d_rtrl"), _best_by_backpropagation(findings, task)
        if run is not None and best is not None:
            case = _case(task, run, best, matches)
            yield dataclasses.replace(case, numbers=f"{case.numbers} ({words.cell(best.key[1])})")


def _best_by_backpropagation(findings: Findings, task: str) -> Run | None:
    found = [findings.find(task, cell, "bptt") for cell in findings.cells]
    gains = [(run.gain, -i, run) for i, run in enumerate(found) if run and run.gain is not None]
    return max(gains)[2] if gains else None


def _less_noise(findings: Findings) -> Iterator[Case]:
    for task, cell in findings.pairs():
        run, other = (findings.find(task, cell, way) for way in ("kf_rtrl", "uoro"))
        if run is None or other is None or not run.cosine or not other.cosine:
            continue
        theirs = dict(other.cosine)
        differences = [value - theirs[at] for at, value in run.cosine if at in theirs]
        found, least = (statistics.fmean(dict(one.cosine).values()) for one in (run, other))
        numbers = f"cosine {words.digits(found)} and {words.digits(least)}"
        answer = counts(statistics.fmean(differences), standard_error(differences))
        yield Case(words.pair(task, cell), numbers, outcome(answer))


def _as_cheap(findings: Findings) -> Iterator[Case]:
    for cell in findings.cells:
        ratios = findings.of_cell(cell).ratios("snap-1", "seconds_per_step")
        if ratios:
            logarithms = [math.log(ratio) for ratio in ratios]
            mean, error = statistics.fmean(logarithms), standard_error(logarithms)
            numbers = (
                f"{words.times(math.exp(mean))} times BPTT in the mean over "
                f"{words.counted(len(ratios), 'task')} ({words.between(ratios)})"
            )
            answer = counts(math.log(DEARER) - mean, error) if len(ratios) > 1 else None
            yield Case(words.cell(cell), numbers, outcome(answer))


BELLEC = (
    "Bellec et al., A solution to the learning dilemma for recurrent networks of spiking neurons, "
    "Nature Communications 2020"
)
_KEEPS = f"at least {PART} of"
_LESS = f"less than {PART} of"

ALL = (
    Statement(
        "With RMSprop, gradients of the current step alone learn as well as exact ones (RTRL)",
        "said in the field; no certain source is known",
        f"both with RMSprop: the gain of `Immediate` over chance is {_KEEPS} the gain of `RTRL`",
        compare("immediate-rmsprop", "rtrl-rmsprop", matches),
    ),
    Statement(
        "The same with Adam, which all other runs use",
        "control of statement 1",
        f"the gain of `Immediate` is {_KEEPS} the gain of `RTRL`",
        compare("immediate", "rtrl", matches),
    ),
    Statement(
        "Trace units (RTUs) learn long memories where gated units under D-RTRL do not",
        "Elelimy, White, Bowling & White, Real-time recurrent learning using trace units in "
        "reinforcement learning, NeurIPS 2024",
        f"memory tasks: the gain of RTUs under `D_RTRL` is {_KEEPS} the gain of a GRU under BPTT, "
        f"and the gain of a GRU under `D_RTRL` is {_LESS} it",
        _long_memory,
    ),
    Statement(
        "Networks with uncoupled units learn long dependencies online",
        "Zucchet, Meier, Schug, Mujika & Sacramento, Online learning of long-range dependencies, "
        "NeurIPS 2023",
        f"memory tasks: the gain of an LRU under `D_RTRL` is {_KEEPS} the largest gain of any cell "
        "under BPTT (an LRU under BPTT has the same gradient, so it would prove nothing)",
        _linear_memory,
    ),
    Statement(
        "Eligibility propagation approaches backpropagation in recurrent networks of adaptive "
        "spiking neurons",
        BELLEC,
        f"recurrent ALIF: the gain of `D_RTRL`, which equals `EProp` here, is {_KEEPS} the gain of "
        "BPTT",
        compare("d_rtrl", "bptt", matches, ("alif",)),
    ),
    Statement(
        "Random feedback costs little, without paths through recurrent weights",
        "Murray, Local online learning in recurrent networks with random feedback, eLife 2019; "
        f"{BELLEC}",
        f"the gain of `D_RTRL` with random feedback is {_KEEPS} the gain of `D_RTRL`",
        compare("d_rtrl-feedback", "d_rtrl", matches),
    ),
    Statement(
        "Random feedback costs little in backpropagation",
        "Lillicrap, Cownden, Tweed & Akerman, Random synaptic feedback weights support error "
        "backpropagation for deep learning, Nature Communications 2016 (feedforward networks)",
        f"the gain of BPTT with random feedback is {_KEEPS} the gain of BPTT",
        compare("bptt-feedback", "bptt", matches),
    ),
    Statement(
        "A biased approximation without noise (SnAp) learns more than an unbiased one with noise "
        "(UORO)",
        "Menick et al., Practical real time recurrent learning with a sparse approximation, "
        "ICLR 2021",
        f"the gain of `UORO` is {_LESS} the gain of `SnAp`",
        compare("uoro", "snap-1", falls_behind),
    ),
    Statement(
        "SnAp(1) is at most as expensive as backpropagation",
        "source of statement 8",
        f"time of a step at most {DEARER} times the time of BPTT, in the geometric mean over "
        "tasks; the error is over tasks",
        _as_cheap,
    ),
    Statement(
        "Kronecker factors (KF-RTRL) have less noise than a product of two vectors (UORO)",
        "Mujika, Meier & Steger, Approximating real-time recurrent learning with random Kronecker "
        "factors, NeurIPS 2018",
        "the mean cosine to BPTT over training is larger, for one seed and one draw; the error is "
        "over points of training",
        _less_noise,
    ),
)
