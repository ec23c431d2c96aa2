"""Delay lines: hidden states that only store values for later ETP operations.

A delay line stores a new value at every step and shifts its contents. If only ETP operations read
its old contents, no gradient that a trace carries returns to it: D-RTRL leaves out the gradient
through those operations anyway.
"""

from collections.abc import Sequence

from .._jax import Equation, Var
from .._jaxpr import IN_ORDER, moved_operands
from .analysis import Analysis
from .candidates import Candidate
from .step_graph import StepGraph


def find_delay_lines(
    analysis: Analysis,
    graph: StepGraph,
    candidates: Sequence[Candidate],
    loss_reads: set[Var],
) -> frozenset[int]:
    """Return the indices of delay lines that only ETP operations read.

    Parameters
    ----------
    analysis, graph, candidates
        The step, its graph and its hidden states.
    loss_reads
        The values that a loss reads within the step, up to new hidden states.
    """
    return frozenset(
        a
        for a, candidate in enumerate(candidates)
        if loss_reads.isdisjoint([candidate.leaf.in_var, candidate.var])
        and _is_moved_only(analysis, candidates, a)
        and not _is_read_by_others(graph, candidates, a)
    )


def _is_moved_only(analysis: Analysis, candidates: Sequence[Candidate], a: int) -> bool:
    """Test whether a step only shifts a state's contents, and stores no ETP output."""
    state, program, marked = candidates[a], analysis.program, analysis.roles
    uses = {index for index, _ in program.readers.get(state.leaf.in_var, ())}
    if not all(_moves(program.equations[index]) for index in uses - marked.keys()):
        return False
    stops = frozenset(c.var for c in candidates if c.leaf is not state.leaf)
    ancestors = analysis.value_ancestors([state.var], stops) - stops
    path = program.dependents_of([state.leaf.in_var], program.producer[state.var]) & ancestors
    moving = analysis.program.making(path)
    return (
        bool(moving)
        and all(_moves(program.equations[index]) for index in moving)
        and marked.keys().isdisjoint(analysis.program.making(ancestors))
    )


def _moves(equation: Equation) -> bool:
    is_move = equation.primitive.name in IN_ORDER | {"select_n"}  # a selection keeps or replaces
    return is_move or bool(moved_operands(equation))


def _is_read_by_others(graph: StepGraph, candidates: Sequence[Candidate], a: int) -> bool:
    """Test whether another state reads it: its new value, or its old one unmarked.

    An old value that is read through an ETP operation does not count.
    """
    state = candidates[a]
    for other in (candidate for candidate in candidates if candidate.leaf is not state.leaf):
        ends = frozenset(c.var for c in candidates if c.leaf is not other.leaf)
        if state.var in graph.values.ancestors([other.var], ends):
            return True
        if state.leaf.in_var in graph.values.ancestors([other.var], ends | graph.operations):
            return True
    return False
