"""All hidden state of a sample as one vector, and where parameters enter it.

Of rules that follow every way from state to state, through mixing as well. Let ``S`` be the hidden
states that a step reads and writes, of one sample, as a vector of ``n`` numbers, one state after
the other. Samples do not mix, so that ``J = dS'/dS`` is a matrix ``(n, n)`` for each of them.
"""

import dataclasses
from collections.abc import Mapping
from typing import Literal

import jax.numpy as jnp
import numpy as np

from .._jax import Atom, Var
from .._jaxpr import Program
from .._typing import Path
from .traced_model import StateLeaf

UseKind = Literal["product", "elementwise", "any"]
"""How parameters meet data in an equation: every sample apart along an axis of the input and one of
the output; element by element, each of them with one sample; or otherwise."""


@dataclasses.dataclass(frozen=True, eq=False)
class ParameterUse:
    """An equation where what is computed from parameters alone meets data.

    Attributes
    ----------
    key
        Name of the use, the same in every process.
    equation
        Its index in the program; ``None``: what the parameters give is a new state itself.
    operands
        Places of the operands that are computed from parameters; without an equation, the index of
        the state.
    kind
        How they meet.
    x, x_axis, y_axis
        For a product: the place of its other operand, and the axes of samples; ``None``: there is
        one sample.
    samples
        The sample of each element: of the operands (element by element), or of the outputs (any).
    held_paths
        Paths of the States, which the step does not write, behind the operands.
    output_bytes
        Size of its output.
    """

    key: str
    equation: int | None
    operands: tuple[int, ...]
    kind: UseKind
    x: int | None = None
    x_axis: int | None = None
    y_axis: int | None = None
    samples: tuple[np.ndarray, ...] = ()
    held_paths: tuple[Path, ...] = ()
    output_bytes: int = 0


def operand_key(use: ParameterUse) -> str:
    """Name the operands of a use among the weights, apart from parameters."""
    return f"operands of {use.key}"


def operands_of(program: Program, use: ParameterUse) -> dict[str, Atom]:
    """Return the operands of a product but its input, by their places; of other uses none."""
    if use.equation is None or use.kind != "product":
        return {}
    return {
        str(place): atom
        for place, atom in enumerate(program.equations[use.equation].invars)
        if place != use.x and jnp.issubdtype(atom.aval.dtype, jnp.inexact)
    }


@dataclasses.dataclass(frozen=True, eq=False)
class Layer:
    """Hidden states that depend on each other over time, step after step.

    Attributes
    ----------
    leaves, new_vars
        The states that a step writes, and where the model goes on with their new values.
    states
        Indices of those among them that are a part of the whole state.
    """

    leaves: tuple[StateLeaf, ...]
    new_vars: tuple[Var, ...]
    states: tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Structure:
    """Which of the ``n`` numbers of a sample's new state depend on what, by the program of a step.

    Attributes
    ----------
    transition
        On the numbers before the step: ``(n, n)``, new ones by old ones.
    of_outputs
        On the outputs that a product gives a sample, by the key of the use: ``(outputs, n)``.
    of_parameters
        On the entries of a parameter that enters in another way, by its name: ``(entries, n)``.
    """

    transition: np.ndarray
    of_outputs: Mapping[str, np.ndarray]
    of_parameters: Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True, eq=False)
class WholeState:
    """The hidden states of a step as one vector for every sample.

    Attributes
    ----------
    leaves
        The states, in the order of the vector.
    samples
        How many samples there are.
    axes
        The axis of samples of each state; ``None``: there is one sample.
    uses
        Where parameters enter.
    reached
        Indices of the states that each parameter reaches, in this step or a later one, by name.
    layers
        For a rule that leaves out what layers remember of each other: those, each after the ones
        that it reads. Empty: nothing is left out.
    structure
        For a rule that keeps neighbours: what depends on what. ``None``: weights
        are passed.
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
        """How many numbers of one sample each state has."""
        return tuple(int(np.prod(leaf.shape)) // self.samples for leaf in self.leaves)

    @property
    def size(self) -> int:
        """The length ``n`` of the vector."""
        return sum(self.sizes)

    @property
    def update_bytes(self) -> int:
        """What the cotangents of products take that an update keeps of every step."""
        products = (use for use in self.uses if use.kind == "product")
        return self.size * sum(use.output_bytes for use in products)

    def rows(self, states: tuple[int, ...]) -> np.ndarray:
        """Return the places of some states in the vector."""
        ends = np.cumsum([0, *self.sizes])
        parts = [np.arange(ends[index], ends[index + 1]) for index in states]
        return np.concatenate(parts) if parts else np.zeros(0, int)
