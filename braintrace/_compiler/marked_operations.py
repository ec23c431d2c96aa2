"""ETP operations with parameter-derived weights, which may learn online."""

from collections.abc import Iterable, Mapping

from .._etrace_op.registry import ETP_PRIMITIVE_SPECS
from .._graph.hidden_group import HiddenParamOpRelation
from .._graph.traced_model import StateLeaf, TracedModel
from .._jax import Atom, Var, source_line
from .._jaxpr.dataflow import BindingTime
from .._typing import path_name
from .analysis import Analysis, time_of_leaf


def marked_operations(traced: TracedModel, analysis: Analysis) -> list[HiddenParamOpRelation]:
    """Return the ETP operations with parameter-dependent operands, in program order.

    They are relations without hidden groups.
    """
    program = analysis.program
    by_var = {leaf.in_var: leaf for leaf in traced.leaves}
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
        parameters = {name: _parameters(analysis, atom, by_var) for name, atom in operands.items()}
        leaves = [leaf for own in parameters.values() for leaf in own]
        if not leaves:
            continue
        times = {
            var: time_of_leaf(by_var.get(var)) for var in _inputs_of(analysis, operands.values())
        }
        held = (by_var[var].path for var, time in times.items() if time is BindingTime.CONSTANT)
        data = (var for var, time in times.items() if time is BindingTime.DATA)
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
                non_parameters=tuple(_name(var, by_var) for var in data),
                source=source_line(equation),
            )
        )
    return operations


def _inputs_of(analysis: Analysis, operands: Iterable[Atom]) -> list[Var]:
    """Return the inputs that operands depend on, one operand after the other."""
    ancestors = (analysis.program.depends_on([operand]) for operand in operands)
    return list(
        dict.fromkeys(var for of_operand in ancestors for var in analysis.inputs_among(of_operand))
    )


def _parameters(
    analysis: Analysis, operand: Atom, by_var: Mapping[Var, StateLeaf]
) -> list[StateLeaf]:
    inputs = analysis.inputs_among(analysis.values.ancestors([operand]))
    leaves = (by_var[var] for var in inputs if var in by_var)
    return [leaf for leaf in leaves if leaf.kind == "parameter"]


def _name(var: Var, by_var: Mapping[Var, StateLeaf]) -> str:
    return by_var[var].name if var in by_var else "an argument of `update`"
