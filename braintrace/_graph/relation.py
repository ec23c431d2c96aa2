"""An ETP operation that reaches hidden states, and its parameters."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from .._etrace_op import ETPPrimitive
from .._jax import Atom, Var
from .._typing import Path, path_name
from .hidden_group import HiddenGroup
from .influence import InfluenceMap


@dataclasses.dataclass(frozen=True, eq=False)
class HiddenParamOpRelation:
    """One ETP operation that reaches hidden states, and how.

    Attributes
    ----------
    key
        Name of the relation: parameter paths, operation and its number in the step. The same
        in every process.
    primitive, params
        The operation.
    equation
        Index of its equation in the program.
    x_var, y_var
        Its input (``None`` for an operation without one) and its output.
    trainable_vars
        Operands that learn, by the name that the operation's rules give them.
    trainable_positions
        Where those operands stand among the operation's operands.
    trainable_paths
        Path of the (first) ParamState behind every such operand.
    trainable_leaves
        Which leaf of that State's value it is.
    parameter_paths
        Paths of all ParamStates behind the operands.
    held_paths
        Paths of the other States behind the operands (masks, scales). The step does not write
        them.
    influences
        How ``y`` reaches each hidden group.
    hidden_groups
        Those groups.
    source
        ``file:line (function)`` of the user's call.
    gate
        Name of the operation that this one is a gate of, which gate it is, and of how many;
        ``None``: it is the user's operation itself.
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
    influences: tuple[InfluenceMap, ...]
    hidden_groups: tuple[HiddenGroup, ...]
    source: str
    gate: tuple[str, int, int] | None = None

    @property
    def printed_paths(self) -> tuple[str, ...]:
        """Printed form of `parameter_paths`."""
        return tuple(map(path_name, self.parameter_paths))
