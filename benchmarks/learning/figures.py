"""The figures of the evidence, narrow enough for a phone."""

import io
import statistics
from pathlib import Path
from typing import Any

from braintrace._optional import optional_import

from . import formats
from .results import REFERENCE, Results, cost

SIMILAR = ("eprop", "ostl-recurrent", "ostl-feedforward", "rflo", "bptt-feedback")
"""Methods that are left out over training, because their lines nearly equal others."""

FAMILIES = {
    "bptt": ("immediate", "tbptt-short", "tbptt-long", "bptt"),
    "d_rtrl": ("d_rtrl", "d_rtrl-short", "d_rtrl-long", "bptt"),
    "es_d_rtrl": ("es_d_rtrl", "es_d_rtrl-short", "es_d_rtrl-long", "bptt"),
}
"""Windows of rising length, by rule: from none to the whole sequence."""

WIDTH = 5.0
DPI = 130
SIZE = 8.5
COLOURS = 256


def _figure(height: float) -> Any:
    figure = optional_import("matplotlib.figure", "benchmarks").Figure
    return figure(figsize=(WIDTH, height), layout="constrained", facecolor="white")


def _look(method: str) -> dict[str, Any]:
    title, colour, marker = formats.METHODS[method]
    return {"color": colour, "marker": marker, "label": title.replace("`", "")}


def _dress(panel: Any, title: str = "") -> None:
    panel.grid(alpha=0.3)
    panel.spines[["top", "right"]].set_visible(False)
    panel.tick_params(labelsize=SIZE - 1)
    panel.set_title(title, fontsize=SIZE)


def _finish(figure: Any, panels: Any, path: Path) -> None:
    """Put one legend below all panels, and write the file."""
    shown: dict[str, Any] = {}
    for panel in panels:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            shown.setdefault(label, handle)
    figure.legend(
        shown.values(), shown, loc="outside lower center", ncols=2, fontsize=SIZE - 1, frameon=False
    )
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    """Write the same small file for the same numbers."""
    image = optional_import("PIL.Image", "benchmarks")
    path.parent.mkdir(parents=True, exist_ok=True)
    with io.BytesIO() as drawn:
        figure.savefig(drawn, dpi=DPI)
        image.open(drawn).convert("RGB").quantize(COLOURS).save(path, optimize=True)


def over_training(results: Results, path: Path, what: str, label: str) -> None:
    """Draw a property of runs against updates: a row a task, a column a cell, a line a method."""
    tasks, cells = results.tasks, results.cells
    methods = [method for method in results.methods if method not in SIMILAR]
    figure = _figure(1.5 * len(tasks) + 1.7)
    panels = figure.subplots(len(tasks), len(cells), squeeze=False, sharey="row")
    for row, task in zip(panels, tasks, strict=True):
        for panel, cell in zip(row, cells, strict=True):
            for method in methods:
                run = results.find(task, cell, method)
                found = [] if run is None else getattr(run, what)
                if found:
                    look = {"markersize": 3, "linewidth": 1, **_look(method)}
                    panel.plot(*zip(*found, strict=True), **look)
            _dress(panel, f"{task}, {formats.cell(cell)}")
        row[0].set_ylabel(label, fontsize=SIZE)
    for panel in panels[-1]:
        panel.set_xlabel("updates", fontsize=SIZE)
    _finish(figure, panels.flat, path)


PRICES = {"step_seconds": "time, BPTT is 1", "peak_bytes": "temporary memory, BPTT is 1"}


def pareto(results: Results, path: Path) -> None:
    """Draw the relative gain over the cost, in the median over tasks.

    A line connects the worst and the best task.
    """
    cells = results.cells
    figure = _figure(2.7 * len(PRICES) + 2.0)
    panels = figure.subplots(len(PRICES), len(cells), squeeze=False, sharey=True, sharex="row")
    for row, (what, label) in zip(panels, PRICES.items(), strict=True):
        for panel, cell in zip(row, cells, strict=True):
            for method in results.methods:
                found = _gain_and_cost(results, cell, method, what)
                if found:
                    parts, prices = zip(*found, strict=True)
                    at, middle = statistics.median(prices), statistics.median(parts)
                    look = _look(method)
                    panel.plot([at, at], [min(parts), max(parts)], color=look["color"], alpha=0.35)
                    panel.plot(at, middle, linestyle="none", markersize=6, **look)
            panel.set_xscale("log")
            panel.axvline(1, color="black", linewidth=0.5, linestyle=":")
            _ticks(panel)
            _dress(panel, formats.cell(cell))
            panel.set_xlabel(label, fontsize=SIZE)
        row[0].set_ylabel("relative gain", fontsize=SIZE)
    _finish(figure, panels.flat, path)


def _gain_and_cost(
    results: Results, cell: str, method: str, what: str
) -> list[tuple[float, float]]:
    found = []
    for task in results.tasks:
        run, reference = results.find(task, cell, method), results.find(task, cell, REFERENCE)
        own, base = cost(run, what), cost(reference, what)
        part = results.gain(task, cell, method)
        if part is not None and own is not None and base:
            found.append((part, own / base))
    return found


def _ticks(panel: Any) -> None:
    """Write ratios as numbers, not as powers of ten."""
    ticker = optional_import("matplotlib.ticker", "benchmarks")
    panel.xaxis.set_major_locator(ticker.LogLocator(base=10, subs=(1, 3), numticks=12))
    panel.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    panel.xaxis.set_minor_locator(ticker.NullLocator())


def windows(results: Results, path: Path) -> None:
    """Draw the relative gain over memory: a line per rule, a point per length of a window.

    Points are medians over the pairs of task and cell that have all points.
    """
    figure = _figure(3.4)
    panel = figure.subplots()
    needed = {name for names in FAMILIES.values() for name in names}
    pairs = [pair for pair in results.pairs() if all(results.find(*pair, name) for name in needed)]
    for family, methods in FAMILIES.items():
        points = []
        for method in methods if pairs else ():
            gains = [results.gain(*pair, method) or 0.0 for pair in pairs]
            memory = [_memory(results, *pair, method) for pair in pairs]
            points.append((statistics.median(memory), statistics.median(gains)))
        if points:
            panel.plot(*zip(*points, strict=True), markersize=5, **_look(family))
    panel.set_xscale("log")
    _ticks(panel)
    _dress(panel, f"windows from none to the whole sequence, {len(pairs)} pairs")
    panel.set_xlabel("temporary memory and traces, BPTT is 1", fontsize=SIZE)
    panel.set_ylabel("relative gain", fontsize=SIZE)
    _finish(figure, [panel], path)


def _memory(results: Results, task: str, cell: str, method: str) -> float:
    """Return temporary memory and traces relative to BPTT."""
    own, base = (
        sum(
            cost(results.find(task, cell, name), what) or 0.0
            for what in ("peak_bytes", "trace_bytes")
        )
        for name in (method, REFERENCE)
    )
    return own / base
