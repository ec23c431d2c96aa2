"""Hidden groups: hidden states with elementwise coupling.

The *units* of a group connect the elements of its states: each state has at most one element in
each unit. In field names, units are called positions.
"""

import dataclasses
from collections import Counter
from typing import TypeAlias

import numpy as np

from .._jax import Var
from .traced_model import FILTERS, StateLeaf

Ids: TypeAlias = np.ndarray
"""The hidden unit that each element of an array reaches, of the array's shape."""


@dataclasses.dataclass(frozen=True, order=True)
class Cut:
    """A stop-gradient edge: an operand of an equation that couples elements."""

    equation: int
    operand: int


@dataclasses.dataclass(frozen=True, eq=False)
class HiddenGroup:
    """Hidden states that share units and influence each other elementwise.

    Attributes
    ----------
    index
        Index of the group in the graph.
    states
        The states ``a = 0 .. n-1``. A State with several elements of a unit (a ring buffer) occurs
        once for each of these slots.
    new_vars
        Variable of each state's new value, as the rest of the step reads it.
    layouts, old_layouts
        Unit of every element of a state's new variable, and of its old value; ``None``: all units
        in order; -1: in another slot. A state may have elements in a part of the units only.
    shape
        Shape of the units: the shape of the first state that is in all of them, or their number.
    transition
        Pairs ``(a, c)`` for which ``D[a, c]`` is not structurally zero.
    cuts
        For each state the stop-gradient edges: uses of variables that couple elements.
    read_late
        States whose old value a loss of the step sees: the outputs read it, or a state upstream of
        which it is.
    late_inputs
        For each state the old values of States upstream that it reads. A State is upstream if it
        is not in a cycle with the reader.
    downstream
        States that no later step reads elementwise, computed from the new values of the others (the
        ``h`` of an LSTM). Like an output, they see the perturbed new values, so that the learning
        signal of the others includes the path through them; their own ``D`` is zero.
    delay_line
        Whether it is a delay line that only ETP operations of later steps read. Truncated paths in
        it cost no accuracy.
    """

    index: int
    states: tuple[StateLeaf, ...]
    new_vars: tuple[Var, ...]
    layouts: tuple[Ids | None, ...]
    old_layouts: tuple[Ids | None, ...]
    shape: tuple[int, ...]
    transition: tuple[tuple[int, int], ...]
    cuts: tuple[tuple[Cut, ...], ...]
    read_late: tuple[int, ...]
    late_inputs: tuple[frozenset[Var], ...]
    downstream: tuple[int, ...]
    delay_line: bool

    @property
    def model_states(self) -> tuple[StateLeaf, ...]:
        """The states of the model itself, without filters that the compiler has added."""
        return tuple(state for state in self.leaves if state.path[0] != FILTERS)

    @property
    def leaves(self) -> tuple[StateLeaf, ...]:
        """The States of the group, each once."""
        return tuple(dict.fromkeys(self.states))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the states; slots of one State have a number."""
        several = Counter(self.states)
        slots: Counter[StateLeaf] = Counter()
        names = []
        for leaf in self.states:
            names.append(f"{leaf.name}[{slots[leaf]}]" if several[leaf] > 1 else leaf.name)
            slots[leaf] += 1
        return tuple(names)

    @property
    def probes(self) -> tuple[str, ...]:
        """Names of the perturbations of the new states: one for each variable."""
        pairs = set(zip(self.states, self.new_vars, strict=True))
        several = Counter(leaf for leaf, _ in pairs)
        names = zip(self.states, self.names, strict=True)
        return tuple(name if several[leaf] > 1 else leaf.name for leaf, name in names)

    @property
    def hidden_states(self) -> tuple[StateLeaf, ...]:
        """The same as `leaves`: descriptions, not brainstate States."""
        return self.leaves

    @property
    def num_positions(self) -> int:
        """Number of units, batch included."""
        return int(np.prod(self.shape))

    @property
    def read_states(self) -> tuple[int, ...]:
        """States that some state of the group reads elementwise in the next step."""
        return tuple(sorted({c for _, c in self.transition}))
