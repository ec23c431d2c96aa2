"""Layered layout of the nodes of a picture, from left to right.

A node is one layer to the right of all nodes that it depends on, except for paths through earlier
steps that would make a cycle. A path over several layers has a point in each of them. Nodes of a
layer are in the order of their neighbours, which are in the order of theirs.
"""

import dataclasses
import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence

from .._jaxpr import reached
from .parts import Arrow

GAP = 16.0
"""Minimum distance of two nodes in a layer."""
BETWEEN_LAYERS = 44.0
_SWEEPS = 8

Size = tuple[float, float]
Point = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Layout:
    """Coordinates of nodes and arrows.

    Attributes
    ----------
    centres
        Centres of the nodes.
    passes
        For each forward arrow, by its ends: its intermediate points.
    back
        Arrows to the same layer or to an earlier one, by their ends.
    """

    centres: Mapping[str, Point]
    passes: Mapping[tuple[str, str], Sequence[Point]]
    back: frozenset[tuple[str, str]]


def layout_of(sizes: Mapping[str, Size], arrows: Iterable[Arrow]) -> Layout:
    """Place nodes of given sizes, by the arrows between them."""
    between = [arrow for arrow in arrows if arrow.source != arrow.target]
    forward = _without_circles(between)
    layer = _layers(list(sizes), forward)
    ways = {way: _way(way, layer) for way in forward}
    rows = _rows(layer, ways)
    steps = [pair for way in ways.values() for pair in itertools.pairwise(way)]
    for sweep in range(_SWEEPS):
        _reorder(rows, steps, towards_the_end=sweep % 2 == 0)
    ys = _heights(rows, {name: size[1] for name, size in sizes.items()})
    xs = _columns(rows, sizes)
    places = {name: (xs[index], ys[name]) for index, row in enumerate(rows) for name in row}
    ends = {(arrow.source, arrow.target) for arrow in between}
    return Layout(
        centres={name: places[name] for name in sizes},
        passes={way: [places[name] for name in found[1:-1]] for way, found in ways.items()},
        back=frozenset(ends - ways.keys()),
    )


def _without_circles(arrows: Iterable[Arrow]) -> list[tuple[str, str]]:
    """Return the acyclic paths that determine the layers; paths within a step have priority."""
    after: dict[str, set[str]] = {}
    found = []
    for arrow in sorted(arrows, key=lambda arrow: arrow.is_past):
        way = arrow.source, arrow.target
        if way not in found and not _leads(after, arrow.target, arrow.source):
            after.setdefault(arrow.source, set()).add(arrow.target)
            found.append(way)
    return found


def _leads(after: Mapping[str, set[str]], start: str, end: str) -> bool:
    return end in reached([start], lambda node: after.get(node, ()))


def _layers(nodes: Sequence[str], ways: Sequence[tuple[str, str]]) -> dict[str, int]:
    """Return the layer of each node: its longest path; nodes without inputs move to the right."""
    layer = dict.fromkeys(nodes, 0)
    for _ in nodes:
        for source, target in ways:
            layer[target] = max(layer[target], layer[source] + 1)
    reached = {target for _, target in ways}
    for node in nodes:
        ends = [layer[target] for source, target in ways if source == node]
        if node not in reached and ends:
            layer[node] = min(ends) - 1
    return layer


def _way(way: tuple[str, str], layer: Mapping[str, int]) -> list[str]:
    """Return the nodes of a path, with one intermediate node in each layer between."""
    source, target = way
    between = range(layer[source] + 1, layer[target])
    return [source, *(f"{source} -> {target} in {index}" for index in between), target]


def _rows(
    layer: Mapping[str, int], ways: Mapping[tuple[str, str], Sequence[str]]
) -> list[list[str]]:
    rows: list[list[str]] = [[] for _ in range(max(layer.values(), default=0) + 1)]
    for node, index in layer.items():
        rows[index].append(node)
    for (source, _), way in ways.items():
        for offset, name in enumerate(way[1:-1], start=1):
            rows[layer[source] + offset].append(name)
    return rows


def _reorder(
    rows: list[list[str]], steps: Sequence[tuple[str, str]], towards_the_end: bool
) -> None:
    """Sort each layer by the mean position of each node's neighbours in the previous layer."""
    near: dict[str, list[str]] = {}
    for source, target in steps:
        one, other = (target, source) if towards_the_end else (source, target)
        near.setdefault(one, []).append(other)
    place = {name: _share(row, i) for row in rows for i, name in enumerate(row)}
    for row in rows if towards_the_end else reversed(rows):
        wanted = {name: statistics.mean(place[n] for n in near.get(name, [name])) for name in row}
        row.sort(key=wanted.__getitem__)
        place |= {name: _share(row, index) for index, name in enumerate(row)}


def _share(row: Sequence[str], index: int) -> float:
    return (index + 0.5) / len(row)


def _heights(rows: Sequence[Sequence[str]], heights: Mapping[str, float]) -> dict[str, float]:
    """Return vertical coordinates: each layer is a stack around the height zero."""
    ys = {}
    for row in rows:
        top = (sum(heights.get(name, 0.0) for name in row) + GAP * (len(row) - 1)) / 2
        for name in row:
            height = heights.get(name, 0.0)
            ys[name] = top - height / 2
            top -= height + GAP
    return ys


def _columns(rows: Sequence[Sequence[str]], sizes: Mapping[str, Size]) -> list[float]:
    """Return the horizontal centre of each layer."""
    found, left = [], 0.0
    for row in rows:
        width = max((sizes[name][0] for name in row if name in sizes), default=0.0)
        found.append(left + width / 2)
        left += width + BETWEEN_LAYERS
    return found
