"""Results as Markdown tables."""

from collections.abc import Iterable, Mapping, Sequence

DASH = "–"


def in_units(value: float | None, units: Mapping[str, float]) -> str:
    """Return a number with three digits, in the first unit that is not larger, else the last."""
    if value is None:
        return DASH
    counts = {unit: value * per for unit, per in units.items()}
    unit = next((name for name, count in counts.items() if count >= 1), [*units][-1])
    return f"{counts[unit]:.3g} {unit}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows), ""]
