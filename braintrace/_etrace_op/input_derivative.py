"""Derivatives of an operation's output elements with respect to input elements.

SnAp follows the paths from hidden states through a product. The compiler determines which pairs of
elements count. The rules of the operation determine which of them depend on each other, and the
derivatives. Samples are independent, so that these rules are about a single sample.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._jax import Equation, is_var, trace_to_jaxpr
from .._jaxpr import carries_derivative, program_of
from .primitive import get_primitive_spec
from .registry import Arrays, Shapes


def is_joined(equation: Equation, inputs: np.ndarray, outputs: np.ndarray) -> np.ndarray:
    """Return which output elements of a sample may depend on which input elements.

    Parameters
    ----------
    equation
        The operation.
    inputs, outputs
        Flat numbers of elements, of one shape.
    """
    spec = get_primitive_spec(equation.primitive)
    assert spec.x_invar_index is not None
    if spec.joins_input is None:  # an integer input has no derivative
        return np.full(inputs.shape, carries_derivative(equation.invars[spec.x_invar_index]))
    arguments = _weights(equation, [atom.aval for atom in equation.invars]), _shapes(equation)
    return np.asarray(spec.joins_input(*arguments, inputs, outputs, **equation.params))


def input_derivative(
    equation: Equation, operands: Sequence[Any], inputs: np.ndarray, outputs: np.ndarray
) -> jax.Array:
    """Return derivatives of a sample's output elements to its input elements.

    Parameters
    ----------
    equation
        The operation.
    operands
        Values of its operands; the value of the input is ignored.
    inputs, outputs
        See `is_joined`.
    """
    spec = get_primitive_spec(equation.primitive)
    if spec.input_derivative is not None:
        weights, shapes = _weights(equation, operands), _shapes(equation)
        derivative: jax.Array = spec.input_derivative(
            weights, shapes, inputs, outputs, **equation.params
        )
        return derivative
    return derivative_by_unit_vectors(equation, operands, inputs, outputs)


def derivative_by_unit_vectors(
    equation: Equation, operands: Sequence[Any], inputs: np.ndarray, outputs: np.ndarray
) -> jax.Array:
    """Return the same derivatives by a forward derivative along each input element."""
    spec = get_primitive_spec(equation.primitive)
    assert spec.x_invar_index is not None
    x = equation.invars[spec.x_invar_index].aval
    zero = jnp.zeros((1, *x.shape[1:]) if spec.batched else x.shape, x.dtype)
    used, which = np.unique(inputs, return_inverse=True)
    units = np.zeros((len(used), math.prod(zero.shape)), zero.dtype)
    units[np.arange(len(used)), used] = 1

    def of_unit(unit: jax.Array) -> jax.Array:
        return _tangent(equation, operands, zero, unit.reshape(zero.shape)).ravel()

    return jax.vmap(of_unit)(jnp.asarray(units))[which.reshape(inputs.shape), outputs]


def is_linear_in_input(equation: Equation) -> bool:
    """Test whether the derivative to the input is the same for every input."""
    spec = get_primitive_spec(equation.primitive)
    if spec.input_derivative is not None or spec.x_invar_index is None:
        return True

    def tangent(x: Any, unit: Any, *operands: Any) -> jax.Array:
        return _tangent(equation, operands, x, unit)

    operands = [atom.aval for atom in equation.invars]
    x = operands[spec.x_invar_index]
    program = program_of(trace_to_jaxpr(tangent, [x, x, *operands]))
    return program.in_vars[0] not in program.depends_on(filter(is_var, program.out_atoms))


def _tangent(
    equation: Equation, operands: Sequence[Any], x: jax.Array, unit: jax.Array
) -> jax.Array:
    primitive = equation.primitive
    index = get_primitive_spec(primitive).x_invar_index

    def of_input(x: jax.Array) -> jax.Array:
        values = [x if i == index else value for i, value in enumerate(operands)]
        y: jax.Array = primitive.implementation(*values, **equation.params)
        return y

    return jax.jvp(of_input, (x,), (unit,))[1]


def _weights(equation: Equation, operands: Sequence[Any]) -> Arrays:
    layout = get_primitive_spec(equation.primitive).resolve_trainable_invars(equation.params)
    return {name: operands[position] for name, position in layout.items()}


def _shapes(equation: Equation) -> Shapes:
    spec = get_primitive_spec(equation.primitive)
    assert spec.x_invar_index is not None
    x, y = equation.invars[spec.x_invar_index].aval, equation.outvars[0].aval
    first = 1 if spec.batched else 0
    return tuple(x.shape[first:]), tuple(y.shape[first:])
