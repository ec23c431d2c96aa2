"""Result of a comparison of learning rules: a table, a plot, plain data."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from .._pictures import draw_comparison, in_bytes
from .._tables import Table, as_html, as_text
from .check import GradientCheck

_HEADS = ("#", "rule", "window", "cosine", "deviation", "time per step", "temporary", "traces")


@dataclasses.dataclass(frozen=True)
class ComparedRule:
    """One row of a comparison: a rule with a window.

    Attributes
    ----------
    rule, window
        Name of the rule, and the number of steps that are differentiated in full.
    gradient
        Its gradient compared with backpropagation through time, for every parameter; ``None`` for a
        refused rule.
    seconds
        Median time of a gradient of the sequence, divided by the number of steps.
    temp, traces
        Bytes of temporary memory of the compiled program, and of the traces.
    refused
        Reason why the rule was not run; ``None`` if it was run.
    """

    rule: str
    window: int | None = None
    gradient: GradientCheck | None = None
    seconds: float = math.nan
    temp: int = 0
    traces: int = 0
    refused: str | None = None

    @property
    def cosine(self) -> float:
        """Cosine to the gradient by backpropagation through time, of all parameters together."""
        return math.nan if self.gradient is None else self.gradient.rows[-1].cosine

    @property
    def deviation(self) -> float:
        """Relative error: the norm of the difference over the norm of the exact gradient."""
        return math.nan if self.gradient is None else self.gradient.rows[-1].deviation

    def to_dict(self) -> dict[str, Any]:
        """Return the row as dicts, lists, strings and numbers, ready for JSON."""
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        gradient = None if self.gradient is None else self.gradient.to_dict()
        return {**own, "cosine": self.cosine, "deviation": self.deviation, "gradient": gradient}


@dataclasses.dataclass(frozen=True)
class RuleComparison:
    """Result of `compare_rules`; ``print`` shows a table.

    Attributes
    ----------
    steps, length
        Number of compared steps, and of steps of the given sequence.
    memory_budget
        Limit in bytes for backpropagation and for each rule.
    bptt
        Backpropagation through time, without a learner.
    checkpointed
        The same with the memory of about ``sqrt(steps)`` steps, each of which runs twice.
    rows
        One row per rule and window, in the order of the call.
    """

    steps: int
    length: int
    memory_budget: int
    bptt: ComparedRule
    checkpointed: ComparedRule
    rows: tuple[ComparedRule, ...]

    def __str__(self) -> str:
        return as_text(self._parts())

    def _repr_html_(self) -> str:
        return as_html(self._parts())

    def to_dict(self) -> dict[str, Any]:
        """Return the result as dicts, lists, strings and numbers, ready for JSON."""
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        rows = [row.to_dict() for row in self.rows]
        exact = {"bptt": self.bptt.to_dict(), "checkpointed": self.checkpointed.to_dict()}
        return {**own, **exact, "rows": rows}

    def plot(self, ax: Any = None) -> Any:
        """Draw the cosine over the memory with Matplotlib, one line per rule; return the axes.

        The memory is the sum of temporary memory and traces, and each point has its window.

        Parameters
        ----------
        ax
            Axes to draw in; ``None``: new axes.

        Raises
        ------
        MissingPackageError
            Without Matplotlib.
        """
        lines: dict[str, list[tuple[int, float, str]]] = {}
        for row in (self.bptt, self.checkpointed, *self.rows):
            if row.refused is None:
                window = "" if row.window is None else str(row.window)
                point = (row.temp + row.traces, row.cosine, window)
                lines.setdefault(row.rule, []).append(point)
        return draw_comparison(lines, ax)

    def _parts(self) -> Iterator[Table | str]:
        rows = list(enumerate((self.bptt, self.checkpointed, *self.rows)))
        title = f"Gradients over {self.steps:,} steps, compared with backpropagation through time"
        cells = [_cells(number, row) for number, row in rows]
        yield Table(title, _HEADS, cells, numbers=range(3, len(_HEADS)))
        if self.steps < self.length:
            yield (
                f"The sequence of {self.length:,} steps is shortened to its first {self.steps:,}: "
                "backpropagation over more of them needs more than `memory_budget`, "
                f"{in_bytes(self.memory_budget)}."
            )
        compared = [(number, row.gradient) for number, row in rows[2:] if row.gradient is not None]
        if compared and self.bptt.gradient is not None:
            cosines = [
                [parameter.parameter]
                + [f"{gradient.rows[index].cosine:.3f}" for _, gradient in compared]
                for index, parameter in enumerate(self.bptt.gradient.rows[:-1])
            ]
            heads = ["parameter", *(f"#{number}" for number, _ in compared)]
            yield Table("Cosine of each parameter", heads, cosines, numbers=range(1, len(heads)))
        refused = {(row.rule, row.refused) for row in self.rows if row.refused is not None}
        for rule, reason in sorted(refused):
            yield f"{rule} is refused: {reason}"


def _cells(number: int, row: ComparedRule) -> list[str]:
    start = [str(number), row.rule, "-" if row.window is None else str(row.window)]
    if row.refused is not None:
        return [*start, "refused", "", "", "", ""]
    return [
        *start,
        f"{row.cosine:.4f}",
        f"{row.deviation:.1e}",
        _time(row.seconds),
        in_bytes(row.temp),
        in_bytes(row.traces),
    ]


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"
