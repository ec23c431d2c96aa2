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

from ._errors import optional_import
from ._etrace_op.registry import is_marked
from ._graph import FILTERS, Diagnostic, ETraceGraph, HiddenGroup, StateLeaf, report_of
from ._jax import Atom, Var, is_var, source_line
from ._jaxpr import PRODUCTS, reached
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
    name: str = ""  # of the state
    is_past: bool = False
    use: int | None = None  # index of the equation


class _Site(NamedTuple):
    """A value with its direct origins: of a state, of the output, or the data of a weight."""

    node: str
    origins: frozenset[_Origin]
    use: int | None = None  # index of the equation that combines weights with data
    source: str | None = None  # line of the user's code


def _read(graph: ETraceGraph) -> tuple[dict[str, _Node], dict[_Arrow, int]]:
    """Return the nodes by name, and the arrows with the level of their diagnostics."""
    traced, nodes, arrows = graph.traced, dict[str, _Node](), dict[_Arrow, int]()
    groups = {f"group {group.index}": group for group in graph.hidden_groups}
    boxes = {state.name: box for box, group in groups.items() for state in group.states}
    others = [
        leaf
        for leaf in traced.leaves
        if leaf.kind in ("hidden", "other") and leaf.out_var is not None
        if leaf.path[0] != FILTERS and leaf.name not in boxes
    ]
    boxes |= {leaf.name: f"state {leaf.name}" for leaf in others}
    sites, weights = _sites(graph, boxes, others)
    for site in sites:
        for origin in sorted(site.origins, key=str):
            arrow, level = _Arrow(origin.node, site.node, origin.is_past), 0
            if origin.name:
                level = _level_of_state(graph, sites, groups, origin.name, site)
                own = groups.get(site.node)
                is_memory = origin.is_past and (level or own is None or own.transition)
                if origin.node == site.node and not is_memory:
                    continue
            elif origin.node in weights and site.node in groups:
                level = _level_of_weight(graph, weights[origin.node], groups[site.node])
            arrows[arrow] = max(level, arrows.get(arrow, 0))

    for var, name in zip(traced.argument_vars, traced.argument_names, strict=True):
        shape = str(tuple(var.aval.shape))
        nodes.setdefault(f"argument {_root(name)}", _Node("end", (_root(name), shape)))
    rows, keys = report_of(graph).relations, _keys(graph)
    in_order = dict.fromkeys([*(site.node for site in sites if site.use is not None), *weights])
    for node in in_order:
        names = weights[node]
        uses = {keys.get(site.use) for site in sites if site.node == node}
        own_rows = [
            row
            for row in rows
            if row.key in uses
            or (row.operation == "any" and row.parameters[0].partition("#")[0] in names)
        ]
        told = sorted(names)
        told = [*told[:3], f"and {len(told) - 3} more"] if len(told) > 3 else told
        if own_rows:
            size = sum(row.stored_bytes for row in own_rows)
            told.append(in_bytes(size) if size else "no trace needed")
            nodes[node] = _Node("weight", tuple(told))
        else:
            level = _worst(d for d in graph.diagnostics if not names.isdisjoint(d.paths))
            nodes[node] = _Node("plain weight", (*told, "no trace"), 2 if level == 2 else 0)
    for node, group in groups.items():
        lines = [f"{leaf.name}  {leaf.shape}" for leaf in group.model_states]
        filters = [leaf.nbytes for leaf in group.leaves if leaf.path[0] == FILTERS]
        if filters:
            lines.append(f"{len(filters)} × filter ({in_bytes(sum(filters))})")
        nodes[node] = _Node("group", tuple(lines))
    for leaf in others:
        is_readout = any(leaf.name == readout.state for readout in traced.readouts)
        lines = [f"{leaf.name}  {leaf.shape}", *(["linear readout"] if is_readout else [])]
        cuts = [d for d in graph.diagnostics if d.kind == "untraced-state"]
        level = _worst(d for d in cuts if leaf.name in d.paths)
        nodes[boxes[leaf.name]] = _Node("state", tuple(lines), level)
    nodes["output"] = _Node("end", ("output",))
    ends = {end for a in arrows if a.source != a.target for end in a[:2]} | groups.keys()
    shown = {key: node for key, node in nodes.items() if key in ends}
    return shown, {arrow: level for arrow, level in arrows.items() if arrow.source in shown}


def _sites(
    graph: ETraceGraph, boxes: Mapping[str, str], others: Iterable[StateLeaf]
) -> tuple[list[_Site], dict[str, set[str]]]:
    """Return the sites of a step, and the parameters of the node of each weight."""
    traced, program = graph.traced, graph.traced.program
    origins: dict[Var, list[_Origin]] = {}
    weights: dict[str, set[str]] = {}
    for leaf in traced.leaves:
        if leaf.kind == "parameter":
            name = path_name(leaf.path)
            weights[f"weight {name}"] = {name}
            origins[leaf.in_var] = [_Origin(f"weight {name}")]
        elif leaf.name in boxes:
            origins[leaf.in_var] = [_Origin(boxes[leaf.name], leaf.name, is_past=True)]
    for var, name in zip(traced.argument_vars, traced.argument_names, strict=True):
        origins[var] = [_Origin(f"argument {_root(name)}")]
    pairs = (zip(g.states, g.new_vars, strict=True) for g in graph.hidden_groups)
    news = [pair for of_group in pairs for pair in dict.fromkeys(of_group)]
    news += [(leaf, leaf.out_var) for leaf in others if is_var(leaf.out_var)]
    for leaf, var in news:
        if var in program.producer:
            origins.setdefault(var, []).append(_Origin(boxes[leaf.name], leaf.name))

    def behind(atoms: Iterable[Atom]) -> frozenset[_Origin]:
        found = program.depends_on(atoms, origins)
        return frozenset(o for var in found for o in origins.get(var, ()))

    sites, keys, made = [], _keys(graph), dict[Var, frozenset[_Origin]]()
    for index, equation in enumerate(program.equations):
        if not (is_marked(equation) or equation.primitive.name in PRODUCTS):
            continue
        names, data = set[str](), set[_Origin]()
        for atom in equation.invars:
            found = behind([atom])
            if all(o.node in weights and o.use is None for o in found):
                names.update(*(weights[o.node] for o in found))
            else:
                data.update(found)
        if names and (data or index in keys):
            node = f"weight {', '.join(sorted(names))}"
            weights[node] = names
            sites.append(_Site(node, frozenset(data), index, source_line(equation)))
            for var in equation.outvars:
                made[var] = frozenset({_Origin(node, use=index)})
                origins.setdefault(var, [*made[var]])
    for leaf, var in news:
        producer = program.producer.get(var)
        atoms = [var] if producer is None else program.equations[producer].invars
        sites.append(_Site(boxes[leaf.name], made.get(var) or behind(atoms)))
    return [*sites, _Site("output", behind(traced.output_atoms))], weights


def _keys(graph: ETraceGraph) -> dict[int | None, str]:
    """Return the key of each use of weights in the report, by equation."""
    keys: dict[int | None, str] = {r.equation: r.key for r in graph.hidden_param_op_relations}
    flat = graph.flat_state
    return keys if flat is None else keys | {use.equation: use.key for use in flat.uses}


def _level_of_state(
    graph: ETraceGraph,
    sites: Sequence[_Site],
    groups: Mapping[str, HiddenGroup],
    state: str,
    site: _Site,
) -> int:
    """Return the level of truncation on the path from a state to a site, and on to its groups."""
    lines = {other.source for other in sites}

    def driven(site: _Site) -> set[str]:
        if site.use is None:
            return {site.node}
        later = [o for o in sites if any(origin.use == site.use for origin in o.origins)]
        return set[str]().union(*map(driven, later))

    # The paths of a diagnostic are sources and the states of the group, which may be among them.
    of_groups = [groups[box].leaves for box in driven(site) & groups.keys()]
    wanted = [Counter([state, *(own.name for own in states)]) for states in of_groups]
    cuts = [d for d in graph.diagnostics if d.kind == "truncated"]
    cuts = [d for d in cuts if any(Counter(d.paths) >= names for names in wanted)]
    if site.use is None:
        return _worst(d for d in cuts if d.source is None or d.source not in lines)
    return _worst(d for d in cuts if d.source in (None, site.source))


def _level_of_weight(graph: ETraceGraph, names: set[str], group: HiddenGroup) -> int:
    states = {state.name for state in group.states}
    cuts = [d for d in graph.diagnostics if d.kind in ("truncated", "nonlinear-gradient")]
    cuts = [d for d in cuts if states <= set(d.paths)]
    return _worst(d for d in cuts if not names.isdisjoint(d.paths))


def _worst(diagnostics: Iterable[Diagnostic]) -> int:
    return max([LEVELS.index(d.level) for d in diagnostics], default=0)


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


def draw_model(graph: ETraceGraph, title: str, ax: Any = None) -> Any:
    """Draw a compiled model, and return the axes; ``ax=None`` makes a figure of the right size."""
    pyplot = optional_import("matplotlib.pyplot", "examples")
    patches = optional_import("matplotlib.patches", "examples")
    path = optional_import("matplotlib.path", "examples").Path
    nodes, arrows = _read(graph)
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
