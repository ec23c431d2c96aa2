"""Hidden groups, and relations: an ETP operation with the units that its outputs reach.

A hidden group has hidden states with elementwise coupling. Its *units* connect the elements of its
states: each state has at most one element in each unit. In field names, units are called positions.

Element ``u`` of ``y``, the output of an operation, reaches unit ``p(u)`` of a hidden group, or
several units by a broadcast. With this fan-out as the first axis, *output elements* have the shape
``(fan-out, *y.shape)``. In `_core`, ``Df`` and every other array with "the shape of y" has this
shape.
"""

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import numpy as np

from .._checks import path_name
from .._etrace_op.primitive import ETPPrimitive
from .._jax import Atom, Var
from .._typing import Path
from .traced_model import StateLeaf

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
    read_by_operations_only
        Whether it is a delay line that only ETP operations of later steps read. Truncated paths in
        it cost no accuracy.
    suffix
        Of the names of its states.
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
    read_by_operations_only: bool
    suffix: str = ""

    @property
    def hidden_states(self) -> tuple[StateLeaf, ...]:
        """The States of the group, each once: descriptions, not brainstate States."""
        return tuple(dict.fromkeys(self.states))

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the states; slots of one State have a number."""
        several = Counter(self.states)
        slot = {leaf: itertools.count() for leaf in self.states}
        numbers = (f"[{next(slot[leaf])}]" if several[leaf] > 1 else "" for leaf in self.states)
        pairs = zip(self.states, numbers, strict=True)
        return tuple(leaf.name + number + self.suffix for leaf, number in pairs)

    @property
    def probes(self) -> tuple[str, ...]:
        """Names of the perturbations of the new states: one for each variable."""
        pairs = set(zip(self.states, self.new_vars, strict=True))
        several = Counter(leaf for leaf, _ in pairs)
        names = zip(self.states, self.names, strict=True)
        return tuple(name if several[leaf] > 1 else leaf.name for leaf, name in names)

    @property
    def num_positions(self) -> int:
        """Number of units, batch included."""
        return int(np.prod(self.shape))

    @property
    def read_states(self) -> tuple[int, ...]:
        """States that some state of the group reads elementwise in the next step."""
        return tuple(sorted({c for _, c in self.transition}))


# --- relations

NO_OUTPUT = -1


@dataclasses.dataclass(frozen=True, eq=False)
class Tap:
    """A tap: a variable at which ``Df`` of one state is taken.

    Attributes
    ----------
    state
        Index ``a`` of the state in its group.
    var
        ``y`` itself, or a variable that it is broadcast to.
    outputs
        For every element of ``var``, the index of its output element, or `NO_OUTPUT`; ``None``: in
        order.
    """

    state: int
    var: Var
    outputs: np.ndarray | None


@dataclasses.dataclass(frozen=True, eq=False)
class InfluenceMap:
    """The units of one hidden group that each element of ``y`` reaches.

    Attributes
    ----------
    group
        Index of the group in the graph.
    taps
        The taps at which ``Df`` is taken.
    positions
        Unit of every output element; ``-1``: none.
    kind
        ``'identity'``, ``'tiled'`` or ``'gather'``.
    tile
        For a tiled map: the shape, with axes of size one, that units are reshaped to, and the shape
        that they are then broadcast to.
    reached
        States that ``y`` reaches, in this step or a later one.
    stored
        States of ``reached`` whose trace some later step, or its output, reads.
    mixed
        Whether some elements of ``y`` reach the group by coupling only.
    """

    group: int
    taps: tuple[Tap, ...]
    positions: np.ndarray
    kind: Literal["identity", "tiled", "gather"]
    tile: tuple[tuple[int, ...], tuple[int, ...]] | None
    reached: tuple[int, ...]
    stored: tuple[int, ...]
    mixed: bool

    @property
    def fan_out(self) -> int:
        """Largest number of units that one element of ``y`` reaches."""
        return int(self.positions.shape[0])

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Shape of the output elements; without the leading axis if the fan-out is one."""
        return self.positions.shape if self.fan_out > 1 else self.positions.shape[1:]

    @property
    def states(self) -> tuple[int, ...]:
        """States of the group that ``y`` reaches within the step."""
        return tuple(sorted({point.state for point in self.taps}))


@dataclasses.dataclass(frozen=True, eq=False)
class HiddenParamOpRelation:
    """One ETP operation with the hidden groups that it reaches.

    Attributes
    ----------
    key
        Name of the relation: parameter paths, operation and its number in the step. It is the same
        in every process.
    primitive, params
        The operation.
    equation
        Index of its equation in the program.
    x_var, y_var
        Its input (``None`` for an operation without one) and its output.
    trainable_vars
        Operands that learn, by their name in the operation's rules.
    trainable_positions
        Index of each of them among the operation's operands.
    trainable_paths
        Path of the first ParamState that each of them depends on.
    trainable_leaves
        Index of the leaf in that State's value.
    parameter_paths
        Paths of all ParamStates that the operands depend on.
    held_paths
        Paths of the other States that the operands depend on (masks, scales). The step does not
        write them.
    source
        ``file:line (function)`` of the user's call.
    non_parameters
        Names of other inputs that the operands depend on; with any, the operation has no trace.
    influences
        The map from ``y`` to each hidden group.
    hidden_groups
        Those groups.
    """

    key: str
    primitive: ETPPrimitive
    params: Mapping[str, Any]
    equation: int
    x_var: Atom | None
    y_var: Var
    trainable_vars: Mapping[str, Atom]
    trainable_positions: Mapping[str, int]
    trainable_paths: Mapping[str, Path]
    trainable_leaves: Mapping[str, int]
    parameter_paths: tuple[Path, ...]
    held_paths: tuple[Path, ...]
    source: str
    non_parameters: tuple[str, ...] = ()
    influences: tuple[InfluenceMap, ...] = ()
    hidden_groups: tuple[HiddenGroup, ...] = ()

    @property
    def printed_paths(self) -> tuple[str, ...]:
        """Printed form of `parameter_paths`."""
        return tuple(map(path_name, self.parameter_paths))
