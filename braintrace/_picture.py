"""Picture of a compiled model, drawn by Matplotlib.

Nodes are arguments, weights, hidden groups, other states, and the output. They are placed in
layers, from left to right, as in the method of Sugiyama: a node is one layer to the right of all
that it depends on, and each layer is sorted by the mean place of the neighbours of its nodes.
"""

import itertools
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from ._algorithms import ETraceAlgorithm
from ._core.traces import size_in_bytes
from ._errors import optional_import
from ._etrace_op.registry import is_marked
from ._graph import FILTERS, Diagnostic, ETraceGraph, HiddenGroup, StateLeaf, report_of
from ._jax import Atom, Var, is_var, source_line
from ._jaxpr import reached
from ._jaxpr.dataflow import PRODUCTS
from ._tables import in_bytes
from ._typing import path_name

Kind = Literal["end", "weight", "plain weight", "group", "state"]
Point = tuple[float, float]

RED, GREY = "#c62828", "#6f6f6f"
COLOURS: Mapping[Kind, tuple[str, str, str]] = {
    "end": ("#f4f4f4", GREY, ""),
    "weight": ("#eaf5ea", "#3a7d44", "weight with a trace"),
    "plain weight": ("#ffffff", GREY, "weight without a trace"),
    "group": ("#e6f0fa", "#2b6ca3", "hidden group"),
    "state": ("#f3ecf8", "#7a4fa3", "state of no group"),
}
"""Colours of the inside and the edge of a box, and its name in the legend."""
LEVELS = (None, "info", "warning")
# Lengths are in points.
FONT, LINE, PAD, GAP, BETWEEN, MARGIN, LOOP = 9.0, 14.0, 7.0, 16.0, 44.0, 14.0, 18.0


class _Node(NamedTuple):
    kind: Kind
    lines: tuple[str, ...]  # of a group, one for each state
    level: int = 0  # index in LEVELS of the diagnostic about it

    @property
    def size(self) -> Point:
        paths = optional_import("matplotlib.textpath", "examples")
        widths = [paths.TextPath((0, 0), t, size=FONT).get_extents().width for t in self.lines]
        return max(widths) + 2 * PAD, len(self.lines) * LINE + PAD


class _Arrow(NamedTuple):
    source: str
    target: str
    is_past: bool = False  # reads the values from before the step


class _Origin(NamedTuple):
    """A direct origin of a value: an argument, a state, a parameter, or a use of a weight."""

    node: str
    names: tuple[str, ...] = ()  # of the state or the parameters
    is_past: bool = False
    use: int | None = None  # index of the equation


class _Use(NamedTuple):
    """An equation that combines weights with data."""

    origin: _Origin
    data: frozenset[_Origin]
    source: str  # line of the user's code
    key: str | None  # of its row in the report


class _Flow:
    """Direct origins of the uses of weights, the states and the outputs of a step."""

    def __init__(self, graph: ETraceGraph) -> None:
        traced, program = graph.traced, graph.traced.program
        self.groups = {f"group {group.index}": group for group in graph.hidden_groups}
        self.boxes = {s.name: box for box, group in self.groups.items() for s in group.states}
        self.others = [
            leaf
            for leaf in traced.leaves
            if leaf.kind in ("hidden", "other") and leaf.out_var is not None
            if leaf.path[0] != FILTERS and leaf.name not in self.boxes
        ]
        self.boxes |= {leaf.name: f"state {leaf.name}" for leaf in self.others}
        origins: dict[Var, list[_Origin]] = {}
        for leaf in traced.leaves:
            if leaf.kind == "parameter":
                name = path_name(leaf.path)
                origins[leaf.in_var] = [_Origin(f"weight {name}", (name,))]
            elif leaf.name in self.boxes:
                origins[leaf.in_var] = [_Origin(self.boxes[leaf.name], (leaf.name,), is_past=True)]
        for var, name in zip(traced.argument_vars, traced.argument_names, strict=True):
            origins[var] = [_Origin(f"argument {_root(name)}")]
        news = [
            pair for g in self.groups.values() for pair in zip(g.states, g.new_vars, strict=True)
        ]
        news += [(leaf, leaf.out_var) for leaf in self.others if is_var(leaf.out_var)]
        for leaf, var in news:
            if var in program.producer:
                origins.setdefault(var, []).append(_Origin(self.boxes[leaf.name], (leaf.name,)))

        def behind(atoms: Iterable[Atom]) -> frozenset[_Origin]:
            found = program.depends_on(atoms, origins)
            return frozenset(o for var in found for o in origins.get(var, ()))

        keys = {r.equation: r.key for r in graph.hidden_param_op_relations}
        if graph.flat_state is not None:
            keys |= {use.equation: use.key for use in graph.flat_state.uses if use.equation}
        self.uses: list[_Use] = []
        of_use: dict[Var, frozenset[_Origin]] = {}
        for index, equation in enumerate(program.equations):
            if not (is_marked(equation) or equation.primitive.name in PRODUCTS):
                continue
            weights, data = set[_Origin](), set[_Origin]()
            for atom in equation.invars:
                found = behind([atom])
                is_weight = all(o.node.startswith("weight") and o.use is None for o in found)
                (weights if is_weight else data).update(found)
            if weights and (data or index in keys):
                names = tuple(sorted({name for origin in weights for name in origin.names}))
                origin = _Origin(f"weight {', '.join(names)}", names, use=index)
                line = source_line(equation)
                self.uses.append(_Use(origin, frozenset(data), line, keys.get(index)))
                for var in equation.outvars:
                    of_use[var] = frozenset({origin})
                    origins.setdefault(var, [origin])
        self.targets = []
        for leaf, var in news:
            producer = program.producer.get(var)
            atoms = [var] if producer is None else program.equations[producer].invars
            self.targets.append((self.boxes[leaf.name], of_use.get(var) or behind(atoms)))
        self.targets.append(("output", behind(traced.output_atoms)))

    def driven(self, use: _Use) -> set[str]:
        """Return the boxes that a use drives, directly or through other uses."""
        found = {target for target, origins in self.targets if use.origin in origins}
        later = [self.driven(other) for other in self.uses if use.origin in other.data]
        return found.union(*later)


def _read(graph: ETraceGraph) -> tuple[dict[str, _Node], dict[_Arrow, int]]:
    """Return the nodes by name, and the arrows with the level of their diagnostics."""
    flow, found = _Flow(graph), graph.diagnostics
    arrows: dict[_Arrow, int] = {}
    used: dict[str, set[str]] = {}  # parameters of each weight
    lines = {use.source for use in flow.uses}

    def level(diagnostics: Iterable[Diagnostic]) -> int:
        return max([LEVELS.index(d.level) for d in diagnostics], default=0)

    def states_of(box: str) -> set[str]:
        return {s.name for s in flow.groups[box].states} if box in flow.groups else set()

    def of_state(name: str, box: str, use: _Use | None) -> int:
        """Return the level of truncation on the path from a state, past a line of the model."""
        group = states_of(box)
        wanted = Counter([name, *group])  # a state of the group is there twice
        cuts = [d for d in found if d.kind == "truncated" and group and Counter(d.paths) >= wanted]
        if use is None:
            return level(d for d in cuts if d.source not in lines)
        return level(d for d in cuts if d.source in (None, use.source))

    def of_weight(names: set[str], box: str) -> int:
        group, kinds = states_of(box), ("truncated", "nonlinear-gradient")
        cuts = [d for d in found if d.kind in kinds and group and group <= set(d.paths)]
        return level(d for d in cuts if not names.isdisjoint(d.paths))

    def draw(origin: _Origin, target: str, use: _Use | None) -> None:
        arrow, size = _Arrow(origin.node, target, origin.is_past), 0
        if origin.node.startswith("weight"):
            used.setdefault(origin.node, set()).update(origin.names)
            size = 0 if use else of_weight(used[origin.node], target)
        elif origin.names:
            boxes = [target] if use is None else flow.driven(use)
            size = max([of_state(origin.names[0], box, use) for box in boxes], default=0)
            group = flow.groups.get(target)
            moves = origin.is_past and (size or group is None or group.transition)
            if arrow.source == target and not moves:
                return
        arrows[arrow] = max(size, arrows.get(arrow, 0))

    for target, origins in flow.targets:
        for origin in sorted(origins, key=str):
            draw(origin, target, None)
    for use in flow.uses:
        used.setdefault(use.origin.node, set()).update(use.origin.names)
        for origin in sorted(use.data, key=str):
            draw(origin, use.origin.node, use)

    traced, nodes = graph.traced, dict[str, _Node]()
    for var, name in zip(traced.argument_vars, traced.argument_names, strict=True):
        lines_of = _root(name), str(tuple(var.aval.shape))
        nodes.setdefault(f"argument {_root(name)}", _Node("end", lines_of))
    rows = report_of(graph).relations
    for key, names in used.items():
        keys = {use.key for use in flow.uses if use.origin.node == key}
        own = [
            row
            for row in rows
            if row.key in keys
            or (row.operation == "any" and row.parameters[0].partition("#")[0] in names)
        ]
        told = sorted(names)
        told = [*told[:3], f"and {len(told) - 3} more"] if len(told) > 3 else told
        size = sum(row.stored_bytes for row in own)
        trace = "no trace" if not own else in_bytes(size) if size else "no trace needed"
        is_cut = not own and level(d for d in found if not names.isdisjoint(d.paths)) == 2
        kind: Kind = "weight" if own else "plain weight"
        nodes[key] = _Node(kind, (*told, trace), 2 if is_cut else 0)
    for key, group in flow.groups.items():
        nodes[key] = _Node("group", _lines_of(group))
    for leaf in flow.others:
        is_readout = any(leaf.name == readout.state for readout in traced.readouts)
        told = [_line_of(leaf), *(["linear readout"] if is_readout else [])]
        cut = level(d for d in found if d.kind == "untraced-state" and leaf.name in d.paths)
        nodes[flow.boxes[leaf.name]] = _Node("state", tuple(told), cut)
    nodes["output"] = _Node("end", ("output",))
    ends = {end for a in arrows if a.source != a.target for end in a[:2]} | flow.groups.keys()
    shown = {key: node for key, node in nodes.items() if key in ends}
    return shown, {a: size for a, size in arrows.items() if a.source in shown}


def _lines_of(group: HiddenGroup) -> tuple[str, ...]:
    lines = tuple(map(_line_of, group.model_states))
    filters = [state.nbytes for state in group.states if state.path[0] == FILTERS]
    return (*lines, f"{len(filters)} × filter ({in_bytes(sum(filters))})") if filters else lines


def _line_of(leaf: StateLeaf) -> str:
    return f"{leaf.name}  {leaf.shape}"


def _root(argument: str) -> str:
    """Return the argument of a leaf such as ``x['a'][0]``."""
    return argument.partition("[")[0].partition(".")[0]


def _layout(
    sizes: Mapping[str, Point], arrows: Iterable[_Arrow]
) -> tuple[dict[str, Point], dict[tuple[str, str], list[str]]]:
    """Return the centres of nodes, and the nodes on the way of each forward arrow.

    An arrow over several layers has a node without a size in each of them.
    """
    after: dict[str, list[str]] = {name: [] for name in sizes}
    for arrow in sorted(arrows, key=lambda arrow: arrow.is_past):  # paths in a step come first
        if arrow.source not in reached([arrow.target], lambda node: after[node]):
            after[arrow.source].append(arrow.target)
    layer, ways = dict.fromkeys(sizes, 0), {(s, t): [s, t] for s in after for t in after[s]}
    for _ in sizes:
        for source, target in ways:
            layer[target] = max(layer[target], layer[source] + 1)
    for name in sizes.keys() - {target for _, target in ways}:  # a node without inputs
        layer[name] = min([layer[t] - 1 for t in after[name]], default=0)
    rows: list[list[str]] = [[] for _ in range(max(layer.values(), default=0) + 1)]
    for name in sizes:
        rows[layer[name]].append(name)
    for (source, target), way in ways.items():
        way[1:1] = [f"{source} -> {target} {n}" for n in range(layer[source] + 1, layer[target])]
        for offset, name in enumerate(way[1:-1], 1):
            rows[layer[source] + offset].append(name)
    near: list[dict[str, list[str]]] = [{}, {}]
    for one, other in itertools.chain.from_iterable(map(itertools.pairwise, ways.values())):
        near[0].setdefault(other, []).append(one)
        near[1].setdefault(one, []).append(other)
    place = {name: (i + 0.5) / len(row) for row in rows for i, name in enumerate(row)}
    for sweep in range(8):
        for row in rows[:: -1 if sweep % 2 else 1]:
            by = near[sweep % 2]
            mean = {n: statistics.mean(place[m] for m in by.get(n, [n])) for n in row}
            row.sort(key=mean.__getitem__)
            place |= {name: (i + 0.5) / len(row) for i, name in enumerate(row)}
    centres, left = {}, 0.0
    for row in rows:
        boxes = [sizes.get(name, (0.0, 0.0)) for name in row]
        width, top = max(b[0] for b in boxes), sum(b[1] + GAP for b in boxes) / 2
        for name, (_, height) in zip(row, boxes, strict=True):
            centres[name] = left + width / 2, top - (height + GAP) / 2
            top -= height + GAP
        left += width + BETWEEN
    return centres, ways


def _route(
    arrow: _Arrow,
    centres: Mapping[str, Point],
    sizes: Mapping[str, Point],
    way: Sequence[str] | None,
    turn: int,
) -> list[Point]:
    """Return the points of Bézier curves; ``turn`` counts the backward arrows of a node."""
    (x, y), (width, height) = centres[arrow.source], sizes[arrow.source]
    (x_end, y_end), left = (
        centres[arrow.target],
        centres[arrow.target][0] - sizes[arrow.target][0] / 2,
    )
    if arrow.source == arrow.target:
        top, side = y + height / 2, width / 6
        return [(x - side, top), (x - 2 * side, top + LOOP), (x, top + LOOP), (x - side / 4, top)]
    if way is None:  # below all nodes, then to the left of its target
        passed = [n for n in sizes if x_end <= centres[n][0] <= x]
        level = min(centres[n][1] - sizes[n][1] / 2 for n in passed) - 12.0 * turn
        down = [(x, y - height / 2), (x, level), ((x + left) / 2, level), (left, level)]
        return [*down, (left - BETWEEN, level), (left - BETWEEN, y_end), (left, y_end)]
    points = [(x + width / 2, y), *(centres[name] for name in way[1:-1]), (left, y_end)]
    route = points[:1]
    for (x, y), (x_end, y_end) in itertools.pairwise(points):
        route += [((x + x_end) / 2, y), ((x + x_end) / 2, y_end), (x_end, y_end)]
    return route


def draw_model(algorithm: ETraceAlgorithm, ax: Any = None) -> Any:
    """Draw a compiled model, and return the axes; ``ax=None`` makes a figure of the right size."""
    pyplot = optional_import("matplotlib.pyplot", "examples")
    patches = optional_import("matplotlib.patches", "examples")
    path = optional_import("matplotlib.path", "examples").Path
    nodes, arrows = _read(algorithm.graph)
    sizes = {key: node.size for key, node in nodes.items()}
    centres, ways = _layout(sizes, [arrow for arrow in arrows if arrow.source != arrow.target])
    routes, turns = {}, Counter[str]()
    for arrow in arrows:
        way = ways.get(arrow[:2])
        turns[arrow.source] += way is None and arrow.source != arrow.target
        routes[arrow] = _route(arrow, centres, sizes, way, turns[arrow.source])
    points = [point for route in routes.values() for point in route]
    for name, (width, height) in sizes.items():
        x, y = centres[name]
        points += [(x - width / 2, y - height / 2), (x + width / 2, y + height / 2)]
    (left, bottom), (right, top) = np.min(points, 0) - MARGIN, np.max(points, 0) + MARGIN
    bottom, top = bottom - 26, top + 22  # legend and title
    width, height = right - left, top - bottom
    if ax is None:
        size = width / 72, height / 72
        ax = pyplot.figure(figsize=size, layout="none").add_axes((0, 0, 1, 1))
    box, (across, up) = ax.get_position(), ax.figure.get_size_inches()
    scale = float(min(72 * across * box.width / width, 72 * up * box.height / height))
    ax.set(xlim=(left, right), ylim=(bottom, top), aspect="equal")
    ax.axis("off")
    carried = in_bytes(size_in_bytes(algorithm.compiled.trace_specs))
    title = f"{type(algorithm).__name__}, {carried} of traces"
    ax.set_title(title, fontsize=1.1 * FONT * scale, y=1 - 20 / height)

    head = {"arrowstyle": "-|>", "mutation_scale": 9 * scale, "shrinkA": 0, "shrinkB": 0}
    for arrow, route in routes.items():
        curve = path(route, [path.MOVETO, *[path.CURVE4] * (len(route) - 1)])
        style = _style(arrow.is_past, arrows[arrow], scale)
        name = f"{arrow.source} -> {arrow.target}"
        ax.add_patch(patches.FancyArrowPatch(path=curve, gid=name, **head, **style))
    for key, node in nodes.items():
        (x, y), (width, height), (inside, edge, _) = centres[key], sizes[key], COLOURS[node.kind]
        box = patches.FancyBboxPatch(
            (x - width / 2, y - height / 2),
            width,
            height,
            boxstyle="round,pad=0,rounding_size=4",
            facecolor=inside,
            edgecolor=RED if node.level else edge,
            linewidth=scale,
            gid=f"node {key}",
        )
        ax.add_patch(box)
        colour = RED if node.level else GREY if node.kind == "plain weight" else "black"
        style = {"color": colour, "fontsize": FONT * scale, "linespacing": 1.35}
        text = "\n".join(node.lines)
        ax.text(x, y, text, ha="center", va="center", parse_math=False, **style)
    _draw_legend(ax, nodes.values(), arrows, scale)
    return ax


def _style(is_past: bool, level: int, scale: float) -> dict[str, Any]:
    return {
        "color": RED if level else "black",
        "linestyle": (0, (4, 2)) if is_past else "solid",
        "linewidth": (1.6 if level == 2 else 0.9) * scale,
    }


def _draw_legend(
    ax: Any, nodes: Collection[_Node], arrows: Mapping[_Arrow, int], scale: float
) -> None:
    patches = optional_import("matplotlib.patches", "examples")
    line = optional_import("matplotlib.lines", "examples").Line2D
    kinds = {node.kind for node in nodes}
    handles = [
        patches.Patch(facecolor=inside, edgecolor=edge, label=said)
        for kind, (inside, edge, said) in COLOURS.items()
        if kind in kinds and said
    ]
    if any(arrow.is_past for arrow in arrows):
        handles.append(line([], [], label="from before the step", **_style(True, 0, scale)))
    if any(arrows.values()) or any(node.level for node in nodes):
        handles.append(line([], [], label="truncated path", **_style(False, 1, scale)))
    size = {"fontsize": 0.85 * FONT * scale, "handlelength": 1.6, "columnspacing": 1.2}
    ax.legend(handles=handles, loc="lower center", ncols=len(handles), frameon=False, **size)
