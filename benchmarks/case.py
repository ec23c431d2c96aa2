"""A benchmark: cases, the functions that they compare, and targets."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any


class NotOffered(Exception):  # noqa: N818  (not an error: the device lacks something)
    """A feature of the device is missing; as for a missing package, the table shows a dash."""


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


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A case that is ready to run.

    ``subjects`` make the functions that are timed in turn, ``facts`` are numbers that need no
    repeats, and ``derive`` computes further ones from the median seconds by label.
    """

    subjects: Mapping[str, Callable[[], Subject]] = dataclasses.field(default_factory=dict)
    facts: Mapping[str, Callable[[], float]] = dataclasses.field(default_factory=dict)
    derive: Callable[[Mapping[str, float]], Mapping[str, float]] | None = None


@dataclasses.dataclass(frozen=True)
class Target:
    """A limit of a time or a fact, or of its ratio to another; without one, it is only reported."""

    label: str
    over: str | None
    limit: float | None

    @property
    def name(self) -> str:
        """The name of the row in the table."""
        return self.label if self.over is None else f"{self.label} / {self.over}"

    def holds(self, value: float) -> bool | None:
        """Return whether a value holds the target; ``None`` without a limit."""
        return None if self.limit is None else value <= self.limit


@dataclasses.dataclass(frozen=True)
class Case:
    """One process of the benchmark, named ``question/parameters``; the task is for the tests."""

    name: str
    parameters: Mapping[str, Any]
    build: Callable[[], Prepared]
    targets: tuple[Target, ...] = ()
    quick: bool = False
    full: bool = True
    task: Any = None

    @property
    def question(self) -> str:
        """The part of the name in front of the slash."""
        return self.name.partition("/")[0]
