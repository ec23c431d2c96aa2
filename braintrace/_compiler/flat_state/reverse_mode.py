"""Reverse-mode check: refuse ``while`` loops that would be differentiated."""

from collections.abc import Iterable

from ..._errors import CompilationError
from ..._jax import Var, equations_inside, is_var, source_line
from ..core.analysis import Analysis
from ..groups.grouped_step import GroupedStep


def check_reverse_mode(
    analysis: Analysis, starts: Iterable[Var], ends: Iterable[Var], rule: str
) -> None:
    """Refuse a ``while`` loop between some variables and others.

    Raises
    ------
    CompilationError
        Naming the rule and the loop.
    """
    descendants, ancestors = (
        analysis.gradient_descendants([*starts]),
        analysis.gradient_ancestors([*ends]),
    )
    for index in analysis.program.making(descendants & ancestors):
        equation = analysis.program.equations[index]
        every = (equation, *equations_inside(equation))
        reads = any(is_var(atom) and atom in descendants for atom in equation.invars)
        if reads and any(inner.primitive.name == "while" for inner in every):
            raise CompilationError(
                f"`{rule}` differentiates every step in reverse mode, and a `while` loop of "
                f"unknown length ({source_line(equation)}) has no reverse-mode derivative. Use a "
                "loop of known length (`for_loop`, `scan`), `jax.lax.stop_gradient`, or D_RTRL."
            )


def check_reverse_mode_of_step(step: GroupedStep, goes_on: bool, rule: str) -> None:
    """Refuse a ``while`` loop between a parameter and a result of the step.

    Parameters
    ----------
    step, rule
        The step, and the name of the learning rule.
    goes_on
        Whether the derivative continues to the states before a step.
    """
    traced = step.traced
    written = [leaf for leaf in traced.leaves if leaf.out_var is not None]
    starts = [*traced.parameters, *(written if goes_on else ())]
    ends = [*traced.output_atoms, *(leaf.out_var for leaf in written)]
    variables = [atom for atom in ends if is_var(atom)]
    check_reverse_mode(step.analysis, [leaf.in_var for leaf in starts], variables, rule)
