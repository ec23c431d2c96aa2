"""What a benchmark is made of: cases, the functions that they compare, and targets."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any


class NotOffered(Exception):  # noqa: N818  (not an error: the library timed lacks the feature)
    """The library that is being timed lacks what a function needs; its cell shows a dash."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """A function that is timed.

    Attributes
    ----------
    run
        Does the work and returns arrays to wait for.
    before
        Runs before every call, outside of the time that is measured.
    deviation
        Relative deviation of the result of the first call from the oracle.
    tolerance
        Largest deviation that counts as agreement.
    work
        Number of units (time steps, say) in one call; times are given per unit.
    """

    run: Callable[[], Any]
    before: Callable[[], Any] | None = None
    deviation: Callable[[Any], float] | None = None
    tolerance: float = 1e-4
    work: int = 1


@dataclasses.dataclass(frozen=True)
class Measurements:
    """What the timed part of a case gave: seconds per unit of work, and peak bytes.

    Attributes
    ----------
    seconds
        Medians by label.
    peaks
        Peak memory of the process after the first call of each label, in the order of the labels.
    """

    seconds: Mapping[str, float]
    peaks: Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A case that is ready to run.

    Attributes
    ----------
    subjects
        Makes each function that is timed; all of them are called in turn.
    facts
        Numbers that need no repeats: bytes, deviations, seconds of a first call.
    derive
        Numbers computed from the measurements.
    checks
        Deviations from the oracle of what is not timed, as ``(deviation, tolerance)``.
    """

    subjects: Mapping[str, Callable[[], Subject]] = dataclasses.field(default_factory=dict)
    facts: Mapping[str, Callable[[], float]] = dataclasses.field(default_factory=dict)
    derive: Callable[[Measurements], Mapping[str, float]] | None = None
    checks: Mapping[str, Callable[[], tuple[float, float]]] = dataclasses.field(
        default_factory=dict
    )


@dataclasses.dataclass(frozen=True)
class Target:
    """What a time or a fact, or a ratio of two, has to hold.

    Attributes
    ----------
    label, over
        What is compared, and with what; ``None``: the number itself.
    limit
        The largest value that holds the target; ``None``: the number is only reported.
    equal
        Whether it has to be the limit exactly.
    """

    label: str
    over: str | None
    limit: float | None
    equal: bool = False

    @property
    def name(self) -> str:
        """What the row of the table is called."""
        return self.label if self.over is None else f"{self.label} / {self.over}"

    def holds(self, value: float) -> bool | None:
        """Whether a value holds the target; ``None`` where there is none."""
        if self.limit is None:
            return None
        if self.equal:
            return abs(value - self.limit) <= 1e-9 * abs(self.limit)
        return value <= self.limit


@dataclasses.dataclass(frozen=True)
class Case:
    """One process of the benchmark.

    Attributes
    ----------
    name
        Unique; ``question/parameters``.
    parameters
        Sizes and options, for tables and plots.
    build
        Prepares the case, in the process that runs it.
    targets
        Rows of the table.
    quick, full
        Whether ``--quick`` runs it, and whether the full run does.
    """

    name: str
    parameters: Mapping[str, Any]
    build: Callable[[], Prepared]
    targets: tuple[Target, ...] = ()
    quick: bool = False
    full: bool = True

    @property
    def question(self) -> str:
        """The part of the name in front of the slash."""
        return self.name.partition("/")[0]
