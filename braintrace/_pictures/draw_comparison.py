"""Drawing of a comparison of learning rules with Matplotlib."""

from collections.abc import Mapping, Sequence
from typing import Any

from .._errors import optional_import


def draw_comparison(lines: Mapping[str, Sequence[tuple[int, float, str]]], ax: Any = None) -> Any:
    """Draw the cosine of gradients over memory, and return the axes.

    Parameters
    ----------
    lines
        For each rule, bytes, cosine and label of its points.
    ax
        Matplotlib axes; ``None``: the axes of a new figure.
    """
    pyplot = optional_import("matplotlib.pyplot", "examples")
    if ax is None:
        _, ax = pyplot.subplots(layout="constrained")
    for rule, points in lines.items():
        ordered = sorted(points)
        ax.plot([p[0] for p in ordered], [p[1] for p in ordered], marker="o", label=rule)
        for memory, cosine, label in ordered:
            ax.annotate(label, (memory, cosine), xytext=(4, 4), textcoords="offset points")
    ax.set(xlabel="temporary memory and traces in bytes", ylabel="cosine to BPTT", xscale="log")
    ax.legend()
    return ax
