"""Hidden states that only keep values for marked operations of later steps.

A delay line takes in a value at every step and moves what it holds. Where nothing but marked
operations reads what it held before the step, no gradient that a trace carries comes back to it:
what goes on from it through a marked operation is what D-RTRL leaves out.
"""

from collections.abc import Sequence
from typing import Any

from .._graph.marked import is_marked
from .._jax import Var
from .._jaxpr import Program
from .._jaxpr.data_movement import is_data_movement
from .candidates import Candidate
from .transfer import CONSTANT, COPIES


def find_delay_lines(
    program: Program, candidates: Sequence[Candidate], behind_output: set[Var]
) -> frozenset[int]:
    """Return the states that are delay lines which only marked operations read.

    Parameters
    ----------
    program, candidates
        The program, and its hidden states.
    behind_output
        What a loss reads in the step, up to new hidden states.
    """
    return frozenset(
        a
        for a, candidate in enumerate(candidates)
        if behind_output.isdisjoint([candidate.leaf.in_var, *candidate.new_vars])
        and _is_moved_only(program, candidates, a)
        and not _is_read_by_others(program, candidates, a)
    )


def _is_moved_only(program: Program, candidates: Sequence[Candidate], a: int) -> bool:
    """Tell whether a state keeps what it holds, moved, and takes in no marked output itself."""
    own = candidates[a]
    uses = (program.equations[index] for index, _ in program.readers.get(own.leaf.in_var, ()))
    if not all(_moves(equation) or is_marked(equation) for equation in uses):
        return False
    stops = frozenset(c.var for i, c in enumerate(candidates) if i != a)
    behind = program.depends_on([own.var], stops, CONSTANT) - stops
    kept = program.dependents_of([own.leaf.in_var], program.producer[own.var]) & behind
    made = {program.producer[var] for var in behind if var in program.producer}
    moving = {program.producer[var] for var in kept if var in program.producer}
    return (
        bool(moving)
        and all(_moves(program.equations[index]) for index in moving)
        and not any(is_marked(program.equations[index]) for index in made)
    )


def _moves(equation: Any) -> bool:
    return is_data_movement(equation) or equation.primitive.name in COPIES | {
        "convert_element_type"
    }


def _is_read_by_others(program: Program, candidates: Sequence[Candidate], a: int) -> bool:
    """Tell whether another state reads one, new, or old other than by marked operations."""
    own = candidates[a]
    others = [candidate for i, candidate in enumerate(candidates) if i != a]
    marked = frozenset(e.primitive.name for e in program.equations if is_marked(e))
    for other in others:
        stops = frozenset(c.var for c in candidates if c is not other)
        if own.var in program.depends_on([other.var], stops, CONSTANT):
            return True
        if own.leaf.in_var in program.depends_on([other.var], stops, CONSTANT | marked):
            return True
    return False
