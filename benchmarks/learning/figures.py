"""The plots of the page, narrow enough to be read on a phone."""

import io
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from braintrace._optional import optional_import

from . import words
from .findings import REFERENCE, Findings, Run, price_of
from .study import OLD, OWN, Study

LOOKS = {
    "bptt": ("black", "s"),
    "tbptt-long": ("dimgray", "D"),
    "tbptt-short": ("darkgray", "d"),
    "rtrl": ("tab:blue", "o"),
    "ostl-recurrent": ("cornflowerblue", "^"),
    "snap-1": ("tab:cyan", "<"),
    "d_rtrl": ("tab:red", "o"),
    "eprop": ("lightcoral", "+"),
    "ostl-feedforward": ("darkred", "1"),
    "bptt-feedback": ("black", "x"),
    "d_rtrl-feedback": ("tab:red", "x"),
    "rflo": ("deeppink", "x"),
    "es_d_rtrl": ("tab:orange", "o"),
    "ottt": ("gold", "P"),
    "kf_rtrl": ("tab:green", "*"),
    "uoro": ("yellowgreen", "*"),
    "immediate": ("tab:purple", "X"),
}
"""Colour and marker of a way: exact ones are blue, those of one family have one colour."""

NAMED_OTHERWISE = ("eprop", "ostl-recurrent", "ostl-feedforward", "rflo", "bptt-feedback")
"""What is not drawn over training, so that lines can be told apart: close kin of what is drawn."""

WIDTH = 5.0
DPI = 130
SIZE = 8.5
COLOURS = 256
THIN = {"linewidth": 0.8, "linestyle": ":"}


def _figure(height: float) -> Any:
    figure = optional_import("matplotlib.figure", "benchmarks").Figure
    return figure(figsize=(WIDTH, height), layout="constrained", facecolor="white")


def _look(way: str) -> dict[str, Any]:
    colour, marker = LOOKS.get(way, ("tab:brown", "."))
    return {"color": colour, "marker": marker, "label": words.plain(words.way(way))}


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


def over_training(
    findings: Findings, path: Path, points: Callable[[Run], list[tuple[int, float]]], label: str
) -> None:
    """Draw something against updates: a row a task, a column a cell, a line a way."""
    tasks, cells = findings.tasks, findings.cells
    ways = [way for way in findings.ways if way not in NAMED_OTHERWISE]
    figure = _figure(1.5 * len(tasks) + 1.7)
    panels = figure.subplots(len(tasks), len(cells), squeeze=False, sharey="row")
    for row, task in zip(panels, tasks, strict=True):
        for panel, cell in zip(row, cells, strict=True):
            for way in ways:
                run = findings.find(task, cell, way)
                found = [] if run is None else points(run)
                if found:
                    panel.plot(*zip(*found, strict=True), markersize=3, linewidth=1, **_look(way))
            _dress(panel, f"{task}, {words.cell(cell)}")
        row[0].set_ylabel(label, fontsize=SIZE)
    for panel in panels[-1]:
        panel.set_xlabel("updates", fontsize=SIZE)
    _finish(figure, panels.flat, path)


PRICES = {
    "seconds_per_step": "time, BPTT is 1",
    "peak_bytes": "temporary memory, BPTT is 1",
}


def pareto(findings: Findings, path: Path) -> None:
    """Draw the relative gain over the cost, in the median over tasks.

    A line connects the worst and the best task; a step line joins Pareto-optimal methods.
    """
    cells = findings.cells
    figure = _figure(2.7 * len(PRICES) + 2.0)
    panels = figure.subplots(len(PRICES), len(cells), squeeze=False, sharey=True, sharex="row")
    for row, (what, label) in zip(panels, PRICES.items(), strict=True):
        for panel, cell in zip(row, cells, strict=True):
            best = []
            for way in findings.ways:
                found = _kept_and_price(findings, cell, way, what)
                if found:
                    parts, prices = zip(*found, strict=True)
                    at, middle = statistics.median(prices), statistics.median(parts)
                    look = _look(way)
                    panel.plot([at, at], [min(parts), max(parts)], color=look["color"], alpha=0.35)
                    panel.plot(at, middle, linestyle="none", markersize=6, **look)
                    best.append((at, middle))
            front = _front(best)
            if front:
                panel.step(*zip(*front, strict=True), where="post", color="gray", lw=0.7, zorder=0)
            panel.set_xscale("log")
            panel.axvline(1, color="black", linewidth=0.5, linestyle=":")
            _ticks(panel)
            _dress(panel, words.cell(cell))
            panel.set_xlabel(label, fontsize=SIZE)
        row[0].set_ylabel("relative gain", fontsize=SIZE)
    _finish(figure, panels.flat, path)


def _kept_and_price(
    findings: Findings, cell: str, way: str, what: str
) -> list[tuple[float, float]]:
    found = []
    for task in findings.tasks:
        run, reference = findings.find(task, cell, way), findings.find(task, cell, REFERENCE)
        own, base = price_of(run, what), price_of(reference, what)
        part = findings.part(task, cell, way)
        if part is not None and own is not None and base:
            found.append((part, own / base))
    return found


def _front(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the Pareto-optimal points, by rising cost."""
    front: list[tuple[float, float]] = []
    for price, part in sorted(points, key=lambda point: (point[0], -point[1])):
        if not front or part > front[-1][1]:
            front.append((price, part))
    return front


def _ticks(panel: Any) -> None:
    """Write ratios as numbers, not as powers of ten."""
    ticker = optional_import("matplotlib.ticker", "benchmarks")
    panel.xaxis.set_major_locator(ticker.LogLocator(base=10, subs=(1, 3), numticks=12))
    panel.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    panel.xaxis.set_minor_locator(ticker.NullLocator())


def scores_against_price(findings: Findings, path: Path) -> None:
    """Draw the score of every task and cell against the time of a step."""
    tasks, cells = findings.tasks, findings.cells
    figure = _figure(1.6 * len(tasks) + 2.0)
    panels = figure.subplots(len(tasks), len(cells), squeeze=False, sharey="row")
    for row, task in zip(panels, tasks, strict=True):
        for panel, cell in zip(row, cells, strict=True):
            for way in findings.ways:
                run = findings.find(task, cell, way)
                own = price_of(run, "seconds_per_step")
                if run is not None and run.mean is not None and own is not None:
                    look = _look(way)
                    panel.errorbar(
                        1e6 * own, run.mean, run.spread, linestyle="none", markersize=5, **look
                    )
                    panel.axhline(run.record.settings.chance, color="gray", lw=0.6, ls=":")
            panel.set_xscale("log")
            _ticks(panel)
            _dress(panel, f"{task}, {words.cell(cell)}")
        row[0].set_ylabel("score", fontsize=SIZE)
    for panel in panels[-1]:
        panel.set_xlabel("µs a step", fontsize=SIZE)
    _finish(figure, panels.flat, path)


def kept_by_task(findings: Findings, path: Path) -> None:
    """Draw what each way keeps of the gain of backpropagation: a field a task and a cell.

    Fields are grey where backpropagation has not learned, and empty where nothing was run.
    """
    tasks, cells = findings.tasks, findings.cells
    ways = [way for way in findings.ways if way != REFERENCE]
    rows = max(1, -(-len(ways) // 2))
    figure = _figure(rows * (0.22 * len(tasks) + 0.9))
    panels = figure.subplots(rows, 2, squeeze=False, sharex=True, sharey=True)
    for panel, way in zip(panels.flat, ways, strict=False):
        for x, cell in enumerate(cells):
            for y, task in enumerate(tasks):
                if findings.find(task, cell, way) and findings.find(task, cell, REFERENCE):
                    _field(panel, x, y, findings.part(task, cell, way))
        panel.set_xlim(-0.5, len(cells) - 0.5)
        panel.set_ylim(len(tasks) - 0.5, -0.5)
        panel.set_xticks(range(len(cells)), map(words.cell, cells), rotation=90)
        panel.set_yticks(range(len(tasks)), tasks)
        panel.tick_params(labelsize=SIZE - 1.5, length=0)
        panel.spines[:].set_visible(False)
        panel.set_title(words.plain(words.way(way)), fontsize=SIZE)
    for panel in panels.flat[len(ways) :]:
        panel.set_visible(False)
    _save(figure, path)


def _field(panel: Any, x: int, y: int, part: float | None) -> None:
    """Colour one field by the part that is kept, and write it there."""
    patch = optional_import("matplotlib.patches", "benchmarks").Rectangle
    colours = optional_import("matplotlib", "benchmarks").colormaps["viridis"]
    colour = "lightgray" if part is None else colours(max(0.0, part))
    panel.add_patch(patch((x - 0.5, y - 0.5), 1, 1, facecolor=colour, edgecolor="white", lw=0.6))
    if part is not None:
        ink = "black" if part > 0.6 else "white"
        panel.text(x, y, words.digits(part), fontsize=5, color=ink, ha="center", va="center")


def online_updates(studies: list[Study], path: Path) -> None:
    """Draw the cosine to BPTT, and thinly that to RTRL, against the learning rate."""
    columns = list(dict.fromkeys(study.settings["cell"] for study in studies))
    rows = list(dict.fromkeys(study.settings["task"] for study in studies))
    figure = _figure(1.9 * len(rows) + 1.2)
    panels = figure.subplots(len(rows), len(columns), squeeze=False, sharex=True, sharey=True)
    for study in studies:
        settings = study.settings
        panel = panels[rows.index(settings["task"])][columns.index(settings["cell"])]
        every, rates = settings["every"][0], settings["rates"]
        least = min(rate for rate in rates if rate > 0)
        for rule in settings["rules"]:
            look = _look(rule)
            for measure, drawn in ((OLD, {"markersize": 3, "linewidth": 1, **look}), (OWN, THIN)):
                found = [(rate, study.mean(rule, measure, every, rate)) for rate in rates]
                shown = [(rate, value) for rate, value in found if value is not None]
                if shown:
                    panel.plot(*zip(*shown, strict=True), **{"color": look["color"], **drawn})
        panel.set_xscale("symlog", linthresh=least, linscale=0.5)
        best = study.best(every)
        if best is not None:
            panel.axvline(best, color="black", linewidth=0.5, linestyle=":")
        panel.set_xticks(rates, ["0" if rate == 0 else f"{rate:.0e}" for rate in rates])
        panel.tick_params(axis="x", labelrotation=45)
        panel.minorticks_off()
        _dress(panel, study.name)
    for row in panels:
        row[0].set_ylabel("cosine", fontsize=SIZE)
    for panel in panels[-1]:
        panel.set_xlabel("learning rate", fontsize=SIZE)
    _finish(figure, panels.flat, path)
