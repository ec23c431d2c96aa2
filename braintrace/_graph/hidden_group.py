"""Hidden states that are coupled position by position."""

import dataclasses
from typing import TypeAlias

import numpy as np

from .._jax import Var
from .._typing import Path
from .traced_model import FILTERS, StateLeaf

Ids: TypeAlias = np.ndarray
"""Which hidden position each element of an array reaches, of the array's shape."""


@dataclasses.dataclass(frozen=True, order=True)
class Cut:
    """One use of a variable that couples elements: an equation and its operand."""

    equation: int
    operand: int


@dataclasses.dataclass(frozen=True, eq=False)
class Diagonal:
    """What goes through one product from the positions of old states to the same positions.

    Attributes
    ----------
    equation, operand
        The product, and the operand of it that the old states reach position by position.
    var
        Its output, or a variable that this is broadcast to.
    outputs
        For every element of ``var`` the element of the output behind it.
    inputs
        For every element of ``var`` an element of the operand, or `NO_ELEMENT`; in front an axis
        over the elements of the operand that are at one position.
    cuts
        The uses of variables on the way to the operand that are held constant.
    reads
        States ``c`` of the group whose old values reach it.
    """

    equation: int
    operand: int
    var: Var
    outputs: np.ndarray
    inputs: np.ndarray
    cuts: tuple[Cut, ...]
    reads: tuple[int, ...]


NO_ELEMENT = -1


@dataclasses.dataclass(frozen=True, eq=False)
class HiddenGroup:
    """Hidden states that share positions and influence each other position by position.

    Attributes
    ----------
    index
        Place of the group in the graph.
    states
        The states ``a = 0 .. n-1``.
    new_vars
        Variable of each state's new value; everything downstream reads it there.
    layouts, old_layouts
        Position of every element of a state's new variable, and of its old value; ``None``
        where they are all positions in order. A state may be at a part of them only.
    shape
        Shape of the positions: that of the first state that is at all of them, or their number.
    transition
        Pairs ``(a, c)`` for which ``D[a, c]`` is not structurally zero.
    cuts
        For each state the uses of variables that couple elements and are held constant.
    diagonals
        For each state what reaches it, all the same, through one product from its own position:
        nothing, unless the learning rule keeps that. It is a part of ``D``.
    read_by_output
        States whose value before the step the outputs of the step read.
    downstream
        States that no later step reads position by position, computed from the new values of the
        others (the ``h`` of an LSTM). Like an output, they see those values perturbed, so that
        the learning signal of the others has their part in it; their own ``D`` is zero.
    delay_line
        Whether it is a delay line that only ETP operations of later steps read: what is cut in
        it costs nothing.
    """

    index: int
    states: tuple[StateLeaf, ...]
    new_vars: tuple[Var, ...]
    layouts: tuple[Ids | None, ...]
    old_layouts: tuple[Ids | None, ...]
    shape: tuple[int, ...]
    transition: tuple[tuple[int, int], ...]
    cuts: tuple[tuple[Cut, ...], ...]
    diagonals: tuple[tuple[Diagonal, ...], ...]
    read_by_output: tuple[int, ...]
    downstream: tuple[int, ...]
    delay_line: bool

    @property
    def paths(self) -> tuple[Path, ...]:
        """Paths of the group's states."""
        return tuple(state.path for state in self.states)

    @property
    def model_states(self) -> tuple[StateLeaf, ...]:
        """Those that are the model's own, without the filters that the compiler has added."""
        return tuple(state for state in self.states if state.path[0] != FILTERS)

    @property
    def num_states(self) -> int:
        """Number ``n`` of states in the group."""
        return len(self.states)

    @property
    def hidden_paths(self) -> tuple[Path, ...]:
        """The same as `paths`."""
        return self.paths

    @property
    def hidden_states(self) -> tuple[StateLeaf, ...]:
        """The same as `states`: what is known of them; a graph holds no State."""
        return self.states

    @property
    def num_state(self) -> int:
        """The same as `num_states`."""
        return self.num_states

    @property
    def num_positions(self) -> int:
        """Number of positions, batch included."""
        return int(np.prod(self.shape))

    @property
    def read_states(self) -> tuple[int, ...]:
        """States that some state of the group reads, position by position, in the next step."""
        return tuple(sorted({c for _, c in self.transition}))
