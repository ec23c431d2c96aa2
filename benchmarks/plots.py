"""Plots of time and memory against the length of a sequence, the hidden size and the batch."""

from pathlib import Path
from typing import Any

from braintrace._optional import optional_import

from .results import Result

AXES = {"T": "steps", "H": "hidden", "B": "batch"}
NAMES = {"T": "steps T", "H": "hidden units H", "B": "batch B"}
BASE = {"steps": 64, "hidden": 256, "batch": 32}
COLOURS = {
    "BPTT": "black",
    "D_RTRL, one chunk": "tab:blue",
    "D_RTRL, chunks of 16": "tab:cyan",
    "D_RTRL, auto": "tab:purple",
    "ES_D_RTRL, auto": "tab:orange",
    "ES_D_RTRL, chunks of 16": "tab:orange",
    "hand-written, one chunk": "tab:green",
    "hand-written, chunks of 16": "tab:olive",
}
Series = dict[str, dict[int, float]]


def times_against(results: Result, axis: str) -> Series:
    """Return ``{label: {size: seconds}}`` along one axis, the others at their base."""
    series: Series = {}
    for name, case in results["cases"].items():
        if not name.startswith("sequence/") or "seconds" not in case:
            continue
        sizes = {key: case["parameters"][key] for key in BASE}
        if all(sizes[key] == BASE[key] for key in BASE if key != AXES[axis]):
            for label, spread in case["seconds"].items():
                series.setdefault(label, {})[sizes[AXES[axis]]] = spread["median"]
    return series


def memory_against(results: Result, axis: str) -> Series:
    """Return ``{label: {size: bytes}}`` along one axis."""
    series: Series = {}
    for name, case in results["cases"].items():
        if name.startswith("memory/") and case.get("parameters", {}).get("axis") == axis:
            for label, value in case["facts"].items():
                what, _, size = label.rpartition(f", {axis}=")
                series.setdefault(what, {})[int(size)] = value / 2**20
    return series


def _draw(panel: Any, series: Series, axis: str, unit: str) -> None:
    for label, colour in COLOURS.items():
        points = sorted(series.get(label, {}).items())
        if points:
            style = "--" if label.startswith("hand") else "-"
            panel.plot(*zip(*points, strict=True), style, marker="o", color=colour, label=label)
    panel.set(xlabel=NAMES[axis], ylabel=unit)
    if panel.lines:
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.legend(fontsize="x-small")


def draw(results: Result, stem: Path) -> list[str]:
    """Write the plots next to the results, and return their file names.

    Raises
    ------
    MissingPackageError
        Without matplotlib; the message names the extra that brings it.
    """
    figures = optional_import("matplotlib.figure", "benchmarks")
    names = []
    kinds = (
        ("time", times_against, "seconds"),
        ("memory", memory_against, "temporary MiB"),
    )
    for kind, series_of, unit in kinds:
        figure = figures.Figure(figsize=(13, 4), layout="constrained")
        for panel, axis in zip(figure.subplots(1, 3), AXES, strict=True):
            _draw(panel, series_of(results, axis), axis, unit)
        figure.suptitle(f"Sequence gradient of a leaky tanh RNN, {results['machine']['name']}")
        names.append(f"{stem.name}-{kind}.png")
        figure.savefig(stem.with_name(names[-1]), dpi=120)
    return names
