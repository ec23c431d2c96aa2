"""A benchmark: cases, the functions that they compare, and targets."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any


class NotOffered(Exception):  # noqa: N818  (not an error: something is not installed here)
    """A package, plugin or device feature is missing; the table shows a dash."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """A function that is timed.

    Attributes
    ----------
    run
        Does the work and returns arrays to wait for.
    before
        Runs before every call, outside of the measured time.
    work
        Number of units (such as time steps) in one call; times are given per unit.
    rule
        The rule whose gradient the tests compare with an oracle; empty: not compared.
    found
        Turns the result of a call into that gradient.
    """

    run: Callable[[], Any]
    before: Callable[[], Any] | None = None
    work: int = 1
    rule: str = ""
    found: Callable[[Any], Any] = lambda result: result


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A case that is ready to run.

    Attributes
    ----------
    subjects
        Makes each function that is timed; all of them are called in turn.
    facts
        Numbers that need no repeats, such as bytes.
    derive
        Numbers computed from the median seconds by label.
    """

    subjects: Mapping[str, Callable[[], Subject]] = dataclasses.field(default_factory=dict)
    facts: Mapping[str, Callable[[], float]] = dataclasses.field(default_factory=dict)
    derive: Callable[[Mapping[str, float]], Mapping[str, float]] | None = None


@dataclasses.dataclass(frozen=True)
class Target:
    """A limit of a time or a fact, or of a ratio of two.

    Attributes
    ----------
    label, over
        The value, and what it is divided by; ``None``: the value itself.
    limit
        The largest value that holds the target; ``None``: the value is only reported.
    """

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
    """One process of the benchmark.

    Attributes
    ----------
    name
        Unique: ``question/parameters``.
    parameters
        Sizes and options.
    build
        Prepares the case, in the process that runs it.
    targets
        Rows of the table.
    quick, full
        Whether ``--quick`` runs it, and whether the full run does.
    task
        The network and its sequences.
    """

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
