"""Relations: the hidden groups and the parameters of each ETP operation."""

from collections.abc import Sequence

from .._graph import HiddenParamOpRelation, InfluenceMap
from .._jax import Var, source_line
from .grouped_step import GroupedStep
from .influence import find_influence
from .marked_operations import MarkedOperation


def find_relations(step: GroupedStep) -> list[HiddenParamOpRelation]:
    """Return the relations of a model, in program order."""
    groups_of = _groups_reached(step)
    relations = []
    for number, operation in enumerate(step.operations):
        if operation.non_parameters:
            continue
        reached = [
            find_influence(step.analysis, operation.y_var, step.groups[index], step.walks[index])
            for index in groups_of[operation.y_var]
        ]
        influences = [influence for influence in reached if influence is not None]
        if influences:
            relations.append(_relation(step, operation, number, influences))
    return relations


def _groups_reached(step: GroupedStep) -> dict[Var, list[int]]:
    """Return the groups whose walks reached the output of each ETP operation."""
    groups: dict[Var, list[int]] = {operation.y_var: [] for operation in step.operations}
    for index, walks in enumerate(step.walks):
        for var in dict.fromkeys(var for walk in walks for var in walk.ids):
            if var in groups:
                groups[var].append(index)
    return groups


def _relation(
    step: GroupedStep,
    operation: MarkedOperation,
    number: int,
    influences: Sequence[InfluenceMap],
) -> HiddenParamOpRelation:
    equation = step.analysis.program.equations[operation.equation]
    primitive, params = equation.primitive, equation.params
    name = primitive.name.removeprefix("etp_")
    return HiddenParamOpRelation(
        key=f"{','.join(operation.printed_paths)}@{name}{number}",
        primitive=primitive,
        params=params,
        equation=operation.equation,
        x_var=operation.x_var,
        y_var=operation.y_var,
        trainable_vars=operation.operands,
        trainable_positions=operation.positions,
        trainable_paths={
            key: leaves[0].path for key, leaves in operation.parameters.items() if leaves
        },
        trainable_leaves={
            key: leaves[0].leaf for key, leaves in operation.parameters.items() if leaves
        },
        parameter_paths=operation.paths,
        held_paths=tuple(dict.fromkeys(leaf.path for leaf in operation.held)),
        influences=tuple(influences),
        hidden_groups=tuple(step.groups[influence.group] for influence in influences),
        source=source_line(equation),
    )
