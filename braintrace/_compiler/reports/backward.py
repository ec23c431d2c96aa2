"""Backward passes of the user's own on the way to a hidden state.

A trace goes forward in time and does not know the gradient that will come back. It takes the
answer of a backward pass to a gradient of one, and multiplies it by the learning signal later:
right where the backward pass is proportional to the gradient that it is given, and only there.

A state that no later step reads needs no trace. If such a backward pass lies on the way to it,
it counts as an output of the step: the weights before it get the ordinary gradient.
"""

from collections.abc import Iterator, Sequence

from ..._graph.diagnostics import Diagnostic
from ..._graph.traced_model import StateLeaf, TracedModel
from ..._jax import Atom, Equation, Var, is_var
from ..core.analysis import Analysis


def bent_uses(
    analysis: Analysis, targets: Sequence[Atom], stops: frozenset[Var] = frozenset()
) -> Iterator[tuple[Equation, list[Atom]]]:
    """Yield the equations behind some targets that bend a gradient, and the operands that get it.

    Variables in ``stops`` are not looked behind.
    """
    for index in analysis.program.making(analysis.gradients_behind(targets, stops) - stops):
        equation = analysis.program.equations[index]
        operands = analysis.derivative(equation).bent
        if operands:
            yield equation, [equation.invars[operand] for operand in sorted(operands)]


def states_as_outputs(traced: TracedModel, analysis: Analysis) -> tuple[StateLeaf, ...]:
    """Return the hidden states that no later step reads, behind a gradient that is bent.

    States that are written as one, side by side, are treated alike.
    """
    program = analysis.program
    bent = [equation for equation in program.equations if analysis.derivative(equation).bent]
    behind = analysis.gradients_ahead(var for equation in bent for var in equation.outvars)
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


def about_outputs(states: Sequence[StateLeaf]) -> Iterator[Diagnostic]:
    """Yield what a user should know of `states_as_outputs`."""
    for state in states:
        yield Diagnostic(
            "info",
            "backward-not-linear",
            f"Hidden state '{state.name}' lies behind a `custom_vjp` whose backward rule is not "
            "proportional to the gradient that it is given. No later step reads the state, so "
            "that it needs no trace: the weights before it get the gradient of the current step.",
            (state.name,),
        )
