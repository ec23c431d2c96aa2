"""Backward rules of the user's own that are nonlinear, on the way to a hidden state.

A trace goes forward in time and does not know the gradient that will come back. It takes the
answer of a backward pass to a gradient of one, and multiplies it by the learning signal later:
right where the backward pass is proportional to the gradient that it is given, and only there.

A state that no later step reads needs no trace. If such a backward pass lies on the way to it,
it counts as an output of the step: the weights before it get the ordinary gradient.
"""

from collections.abc import Iterator, Sequence

from ..._graph.traced_model import StateLeaf, TracedModel
from ..._jax import Atom, Equation, Var, is_var
from .analysis import Analysis


def nonlinear_uses(
    analysis: Analysis, targets: Sequence[Atom], stops: frozenset[Var] = frozenset()
) -> Iterator[tuple[Equation, list[Atom]]]:
    """Yield the equations behind some targets that have a nonlinear backward rule.

    With each come the operands whose cotangents are not proportional to what the rule is given.
    Variables in ``stops`` are not looked behind.
    """
    for index in analysis.program.making(analysis.gradients_behind(targets, stops) - stops):
        equation = analysis.program.equations[index]
        operands = analysis.derivative(equation).nonlinear
        if operands:
            yield equation, [equation.invars[operand] for operand in sorted(operands)]


def states_as_outputs(traced: TracedModel, analysis: Analysis) -> tuple[StateLeaf, ...]:
    """Return the hidden states that no later step reads, behind a nonlinear backward rule.

    States that are written as one, side by side, are treated alike.
    """
    program = analysis.program
    rules = [equation for equation in program.equations if analysis.derivative(equation).nonlinear]
    behind = analysis.gradients_ahead(var for equation in rules for var in equation.outvars)
    read = analysis.gradients_behind(program.out_atoms)
    written: dict[Var, list[StateLeaf]] = {}
    for leaf in traced.leaves:
        if leaf.kind == "hidden" and leaf.out_var is not None:
            written.setdefault(leaf.joined_var or leaf.in_var, []).append(leaf)
    return tuple(
        leaf
        for leaves in written.values()
        if read.isdisjoint(leaf.in_var for leaf in leaves)
        and not behind.isdisjoint(leaf.out_var for leaf in leaves if is_var(leaf.out_var))
        for leaf in leaves
    )
