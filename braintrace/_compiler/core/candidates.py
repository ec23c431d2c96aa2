"""Candidates for hidden groups: the hidden states that a step writes.

Each is taken at the variable that the model itself continues with.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from ..._graph.traced_model import StateLeaf, TracedModel
from ..._jax import Equation, Var, is_var
from ..._jaxpr import BOTTOM, Constants, Labels, carries_derivative, moved_operands, sources_of
from .analysis import Analysis
from .back_through import Ids, numbered


@dataclasses.dataclass(frozen=True, eq=False)
class Candidate:
    """A hidden state that the step writes, with the unit of each element.

    ``var`` is the variable of its new value. ``ids`` are the units of that variable's elements,
    ``old_ids`` those of the old value's elements. ``shape`` is the shape of all units, which
    include those of other states.
    """

    leaf: StateLeaf
    var: Var
    ids: Ids
    old_ids: Ids
    shape: tuple[int, ...]

    @property
    def new_vars(self) -> tuple[Var, ...]:
        """The variables that contain the state's new value."""
        joined = self.leaf.joined_var
        return (self.var,) if joined is None else (self.var, joined)


def candidates_of(
    traced: TracedModel, analysis: Analysis, outputs: Sequence[StateLeaf]
) -> list[Candidate]:
    """Return the hidden states that the step writes, in the order of computation.

    Parameters
    ----------
    traced, analysis
        The step.
    outputs
        Hidden states that count as its outputs instead.
    """
    candidates: list[Candidate] = []
    taken: set[Var] = set()
    for leaf in traced.leaves:
        if leaf.kind != "hidden" or leaf.out_var is None or not carries_derivative(leaf.out_var):
            continue
        if leaf in outputs:
            continue
        # Each component of a `HiddenGroupState` comes from a variable of its shape.
        shape = None if leaf.component is None else leaf.shape
        var, ids = _resolve(analysis, leaf.out_var, taken, shape)
        candidates.append(Candidate(leaf, var, ids, numbered(leaf.in_var), leaf.shape))
        taken.add(var)
    producer = traced.program.producer
    return sorted(candidates, key=lambda candidate: producer.get(candidate.var, -1))


def _resolve(
    analysis: Analysis, var: Var, taken: set[Var], shape: tuple[int, ...] | None
) -> tuple[Var, Ids]:
    """Find the variable of a new state that the model itself reads.

    A model that writes ``h.reshape(...)`` to a State and continues with ``h`` reads the new state
    at ``h``. The search goes back through reshapes and other data movement. Given a ``shape``, the
    variable must have it, with its elements in order.
    """
    program, size = analysis.program, var.aval.size
    current, ids = var, numbered(var)
    resolved = current, ids
    while True:
        if current not in program.producer:
            return resolved
        equation = program.equations[program.producer[current]]
        moved = _unmove(equation, ids, size, analysis.constants)
        if moved is None:
            return resolved
        current, ids = moved
        complete = ids.size == size and not np.any(ids == BOTTOM)
        if shape is not None:
            in_order = np.array_equal(ids.ravel(), np.arange(size))
            complete = complete and in_order and current.aval.shape == shape
        if complete and current not in taken and current in program.producer:
            resolved = current, ids


def _unmove(
    equation: Equation, ids: Ids, size: int, constants: Constants
) -> tuple[Var, Ids] | None:
    """Follow data movement back to the one operand that contains all elements."""
    operands = [equation.invars[operand] for operand in moved_operands(equation)]
    sources = sources_of(constants, equation) if operands else None
    if sources is None or len(equation.outvars) != 1:
        return None
    sizes = [atom.aval.size for atom in operands]
    received = Labels().put(Labels().empty([sum(sizes)]), sources[0], ids)
    for atom, piece in zip(operands, np.split(received, np.cumsum(sizes)[:-1]), strict=True):
        positions = piece[piece >= 0]
        if is_var(atom) and len(positions) == size and are_distinct(positions, size):
            return atom, piece.reshape(atom.aval.shape)
    return None


def are_distinct(positions: np.ndarray, size: int) -> bool:
    """Test whether numbers below ``size`` are all different."""
    return int(np.count_nonzero(places_of(positions, size))) == positions.size


def places_of(positions: np.ndarray, size: int) -> np.ndarray:
    """Return for each number below ``size`` whether it is among ``positions``."""
    is_among = np.zeros(size, bool)
    is_among[positions] = True
    return is_among
