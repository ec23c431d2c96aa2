"""A benchmark: cases, the functions that they compare, and targets."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Subject:
    """A function that is timed.

    ``run`` returns arrays to wait for, ``before`` runs in front of every call outside of the
    measured time, and ``work`` is the number of units (such as steps) in a call, since times are
    given per unit. The tests compare ``found(result)`` with the gradient of ``rule``, unless that
    is empty. ``lower`` returns the program of the call, if a method of the learner does.
    """

    run: Callable[[], Any]
    before: Callable[[], Any] | None = None
    work: int = 1
    rule: str = ""
    found: Callable[[Any], Any] = lambda result: result
    lower: Callable[[], Any] | None = None


Subjects = dict[str, Callable[[], Subject]]
"""What makes the functions that are timed in turn, by label."""


@dataclasses.dataclass(frozen=True)
class Target:
    """A limit of a time or a fact, or of its ratio to another; without one, it is only reported."""

    label: str
    over: str | None
    limit: float | None

    @property
    def name(self) -> str:
        return self.label if self.over is None else f"{self.label} / {self.over}"


@dataclasses.dataclass(frozen=True)
class Case:
    """One process of the benchmark, named ``question/parameters``; the task is for the tests.

    ``facts`` are numbers that need no repeats, and ``derive`` computes further ones from the median
    seconds by label.
    """

    name: str
    subjects: Subjects = dataclasses.field(default_factory=dict)
    targets: tuple[Target, ...] = ()
    facts: Mapping[str, Callable[[], float]] = dataclasses.field(default_factory=dict)
    derive: Callable[[Mapping[str, float]], Mapping[str, float]] = lambda medians: {}
    quick: bool = False
    full: bool = True
    task: Any = None
