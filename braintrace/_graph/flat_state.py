"""Flattened state: all hidden states of a sample as one vector.

Full-Jacobian rules need it: they follow every path from state to state, also through coupling. Let
``S`` be the hidden states that a step reads and writes, of one sample, concatenated to a vector of
``n`` elements. Samples are independent, so that ``J = dS'/dS`` is an ``(n, n)`` matrix for each
sample.
"""

import dataclasses
from collections.abc import Mapping
from typing import Literal, TypeAlias

import jax.numpy as jnp
import numpy as np

from .._jax import Atom, Var
from .._jaxpr.program import Program
from .traced_model import StateLeaf


@dataclasses.dataclass(frozen=True, eq=False)
class ParameterUse:
    """An equation in which parameter-derived values meet data.

    Attributes
    ----------
    key
        Name of the use, the same in every process.
    equation
        Its index in the program; ``None``: the parameter-derived value is a new state itself.
    operands
        Indices of the parameter-derived operands; without an equation, the index of the state.
    kind
        How they meet. Product: samples are separate along an axis of the input and of the output.
        Elementwise: each element belongs to one sample. Any: neither of these.
    x, x_axis, y_axis
        For a product: index of its other operand, and the axes of samples; ``None``: a single
        sample.
    samples
        The sample of each element, of the operands (elementwise) or of the outputs (any).
    varies
        Whether the operands also depend on values that the samples of a step share.
    """

    key: str
    equation: int | None
    operands: tuple[int, ...]
    kind: Literal["product", "elementwise", "any"]
    x: int | None = None
    x_axis: int | None = None
    y_axis: int | None = None
    samples: tuple[np.ndarray, ...] = ()
    varies: bool = False


def operand_key(use: ParameterUse) -> str:
    """Return the key of a use's operands among the weights, unlike any parameter's."""
    return f"operands of {use.key}"


def operands_of(program: Program, use: ParameterUse) -> dict[str, Atom]:
    """Return the operands of a product except its input, by index; {} for other uses."""
    if use.equation is None or use.kind != "product":
        return {}
    return {
        str(place): atom
        for place, atom in enumerate(program.equations[use.equation].invars)
        if place != use.x and jnp.issubdtype(atom.aval.dtype, jnp.inexact)
    }


Layer: TypeAlias = tuple[tuple[StateLeaf, Var | None], ...]
"""Hidden states that depend on each other over time, each with the variable of its new value."""


@dataclasses.dataclass(frozen=True, eq=False)
class Structure:
    """Sparsity pattern of the new state of a sample: boolean matrices, new elements by others.

    Attributes
    ----------
    transition
        Dependence on the old elements.
    of_parameters
        Dependence on the entries of each parameter, by name.
    """

    transition: np.ndarray
    of_parameters: Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True, eq=False)
class FlatState:
    """The hidden states of a step as one vector for every sample.

    Attributes
    ----------
    leaves
        The states, in the order of the vector.
    samples
        Number of samples.
    axes
        The sample axis of each state; ``None``: a single sample.
    uses
        Equations where parameters enter.
    reached
        Indices of the states that each parameter reaches, in this step or a later one, by name.
    layers
        For a layered rule, which leaves out the memory of other layers: the layers, each after the
        ones that it reads. Empty: nothing is left out.
    structure
        The sparsity pattern, for a sparse rule (SnAp-n); ``None``: gradients pass through the steps
        of a chunk.
    """

    leaves: tuple[StateLeaf, ...]
    samples: int
    axes: tuple[int | None, ...]
    uses: tuple[ParameterUse, ...]
    reached: Mapping[str, tuple[int, ...]]
    layers: tuple[Layer, ...] = ()
    structure: Structure | None = None

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of elements that each state has for one sample."""
        return tuple(int(np.prod(leaf.shape)) // self.samples for leaf in self.leaves)

    @property
    def size(self) -> int:
        """The length ``n`` of the vector."""
        return sum(self.sizes)

    def update_bytes(self, program: Program) -> int:
        """Return the bytes of the product cotangents that an update keeps for every step."""
        places = [use.equation for use in self.uses if use.kind == "product"]
        outputs = program.made_by(place for place in places if place is not None)
        return int(self.size * sum(var.aval.size * var.aval.dtype.itemsize for var in outputs))

    def operands(self, program: Program, use: ParameterUse) -> list[Atom]:
        """Return the operands of a use, or the new state that is parameter-derived itself."""
        if use.equation is None:
            return [self.leaves[use.operands[0]].out_var]
        return [program.equations[use.equation].invars[place] for place in use.operands]

    def rows(self, states: tuple[int, ...]) -> np.ndarray:
        """Return the indices of some states' elements in the vector."""
        ends = np.cumsum([0, *self.sizes])
        parts = [np.arange(ends[index], ends[index + 1]) for index in states]
        return np.concatenate(parts) if parts else np.zeros(0, int)
