"""ETP operations with parameter-derived weights, which may learn online."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from .._etrace_op import ETP_PRIMITIVE_SPECS
from .._graph.traced_model import StateLeaf, TracedModel
from .._jax import Atom, Var
from .._jaxpr import BindingTime
from .._typing import Path, path_name
from .analysis import Analysis, time_of_leaf


@dataclasses.dataclass(frozen=True, eq=False)
class MarkedOperation:
    """An ETP operation with trainable operands, before its hidden groups are known.

    Attributes
    ----------
    equation
        Index of the equation.
    x_var, y_var
        Input and output.
    operands, positions
        Trainable operands by name, and their index among the operands.
    parameters
        The parameter leaves that each operand depends on.
    held
        State leaves that operands depend on and the step does not write (masks, scales).
    non_parameters
        Names of the other inputs that operands depend on.
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
        """Paths of all parameters that the operands depend on, each once."""
        return tuple(dict.fromkeys(p.path for leaves in self.parameters.values() for p in leaves))

    @property
    def printed_paths(self) -> tuple[str, ...]:
        """Printed form of `paths`."""
        return tuple(path_name(path) for path in self.paths)


def marked_operations(traced: TracedModel, analysis: Analysis) -> list[MarkedOperation]:
    """Return the ETP operations with parameter-dependent operands, in program order."""
    program = analysis.program
    by_var = {leaf.in_var: leaf for leaf in traced.leaves}
    # Transformations trace a function more than once and leave unused equations.
    used = program.depends_on(program.out_atoms)
    operations = []
    for index in analysis.roles:
        equation = program.equations[index]
        spec = ETP_PRIMITIVE_SPECS.get(equation.primitive)
        if spec is None or used.isdisjoint(equation.outvars):
            continue
        positions = spec.resolve_trainable_invars(equation.params)
        operands = {name: equation.invars[position] for name, position in positions.items()}
        parameters = {
            name: _parameters(analysis.inputs_among(analysis.value_ancestors([atom])), by_var)
            for name, atom in operands.items()
        }
        if not any(parameters.values()):
            continue
        ancestors = _inputs_of(analysis, operands.values())
        times = {var: time_of_leaf(by_var.get(var)) for var in ancestors}
        read_only = [var for var, time in times.items() if time is BindingTime.CONSTANT]
        others = [var for var, time in times.items() if time is BindingTime.DATA]
        operations.append(
            MarkedOperation(
                equation=index,
                x_var=None if spec.x_invar_index is None else equation.invars[spec.x_invar_index],
                y_var=equation.outvars[spec.y_outvar_index],
                operands=operands,
                positions=positions,
                parameters=parameters,
                held=tuple(by_var[var] for var in read_only),
                non_parameters=tuple(_name(var, by_var) for var in others),
            )
        )
    return operations


def _inputs_of(analysis: Analysis, operands: Iterable[Atom]) -> list[Var]:
    """Return the inputs that operands depend on, one operand after the other."""
    ancestors = (analysis.program.depends_on([operand]) for operand in operands)
    return list(
        dict.fromkeys(var for of_operand in ancestors for var in analysis.inputs_among(of_operand))
    )


def _parameters(inputs: Sequence[Var], by_var: Mapping[Var, StateLeaf]) -> tuple[StateLeaf, ...]:
    leaves = (by_var[var] for var in inputs if var in by_var)
    return tuple(leaf for leaf in leaves if leaf.kind == "parameter")


def _name(var: Var, by_var: Mapping[Var, StateLeaf]) -> str:
    return by_var[var].name if var in by_var else "an argument of `update`"
