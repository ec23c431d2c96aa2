"""Drawing of a compiled model with Matplotlib."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from .._algorithms import ETraceAlgorithm
from .._core.traces import size_in_bytes
from .._errors import optional_import
from .layers import BETWEEN_LAYERS, Layout, Point, Size, layout_of
from .model_picture import picture_of
from .parts import Arrow, Kind, Node, Picture, in_bytes

RED = "#c62828"
GREY = "#6f6f6f"
_COLOURS: Mapping[Kind, tuple[str, str]] = {
    "argument": ("#f4f4f4", GREY),
    "output": ("#f4f4f4", GREY),
    "group": ("#e6f0fa", "#2b6ca3"),
    "state": ("#f3ecf8", "#7a4fa3"),
    "weight": ("#eaf5ea", "#3a7d44"),
    "plain weight": ("#ffffff", GREY),
}
"""Colours of the inside and the edge of a box; the edge is red if a path is truncated."""
_SAID: Mapping[Kind, str] = {
    "weight": "weight with a trace",
    "plain weight": "weight without a trace",
    "group": "hidden group",
    "state": "state of no group",
}
# Lengths are in points.
_FONT = 9.0
_LINE = 14.0
_PAD = 7.0
_MARGIN = 14.0
_HEAD = 22.0
_LEGEND = 26.0
_LOOP = 18.0
_BESIDE = 12.0


def draw_model(algorithm: ETraceAlgorithm, ax: Any = None) -> Any:
    """Draw a compiled model, and return the axes.

    Parameters
    ----------
    algorithm
        The algorithm with its model.
    ax
        Matplotlib axes to draw in; ``None``: new axes in a figure of the picture's size.
    """
    pyplot = optional_import("matplotlib.pyplot", "examples")
    picture = picture_of(algorithm.graph)
    sizes = {node.key: _size(node) for node in picture.nodes}
    layout = layout_of(sizes, picture.arrows)
    back = [arrow for arrow in picture.arrows if (arrow.source, arrow.target) in layout.back]
    sources = [arrow.source for arrow in back]
    turns = {arrow: 1 + sources[:i].count(arrow.source) for i, arrow in enumerate(back)}
    routes = {arrow: _route(arrow, layout, sizes, turns.get(arrow)) for arrow in picture.arrows}
    left, right, bottom, top = _extent(layout, sizes, [p for r in routes.values() for p in r])
    if ax is None:
        size = ((right - left) / 72, (top - bottom) / 72)
        ax = pyplot.figure(figsize=size, layout="none").add_axes((0, 0, 1, 1))
    scale = _scale(ax, right - left, top - bottom)
    ax.set(xlim=(left, right), ylim=(bottom, top), aspect="equal")
    ax.axis("off")
    carried = in_bytes(size_in_bytes(algorithm.compiled.trace_specs))
    title = f"{type(algorithm).__name__}, {carried} of traces"
    ax.set_title(title, fontsize=1.1 * _FONT * scale, y=1 - 20 / (top - bottom))
    for arrow, route in routes.items():
        _draw_arrow(ax, arrow, route, scale)
    for node in picture.nodes:
        _draw_node(ax, node, layout.centres[node.key], sizes[node.key], scale)
    _draw_legend(ax, picture, scale)
    return ax


def _size(node: Node) -> Size:
    """Return the width and height of a box with its text."""
    paths = optional_import("matplotlib.textpath", "examples")
    width = max(paths.TextPath((0, 0), line, size=_FONT).get_extents().width for line in node.lines)
    inside = 2 * _PAD if node.kind == "group" else 0.0  # the boxes of the states
    return width + 2 * _PAD + inside, len(node.lines) * _line(node) + _PAD


def _line(node: Node) -> float:
    return _LINE + 4.0 if node.kind == "group" else _LINE


def _route(
    arrow: Arrow, layout: Layout, sizes: Mapping[str, Size], turn: int | None
) -> tuple[Point, ...]:
    """Return the points of an arrow's Bézier curves: an end, two control points, an end, and so on.

    Backward arrows of a node are counted by ``turn``; ``None``: a forward arrow.
    """
    (x, y), (x_end, y_end) = layout.centres[arrow.source], layout.centres[arrow.target]
    width, height = sizes[arrow.source]
    if arrow.source == arrow.target:
        top, side = y + height / 2, width / 6
        shift = 2 * side if arrow.level else 0.0
        return (
            (x + shift - side, top),
            (x + shift - 2 * side, top + _LOOP),
            (x + shift, top + _LOOP),
            (x + shift - side / 4, top),
        )
    if turn is not None:
        return _back(layout, sizes, arrow, turn)
    points = [
        (x + width / 2, y),
        *layout.passes[arrow.source, arrow.target],
        (x_end - sizes[arrow.target][0] / 2, y_end),
    ]
    route = [points[0]]
    for (left, below), (right, above) in itertools.pairwise(points):
        middle = (left + right) / 2
        route += [(middle, below), (middle, above), (right, above)]
    return tuple(route)


def _back(layout: Layout, sizes: Mapping[str, Size], arrow: Arrow, turn: int) -> tuple[Point, ...]:
    """Return the points of a backward arrow, below all nodes and then to the left of its target."""
    (x, y), (x_end, y_end) = layout.centres[arrow.source], layout.centres[arrow.target]
    start, left = y - sizes[arrow.source][1] / 2, x_end - sizes[arrow.target][0] / 2
    passed = [n for n, (across, _) in layout.centres.items() if x_end <= across <= x]
    lowest = min(layout.centres[name][1] - sizes[name][1] / 2 for name in passed)
    level, before = lowest - _BESIDE * turn, left - BETWEEN_LAYERS
    down = ((x, start), (x, level), ((x + left) / 2, level), (left, level))
    return (*down, (before, level), (before, y_end), (left, y_end))


def _extent(
    layout: Layout, sizes: Mapping[str, Size], points: Sequence[Point]
) -> tuple[float, float, float, float]:
    """Return the left, right, lower and upper end of the picture, with margins."""
    corners = [
        (x + side * sizes[name][0] / 2, y + side * sizes[name][1] / 2)
        for name, (x, y) in layout.centres.items()
        for side in (-1, 1)
    ]
    xs, ys = zip(*corners, *points, strict=True)
    bottom, top = min(ys) - _MARGIN - _LEGEND, max(ys) + _MARGIN + _HEAD
    return min(xs) - _MARGIN, max(xs) + _MARGIN, bottom, top


def _scale(ax: Any, width: float, height: float) -> float:
    """Return the number of points in one unit of the axes."""
    box = ax.get_position()
    across, up = ax.figure.get_size_inches()
    return float(min(72 * across * box.width / width, 72 * up * box.height / height))


def _draw_node(ax: Any, node: Node, centre: Point, size: Size, scale: float) -> None:
    (x, y), (width, height) = centre, size
    inside, edge = _COLOURS[node.kind]
    colour = RED if node.level else edge
    ax.add_patch(_box(centre, size, inside, colour, scale, f"node {node.key}"))
    for number, line in enumerate(node.lines):
        at = y + height / 2 - _PAD / 2 - (number + 0.5) * _line(node)
        if node.kind == "group":
            state = (width - 2 * _PAD, _LINE)
            ax.add_patch(_box((x, at), state, "white", edge, 0.6 * scale, f"state {line}"))
        text = RED if node.level else GREY if node.kind == "plain weight" else "black"
        style = {"color": text, "fontsize": _FONT * scale, "parse_math": False}
        ax.text(x, at, line, ha="center", va="center_baseline", gid=f"text {node.key}", **style)


def _box(centre: Point, size: Size, inside: str, edge: str, scale: float, name: str) -> Any:
    patches = optional_import("matplotlib.patches", "examples")
    corner = centre[0] - size[0] / 2, centre[1] - size[1] / 2
    style = {"boxstyle": "round,pad=0,rounding_size=4", "linewidth": scale, "gid": name}
    return patches.FancyBboxPatch(corner, *size, facecolor=inside, edgecolor=edge, **style)


def _draw_arrow(ax: Any, arrow: Arrow, route: Sequence[Point], scale: float) -> None:
    patches = optional_import("matplotlib.patches", "examples")
    paths = optional_import("matplotlib.path", "examples")
    codes = [paths.Path.MOVETO, *[paths.Path.CURVE4] * (len(route) - 1)]
    ax.add_patch(
        patches.FancyArrowPatch(
            path=paths.Path(route, codes),
            arrowstyle="-|>",
            mutation_scale=9 * scale,
            shrinkA=0,
            shrinkB=0,
            gid=f"{arrow.source} -> {arrow.target}",
            **_line_style(arrow, scale),
        )
    )


def _line_style(arrow: Arrow, scale: float) -> dict[str, Any]:
    return {
        "color": RED if arrow.level else "black",
        "linestyle": (0, (4, 2)) if arrow.is_past else "solid",
        "linewidth": (1.6 if arrow.level == "warning" else 0.9) * scale,
    }


def _draw_legend(ax: Any, picture: Picture, scale: float) -> None:
    """Draw a legend for the boxes and lines that occur."""
    patches = optional_import("matplotlib.patches", "examples")
    lines = optional_import("matplotlib.lines", "examples")
    kinds = {node.kind for node in picture.nodes}
    handles = [
        patches.Patch(facecolor=_COLOURS[kind][0], edgecolor=_COLOURS[kind][1], label=said)
        for kind, said in _SAID.items()
        if kind in kinds
    ]
    levels = [arrow.level for arrow in picture.arrows] + [node.level for node in picture.nodes]
    samples = {
        "from before the step": (
            Arrow("", "", is_past=True),
            any(a.is_past for a in picture.arrows),
        ),
        "truncated path": (Arrow("", "", level="info"), any(levels)),
    }
    handles += [
        lines.Line2D([], [], label=said, **_line_style(arrow, scale))
        for said, (arrow, occurs) in samples.items()
        if occurs
    ]
    ax.legend(
        handles=handles,
        loc="lower center",
        ncols=len(handles),
        frameon=False,
        fontsize=0.85 * _FONT * scale,
        borderaxespad=0.2,
        handlelength=1.6,
        columnspacing=1.2,
    )
