"""Parameter uses for full-Jacobian rules, and the states that parameters reach."""

import itertools
from collections.abc import Iterator, Sequence

from .._etrace_op import ETP_PRIMITIVE_SPECS
from .._graph.flat_state import ParameterUse, UseKind
from .._graph.traced_model import StateLeaf, TracedModel
from .._jax import Atom, Equation, Var, is_var
from .._jaxpr import PRODUCTS, carries_derivative
from .._typing import Path
from .analysis import Analysis
from .binding_times import data_of
from .grouped_step import GroupedStep
from .layers import HiddenStates


def new_vars(leaves: Sequence[StateLeaf]) -> list[Var]:
    """Return the new values of States."""
    return [leaf.out_var for leaf in leaves if leaf.out_var is not None]


def uses_of_parameters(
    traced: TracedModel, analysis: Analysis, leaves: Sequence[StateLeaf]
) -> Iterator[ParameterUse]:
    """Yield the equations where parameter-derived values meet data."""
    program, data = analysis.program, data_of(traced, analysis)
    descendants = analysis.gradient_descendants(leaf.in_var for leaf in traced.parameters)
    ancestors = analysis.gradient_ancestors(new_vars(leaves))
    count = itertools.count()
    for index in analysis.program.making(ancestors & descendants):
        equation = program.equations[index]
        operands = tuple(
            i
            for i, atom in enumerate(equation.invars)
            if carries_derivative(atom) and atom in descendants and atom not in data
        )
        if operands and not data.isdisjoint(equation.outvars):
            key = f"{equation.primitive.name}{next(count)}"
            x = _input_of_product(equation, operands, data)
            kind: UseKind = "elementwise" if x is None else "product"
            held_paths = _held_paths(traced, analysis, [equation.invars[i] for i in operands])
            size = sum(v.aval.size * v.aval.dtype.itemsize for v in equation.outvars)
            yield ParameterUse(
                key, index, operands, kind, x, held_paths=held_paths, output_bytes=int(size)
            )
    for number, var in enumerate(new_vars(leaves)):
        if var in descendants and var not in data:
            held_paths = _held_paths(traced, analysis, [var])
            key = f"state{next(count)}"
            yield ParameterUse(key, None, (number,), "elementwise", held_paths=held_paths)


def _held_paths(traced: TracedModel, analysis: Analysis, atoms: Sequence[Atom]) -> tuple[Path, ...]:
    ancestors = analysis.value_ancestors(atoms)
    others = (s for s in traced.leaves if s.kind != "parameter" and s.in_var in ancestors)
    return tuple(dict.fromkeys(leaf.path for leaf in others))


def _input_of_product(equation: Equation, operands: tuple[int, ...], data: set[Var]) -> int | None:
    """Return the operand of a product with parameters that contains the samples."""
    others = [i for i, atom in enumerate(equation.invars) if is_var(atom) and atom in data]
    if len(others) != 1 or others[0] in operands:
        return None
    spec = ETP_PRIMITIVE_SPECS.get(equation.primitive)
    if spec is not None:
        return others[0] if others[0] == spec.x_invar_index else None
    is_plain = equation.primitive.name in PRODUCTS
    is_input = equation.primitive.name == "dot_general" or others[0] == 0
    return others[0] if is_plain and is_input else None


def reached_by_parameters(
    step: GroupedStep, leaves: Sequence[StateLeaf], layers: Sequence[HiddenStates]
) -> dict[str, tuple[int, ...]]:
    """Return the states that each parameter reaches, in this step or a later one.

    Paths through the states of another layer do not count.
    """
    gradients, every = step.graph.gradients, set(leaves)
    insides = [{leaf for leaf, _ in layer} for layer in layers] or [every]
    reached: dict[str, set[StateLeaf]] = {}
    for inside in insides:
        outside = {var for leaf in every - inside for var in (leaf.in_var, leaf.out_var)}
        for parameter in step.traced.parameters:
            descendants = gradients.descendants_over_time([parameter.in_var], outside)
            written = {leaf for leaf in inside if leaf.out_var in descendants}
            reached.setdefault(parameter.name, set()).update(written)
    numbers = {
        name: tuple(number for number, leaf in enumerate(leaves) if leaf in written)
        for name, written in reached.items()
    }
    return {name: own for name, own in numbers.items() if own}
