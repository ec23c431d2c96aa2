"""ETP operations with parameter-derived weights, and their relations: the groups that each reaches.

Element ``u`` of an output ``y`` reaches unit ``p(u)`` of a group, or several units by a broadcast.
The units of all elements form an array ``(fan-out, *y.shape)``; see `InfluenceMap`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from .._checks import path_name
from .._etrace_op.registry import ETP_PRIMITIVE_SPECS
from .._graph.hidden_group import NO_OUTPUT, HiddenGroup, HiddenParamOpRelation, InfluenceMap, Tap
from .._graph.traced_model import TracedModel
from .._jax import Var, source_line
from .._jaxpr.dataflow import BOTTOM
from .._jaxpr.program import reached
from .analysis import Analysis, BindingTime, numbered, times_of_inputs
from .hidden_groups import GroupedStep
from .walk import BROADCAST, Walk


def marked_operations(traced: TracedModel, analysis: Analysis) -> list[HiddenParamOpRelation]:
    """Return the ETP operations with parameter-dependent operands, in program order.

    They are relations without hidden groups.
    """
    program = analysis.program
    by_var = {leaf.in_var: leaf for leaf in traced.leaves}
    inputs = dict(zip(program.in_vars, times_of_inputs(traced), strict=True))
    # Transformations trace a function more than once and leave unused equations.
    used = program.depends_on(program.out_atoms)
    operations: list[HiddenParamOpRelation] = []
    for index in analysis.roles:
        equation = program.equations[index]
        primitive, spec = equation.primitive, ETP_PRIMITIVE_SPECS.get(equation.primitive)
        if spec is None or used.isdisjoint(equation.outvars):
            continue
        positions = spec.resolve_trainable_invars(equation.params)
        operands = {name: equation.invars[position] for name, position in positions.items()}
        behind = {name: program.ancestors([atom]) for name, atom in operands.items()}
        parameters = {
            name: [leaf for leaf in traced.parameters if leaf.in_var in own]
            for name, own in behind.items()
        }
        leaves = [leaf for own in parameters.values() for leaf in own]
        if not leaves:
            continue
        read = program.depends_on(operands.values())
        times = {var: time for var, time in inputs.items() if var in read}
        held = (by_var[var].path for var, time in times.items() if time is BindingTime.CONSTANT)
        data = (by_var.get(var) for var, time in times.items() if time is BindingTime.DATA)
        names = (leaf.name if leaf else "an argument of `update`" for leaf in data)
        paths = tuple(dict.fromkeys(leaf.path for leaf in leaves))
        name = f"{primitive.name.removeprefix('etp_')}{len(operations)}"
        operations.append(
            HiddenParamOpRelation(
                key=f"{','.join(map(path_name, paths))}@{name}",
                primitive=primitive,
                params=equation.params,
                equation=index,
                x_var=None if spec.x_invar_index is None else equation.invars[spec.x_invar_index],
                y_var=equation.outvars[spec.y_outvar_index],
                trainable_vars=operands,
                trainable_positions=positions,
                trainable_paths={key: own[0].path for key, own in parameters.items() if own},
                trainable_leaves={key: own[0].leaf for key, own in parameters.items() if own},
                parameter_paths=paths,
                held_paths=tuple(dict.fromkeys(held)),
                non_parameters=tuple(names),
                source=source_line(equation),
            )
        )
    return operations


def find_relations(step: GroupedStep) -> list[HiddenParamOpRelation]:
    """Return the relations of a model, in program order."""
    relations = []
    for operation in (o for o in step.operations if not o.non_parameters):
        found = [
            (influence, group)
            for group, walks in zip(step.groups, step.walks, strict=True)
            if (influence := find_influence(step.analysis, operation.y_var, group, walks))
        ]
        if found:
            influences, groups = zip(*found, strict=True)
            relations.append(
                dataclasses.replace(operation, influences=influences, hidden_groups=groups)
            )
    return relations


def find_influence(
    analysis: Analysis, y: Var, group: HiddenGroup, walks: Sequence[Walk]
) -> InfluenceMap | None:
    """Return how ``y`` reaches ``group``; ``None`` if no element of it does."""
    paths: list[_Path] = []
    mixed = False
    for state, walk in enumerate(walks):
        if y in walk.ids:
            own, is_whole = _paths_of(analysis, y, state, walk)
            paths += own
            mixed |= not is_whole
    if not paths:
        return None
    places, units = _output_elements(paths, y.aval.size)
    units = units.reshape(-1, *y.aval.shape)
    kind, tile = _recognise(units, group.shape)
    now = {path.state for path in paths}
    later = reached(now, lambda old: [new for new, read in group.transition if read == old])
    read = {*group.read_states, *group.read_late}
    return InfluenceMap(
        group=group.index,
        taps=tuple(_tap(*pair, units.size) for pair in zip(paths, places, strict=True)),
        positions=units,
        kind=kind,
        tile=tile,
        reached=tuple(sorted(later)),
        stored=tuple(sorted(later & read)),
        mixed=mixed,
    )


class _Path(NamedTuple):
    """A path from ``y`` to one state: directly, or by a broadcast.

    ``elements`` of the variable ``var`` come from the elements ``sources`` of ``y``, and reach
    these ``units``.
    """

    state: int
    var: Var
    elements: np.ndarray
    sources: np.ndarray
    units: np.ndarray


def _paths_of(analysis: Analysis, y: Var, state: int, walk: Walk) -> tuple[list[_Path], bool]:
    """Return the paths from ``y`` to a state, and whether they cover all that reaches it."""
    ids, sources, roots = walk.ids[y], {y: numbered(y)}, list[Var]()
    if np.any(ids == BROADCAST):
        made, same = analysis.program.dependents_of([y]), analysis.elements_of(y)
        roots = [root for root in walk.roots if root in made and root in walk.ids]
        sources |= {root: same[root] for root in roots if root in same}
    paths, has_output = list[_Path](), np.zeros(y.aval.size, bool)
    for var, source in sources.items():
        elements = np.flatnonzero((source != BOTTOM) & (walk.ids[var] >= 0))
        if elements.size:
            of_y, units = source.ravel()[elements], walk.ids[var].ravel()[elements]
            paths.append(_Path(state, var, elements, of_y, units))
            has_output[of_y] = True
    is_covered = np.array_equal(has_output, ids.ravel() != BOTTOM)
    return paths, is_covered and all(root in sources for root in roots)


def _tap(path: _Path, places: np.ndarray, size: int) -> Tap:
    outputs = np.full(path.var.aval.size, NO_OUTPUT, np.int32)
    outputs[path.elements] = places
    in_order = np.array_equal(outputs, np.arange(size))
    return Tap(path.state, path.var, None if in_order else outputs)


def _output_elements(paths: Sequence[_Path], size: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Give every pair (element of y, unit) an output element.

    Returns
    -------
    places
        For each path, the output elements of its elements.
    units
        The unit of each output element, of shape ``(fan-out, size)``.
    """
    sources = np.concatenate([path.sources for path in paths])
    targets = np.concatenate([path.units for path in paths])
    ends = np.cumsum([len(path.sources) for path in paths])[:-1]
    only = np.full(size, NO_OUTPUT, np.int32)
    only[sources] = targets
    if np.array_equal(only[sources], targets):  # no element has two units
        return np.split(sources.astype(np.int32), ends), only[None]
    order = np.lexsort((targets, sources))
    element, unit = sources[order], targets[order]
    begins = np.diff(element, prepend=-1) != 0
    number = np.cumsum(begins | (np.diff(unit, prepend=-1) != 0))
    rank = number - np.maximum.accumulate(np.where(begins, number, 0))
    units = np.full((int(rank.max()) + 1, size), NO_OUTPUT, np.int32)
    units[rank, element] = unit
    places = np.empty(len(order), np.int32)
    places[order] = rank * size + element
    return np.split(places, ends), units


def _recognise(
    units: np.ndarray, shape: tuple[int, ...]
) -> tuple[Literal["identity", "tiled", "gather"], tuple[tuple[int, ...], tuple[int, ...]] | None]:
    """Find the cheapest way to bring one value per unit into the shape of the output elements."""
    size = int(np.prod(shape))
    if units.size == size and np.array_equal(units.ravel(), np.arange(size)):
        return "identity", None
    copies, rest = divmod(units.size, size)
    for axis, length in enumerate(units.shape):
        if rest or length % copies:
            continue
        before, after = units.shape[:axis], units.shape[axis + 1 :]
        once = (*before, 1, length // copies, *after)
        split = (*before, copies, length // copies, *after)
        tiled = np.broadcast_to(np.arange(size).reshape(once), split)
        if np.array_equal(tiled.ravel(), units.ravel()):
            return "tiled", (once, split)
    return "gather", None
