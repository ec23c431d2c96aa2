"""Candidates for hidden groups: the hidden states that a step writes.

Each is taken at the variable that the model itself continues with.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import numpy as np

from .._graph.traced_model import StateLeaf, TracedModel
from .._jax import Equation, Var, is_var
from .._jaxpr import BOTTOM, Constants, Labels, carries_derivative, moved_operands, sources_of
from .analysis import Analysis
from .back_through import Ids, numbered
from .slots import Slots


@dataclasses.dataclass(frozen=True, eq=False)
class Candidate:
    """A hidden state that the step writes, or one slot of it, with the unit of each element.

    ``var`` is the variable of its new value. ``ids`` are the units of that variable's elements,
    ``old_ids`` those of the old value's elements; `BOTTOM`: in another slot. ``shape`` is the shape
    of all units, which include those of other states. ``slots`` are the slots of its State, if it
    has several.
    """

    leaf: StateLeaf
    var: Var
    ids: Ids
    old_ids: Ids
    shape: tuple[int, ...]
    slots: Slots | None = None

    @property
    def count(self) -> int:
        """The number of its elements."""
        return int(self.old_places.size)

    @functools.cached_property
    def places(self) -> np.ndarray:
        """The places of its elements in the new value, flattened."""
        return np.flatnonzero(self.ids.ravel() != BOTTOM)

    @functools.cached_property
    def old_places(self) -> np.ndarray:
        """The places of its elements in the old value, flattened."""
        return np.flatnonzero(self.old_ids.ravel() != BOTTOM)


def candidates_of(
    traced: TracedModel,
    analysis: Analysis,
    outputs: Sequence[StateLeaf],
    slots: Mapping[Var, Slots],
) -> list[Candidate]:
    """Return the hidden states that the step writes, in the order of computation.

    Parameters
    ----------
    traced, analysis
        The step.
    outputs
        Hidden states that count as its outputs instead.
    slots
        The slots of some states, by old value.
    """
    candidates: list[Candidate] = []
    taken: set[Var] = set()
    for leaf in traced.leaves:
        if leaf.kind != "hidden" or leaf.out_var is None or not carries_derivative(leaf.out_var):
            continue
        if leaf in outputs:
            continue
        if leaf.in_var in slots:
            own = _candidates_of_slots(analysis, leaf, slots[leaf.in_var], taken)
        else:
            ids = numbered(leaf.in_var)
            own = [Candidate(leaf, *_resolve(analysis, leaf.out_var, ids, taken), ids, leaf.shape)]
        candidates += own
        taken.update(candidate.var for candidate in own)
    producer = traced.program.producer
    return sorted(candidates, key=lambda candidate: producer.get(candidate.var, -1))


def _candidates_of_slots(
    analysis: Analysis, leaf: StateLeaf, slots: Slots, taken: set[Var]
) -> list[Candidate]:
    """Return a candidate for each slot, at a variable of its own if each of them has one."""
    together, apart = list[Candidate](), list[Candidate]()
    for slot in range(slots.count):
        inside, shape = slots.slot == slot, slots.shape(slot)
        ids = np.full(leaf.shape, BOTTOM, np.int32)
        ids[inside] = np.arange(np.count_nonzero(inside))
        var, own_ids = _resolve(analysis, leaf.out_var, ids, {*taken, *(c.var for c in apart)})
        together.append(Candidate(leaf, leaf.out_var, ids, ids, shape, slots))
        if var is not leaf.out_var and var.aval.shape == shape:
            apart.append(Candidate(leaf, var, own_ids, ids, shape, slots))
    return apart if len(apart) == slots.count else together


def _resolve(analysis: Analysis, var: Var, ids: Ids, taken: set[Var]) -> tuple[Var, Ids]:
    """Find the variable of a new state that the model itself reads.

    A model that writes ``h.reshape(...)`` to a State and continues with ``h`` reads the new state
    at ``h``. The search goes back through reshapes and other data movement. ``ids`` are the
    elements of the state in the variable that the State is written with.
    """
    program, size = analysis.program, int(np.count_nonzero(ids != BOTTOM))
    current = var
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
