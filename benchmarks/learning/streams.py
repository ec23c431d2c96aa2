"""Numbers that the notebook derives from the rows of `online_updates`."""

import statistics
from collections.abc import Iterable

from .formats import MISSING, answer, digits
from .results import is_positive, mean_of, place_of, standard_error
from .rows import StreamRow


class Streams:
    """Means over seeds, in the order of the catalogues."""

    def __init__(self, rows: Iterable[StreamRow]) -> None:
        self.rows = tuple(sorted(rows, key=lambda row: place_of(row.identity)))
        self.pairs = list(dict.fromkeys((row.task, row.cell) for row in self.rows))
        self.methods = list(dict.fromkeys(row.method for row in self.rows))
        self.every = sorted({row.every for row in self.rows})
        self.rates = sorted({row.rate for row in self.rows})

    def values(self, what: str, *place: object) -> list[float | None]:
        """Return a field by seed, at ``(task, cell, method, every, rate)``."""
        return [getattr(row, what) for row in self.rows if row.identity[:-1] == place]

    def mean(self, what: str, *place: object) -> float | None:
        """Return the mean of a field over seeds; ``None`` if one is not finite."""
        return mean_of(self.values(what, *place))

    def best(self, task: str, cell: str, every: int) -> float | None:
        """Return the learning rate with the lowest loss."""
        losses = [
            (loss, rate)
            for rate in self.rates
            if (loss := self.mean("loss", task, cell, "rtrl", every, rate)) is not None
        ]
        return min(losses)[1] if losses else None

    def entry(self, *place: object) -> str:
        """Return the cosine to the exact gradient, and in brackets the cosine to RTRL."""
        both, own = self.mean("to_bptt", *place), self.mean("to_rtrl", *place)
        text = digits(both) if both is not None else "undefined"
        return text if place[2] == "rtrl" or own is None else f"{text} ({digits(own)})"

    def stale_is_less(self, task: str, cell: str, every: int, rate: float) -> str:
        """Return whether stale traces turn the gradient by less than `D_RTRL` does."""
        stale = self.values("to_bptt", task, cell, "rtrl", every, rate)
        bent = self.values("to_rtrl", task, cell, "d_rtrl", every, rate)
        pairs = zip(stale, bent, strict=True)
        differences = [a - b for a, b in pairs if a is not None and b is not None]
        if rate == 0 or len(differences) < len(stale):
            return MISSING
        return answer(is_positive(statistics.fmean(differences), standard_error(differences)))
