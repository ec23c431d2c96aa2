"""The figures of the evidence, narrow enough for a phone."""

import contextlib
import io
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from braintrace._optional import optional_import

from . import formats
from .results import Results

SIMILAR = ("eprop", "ostl-recurrent", "ostl-feedforward", "rflo", "bptt-feedback")
"""Methods that are left out over training, because their lines nearly equal others."""

FAMILIES = {
    "bptt": ("immediate", "tbptt-short", "tbptt-long", "bptt"),
    "d_rtrl": ("d_rtrl", "d_rtrl-short", "d_rtrl-long", "bptt"),
    "es_d_rtrl": ("es_d_rtrl", "es_d_rtrl-short", "es_d_rtrl-long", "bptt"),
}
"""Windows of rising length, by rule: from none to the whole sequence."""

WIDTH, DPI, SIZE, COLOURS = 5.0, 130, 8.5, 256
STYLE = {
    "axes.grid": True,
    "axes.labelsize": SIZE,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": SIZE,
    "figure.constrained_layout.use": True,
    "figure.facecolor": "white",
    "grid.alpha": 0.3,
    "legend.fontsize": SIZE - 1,
    "legend.frameon": False,
    "xtick.labelsize": SIZE - 1,
    "ytick.labelsize": SIZE - 1,
}


@contextlib.contextmanager
def _drawn(path: Path, height: float, rows: int, columns: int, **shared: Any) -> Iterator[Any]:
    """Offer panels, and write them above one legend: the same small file for the same numbers."""
    image = optional_import("PIL.Image", "benchmarks")
    matplotlib = optional_import("matplotlib", "benchmarks")
    make = optional_import("matplotlib.figure", "benchmarks").Figure
    with matplotlib.rc_context(STYLE), io.BytesIO() as file:
        figure = make(figsize=(WIDTH, height))
        panels = figure.subplots(rows, columns, squeeze=False, **shared)
        yield panels
        shown: dict[str, Any] = {}
        for panel in panels.flat:
            for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
                shown.setdefault(label, handle)
        figure.legend(shown.values(), shown, loc="outside lower center", ncols=2)
        figure.savefig(file, dpi=DPI)
        path.parent.mkdir(parents=True, exist_ok=True)
        image.open(file).convert("RGB").quantize(COLOURS).save(path, optimize=True)


def _look(method: str) -> dict[str, Any]:
    title, colour, marker = formats.METHODS[method]
    return {"color": colour, "marker": marker, "label": title.replace("`", "")}


def over_training(results: Results, path: Path, what: str, label: str) -> None:
    """Draw a property of runs against updates: a row a task, a column a cell, a line a method."""
    tasks, cells = results.tasks, results.cells
    methods = [method for method in results.methods if method not in SIMILAR]
    sizes = 1.5 * len(tasks) + 1.7, len(tasks), len(cells)
    with _drawn(path, *sizes, sharey="row") as panels:
        for row, task in zip(panels, tasks, strict=True):
            for panel, cell in zip(row, cells, strict=True):
                for method in methods:
                    run = results.find(task, cell, method)
                    found = [] if run is None else getattr(run, what)
                    if found:
                        look = {"markersize": 3, "linewidth": 1, **_look(method)}
                        panel.plot(*zip(*found, strict=True), **look)
                panel.set_title(f"{task}, {formats.cell(cell)}")
            row[0].set_ylabel(label)
        for panel in panels[-1]:
            panel.set_xlabel("updates")


PRICES = {"step_seconds": "time, BPTT is 1", "peak_bytes": "temporary memory, BPTT is 1"}


def pareto(results: Results, path: Path) -> None:
    """Draw the relative gain over the cost, in the median over tasks.

    A line connects the worst and the best task.
    """
    cells = results.cells
    sizes = 2.7 * len(PRICES) + 2.0, len(PRICES), len(cells)
    with _drawn(path, *sizes, sharey=True, sharex="row") as panels:
        for row, (what, label) in zip(panels, PRICES.items(), strict=True):
            for panel, cell in zip(row, cells, strict=True):
                for method in results.methods:
                    places = [(task, cell, method) for task in results.tasks]
                    found = [(results.gain(*p), results.relative_cost(*p, what)) for p in places]
                    known = [(gain, price) for gain, price in found if None not in (gain, price)]
                    if known:
                        parts, prices = zip(*known, strict=True)
                        at, middle = statistics.median(prices), statistics.median(parts)
                        look = _look(method)
                        ends = [min(parts), max(parts)]
                        panel.plot([at, at], ends, color=look["color"], alpha=0.35)
                        panel.plot(at, middle, linestyle="none", markersize=6, **look)
                panel.axvline(1, color="black", linewidth=0.5, linestyle=":")
                _write_ratios(panel)
                panel.set_title(formats.cell(cell))
                panel.set_xlabel(label)
            row[0].set_ylabel("relative gain")


def _write_ratios(panel: Any) -> None:
    """Write ratios as numbers, not as powers of ten."""
    ticker = optional_import("matplotlib.ticker", "benchmarks")
    panel.set_xscale("log")
    panel.xaxis.set_major_locator(ticker.LogLocator(base=10, subs=(1, 3), numticks=12))
    panel.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    panel.xaxis.set_minor_locator(ticker.NullLocator())


def windows(results: Results, path: Path) -> None:
    """Draw the relative gain over memory: a line per rule, a point per length of a window.

    Points are medians over the pairs of task and cell that have all points.
    """
    needed = {name for names in FAMILIES.values() for name in names}
    pairs = [pair for pair in results.pairs() if all(results.find(*pair, name) for name in needed)]
    with _drawn(path, 3.4, 1, 1) as ((panel,),):
        for family, methods in FAMILIES.items():
            points = []
            for method in methods if pairs else ():
                places = [(*pair, method) for pair in pairs]
                gains = [results.gain(*place) or 0.0 for place in places]
                memory = [
                    results.relative_cost(*place, "peak_bytes", "trace_bytes") or 0.0
                    for place in places
                ]
                points.append((statistics.median(memory), statistics.median(gains)))
            if points:
                panel.plot(*zip(*points, strict=True), markersize=5, **_look(family))
        _write_ratios(panel)
        panel.set_title(f"windows from none to the whole sequence, {len(pairs)} pairs")
        panel.set_xlabel("temporary memory and traces, BPTT is 1")
        panel.set_ylabel("relative gain")
