"""Nonlinear ``custom_vjp`` rules on the way to a hidden state.

A trace is computed forward in time, before the learning signal is known. It contains the result of
a backward rule for a cotangent of one, which is multiplied by the learning signal later. This is
exact only if the backward rule is linear in the cotangent.

A state that no later step reads needs no trace. If a nonlinear rule is on the way to such a state,
the state counts as an output of the step. The weights before the rule then get the ordinary
gradient.
"""

from collections.abc import Iterator, Sequence

from .._graph.traced_model import StateLeaf, TracedModel
from .._jax import Atom, Equation, Var
from .._jaxpr import nonlinear_operands
from .analysis import Analysis


def nonlinear_uses(
    analysis: Analysis, targets: Sequence[Atom], stops: frozenset[Var] = frozenset()
) -> Iterator[tuple[Equation, list[Atom]]]:
    """Yield the ancestors of some targets that have a nonlinear backward rule.

    Each equation comes with the operands whose cotangents are not proportional to the cotangents of
    its results. The ancestors of ``stops`` are left out.
    """
    for index in analysis.program.making(analysis.gradient_ancestors(targets, stops) - stops):
        equation = analysis.program.equations[index]
        operands = nonlinear_operands(equation)
        if operands:
            yield equation, [equation.invars[operand] for operand in sorted(operands)]


def states_as_outputs(traced: TracedModel, analysis: Analysis) -> tuple[StateLeaf, ...]:
    """Return the hidden states after a nonlinear rule that no later step reads."""
    program = analysis.program
    rules = [equation for equation in program.equations if nonlinear_operands(equation)]
    ancestors = analysis.gradient_descendants(var for equation in rules for var in equation.outvars)
    read = analysis.gradient_ancestors(program.out_atoms)
    return tuple(
        leaf
        for leaf in traced.leaves
        if leaf.kind == "hidden" and leaf.in_var not in read and leaf.out_var in ancestors
    )
