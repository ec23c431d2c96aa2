"""Relations: the hidden groups and the parameters of each ETP operation, and its influence on them.

Element ``u`` of an output ``y`` reaches unit ``p(u)`` of a group, or several units by a broadcast.
The units of all elements form an array ``(fan-out, *y.shape)``; see `InfluenceMap`.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from .._graph.hidden_group import NO_OUTPUT, HiddenGroup, HiddenParamOpRelation, InfluenceMap, Tap
from .._jax import Var
from .._jaxpr.lattices import BOTTOM
from .._jaxpr.program import reached
from .analysis import Analysis
from .back_through import BROADCAST, Ids
from .hidden_groups import GroupedStep
from .walk import Walk


def find_relations(step: GroupedStep) -> list[HiddenParamOpRelation]:
    """Return the relations of a model, in program order."""
    relations = []
    for operation in (o for o in step.operations if not o.non_parameters):
        found = [
            (find_influence(step.analysis, operation.y_var, group, walks), group)
            for group, walks in zip(step.groups, step.walks, strict=True)
        ]
        reached = [(influence, group) for influence, group in found if influence is not None]
        if reached:
            influences, groups = zip(*reached, strict=True)
            relations.append(
                dataclasses.replace(operation, influences=influences, hidden_groups=groups)
            )
    return relations


@dataclasses.dataclass(frozen=True, eq=False)
class OutputPath:
    """One path from ``y`` to one state.

    Attributes
    ----------
    state, var
        See `Tap`.
    elements
        Elements of ``var`` that reach a unit of the state.
    sources, positions
        The element of ``y`` that each of these comes from, and the unit that it reaches.
    """

    state: int
    var: Var
    elements: np.ndarray
    sources: np.ndarray
    positions: np.ndarray


def find_influence(
    analysis: Analysis, y: Var, group: HiddenGroup, walks: Sequence[Walk]
) -> InfluenceMap | None:
    """Return how ``y`` reaches ``group``; ``None`` if no element of it does."""
    entries: list[OutputPath] = []
    mixed = False
    for state, walk in enumerate(walks):
        if y in walk.ids:
            origin, lost = broadcasts_of(analysis, y, walk)
            paths = output_paths(y, state, walk, origin)
            entries += paths
            mixed |= lost or not _covered(walk.ids[y], paths)
    if not entries:
        return None
    places, positions = _outputs(entries, y.aval.size)
    positions = positions.reshape(-1, *y.aval.shape)
    kind, tile = _recognise(positions, group.shape)
    reached = _reached({entry.state for entry in entries}, group)
    read = {*group.read_states, *group.read_late}
    return InfluenceMap(
        group=group.index,
        taps=tuple(
            _tap(entry, entry_outputs, positions.size)
            for entry, entry_outputs in zip(entries, places, strict=True)
        ),
        positions=positions,
        kind=kind,
        tile=tile,
        reached=reached,
        stored=tuple(a for a in reached if a in read),
        mixed=mixed,
    )


def _tap(entry: OutputPath, places: np.ndarray, size: int) -> Tap:
    outputs = np.full(entry.var.aval.size, NO_OUTPUT, np.int32)
    outputs[entry.elements] = places
    in_order = np.array_equal(outputs, np.arange(size))
    return Tap(entry.state, entry.var, None if in_order else outputs)


def broadcasts_of(analysis: Analysis, y: Var, walk: Walk) -> tuple[dict[Var, Ids], bool]:
    """Return the elementwise broadcasts of ``y``, and whether it has others."""
    if not np.any(walk.ids[y] == BROADCAST):
        return {}, False
    program = analysis.program
    last = max((program.producer[root] for root in walk.roots), default=-1)
    origin = analysis.elements_of(y, last)
    made = program.dependents_of([y], last)
    roots = [root for root in walk.roots if root in made and root in walk.ids]
    return (
        {root: origin[root] for root in roots if root in origin},
        any(root not in origin for root in roots),
    )


def output_paths(y: Var, state: int, walk: Walk, origin: Mapping[Var, Ids]) -> list[OutputPath]:
    """Return the direct path from ``y`` to a state, and a path for each broadcast."""
    ids = walk.ids[y].ravel()
    entries: list[OutputPath] = []
    direct = np.flatnonzero(ids >= 0)
    if len(direct):
        entries.append(OutputPath(state, y, direct, direct, ids[direct]))
    for root, sources in origin.items():
        reached, source = walk.ids[root].ravel(), sources.ravel()
        elements = np.flatnonzero((source != BOTTOM) & (reached >= 0))
        if len(elements):
            entries.append(OutputPath(state, root, elements, source[elements], reached[elements]))
    return entries


def _covered(ids: Ids, entries: Sequence[OutputPath]) -> bool:
    """Test whether every element that reaches the state has an output element."""
    has_output = np.zeros(ids.size, bool)
    for entry in entries:
        has_output[entry.sources] = True
    return np.array_equal(has_output, ids.ravel() != BOTTOM)


def _outputs(entries: Sequence[OutputPath], size: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Give every pair (element of y, unit) an output element.

    Returns
    -------
    places
        For each entry, the output elements of its elements.
    positions
        The unit of each output element, of shape ``(fan-out, size)``.
    """
    sources = np.concatenate([entry.sources for entry in entries])
    targets = np.concatenate([entry.positions for entry in entries])
    ends = np.cumsum([len(entry.sources) for entry in entries])[:-1]
    only = np.full(size, NO_OUTPUT, np.int32)
    only[sources] = targets
    if np.array_equal(only[sources], targets):  # no element has two positions
        return np.split(sources.astype(np.int32), ends), only[None]
    # By source, then by target. Integers of 16 bits, and what is in order, sort in linear time.
    order = np.argsort(targets, kind="stable")
    keys = sources[order].astype(np.uint16 if size <= 2**16 else np.int64)
    order = order[np.argsort(keys, kind="stable")]
    element, unit = sources[order], targets[order]
    begins = np.diff(element, prepend=-1) != 0
    number = np.cumsum(begins | (np.diff(unit, prepend=-1) != 0))
    rank = number - np.maximum.accumulate(np.where(begins, number, 0))
    positions = np.full((int(rank.max()) + 1, size), NO_OUTPUT, np.int32)
    positions[rank, element] = unit
    places = np.empty(len(order), np.int32)
    places[order] = rank * size + element
    return np.split(places, ends), positions


def _reached(now: set[int], group: HiddenGroup) -> tuple[int, ...]:
    later = reached(now, lambda old: [new for new, read in group.transition if read == old])
    return tuple(sorted(later))


def _recognise(
    positions: np.ndarray, shape: tuple[int, ...]
) -> tuple[Literal["identity", "tiled", "gather"], tuple[tuple[int, ...], tuple[int, ...]] | None]:
    """Find the cheapest way to bring one value per unit into the shape of the output elements."""
    size = int(np.prod(shape))
    if positions.size == size and np.array_equal(positions.ravel(), np.arange(size)):
        return "identity", None
    if positions.size % size == 0:
        copies = positions.size // size
        for axis, length in enumerate(positions.shape):
            if length % copies:
                continue
            split = (
                *positions.shape[:axis],
                copies,
                length // copies,
                *positions.shape[axis + 1 :],
            )
            once = (*split[:axis], 1, *split[axis + 1 :])
            tiled = np.broadcast_to(np.arange(size).reshape(once), split)
            if np.array_equal(tiled.ravel(), positions.ravel()):
                return "tiled", (once, split)
    return "gather", None
