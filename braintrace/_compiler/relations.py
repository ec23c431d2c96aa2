"""Relations: which marked operation reaches which hidden groups, and its parameters."""

import dataclasses
from collections.abc import Mapping, Sequence

from .._etrace_op import ETP_PRIMITIVE_SPECS, validate_rules
from .._graph import HiddenParamOpRelation
from .._graph.hidden_group import HiddenGroup
from .._graph.influence import InfluenceMap
from .._graph.traced_model import StateLeaf, TracedModel
from .._jax import Atom, Var, source_line
from .._typing import Path, path_name
from .derivative import Derivatives
from .influence import find_influence
from .origin_position import Constants
from .positions import Walk
from .transfer import CONSTANT


@dataclasses.dataclass(frozen=True, eq=False)
class MarkedOperation:
    """A marked operation with trainable operands, before it is known what it reaches.

    Attributes
    ----------
    equation
        Index of the equation.
    x_var, y_var
        Input and output.
    operands, positions
        Trainable operands by name, and where they stand.
    parameters
        The parameter leaves behind each operand.
    held
        State leaves that the step does not write (masks, scales) behind the operands.
    non_parameters
        Names of the other inputs that operands are computed from.
    """

    equation: int
    x_var: Atom | None
    y_var: Var
    operands: Mapping[str, Atom]
    positions: Mapping[str, int]
    parameters: Mapping[str, tuple[StateLeaf, ...]]
    held: tuple[StateLeaf, ...]
    non_parameters: tuple[str, ...]

    @property
    def paths(self) -> tuple[Path, ...]:
        """Paths of all parameters behind the operands, each once."""
        return tuple(dict.fromkeys(p.path for leaves in self.parameters.values() for p in leaves))

    @property
    def printed_paths(self) -> tuple[str, ...]:
        """Printed form of `paths`."""
        return tuple(path_name(path) for path in self.paths)


def marked_operations(traced: TracedModel) -> list[MarkedOperation]:
    """Return the marked operations whose operands depend on parameters, in program order."""
    program = traced.program
    by_var = {leaf.in_var: leaf for leaf in traced.leaves}
    place = {var: i for i, var in enumerate(program.in_vars)}
    arguments = set(traced.argument_vars)

    def inputs_behind(atom: Atom, blocked: frozenset[str] = frozenset()) -> list[Var]:
        behind = program.depends_on([atom], blocked=blocked)
        return sorted((var for var in behind if var in place), key=place.__getitem__)

    # Transformations trace a function more than once and leave unused equations behind.
    used = program.depends_on(program.out_atoms)
    found = []
    for index, equation in enumerate(program.equations):
        spec = ETP_PRIMITIVE_SPECS.get(equation.primitive)
        if spec is None or used.isdisjoint(equation.outvars):
            continue
        positions = spec.resolve_trainable_invars(equation.params)
        operands = {name: equation.invars[position] for name, position in positions.items()}
        parameters = {
            name: tuple(
                by_var[var]
                for var in inputs_behind(atom, CONSTANT)
                if var in by_var and by_var[var].kind == "parameter"
            )
            for name, atom in operands.items()
        }
        if not any(parameters.values()):
            continue
        behind = dict.fromkeys(v for atom in operands.values() for v in inputs_behind(atom))
        non_parameters = [var for var in behind if _is_no_parameter(var, by_var)]
        others = [var for var in behind if var not in non_parameters]
        found.append(
            MarkedOperation(
                equation=index,
                x_var=None if spec.x_invar_index is None else equation.invars[spec.x_invar_index],
                y_var=equation.outvars[spec.y_outvar_index],
                operands=operands,
                positions=positions,
                parameters=parameters,
                held=tuple(by_var[v] for v in others if by_var[v].kind != "parameter"),
                non_parameters=tuple(
                    "an argument of `update`" if var in arguments else by_var[var].name
                    for var in non_parameters
                ),
            )
        )
    return found


def _is_no_parameter(var: Var, by_var: Mapping[Var, StateLeaf]) -> bool:
    """Tell whether an input may change within a step, or from sample to sample."""
    leaf = by_var.get(var)
    if leaf is None or leaf.kind == "random":
        return True
    return leaf.kind != "parameter" and leaf.out_var is not None


def find_relations(
    traced: TracedModel,
    operations: Sequence[MarkedOperation],
    groups: Sequence[HiddenGroup],
    walks: Sequence[Sequence[Walk]],
    derivatives: Derivatives,
) -> list[HiddenParamOpRelation]:
    """Return the relations of a model, in program order."""
    facts = Constants(traced.program), derivatives
    reached_by: dict[Var, list[int]] = {operation.y_var: [] for operation in operations}
    for index, group_walks in enumerate(walks):
        for var in dict.fromkeys(var for walk in group_walks for var in walk.ids):
            if var in reached_by:
                reached_by[var].append(index)
    relations = []
    for number, operation in enumerate(operations):
        if operation.non_parameters:
            continue
        y = operation.y_var
        influences = [
            influence
            for index in reached_by[y]
            if (influence := find_influence(traced.program, y, groups[index], walks[index], *facts))
        ]
        if influences:
            equation = traced.program.equations[operation.equation]
            validate_rules(
                equation.primitive,
                equation.params,
                operation.x_var,
                operation.y_var,
                dict(operation.operands),
            )
            relations.append(_relation(traced, operation, number, influences, groups))
    return relations


def _relation(
    traced: TracedModel,
    operation: MarkedOperation,
    number: int,
    influences: Sequence[InfluenceMap],
    groups: Sequence[HiddenGroup],
) -> HiddenParamOpRelation:
    equation = traced.program.equations[operation.equation]
    name = equation.primitive.name.removeprefix("etp_")
    return HiddenParamOpRelation(
        key=f"{','.join(operation.printed_paths)}@{name}{number}",
        primitive=equation.primitive,
        params=equation.params,
        equation=operation.equation,
        x_var=operation.x_var,
        y_var=operation.y_var,
        trainable_vars=operation.operands,
        trainable_positions=operation.positions,
        trainable_paths={
            key: leaves[0].path for key, leaves in operation.parameters.items() if leaves
        },
        parameter_paths=operation.paths,
        held_paths=tuple(dict.fromkeys(leaf.path for leaf in operation.held)),
        influences=tuple(influences),
        hidden_groups=tuple(groups[influence.group] for influence in influences),
        source=source_line(equation),
    )
