"""One step of a model as plain data: a flat program whose inputs and outputs are named."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from .._jax import Atom, Var
from .._jaxpr import Program
from .._typing import Path, PyTree, path_name

StateKind = Literal["hidden", "parameter", "random", "other"]
"""What a State is to a step."""


@dataclasses.dataclass(frozen=True)
class StateLeaf:
    """One array of one State.

    Attributes
    ----------
    path
        Path of the State in the model; States outside it are under ``'<outside>'``.
    leaf
        Index of the leaf within the State's value.
    component
        Index along the last axis for a `HiddenGroupState`, else ``None``.
    kind
        What the State is to the compiler.
    shape, dtype
        Of the leaf, batch axis included.
    in_var, out_var
        Value before the step, and after it (``None`` where the step does not write).
    joined_var
        For a component, the whole value of its State after the step.
    """

    path: Path
    leaf: int
    component: int | None
    kind: StateKind
    shape: tuple[int, ...]
    dtype: Any
    in_var: Var
    out_var: Atom | None
    joined_var: Atom | None

    @property
    def name(self) -> str:
        """Printed form: the path, and the leaf or component where there are several."""
        suffix = "" if self.component is None else f"[{self.component}]"
        return path_name(self.path) + (f"#{self.leaf}" if self.leaf else "") + suffix


@dataclasses.dataclass(frozen=True, eq=False)
class TracedModel:
    """One step of a model as plain data."""

    program: Program
    leaves: tuple[StateLeaf, ...]
    argument_vars: tuple[Var, ...]
    argument_roots: tuple[str, ...]
    argument_names: tuple[str, ...]
    argument_tree: PyTree
    state_trees: Mapping[Path, PyTree]
    output_atoms: tuple[Atom, ...]
    output_tree: PyTree
    parameter_paths: tuple[Path, ...]
    batch_size: int | None

    @property
    def written_vars(self) -> list[Var]:
        """Input variables of the State leaves that the step writes."""
        return [leaf.in_var for leaf in self.leaves if leaf.out_var is not None]
