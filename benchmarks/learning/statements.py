"""What the literature says and these runs can test, each with a criterion fixed beforehand.

A statement is judged case by case, a case being a task and a cell. It holds or fails there if the
numbers are further from the limit of the criterion than `findings.ERRORS` times their standard
error, and is undecided otherwise. Cases in which what others are measured by has not learned, or
is refused, are left out, and listed with the reason.
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
"""Tasks that ask for memory and for nothing else."""

DEARER = 1.1
"""Who takes at most so many times the time is no more expensive."""


class Outcome(enum.Enum):
    """What one case says, as the page writes it."""

    HOLDS = "yes"
    UNDECIDED = "undecided"
    FAILS = "**no**"
    LEFT_OUT = "left out"


@dataclasses.dataclass(frozen=True)
class Case:
    """What one task and cell say; ``why`` they are left out, if they are."""

    name: str
    numbers: str
    outcome: Outcome
    why: str = ""


Cases = Callable[[Findings], Iterator[Case]]


@dataclasses.dataclass(frozen=True)
class Statement:
    """A statement, where it comes from, and how it is judged.

    Attributes
    ----------
    claim, source
        What is said, and by whom.
    criterion
        What is compared, and when a case holds.
    cases
        The cases that there are.
    """

    claim: str
    source: str
    criterion: str
    cases: Cases


def tally(cases: list[Case]) -> Counter[Outcome]:
    """Return how many cases say what."""
    return Counter(case.outcome for case in cases)


def verdict(cases: list[Case]) -> str:
    """Return what the cases say together."""
    found = tally(cases)
    holds, fails = found[Outcome.HOLDS], found[Outcome.FAILS]
    if not holds and not fails:
        return "undecided" if found[Outcome.UNDECIDED] else "not tested"
    if holds and fails:
        return "mixed"
    said = "holds" if holds else "fails"
    return f"{said} where decided" if found[Outcome.UNDECIDED] else said


def outcome(*answers: bool | None) -> Outcome:
    """Return what follows if all answers have to be yes; ``None`` is one that is not known."""
    if False in answers:
        return Outcome.FAILS
    return Outcome.UNDECIDED if None in answers else Outcome.HOLDS


Judge = Callable[[bool | None], bool | None]
"""From whether a way keeps `PART` of a gain to whether that is what the statement says."""


def matches(keeps: bool | None) -> bool | None:
    """Return that a way keeps as good as all."""
    return keeps


def falls_behind(keeps: bool | None) -> bool | None:
    """Return that a way keeps less than that."""
    return None if keeps is None else not keeps


def compare(way: str, other: str, judge: Judge, cells: tuple[str, ...] = ()) -> Cases:
    """Return cases about the part of another way's gain that a way keeps; no cells are all."""

    def cases(findings: Findings) -> Iterator[Case]:
        for task, cell in findings.pairs():
            run, reference = findings.find(task, cell, way), findings.find(task, cell, other)
            if run is not None and reference is not None and (not cells or cell in cells):
                yield _case(words.pair(task, cell), run, reference, judge)

    return cases


def _case(name: str, run: Run, reference: Run, judge: Judge) -> Case:
    """Return a case about the part of another run's gain that a run keeps."""
    text = f"{words.score(run)} against {words.score(reference)}"
    why = _why_left_out(run, reference)
    if why:
        return Case(name, text, Outcome.LEFT_OUT, why)
    answer = beyond(run, reference, part=PART)
    numbers = f"{text}: keeps {words.digits(kept(run, reference))}"
    return Case(name, numbers, outcome(judge(answer)))


def _why_left_out(run: Run, reference: Run) -> str:
    """Return why nothing can be said; nothing where something can."""
    for one in (run, reference):
        if not one.ran:
            return f"{words.way(one.key[2])} is refused"
    return "" if reference.learned else f"{words.way(reference.key[2])} has not learned"


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
        numbers = f"cosine {words.digits(found)} against {words.digits(least)}"
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
_KEEPS = f"keeps at least {PART} of"
_LESS = f"keeps less than {PART} of"

ALL = (
    Statement(
        "With RMSprop, gradients of the step at hand alone learn what exact ones (RTRL) learn",
        "said in the field; no paper is named, since none is known here for certain",
        f"both by RMSprop: `Immediate` {_KEEPS} the gain of `RTRL` over chance",
        compare("immediate-rmsprop", "rtrl-rmsprop", matches),
    ),
    Statement(
        "The same with Adam, which all other runs use",
        "the control of the one above",
        f"`Immediate` {_KEEPS} the gain of `RTRL`",
        compare("immediate", "rtrl", matches),
    ),
    Statement(
        "Trace units (RTUs) keep long memories where gated units under D-RTRL do not",
        "Elelimy, White, Bowling & White, Real-time recurrent learning using trace units in "
        "reinforcement learning, NeurIPS 2024",
        f"on tasks that ask for memory: RTUs under `D_RTRL` keep at least {PART} of the gain of a "
        f"GRU under BPTT, and a GRU under `D_RTRL` {_LESS} it",
        _long_memory,
    ),
    Statement(
        "Networks whose units read their own past only learn long dependencies online",
        "Zucchet, Meier, Schug, Mujika & Sacramento, Online learning of long-range dependencies, "
        "NeurIPS 2023",
        f"on tasks that ask for memory: an LRU under `D_RTRL` {_KEEPS} the largest gain that any "
        "cell has under BPTT (that of an LRU would prove nothing: the two gradients are the same)",
        _linear_memory,
    ),
    Statement(
        "Eligibility propagation comes near backpropagation in recurrent networks of spiking "
        "neurons that adapt",
        BELLEC,
        f"recurrent ALIF: `D_RTRL`, which is `EProp` here, {_KEEPS} the gain of BPTT",
        compare("d_rtrl", "bptt", matches, ("alif",)),
    ),
    Statement(
        "Errors that come back by a random matrix cost little: without the past of recurrent "
        "weights",
        "Murray, Local online learning in recurrent networks with random feedback, eLife 2019; "
        f"{BELLEC}",
        f"`D_RTRL` with random feedback {_KEEPS} the gain of `D_RTRL`",
        compare("d_rtrl-feedback", "d_rtrl", matches),
    ),
    Statement(
        "Errors that come back by a random matrix cost little: in backpropagation",
        "Lillicrap, Cownden, Tweed & Akerman, Random synaptic feedback weights support error "
        "backpropagation for deep learning, Nature Communications 2016 (of networks without a "
        "past)",
        f"BPTT with random feedback {_KEEPS} the gain of BPTT",
        compare("bptt-feedback", "bptt", matches),
    ),
    Statement(
        "An approximation with a bias and no noise (SnAp) learns more than an unbiased one with "
        "noise (UORO)",
        "Menick et al., Practical real time recurrent learning with a sparse approximation, "
        "ICLR 2021",
        f"`UORO` {_LESS} the gain of `SnAp`",
        compare("uoro", "snap-1", falls_behind),
    ),
    Statement(
        "SnAp(1) is no more expensive than backpropagation",
        "the same",
        f"time of a step at most {DEARER} times that of BPTT, in the geometric mean over tasks; "
        "the error is over tasks",
        _as_cheap,
    ),
    Statement(
        "Kronecker factors (KF-RTRL) have less noise than a product of two vectors (UORO)",
        "Mujika, Meier & Steger, Approximating real-time recurrent learning with random Kronecker "
        "factors, NeurIPS 2018",
        "the cosine to BPTT, in the mean over training, is larger; of one seed and one draw: the "
        "error is over points of training",
        _less_noise,
    ),
)
