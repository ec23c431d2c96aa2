"""How the output of one marked operation reaches the positions of one hidden group.

Element ``u`` of ``y`` reaches position ``p(u)``, through a broadcast possibly several. The
positions of all elements form a table of shape ``(fan-out, *y.shape)``. ``Df`` and everything
else that has "the shape of y" in the executor has the shape of that table.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from .._graph.hidden_group import HiddenGroup
from .._graph.influence import NO_SLOT, InfluenceMap, InjectionPoint
from .._jax import Var
from .._jaxpr import Program
from .derivative import Derivatives
from .opaque_calls import opaque_where_differentiated
from .origin_position import Constants, pure_origin
from .positions import Walk
from .transfer import MANY, NONE, Ids, places_of


def find_influence(
    program: Program,
    y: Var,
    group: HiddenGroup,
    walks: Sequence[Walk],
    constant: Constants,
    derivatives: Derivatives,
) -> InfluenceMap | None:
    """Return how ``y`` reaches ``group``, or ``None`` where no element of it does."""
    entries = []
    mixed = False
    for state, walk in enumerate(walks):
        if y in walk.ids:
            origin, lost = _roots_behind(program, y, walk, constant, derivatives)
            found = _entries(y, state, walk, origin)
            entries += found
            mixed |= lost or not _covered(walk.ids[y], found)
    if not entries:
        return None
    sources = np.concatenate([source for _, _, _, source, _ in entries])
    targets = np.concatenate([target for _, _, _, _, target in entries])
    places, positions = _table(sources, targets, y.aval.size)
    injection_points = []
    start = 0
    for state, var, elements, source, _ in entries:
        slots = np.full(var.aval.size, NO_SLOT, np.int32)
        slots[elements] = places[start : start + len(source)]
        start += len(source)
        in_order = np.array_equal(slots, np.arange(positions.size))
        injection_points.append(InjectionPoint(state, var, None if in_order else slots))
    table = positions.reshape(-1, *y.aval.shape)
    kind, tile = _recognise(table, group.shape)
    reached = _reached({point.state for point in injection_points}, group)
    read = {*group.read_states, *group.read_by_output}
    stored = tuple(a for a in reached if a in read)
    return InfluenceMap(
        group.index, tuple(injection_points), table, kind, tile, reached, stored, mixed
    )


_Entry = tuple[int, Var, np.ndarray, np.ndarray, np.ndarray]


def _roots_behind(
    program: Program, y: Var, walk: Walk, constant: Constants, derivatives: Derivatives
) -> tuple[dict[Var, Ids], bool]:
    """Return the roots made from ``y`` element by element, and whether others are made from it."""
    if not np.any(walk.ids[y] == MANY):
        return {}, False
    last = max((program.producer[root] for root in walk.roots), default=-1)
    origin = pure_origin(program, y, constant, last, opaque_where_differentiated(derivatives))
    made = program.dependents_of([y], last)
    roots = [root for root in walk.roots if root in made and root in walk.ids]
    return (
        {root: origin[root] for root in roots if root in origin},
        any(root not in origin for root in roots),
    )


def _entries(y: Var, state: int, walk: Walk, origin: Mapping[Var, Ids]) -> list[_Entry]:
    """Return ``(state, var, elements of var, elements of y, positions)`` of every branch."""
    ids = walk.ids[y].ravel()
    entries: list[_Entry] = []
    direct = np.flatnonzero(ids >= 0)
    if len(direct):
        entries.append((state, y, direct, direct, ids[direct]))
    for root, found in origin.items():
        reached, source = walk.ids[root].ravel(), found.ravel()
        elements = np.flatnonzero((source != NONE) & (reached >= 0))
        if len(elements):
            entries.append((state, root, elements, source[elements], reached[elements]))
    return entries


def _covered(ids: Ids, entries: Sequence[_Entry]) -> bool:
    """Tell whether every element that reaches the state has a place in the table."""
    elements = np.concatenate([entry[3] for entry in entries]) if entries else np.zeros(0, int)
    return np.array_equal(places_of(elements, ids.size), ids.ravel() != NONE)


def _table(sources: np.ndarray, targets: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Give every pair (element of y, position) a place in the table ``(fan-out, size)``."""
    only = np.full(size, -1, np.int32)
    only[sources] = targets
    if np.array_equal(only[sources], targets):  # no element has two positions
        return sources.astype(np.int32), only[None]
    pairs = sources.astype(np.int64) * (int(targets.max()) + 1) + targets
    unique, inverse = np.unique(pairs, return_inverse=True)
    element = unique // (int(targets.max()) + 1)
    rank = np.arange(len(unique)) - np.searchsorted(element, element, side="left")
    positions = np.full((int(rank.max()) + 1, size), -1, np.int32)
    positions[rank, element] = unique % (int(targets.max()) + 1)
    return (rank * size + element)[inverse.ravel()].astype(np.int32), positions


def _reached(now: set[int], group: HiddenGroup) -> tuple[int, ...]:
    while True:
        later = now | {a for a, c in group.transition if c in now}
        if later == now:
            return tuple(sorted(now))
        now = later


def _recognise(
    table: np.ndarray, shape: tuple[int, ...]
) -> tuple[Literal["identity", "tiled", "gather"], tuple[tuple[int, ...], tuple[int, ...]] | None]:
    """Find the cheapest way to bring a value per position into the shape of the table."""
    size = int(np.prod(shape))
    if table.size == size and np.array_equal(table.ravel(), np.arange(size)):
        return "identity", None
    if table.size % size == 0:
        copies = table.size // size
        for axis, length in enumerate(table.shape):
            if length % copies:
                continue
            split = (*table.shape[:axis], copies, length // copies, *table.shape[axis + 1 :])
            once = (*table.shape[:axis], 1, length // copies, *table.shape[axis + 1 :])
            tiled = np.broadcast_to(np.arange(size).reshape(once), split)
            if np.array_equal(tiled.ravel(), table.ravel()):
                return "tiled", (once, split)
    return "gather", None
