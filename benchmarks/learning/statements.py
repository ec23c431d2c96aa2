"""What the literature says and these runs can test, each with a criterion fixed beforehand.

A statement is judged case by case, a case being a task and a cell: it holds, it does not, or the
case says nothing, since what others are measured by has not learned there (see `findings`). Cases
that say nothing are listed too.
"""

import dataclasses
from collections.abc import Callable, Iterator

from . import words
from .findings import Findings, Run, kept, price_of

PART = 0.9
"""Who keeps this part of another's gain over chance has matched it."""

MEMORY = (
    "copy with lag",
    "adding problem",
    "evidence accumulation",
    "delayed XOR",
    "delayed match-to-sample",
    "memory chain",
)
"""Tasks that ask for memory and for nothing else."""


@dataclasses.dataclass(frozen=True)
class Case:
    """What one task and cell say; ``holds`` is ``None`` where they say nothing."""

    name: str
    numbers: str
    holds: bool | None


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


def verdict(cases: list[Case]) -> str:
    """Return what the cases say together."""
    judged = [case.holds for case in cases if case.holds is not None]
    if not judged:
        return "not tested"
    held = f"{sum(judged)} of {len(judged)} cases"
    if all(judged):
        return f"holds ({held})"
    return f"holds in {held}" if any(judged) else f"does not hold ({held})"


def compare(way: str, other: str, holds: Callable[[float], bool], cells: tuple[str, ...]) -> Cases:
    """Return cases about the part of another way's gain that a way keeps; no cells are all."""

    def cases(findings: Findings) -> Iterator[Case]:
        for task, cell in findings.pairs():
            run, reference = findings.find(task, cell, way), findings.find(task, cell, other)
            if (not cells or cell in cells) and _ran(run) and _ran(reference):
                part = kept(run, reference)
                judged = None if part is None else holds(part)
                yield Case(f"{task}, {words.cell(cell)}", _parts(run, reference, part), judged)

    return cases


def _ran(run: Run | None) -> bool:
    return run is not None and run.ran


def _parts(run: Run | None, reference: Run | None, part: float | None) -> str:
    text = f"{words.score(run)} against {words.score(reference)}"
    return f"{text}: {'nothing to keep' if part is None else 'keeps ' + words.digits(part)}"


def matches(part: float) -> bool:
    """Whether a part is as good as all."""
    return part >= PART


def falls_behind(part: float) -> bool:
    """Whether a part is less than all."""
    return part < PART


def _long_memory(findings: Findings) -> Iterator[Case]:
    for task in findings.tasks:
        exact, trace, other, gated = (
            findings.find(task, cell, way) for cell in ("rtu", "gru") for way in ("bptt", "d_rtrl")
        )
        if task in MEMORY and _ran(exact) and _ran(trace) and _ran(gated):
            own, others = kept(trace, other), kept(gated, other)
            numbers = (
                f"RTU {words.score(trace)} (BPTT {words.score(exact)}), "
                f"GRU {words.score(gated)} (BPTT {words.score(other)})"
            )
            if own is None or others is None:
                yield Case(task, numbers, None)
            else:
                yield Case(task, numbers, own >= PART > others)


def _linear_memory(findings: Findings) -> Iterator[Case]:
    for task in findings.tasks:
        run, best = findings.find(task, "lru", "d_rtrl"), _best_by_backpropagation(findings, task)
        if task in MEMORY and _ran(run) and best is not None:
            part = kept(run, best)
            numbers = f"{_parts(run, best, part)} ({words.cell(best.key[1])})"
            yield Case(task, numbers, None if part is None else matches(part))


def _best_by_backpropagation(findings: Findings, task: str) -> Run | None:
    found = [findings.find(task, cell, "bptt") for cell in findings.cells]
    gains = [(run.gain, -i, run) for i, run in enumerate(found) if run and run.gain is not None]
    return max(gains)[2] if gains else None


def _less_noise(findings: Findings) -> Iterator[Case]:
    for task, cell in findings.pairs():
        run, other = (findings.find(task, cell, way) for way in ("kf_rtrl", "uoro"))
        if run is not None and other is not None:
            found, theirs = run.mean_cosine, other.mean_cosine
            if found is not None and theirs is not None:
                numbers = f"cosine {words.digits(found)} against {words.digits(theirs)}"
                yield Case(f"{task}, {words.cell(cell)}", numbers, found > theirs)


def _as_cheap(findings: Findings) -> Iterator[Case]:
    for task, cell in findings.pairs():
        runs = [findings.find(task, cell, way) for way in ("snap-1", "bptt")]
        own, base = (price_of(run, "seconds_per_step") for run in runs)
        if own is not None and base is not None:
            numbers = f"{words.duration(own)} against {words.duration(base)} a step"
            yield Case(f"{task}, {words.cell(cell)}", numbers, own <= 1.1 * base)


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
        compare("immediate-rmsprop", "rtrl-rmsprop", matches, ()),
    ),
    Statement(
        "The same with Adam, which all other runs use",
        "the control of the one above",
        f"`Immediate` {_KEEPS} the gain of `RTRL`",
        compare("immediate", "rtrl", matches, ()),
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
        compare("d_rtrl-feedback", "d_rtrl", matches, ()),
    ),
    Statement(
        "Errors that come back by a random matrix cost little: in backpropagation",
        "Lillicrap, Cownden, Tweed & Akerman, Random synaptic feedback weights support error "
        "backpropagation for deep learning, Nature Communications 2016 (of networks without a "
        "past)",
        f"BPTT with random feedback {_KEEPS} the gain of BPTT",
        compare("bptt-feedback", "bptt", matches, ()),
    ),
    Statement(
        "An approximation with a bias and no noise (SnAp) learns more than an unbiased one with "
        "noise (UORO)",
        "Menick et al., Practical real time recurrent learning with a sparse approximation, "
        "ICLR 2021",
        f"`UORO` {_LESS} the gain of `SnAp`",
        compare("uoro", "snap-1", falls_behind, ()),
    ),
    Statement(
        "SnAp(1) is no more expensive than backpropagation",
        "the same",
        "time of a step at most 1.1 times that of BPTT",
        _as_cheap,
    ),
    Statement(
        "Kronecker factors (KF-RTRL) have less noise than a product of two vectors (UORO)",
        "Mujika, Meier & Steger, Approximating real-time recurrent learning with random Kronecker "
        "factors, NeurIPS 2018",
        "the cosine to BPTT (of one seed and one draw), in the mean over training, is larger",
        _less_noise,
    ),
)
