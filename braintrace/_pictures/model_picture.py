"""Conversion of a compiled model to the nodes and arrows of its picture."""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from .._graph import FILTERS, ETraceGraph, HiddenGroup, StateLeaf, report_of
from .._graph.diagnostics import Diagnostic, Level
from .._graph.report import RelationRow
from .dataflow import Dataflow, Origin, Use, dataflow_of, ungrouped
from .parts import Arrow, Node, Picture, in_bytes

_CUT_WEIGHTS = ("truncated", "nonlinear-gradient")
"""Kinds of diagnostics about a path from a weight that has a trace."""
_MOST_NAMES = 3
"""Maximum number of parameter names in one box."""


def picture_of(graph: ETraceGraph) -> Picture:
    """Return the picture of a compiled model."""
    return _Drawing(graph).result()


class _Drawing:
    def __init__(self, graph: ETraceGraph) -> None:
        self._graph = graph
        self._flow: Dataflow = dataflow_of(graph)
        self._boxes = {
            state.name: _box(group) for group in graph.hidden_groups for state in group.states
        }
        self._others = ungrouped(graph, self._boxes)
        self._boxes |= {leaf.name: f"state {leaf.name}" for leaf in self._others}
        self._findings = _Findings(graph)

    def result(self) -> Picture:
        """Return the nodes that have an arrow, and the arrows."""
        weights = _merged([*self._of_uses(), *self._of_loose_parameters()])
        arrows = _joined([*self._between_boxes(), *(a for w in weights for a in w.arrows)])
        nodes = [
            *self._arguments(),
            *(self._weight_node(weight) for weight in weights),
            *(self._group_node(group) for group in self._graph.hidden_groups),
            *(self._state_node(leaf) for leaf in self._others),
            Node("output", "output", ("output",)),
        ]
        ends = {end for a in arrows if a.source != a.target for end in (a.source, a.target)}
        shown = ends | {_box(group) for group in self._graph.hidden_groups}
        return Picture(
            tuple(node for node in nodes if node.key in shown),
            tuple(arrow for arrow in arrows if arrow.source in shown),
        )

    @property
    def _targets(self) -> Iterator[tuple[str, frozenset[Origin]]]:
        """Yield every box, and its origins."""
        for name, origins in self._flow.states.items():
            if name in self._boxes:
                yield self._boxes[name], origins
        yield "output", self._flow.outputs

    def _between_boxes(self) -> Iterator[Arrow]:
        """Yield the arrows without a weight."""
        for target, origins in self._targets:
            arrows = [self._from(origin, target, None) for origin in sorted(origins)]
            yield from (arrow for arrow in arrows if arrow and not _is_inside_a_step(arrow))

    def _from(self, origin: Origin, target: str, use: Use | None) -> Arrow | None:
        """Return the arrow from an argument or a state; ``None`` for other origins."""
        if origin.kind == "argument":
            return Arrow(f"argument {_root(origin.name)}", target)
        if origin.kind not in ("old", "new") or origin.name not in self._boxes:
            return None
        reached = [target] if use is None else self._reached_by(use)
        sources = [use.source] if use else self._findings.elsewhere(self._flow.uses)
        level = self._findings.about_way(origin.name, reached, sources)
        source, is_past = self._boxes[origin.name], origin.kind == "old"
        if source == target and is_past and level is None and not self._has_transition(target):
            return None
        return Arrow(source, target, is_past, level)

    def _has_transition(self, box: str) -> bool:
        own = [group for group in self._graph.hidden_groups if _box(group) == box]
        return not own or bool(own[0].transition)

    def _reached_by(self, use: Use) -> list[str]:
        """Return the boxes that a use drives, directly or through other uses."""
        origin = Origin("weight", use.key)
        found = [target for target, origins in self._targets if origin in origins]
        for later in self._flow.uses:
            if origin in later.origins:
                found += self._reached_by(later)
        return found

    def _of_uses(self) -> Iterator["_Weight"]:
        for use in self._flow.uses:
            key = f"weight {use.key}"
            arrows = [self._from(origin, key, use) for origin in sorted(use.origins)]
            ways_in = [arrow for arrow in arrows if arrow is not None]
            ways_out = self._ways_out(Origin("weight", use.key), key, use.parameters)
            yield _Weight(key, use.parameters, self._findings.rows(use), (*ways_in, *ways_out))

    def _of_loose_parameters(self) -> Iterator["_Weight"]:
        """Yield parameters that are not operands of products, such as biases."""
        every = [o for _, origins in self._targets for o in origins]
        every += [o for use in self._flow.uses for o in use.origins]
        for origin in sorted({o for o in every if o.kind == "parameter"}):
            key, own = f"weight {origin.name}", (origin.name,)
            rows = self._findings.of_parameter.get(origin.name, ())
            yield _Weight(key, own, tuple(rows), tuple(self._ways_out(origin, key, own)))

    def _ways_out(self, origin: Origin, key: str, parameters: Sequence[str]) -> Iterator[Arrow]:
        for target, origins in self._targets:
            if origin in origins:
                yield Arrow(key, target, level=self._findings.about_weight(parameters, target))
        for use in self._flow.uses:
            if origin in use.origins:
                yield Arrow(key, f"weight {use.key}")

    def _arguments(self) -> Iterator[Node]:
        traced = self._graph.traced
        for root in traced.argument_roots:
            pairs = zip(traced.argument_vars, traced.argument_names, strict=True)
            shapes = [str(tuple(var.aval.shape)) for var, name in pairs if _root(name) == root]
            yield Node(f"argument {root}", "argument", (root, *shapes[:1]))

    def _weight_node(self, weight: "_Weight") -> Node:
        names = weight.parameters
        if len(names) > _MOST_NAMES:
            names = (*names[:_MOST_NAMES], f"and {len(names) - _MOST_NAMES} more")
        if weight.rows:
            size = sum(row.stored_bytes for row in weight.rows)
            trace = in_bytes(size) if size else "no trace needed"
            return Node(weight.key, "weight", (*names, trace))
        level = self._findings.about_parameters(weight.parameters)
        return Node(weight.key, "plain weight", (*names, "no trace"), level)

    def _group_node(self, group: HiddenGroup) -> Node:
        filters = [state for state in group.states if state.path[0] == FILTERS]
        lines = tuple(map(self._line, group.model_states))
        if filters:
            size = in_bytes(sum(leaf.nbytes for leaf in filters))
            lines = (*lines, f"{len(filters)} × filter ({size})")
        return Node(_box(group), "group", lines)

    def _state_node(self, leaf: StateLeaf) -> Node:
        is_readout = any(leaf.name == r.state for r in self._graph.traced.readouts)
        lines = (self._line(leaf), *(("linear readout",) if is_readout else ()))
        return Node(self._boxes[leaf.name], "state", lines, self._findings.about_state(leaf.name))

    def _line(self, leaf: StateLeaf) -> str:
        return f"{leaf.name}  {leaf.shape}"


@dataclasses.dataclass(frozen=True)
class _Weight:
    """Parameters in one box, the rows of the report about them, and their arrows."""

    key: str
    parameters: tuple[str, ...]
    rows: tuple[RelationRow, ...]
    arrows: tuple[Arrow, ...]

    @property
    def driven(self) -> frozenset[str]:
        """Targets of the weight's arrows."""
        return frozenset(arrow.target for arrow in self.arrows if arrow.source == self.key)


class _Findings:
    """Rows of the report about weights, and diagnostics about weights and paths."""

    def __init__(self, graph: ETraceGraph) -> None:
        self._diagnostics = graph.diagnostics
        self._states = {_box(g): [state.name for state in g.states] for g in graph.hidden_groups}
        rows = report_of(graph).relations
        self._of_key = {row.key: row for row in rows}
        self.of_parameter: dict[str, list[RelationRow]] = {}
        for row in rows:
            for name in row.parameters if row.operation == "any" else ():
                of_state, _, _ = name.partition("#")  # a leaf of it, such as ``w#1``
                self.of_parameter.setdefault(of_state, []).append(row)

    def rows(self, use: Use) -> tuple[RelationRow, ...]:
        """Return the row of a use, or the rows of its parameters."""
        if use.key in self._of_key:
            return (self._of_key[use.key],)
        return tuple(row for name in use.parameters for row in self.of_parameter.get(name, ()))

    def elsewhere(self, uses: Iterable[Use]) -> list[str | None]:
        """Return the source lines that have diagnostics and no use of weights."""
        return list({found.source for found in self._diagnostics} - {use.source for use in uses})

    def about_way(
        self, state: str, boxes: Iterable[str], sources: Sequence[str | None]
    ) -> Level | None:
        """Return the level of truncation on the path from a state, past some lines of the model."""
        groups = [self._states[box] for box in boxes if box in self._states]
        return _worst(
            found
            for found in self._diagnostics
            for group in groups
            if _is_about_way(found, state, group)
            and (found.source is None or found.source in sources)
        )

    def about_weight(self, parameters: Iterable[str], box: str) -> Level | None:
        """Return the level of truncation on the path from weights that have a trace."""
        own, group = set(parameters), self._states.get(box, [])
        return _worst(
            found
            for found in self._diagnostics
            if found.kind in _CUT_WEIGHTS
            and group
            and not own.isdisjoint(found.paths)
            and set(group) <= set(found.paths)
        )

    def about_parameters(self, parameters: Iterable[str]) -> Level | None:
        """Return the level of truncation in the gradient of weights without a trace."""
        own = set(parameters)
        found = _worst(d for d in self._diagnostics if not own.isdisjoint(d.paths))
        return "warning" if found == "warning" else None

    def about_state(self, name: str) -> Level | None:
        """Return the level of truncation of a State that is not a hidden state."""
        return _worst(
            d for d in self._diagnostics if d.kind == "untraced-state" and name in d.paths
        )


def _is_about_way(found: Diagnostic, state: str, group: Sequence[str]) -> bool:
    sources = Counter(found.paths)
    sources.subtract(group)
    is_into_group = min(sources.values()) >= 0
    return found.kind == "truncated" and is_into_group and sources[state] > 0


def _worst(found: Iterable[Diagnostic]) -> Level | None:
    levels = {diagnostic.level for diagnostic in found}
    return "warning" if "warning" in levels else "info" if levels else None


def _merged(weights: Iterable[_Weight]) -> list[_Weight]:
    """Merge uses of the same parameters with the same targets."""
    found: dict[tuple[tuple[str, ...], frozenset[str]], _Weight] = {}
    other: dict[str, str] = {}
    for weight in weights:
        name = weight.parameters, weight.driven
        first = found.setdefault(name, weight)
        if first is not weight:
            rows = tuple(dict.fromkeys((*first.rows, *weight.rows)))
            arrows = (*first.arrows, *weight.arrows)
            found[name] = dataclasses.replace(first, rows=rows, arrows=arrows)
        other[weight.key] = first.key
    return [
        dataclasses.replace(weight, arrows=tuple(_between(arrow, other) for arrow in weight.arrows))
        for weight in found.values()
    ]


def _between(arrow: Arrow, other: Mapping[str, str]) -> Arrow:
    source, target = (other.get(end, end) for end in (arrow.source, arrow.target))
    return dataclasses.replace(arrow, source=source, target=target)


def _joined(arrows: Iterable[Arrow]) -> list[Arrow]:
    """Return every arrow once, with the highest level of its diagnostics."""
    rank = {None: 0, "info": 1, "warning": 2}
    found: dict[tuple[str, str, bool], Arrow] = {}
    for arrow in arrows:
        name = arrow.source, arrow.target, arrow.is_past
        if name not in found or rank[arrow.level] > rank[found[name].level]:
            found[name] = arrow
    return list(found.values())


def _is_inside_a_step(arrow: Arrow) -> bool:
    return arrow.source == arrow.target and not arrow.is_past


def _box(group: HiddenGroup) -> str:
    return f"group {group.index}"


def _root(argument: str) -> str:
    """Return the argument of a leaf such as ``x['a'][0]``."""
    return argument.partition("[")[0].partition(".")[0]
