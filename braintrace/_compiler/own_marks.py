"""Detection of a model's own ETP operations on the way to a hidden state."""

from collections.abc import Sequence

from .._etrace_op import ETP_PRIMITIVE_SPECS, lost_mark
from .._etrace_op.registry import is_marked
from .._jax import Atom, Equation, equations_inside
from .._jaxpr import Program, carries_derivative
from .analysis import Analysis
from .state_arrays import StateArray


def has_own_marks(program: Program, arrays: Sequence[StateArray]) -> bool:
    """Test whether an ETP operation with a parameter reaches a hidden state.

    An operation in a branch, a loop or a function with a custom derivative counts as well. So does
    an operation that lost its mark to a map over its weights; another diagnostic reports that.

    Parameters
    ----------
    program
        The step without calls: ``(arguments, leaves) -> (results, leaves that it writes)``.
    arrays
        The State leaves.
    """
    holding = list(filter(_holds_own_mark, program.equations))
    if not holding:
        return False
    written = [array for array in arrays if array.written]
    new = program.out_atoms[len(program.out_atoms) - len(written) :]
    hidden = [atom for atom, array in zip(new, written, strict=True) if array.kind == "hidden"]
    analysis = Analysis(program)
    ancestors = analysis.gradient_ancestors(hidden)
    before = program.in_vars[len(program.in_vars) - len(arrays) :]
    parameters = {v for v, a in zip(before, arrays, strict=True) if a.kind == "parameter"}
    return any(
        not ancestors.isdisjoint(equation.outvars)
        and not parameters.isdisjoint(analysis.gradient_ancestors(_weights(equation)))
        for equation in holding
    )


def _holds_own_mark(equation: Equation) -> bool:
    every = (equation, *equations_inside(equation))
    return any(is_marked(inner) or lost_mark(inner) is not None for inner in every)


def _weights(equation: Equation) -> list[Atom]:
    """Return the operands of an equation that may be weights of an ETP operation."""
    spec = ETP_PRIMITIVE_SPECS.get(equation.primitive)
    if spec is None:
        return list(filter(carries_derivative, equation.invars))
    places = spec.resolve_trainable_invars(equation.params).values()
    return [equation.invars[place] for place in places]
