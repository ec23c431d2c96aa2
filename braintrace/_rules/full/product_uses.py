"""Products of parameters and data: their parts, by sample and by operand."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ..._core.flat_state import equation_of, flat_state_of, row_dtype
from ..._graph import ETraceGraph, ParameterUse, operand_key
from ..._jax import Equation, bind, is_var, struct_of
from ..._jaxpr.dataflow import Kind, kinds_of
from .chunk_vjp import parameters_behind

Operands = dict[str, jax.Array]
"""Operands of one product, by the index of each among the operands of its equation."""


@dataclasses.dataclass(frozen=True, eq=False)
class Product:
    """A product of parameters and an input of every sample.

    Attributes
    ----------
    graph, use
        The compiled model, and the use of its parameters.
    """

    graph: ETraceGraph
    use: ParameterUse

    @property
    def key(self) -> str:
        """Name of the product, and of its traces."""
        return self.use.key

    @property
    def operand_key(self) -> str:
        """Name of its operands among the weights."""
        return operand_key(self.use)

    @property
    def equation(self) -> Equation:
        """The equation."""
        return equation_of(self.graph, self.use)

    @property
    def x_place(self) -> int:
        """Index of the input among the operands."""
        assert self.use.x is not None
        return self.use.x

    @property
    def x_aval(self) -> Any:
        """Shape and dtype of the input."""
        return self.equation.invars[self.x_place].aval

    @property
    def y_aval(self) -> Any:
        """Shape and dtype of the output."""
        return self.equation.outvars[0].aval

    @property
    def dtype(self) -> Any:
        """Dtype of its traces."""
        dtypes = row_dtype(flat_state_of(self.graph)), self.x_aval.dtype, self.y_aval.dtype
        return jnp.result_type(*dtypes)

    def gradients(self, operands: Mapping[str, Any], x: jax.Array, y: jax.Array) -> Operands:
        """Return the gradients of parameters' operands, given an input and a cotangent."""

        def run(changed: Operands) -> jax.Array:
            all_operands = {**operands, **changed}
            values = [
                x if place == self.x_place else self.operand_at(all_operands, place)
                for place in range(len(self.equation.invars))
            ]
            (result,) = bind(self.equation, values)
            return result

        own = {str(place): operands[str(place)] for place in self.use.operands}
        gradients: Operands = jax.vjp(run, own)[1](y)[0]
        return gradients

    def operand_at(self, operands: Mapping[str, Any], place: int) -> Any:
        """Return an operand of the equation, given the operands that depend on parameters."""
        if str(place) in operands:
            return operands[str(place)]
        atom = self.equation.invars[place]
        return self.graph.traced.program.constants[atom] if is_var(atom) else atom.val

    def kinds(self) -> dict[str, Kind]:
        """Return how the gradient of each operand depends on the input."""
        atoms = self.graph.operand_atoms[self.operand_key]
        shapes = {name: struct_of(atom.aval) for name, atom in atoms.items()}

        def of_input(x: jax.Array, y: jax.Array, operands: Operands) -> Operands:
            return self.gradients(operands, x, y)

        avals = struct_of(self.x_aval), struct_of(self.y_aval), shapes
        names = sorted(map(str, self.use.operands))
        return dict(zip(names, kinds_of(of_input, *avals), strict=True))

    @property
    def constants(self) -> tuple[str, ...]:
        """Operands that are added independently of the input: weights of a constant input 1."""
        kinds = self.kinds()
        return tuple(name for name, kind in kinds.items() if kind is not Kind.LINEAR)


def products_of(graph: ETraceGraph) -> list[Product]:
    """Return the products of a model."""
    return [Product(graph, use) for use in flat_state_of(graph).uses if use.kind == "product"]


def without_products(graph: ETraceGraph) -> ETraceGraph:
    """Return the same model with the other uses of parameters, and the parameters in them, only."""
    flat = flat_state_of(graph)
    others = tuple(use for use in flat.uses if use.kind != "product")
    names = {name for use in others for name in parameters_behind(graph, use)}
    reached = {name: states for name, states in flat.reached.items() if name in names}
    flat = dataclasses.replace(flat, uses=others, reached=reached)
    return dataclasses.replace(graph, flat_state=flat)


def shape_of_sample(shape: tuple[int, ...], axis: int | None) -> tuple[int, ...]:
    """Return a shape without the axis of samples."""
    return shape if axis is None else (*shape[:axis], *shape[axis + 1 :])


def samples_first(value: jax.Array, axis: int | None) -> jax.Array:
    """Return an array with its sample axis first; the axis has length one if there is none."""
    return value[None] if axis is None else jnp.moveaxis(value, axis, 0)


def samples_back(value: jax.Array, axis: int | None) -> jax.Array:
    """Return an array with its sample axis in the place before `samples_first`."""
    return value[0] if axis is None else jnp.moveaxis(value, 0, axis)
