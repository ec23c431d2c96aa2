"""Relation: an ETP operation, the hidden groups that it reaches, its parameters."""

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
    influences
        The map from ``y`` to each hidden group.
    hidden_groups
        Those groups.
    source
        ``file:line (function)`` of the user's call.
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

    @property
    def printed_paths(self) -> tuple[str, ...]:
        """Printed form of `parameter_paths`."""
        return tuple(map(path_name, self.parameter_paths))
