"""Relations: an ETP operation, its parameters, and the units that each of its outputs reaches.

Element ``u`` of ``y`` reaches unit ``p(u)`` of a hidden group, or several units by a broadcast.
With this fan-out as the first axis, *output elements* have the shape ``(fan-out, *y.shape)``. In
`_core`, ``Df`` and every other array with "the shape of y" has this shape.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from .._etrace_op import ETPPrimitive
from .._jax import Atom, Var
from .._typing import Path, path_name
from .hidden_group import HiddenGroup

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
