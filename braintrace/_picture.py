"""Picture of a compiled model, drawn by Matplotlib.

Nodes are arguments, weights, hidden groups, other states, and the output. They are placed in
layers, from left to right, as in the method of Sugiyama: a node is one layer to the right of all
that it depends on, and each layer is sorted by the mean place of the neighbours of its nodes.
"""

import itertools
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ._checks import path_name
from ._errors import optional_import
from ._etrace_op.registry import is_marked
from ._graph.graph import ETraceGraph, report_of
from ._graph.hidden_group import HiddenGroup
from ._graph.report import Diagnostic
from ._graph.traced_model import FILTERS, StateLeaf
from ._jax import Atom, Var, is_var, source_line
from ._jaxpr.primitives import PRODUCTS
from ._tables import in_bytes

Point = tuple[float, float]

RED, GREY = "#c62828", "#6f6f6f"
COLOURS: Mapping[str, tuple[str, str, str]] = {
    "end": ("#f4f4f4", GREY, ""),
    "weight": ("#eaf5ea", "#3a7d44", "weight with a trace"),
    "plain weight": ("#ffffff", GREY, "weight without a trace"),
    "group": ("#e6f0fa", "#2b6ca3", "hidden group"),
    "state": ("#f3ecf8", "#7a4fa3", "state of no group"),
}
"""Colours of the inside and the edge of a box, and its name in the legend."""
# Lengths are in points.
FONT, LINE, PAD, GAP, BETWEEN, MARGIN = 9.0, 14.0, 7.0, 16.0, 44.0, 14.0


class _Node(NamedTuple):
    kind: str  # a key of COLOURS
    lines: Sequence[str]  # of a group, one for each state
    is_cut: bool = False  # a diagnostic warns about it

    @property
    def size(self) -> Point:
        return 0.6 * FONT * max(map(len, self.lines)) + 2 * PAD, len(self.lines) * LINE + PAD


class _Arrow(NamedTuple):
    source: str
    target: str
    is_past: bool = False  # reads the values from before the step


class _Origin(NamedTuple):
    """A direct origin of a value: an argument, a state, a parameter, or a use of a weight."""

    node: str
    name: str = ""  # of the state
    is_past: bool = False
    use: int | None = None  # index of the equation


class _Site(NamedTuple):
    """A value with its direct origins: of a state, of the output, or the data of a weight."""

    node: str
    origins: frozenset[_Origin]
    use: int | None = None  # index of the equation that combines weights with data
    source: str | None = None  # line of the user's code


class _Reader:
    """The parts of a compiled model.

    Attributes
    ----------
    groups, weights
        Hidden groups, and names of parameters, by node.
    others
        States of no group.
    boxes
        The node of each state, by its name.
    keys
        The key of each use of weights in the report, by equation.
    sites
        The sites of a step.
    """

    def __init__(self, graph: ETraceGraph) -> None:
        self.graph, self.weights = graph, dict[str, set[str]]()
        self.groups = {f"group {group.index}": group for group in graph.hidden_groups}
        self.boxes = {s.name: box for box, group in self.groups.items() for s in group.states}
        self.others = [
            leaf
            for leaf in graph.traced.leaves
            if leaf.kind in ("hidden", "other") and leaf.out_var is not None
            if leaf.path[0] != FILTERS and leaf.name not in self.boxes
        ]
        self.boxes |= {leaf.name: f"state {leaf.name}" for leaf in self.others}
        uses: Any = [*graph.hidden_param_op_relations, *getattr(graph.flat_state, "uses", ())]
        self.keys = {use.equation: use.key for use in uses}
        self.sites = list(self._find_sites())

    def _find_sites(self) -> Iterator[_Site]:
        traced, program = self.graph.traced, self.graph.traced.program
        origins: dict[Var, list[_Origin]] = {}
        for leaf in traced.leaves:
            if leaf.kind == "parameter":
                name = path_name(leaf.path)
                self.weights[f"weight {name}"] = {name}
                origins[leaf.in_var] = [_Origin(f"weight {name}")]
            elif leaf.name in self.boxes:
                origins[leaf.in_var] = [_Origin(self.boxes[leaf.name], leaf.name, is_past=True)]
        for var, name in zip(traced.argument_vars, traced.argument_names, strict=True):
            origins[var] = [_Origin(f"argument {_root(name)}")]
        groups = self.graph.hidden_groups
        pairs = [pair for g in groups for pair in zip(g.states, g.new_vars, strict=True)]
        news = [*dict.fromkeys(pairs), *((s, s.out_var) for s in self.others if is_var(s.out_var))]
        for leaf, var in news:
            if var in program.producer:
                origins.setdefault(var, []).append(_Origin(self.boxes[leaf.name], leaf.name))

        def behind(atoms: Iterable[Atom]) -> frozenset[_Origin]:
            reached = program.depends_on(atoms, origins)
            return frozenset(o for var in reached for o in origins.get(var, ()))

        made = dict[Var, frozenset[_Origin]]()
        for index, equation in enumerate(program.equations):
            if not (is_marked(equation) or equation.primitive.name in PRODUCTS):
                continue
            names, data = set[str](), frozenset[_Origin]()
            for each in (behind([atom]) for atom in equation.invars):
                if all(o.node in self.weights and o.use is None for o in each):
                    names.update(*(self.weights[o.node] for o in each))
                else:
                    data |= each
            if names and (data or index in self.keys):
                node = f"weight {', '.join(sorted(names))}"
                self.weights[node] = names
                yield _Site(node, data, index, source_line(equation))
                for var in equation.outvars:
                    made[var] = frozenset({_Origin(node, use=index)})
                    origins.setdefault(var, [*made[var]])
        for leaf, var in news:
            producer = program.producer.get(var)
            atoms = [var] if producer is None else program.equations[producer].invars
            yield _Site(self.boxes[leaf.name], made.get(var) or behind(atoms))
        yield _Site("output", behind(traced.output_atoms))

    def nodes(self) -> dict[str, _Node]:
        roots = map(_root, self.graph.traced.argument_names)
        nodes = {f"argument {name}": _Node("end", [name]) for name in roots}
        nodes |= {node: self._weight(node, names) for node, names in self.weights.items()}
        nodes |= {n: _Node("group", _lines(g.hidden_states)) for n, g in self.groups.items()}
        for leaf in self.others:
            node = _Node("state", _lines([leaf]), self._is_warned({leaf.name}))
            nodes[self.boxes[leaf.name]] = node
        return {**nodes, "output": _Node("end", ["output"])}

    def _weight(self, node: str, names: set[str]) -> _Node:
        uses = {self.keys.get(site.use) for site in self.sites if site.node == node}
        rows = [
            row
            for row in report_of(self.graph).relations
            if row.key in uses
            or (row.operation == "any" and row.parameters[0].partition("#")[0] in names)
        ]
        if rows:
            size = sum(row.stored_bytes for row in rows)
            return _Node("weight", [*sorted(names), in_bytes(size) if size else "no trace needed"])
        return _Node("plain weight", [*sorted(names), "no trace"], self._is_warned(names))

    def _is_warned(self, names: set[str]) -> bool:
        warnings = [d for d in self.graph.diagnostics if d.level == "warning"]
        return any(not names.isdisjoint(d.paths) for d in warnings)

    def arrows(self) -> dict[_Arrow, bool]:
        """Return for each arrow whether its path is truncated."""
        arrows = dict[_Arrow, bool]()
        pairs = [(o, site) for site in self.sites for o in sorted(site.origins, key=str)]
        for origin, site in pairs:
            arrow, is_cut = _Arrow(origin.node, site.node, origin.is_past), False
            own = self.groups.get(site.node)
            if origin.name:
                is_cut = self._cuts_state(origin.name, site)
                is_memory = origin.is_past and (is_cut or own is None or own.transition)
                if origin.node == site.node and not is_memory:
                    continue
            elif own is not None and origin.node in self.weights:
                is_cut = self._cuts_weight(self.weights[origin.node], own)
            arrows[arrow] = is_cut or arrows.get(arrow, False)
        return arrows

    def _diagnostics(self, *kinds: str) -> list[Diagnostic]:
        return [d for d in self.graph.diagnostics if d.kind in kinds]

    def _cuts_weight(self, names: set[str], group: HiddenGroup) -> bool:
        states = {state.name for state in group.states}
        cuts = self._diagnostics("truncated", "nonlinear-gradient")
        return any(states <= set(d.paths) and not names.isdisjoint(d.paths) for d in cuts)

    def _cuts_state(self, state: str, site: _Site) -> bool:
        """Test whether the path from a state to a site, and on to its groups, is truncated."""
        # Its paths are sources and the states of the group, which may be among them.
        driven = [self.groups[box].hidden_states for box in self._driven(site) & self.groups.keys()]
        wanted = [Counter([state, *(own.name for own in leaves)]) for leaves in driven]
        lines = {other.source for other in self.sites}

        def is_here(cut: Diagnostic) -> bool:
            fits = cut.source not in lines if site.use is None else cut.source == site.source
            return (cut.source is None or fits) and any(Counter(cut.paths) >= w for w in wanted)

        return any(map(is_here, self._diagnostics("truncated")))

    def _driven(self, site: _Site) -> set[str]:
        """Return the nodes of states that a site drives."""
        if site.use is None:
            return {site.node}
        later = [o for o in self.sites if any(origin.use == site.use for origin in o.origins)]
        return set[str]().union(*map(self._driven, later))


def _lines(leaves: Iterable[StateLeaf]) -> list[str]:
    return [f"{leaf.name}  {leaf.shape}" for leaf in leaves if leaf.path[0] != FILTERS]


def _root(argument: str) -> str:
    """Return the argument of a leaf such as ``x['a'][0]``."""
    return argument.partition("[")[0].partition(".")[0]


def _layout(sizes: Mapping[str, Point], arrows: Collection[_Arrow]) -> dict[str, Point]:
    """Return the centres of nodes."""
    # Paths within a step have no cycle.
    after = {n: [a.target for a in arrows if a.source == n and not a.is_past] for n in sizes}
    before = {name: [s for s in sizes if name in after[s]] for name in sizes}
    layer = dict.fromkeys(sizes, 0)
    for _ in sizes:
        layer |= {n: 1 + max(layer[s] for s in before[n]) for n in sizes if before[n]}
    for name in sizes:
        if not before[name]:
            layer[name] = min([layer[t] - 1 for t in after[name]], default=0)
    rows = [[n for n in sizes if layer[n] == i] for i in range(max(layer.values(), default=0) + 1)]
    place = {name: (i + 0.5) / len(row) for row in rows for i, name in enumerate(row)}
    for near, row in [*itertools.product((before, after), rows)] * 4:
        row.sort(key=lambda n: statistics.mean(place[m] for m in near[n] or [n]))
        place |= {name: (i + 0.5) / len(row) for i, name in enumerate(row)}
    centres, left = dict[str, Point](), 0.0
    for row in filter(None, rows):
        width, top = max(sizes[n][0] for n in row), sum(sizes[n][1] + GAP for n in row) / 2
        for name in row:
            centres[name] = left + width / 2, top - (sizes[name][1] + GAP) / 2
            top -= sizes[name][1] + GAP
        left += width + BETWEEN
    return centres


def _bend(start: Point, end: Point) -> float:
    """Return the bend of an arrow: short forward ones are straight, all others pass aside."""
    distance, sign = end[0] - start[0], 1 if end[0] < start[0] and end[1] > start[1] else -1
    height = BETWEEN if distance < 0 else 0.2 * max(0.0, distance - 4 * BETWEEN)
    return 2 * sign * min(height, BETWEEN) / (abs(distance) or 1.0)


def draw_model(graph: ETraceGraph, title: str, ax: Any = None) -> Any:
    """Draw a compiled model, and return the axes; ``ax=None`` makes a figure of the right size."""
    pyplot = optional_import("matplotlib.pyplot", "examples")
    patches = optional_import("matplotlib.patches", "examples")
    reader = _Reader(graph)
    arrows, nodes = reader.arrows(), reader.nodes()
    ends = {end for a in arrows if a.source != a.target for end in a[:2]} | reader.groups.keys()
    nodes = {key: node for key, node in nodes.items() if key in ends}
    arrows = {arrow: is_cut for arrow, is_cut in arrows.items() if arrow.source in nodes}
    sizes = {key: node.size for key, node in nodes.items()}
    centres = _layout(sizes, [arrow for arrow in arrows if arrow.source != arrow.target])
    middles, halves = np.array([centres[key] for key in sizes]), np.array([*sizes.values()]) / 2
    (left, bottom), (right, top) = (middles - halves).min(0), (middles + halves).max(0)
    # Room for arrows that pass above or below, for the title and the legend.
    left, right, bottom, top = left - MARGIN, right + MARGIN, bottom - 60, top + 50
    size = np.array([right - left, top - bottom])
    if ax is None:
        ax = pyplot.figure(figsize=size / 72, layout="none").add_axes((0, 0, 1, 1))
    available = 72 * ax.figure.get_size_inches() * ax.get_position().size
    scale = float(min(available / size))
    ax.set(xlim=(left, right), ylim=(bottom, top), aspect="equal")
    ax.set_axis_off()
    ax.set_title(title, fontsize=1.1 * FONT * scale, y=1 - 20 / size[1])
    boxes = {key: _draw_node(ax, key, nodes[key], centres[key], scale) for key in nodes}
    for arrow, is_cut in arrows.items():
        start, end = centres[arrow.source], centres[arrow.target]
        look = {**_style(arrow.is_past, is_cut, scale), "mutation_scale": 9 * scale}
        joined: dict[str, Any] = {"patchA": boxes[arrow.source], "patchB": boxes[arrow.target]}
        bend, name = _bend(start, end), f"{arrow.source} -> {arrow.target}"
        if arrow.source == arrow.target:  # a loop above the node
            x, above = start[0], boxes[arrow.source].get_bbox().y1
            start, end, joined, bend = (x + PAD, above), (x - PAD, above), {}, 1.5
        look |= {"arrowstyle": "-|>", "connectionstyle": f"arc3,rad={bend}", "zorder": 0.5}
        look |= {"shrinkA": 0, "shrinkB": 0, "gid": name}
        ax.add_patch(patches.FancyArrowPatch(start, end, **joined, **look))
    _draw_legend(ax, {node.kind for node in nodes.values()}, scale)
    return ax


def _draw_node(ax: Any, key: str, node: _Node, centre: Point, scale: float) -> Any:
    patches = optional_import("matplotlib.patches", "examples")
    inside, edge, _ = COLOURS[node.kind]
    corner = np.subtract(centre, np.multiply(node.size, 0.5))
    look = {"facecolor": inside, "edgecolor": RED if node.is_cut else edge, "linewidth": scale}
    look |= {"boxstyle": "round,pad=0,rounding_size=4", "gid": f"node {key}"}
    box = ax.add_patch(patches.FancyBboxPatch(corner, *node.size, **look))
    colour = RED if node.is_cut else GREY if node.kind == "plain weight" else "black"
    style = {"color": colour, "fontsize": FONT * scale, "linespacing": 1.35}
    style |= {"ha": "center", "va": "center", "parse_math": False}
    ax.text(*centre, "\n".join(node.lines), **style)
    return box


def _style(is_past: bool, is_cut: bool, scale: float) -> dict[str, Any]:
    line = (0, (4, 2)) if is_past else "solid"
    return {"color": RED if is_cut else "black", "linestyle": line, "linewidth": 0.9 * scale}


def _draw_legend(ax: Any, kinds: Collection[str], scale: float) -> None:
    patch = optional_import("matplotlib.patches", "examples").Patch
    line = optional_import("matplotlib.lines", "examples").Line2D
    known = [look for kind, look in COLOURS.items() if kind in kinds and look[2]]
    handles = [patch(facecolor=inside, edgecolor=edge, label=said) for inside, edge, said in known]
    handles.append(line([], [], label="from before the step", **_style(True, False, scale)))
    handles.append(line([], [], label="truncated path", **_style(False, True, scale)))
    size = {"fontsize": 0.85 * FONT * scale, "handlelength": 1.6, "columnspacing": 1.2}
    ax.legend(handles=handles, loc="lower center", ncols=len(handles), frameon=False, **size)
