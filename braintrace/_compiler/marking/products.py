r"""Ordinary products of data with a weight, as marked operations.

A product sums over axes that both operands have, :math:`y_{bfo} = \sum_k x_{bfk} w_{ko}`, wherever
these axes stand, and on whichever side the weight is. The operands are moved into the places that
a marked operation expects, and the result back into those that the program expects.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from ... import _etrace_op
from ..._jax import Equation, Var
from ..._jaxpr.dataflow import Constants
from ..._jaxpr.factors import dot_axes
from .axes import moved
from .computed_from import From, of_operands
from .lookups import is_paired, lookup_of
from .sparse_products import STORED, stored_of


class Product(Protocol):
    """A product as a marked operation.

    Attributes
    ----------
    weight
        Which operand is the weight; of two, the other one is the input.
    outputs
        The axes of the result that are the weight's own, along which a bias may stand; ``None``:
        it takes no bias.
    """

    @property
    def weight(self) -> int: ...

    @property
    def outputs(self) -> tuple[int, ...] | None: ...

    def __call__(self, operands: Sequence[Any], bias: Any) -> Any:
        """Return the marked product of the equation's operands, plus a bias if there is one."""
        ...


def product_of(
    equation: Equation,
    positions: Sequence[int],
    found: dict[Var, From],
    constants: Constants | None = None,
) -> Product | str | None:
    """Return an equation as a marked product.

    Parameters
    ----------
    equation
        The equation.
    positions
        The operands that are computed from parameters.
    found
        What variables are computed from.
    constants
        The constants of the program; ``None``: they are not known yet.

    Returns
    -------
    Product, str or None
        ``None``: it is no product with a weight. A text: why a product cannot be marked.
    """
    name, params = equation.primitive.name, equation.params
    if name in STORED:
        return stored_of(equation, constants) if tuple(positions) == (0,) else None
    if len(positions) != 1 or From.DATA not in of_operands(equation, found):
        return None
    product: Product | None = None
    if name == "dot_general" and not (
        is_outer(equation) or is_sum_with_weights(equation, positions)
    ):
        product = _dense(equation, positions[0])
    elif name == "conv_general_dilated" and positions == (1,) and len(_shape(equation, 0)) > 2:
        features = params["dimension_numbers"].out_spec[1]
        product = Convolution(params, equation.outvars[0].aval.dtype, (features,))
    elif positions == (0,) and not is_paired(equation):
        return lookup_of(equation)
    return None if product is None else _not_by_default(equation) or product


def is_product(equation: Equation, positions: Sequence[int], found: dict[Var, From]) -> bool:
    """Tell whether an equation is a product with a weight, be it one that can be marked or not."""
    return product_of(equation, positions, found) is not None


def with_one_output(equation: Equation, positions: Sequence[int]) -> Product | str:
    """Return a product by a weight without an axis of its own as one with one output."""
    return _not_by_default(equation) or _dense(equation, positions[0])


def is_outer(equation: Equation) -> bool:
    """Tell whether an equation multiplies and sums nothing up."""
    is_dot = equation.primitive.name == "dot_general"
    return is_dot and not equation.params["dimension_numbers"][0][0]


def is_sum_with_weights(equation: Equation, positions: Sequence[int]) -> bool:
    """Tell whether an equation multiplies by a weight without an axis of its own, and sums up.

    Every element of the data goes to one place, as in ``einsum("bgh,g->bh")``.
    """
    if equation.primitive.name != "dot_general" or len(positions) != 1:
        return False
    axes = dot_axes(equation)
    return bool(axes.summed[0]) and not axes.free[positions[0]]


def row(bias: Any, axes: Sequence[int], outputs: Sequence[int], shape: Sequence[int]) -> Any:
    """Return a bias as the vector that a marked product takes.

    Parameters
    ----------
    bias, axes
        The bias, and the axes of the result along which its own stand.
    outputs, shape
        The axes of the result that are the weight's own, and the shape of the result.
    """
    sizes, order = dict(zip(axes, bias.shape, strict=True)), sorted(outputs)
    aligned = bias.reshape([sizes.get(axis, 1) for axis in order])
    full = jnp.broadcast_to(aligned, [shape[axis] for axis in order])
    return moved(full, [order.index(axis) for axis in outputs]).reshape(-1)


def sum_with_weights(equation: Equation, operands: Sequence[Any], position: int) -> Any:
    """Return the same as an element-wise product and a sum."""
    contracted, batch = equation.params["dimension_numbers"]
    x, weight = operands[1 - position], operands[position]
    dtype = equation.outvars[0].aval.dtype
    own = [*batch[position], *contracted[position]]
    places = [*batch[1 - position], *contracted[1 - position]]
    order = sorted(range(len(own)), key=places.__getitem__)
    weight = jnp.transpose(weight, [own[i] for i in order]).astype(dtype)
    full = jax.lax.broadcast_in_dim(weight, x.shape, tuple(sorted(places)))
    summed = jax.lax.reduce_sum(x.astype(dtype) * full, axes=tuple(contracted[1 - position]))
    left = [axis for axis in range(x.ndim) if axis not in contracted[1 - position]]
    first = [left.index(axis) for axis in batch[1 - position]]
    return moved(summed, [*first, *(i for i in range(len(left)) if i not in first)])


@dataclasses.dataclass(frozen=True)
class Dense:
    """``dot_general``: a matrix product, or several side by side.

    Attributes
    ----------
    shared, summed, free
        Axes of the input and of the weight: those that the result has once, those that are summed
        over, and all others.
    """

    weight: int
    shared: tuple[tuple[int, ...], tuple[int, ...]]
    summed: tuple[tuple[int, ...], tuple[int, ...]]
    free: tuple[tuple[int, ...], tuple[int, ...]]
    dtype: Any

    @property
    def outputs(self) -> tuple[int, ...]:
        """Shared axes come first; the weight's others stand behind the input's, or before them."""
        shared, of_input, of_weight = len(self.shared[0]), *map(len, self.free)
        first = shared + (of_input if self.weight == 1 else 0)
        return (*range(shared), *range(first, first + of_weight))

    def __call__(self, operands: Sequence[Any], bias: Any) -> Any:
        """Return the product; see `Product`."""
        x, weight = operands[1 - self.weight], operands[self.weight]
        of_x, of_weight = zip(self.shared, self.summed, self.free, strict=True)
        (x_shared, x_summed, x_free), (w_shared, w_summed, w_free) = of_x, of_weight
        leading = [x.shape[axis] for axis in x_free]
        shared = [x.shape[axis] for axis in x_shared]
        own = [weight.shape[axis] for axis in w_free]
        count, size = math.prod(x.shape[axis] for axis in x_summed), math.prod(own)
        groups = [math.prod(shared)] if shared else []
        x = moved(x, [*x_free, *x_shared, *x_summed]).reshape(*leading, *groups, count)
        weight = moved(weight, [*w_shared, *w_summed, *w_free]).reshape(*groups, count, size)
        bias = None if bias is None else bias.reshape(*groups, size)
        multiply = _etrace_op.grouped_matmul if shared else _etrace_op.matmul
        y = multiply(x.astype(self.dtype), weight.astype(self.dtype), bias)
        return self.in_order(y.reshape(*leading, *shared, *own))

    def in_order(self, y: Any) -> Any:
        """Bring a result ``(free of the input, shared, free of the weight)`` into its own order."""
        leading, shared = len(self.free[0]), len(self.shared[0])
        places = list(range(y.ndim))
        kinds = [places[:leading], places[leading + shared :]]
        order = kinds if self.weight == 1 else kinds[::-1]
        return moved(y, [*places[leading : leading + shared], *order[0], *order[1]])


@dataclasses.dataclass(frozen=True)
class LowRank:
    """A product by two weights, one after the other: a matrix of low rank.

    Attributes
    ----------
    first, second
        The products. The second sums over all axes that the first gets from its weight.
    """

    first: Dense
    second: Dense

    @property
    def weight(self) -> int:
        """The weight of the second; its input are the operands of the first."""
        return self.second.weight

    @property
    def outputs(self) -> tuple[int, ...]:
        """The axes that the second weight brings."""
        return self.second.outputs

    def __call__(self, operands: Sequence[Any], bias: Any) -> Any:
        """Return the product; see `Product`."""
        first, second = self.first, self.second
        inner, weight = operands[1 - second.weight].operands, operands[second.weight]
        x, lower = inner[1 - first.weight], inner[first.weight]
        (x_summed, l_summed), (x_free, l_free) = first.summed, first.free
        pairs = sorted(zip(*second.summed, strict=True))
        leading = [x.shape[axis] for axis in x_free]
        own = [weight.shape[axis] for axis in second.free[1]]
        rank = math.prod(lower.shape[axis] for axis in l_free)
        x = moved(x, [*x_free, *x_summed]).reshape(*leading, -1).astype(second.dtype)
        lower = moved(lower, [*l_summed, *l_free]).reshape(-1, rank)
        upper = moved(weight, [*(w for _, w in pairs), *second.free[1]]).reshape(rank, -1)
        factors = lower.astype(second.dtype), upper.astype(second.dtype)
        y = _etrace_op.lora_matmul(x, *factors, bias=bias)
        return second.in_order(y.reshape(*leading, *own))


def low_rank(first: Product, second: Product) -> LowRank | None:
    """Return two products, of which the second reads what the first gives, as one."""
    if not (isinstance(first, Dense) and isinstance(second, Dense)):
        return None
    if first.shared[0] or second.shared[0] or set(second.summed[0]) != set(first.outputs):
        return None
    return LowRank(first, second)


@dataclasses.dataclass(frozen=True, eq=False)
class Convolution:
    """``conv_general_dilated`` with a kernel."""

    params: Mapping[str, Any]
    dtype: Any
    outputs: tuple[int, ...]
    weight: int = 1

    def __call__(self, operands: Sequence[Any], bias: Any) -> Any:
        """Return the convolution; see `Product`."""
        (x, weight), params = operands, self.params
        same = "padding", "lhs_dilation", "rhs_dilation", "dimension_numbers"
        counts = "feature_group_count", "batch_group_count"
        return _etrace_op.conv(
            x.astype(self.dtype),
            weight.astype(self.dtype),
            bias,
            strides=params["window_strides"],
            **{name: params[name] for name in (*same, *counts)},
        )


def _dense(equation: Equation, position: int) -> Dense:
    axes, x = dot_axes(equation), 1 - position
    shared, summed, free = (
        (pair[x], pair[position]) for pair in (axes.batch, axes.summed, axes.free)
    )
    return Dense(position, shared, summed, free, equation.outvars[0].aval.dtype)


def _not_by_default(equation: Equation) -> str | None:
    """Say what a product asks for that a marked operation does not do."""
    asked = equation.params["precision"]
    asked = asked if isinstance(asked, tuple) else (asked,)
    plain = (None, jax.lax.Precision.DEFAULT)
    if all(precision in plain for precision in asked) or jax.config.jax_default_matmul_precision:
        return None
    return (
        f"it asks for `precision={equation.params['precision']}`, and a marked operation computes "
        "as `jax.default_matmul_precision` says: set that instead"
    )


def _shape(equation: Equation, operand: int) -> tuple[int, ...]:
    shape: tuple[int, ...] = equation.invars[operand].aval.shape
    return shape
