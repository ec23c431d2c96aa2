r"""Marking of ordinary products of data with a weight.

A ``dot_general`` is an einsum, whose axes have letters
(`braintrace._etrace_op.operations.einsum.Axes`). It is marked in the same way as that einsum.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from ... import _etrace_op
from ..._etrace_op.operations.einsum import Axes, arranged, in_matrices, product_and_sum
from ..._jax import Equation, Var
from ..._jaxpr.dataflow import BindingTime, times_of_operands
from ..._jaxpr.dataflow.bilinear import dot_letters
from .lookups import lookup_of


class Product(Protocol):
    """A product as an ETP operation.

    Attributes
    ----------
    outputs
        The axes of the result that come from the weight, along which a bias may be added; ``None``:
        it takes no bias.
    """

    @property
    def outputs(self) -> tuple[int, ...] | None: ...

    def __call__(self, operands: Sequence[Any], bias: Any) -> Any:
        """Return the marked product of the equation's operands, plus a bias if given."""
        ...


def product_of(
    equation: Equation, positions: Sequence[int], times: dict[Var, BindingTime]
) -> Product | str | None:
    """Return an equation as a marked product.

    Parameters
    ----------
    equation
        The equation.
    positions
        Indices of the parameter-derived operands.
    times
        Binding times of variables.

    Returns
    -------
    Product, str or None
        ``None``: it is not a product with a weight. A string: the reason why a product cannot be
        marked.
    """
    name, params = equation.primitive.name, equation.params
    if len(positions) != 1 or BindingTime.DATA not in times_of_operands(equation, times):
        return None
    product: Product | None = None
    if name == "dot_general" and not (
        is_outer(equation) or is_sum_with_weights(equation, positions)
    ):
        product = _dense(equation, positions[0])
    elif (
        name == "conv_general_dilated"
        and positions == (1,)
        and len(_shape(equation, 0)) > 2
        and params["batch_group_count"] == 1
    ):
        features = params["dimension_numbers"].out_spec[1]
        product = Convolution(params, equation.outvars[0].aval.dtype, (features,))
    elif positions == (0,):
        return STORED if name.startswith(FORMATS) else lookup_of(equation)
    return None if product is None else _not_by_default(equation) or product


FORMATS = ("bcoo_", "bcsr_", "coo_", "csr_")
"""Prefixes of the names of products with a matrix in a sparse format."""

STORED = (
    "it holds the entries of a matrix in a sparse format. Call `braintrace.sparse_matmul`, or use "
    "`braintrace.nn.SparseLinear`"
)


def is_product(equation: Equation, positions: Sequence[int], times: dict[Var, BindingTime]) -> bool:
    """Test whether an equation is a product with a weight, markable or not."""
    return product_of(equation, positions, times) is not None


def with_one_output(equation: Equation, positions: Sequence[int]) -> Product | str:
    """Return a product with a weight that adds no axis, as one with one output."""
    return _not_by_default(equation) or _dense(equation, positions[0])


def is_outer(equation: Equation) -> bool:
    """Test whether an equation is a ``dot_general`` without a sum."""
    is_dot = equation.primitive.name == "dot_general"
    return is_dot and not equation.params["dimension_numbers"][0][0]


def is_sum_with_weights(equation: Equation, positions: Sequence[int]) -> bool:
    """Test whether a ``dot_general`` with a sum has a weight that adds no axis.

    Every element of the data then contributes to one element, as in ``einsum("bgh,g->bh")``.
    """
    if equation.primitive.name != "dot_general" or len(positions) != 1:
        return False
    axes = _dense(equation, positions[0]).axes
    return bool(axes.contracted) and not axes.free


def row(bias: Any, axes: Sequence[int], outputs: Sequence[int], shape: Sequence[int]) -> Any:
    """Return a bias as the vector that a marked product takes.

    Parameters
    ----------
    bias, axes
        The bias, and the axes of the result that its own axes correspond to.
    outputs, shape
        The axes of the result that come from the weight, and the shape of the result.
    """
    sizes, order = dict(zip(axes, bias.shape, strict=True)), sorted(outputs)
    aligned = bias.reshape([sizes.get(axis, 1) for axis in order])
    full = jnp.broadcast_to(aligned, [shape[axis] for axis in order])
    return jnp.transpose(full, [order.index(axis) for axis in outputs]).reshape(-1)


def sum_with_weights(equation: Equation, operands: Sequence[Any], position: int) -> Any:
    """Run the same product as an elementwise product and a sum."""
    product = _dense(equation, position)
    return product_and_sum(product.axes, *product.factors(operands))


@dataclasses.dataclass(frozen=True)
class Dense:
    """``dot_general`` as one matrix product, or as a batch of them.

    Attributes
    ----------
    axes
        The letters of its axes.
    weight
        Index of the weight among the operands; the other one is the input.
    dtype
        The dtype of the result.
    """

    axes: Axes
    weight: int
    dtype: Any

    @property
    def outputs(self) -> tuple[int, ...]:
        """The axes shared with the weight, and the axes that the weight adds."""
        return tuple(map(self.axes.output.index, (*self.axes.shared, *self.axes.free)))

    def factors(self, operands: Sequence[Any]) -> tuple[Any, Any]:
        """Return input and weight in the dtype of the result."""
        return operands[1 - self.weight].astype(self.dtype), operands[self.weight].astype(
            self.dtype
        )

    def __call__(self, operands: Sequence[Any], bias: Any) -> Any:
        """Return the product; see `Product`."""
        return in_matrices(self.axes, *self.factors(operands), bias)


@dataclasses.dataclass(frozen=True)
class LowRank:
    """A low-rank product: two products with weights, one after the other.

    Attributes
    ----------
    first, second
        The products. The second sums over all axes that the first gets from its weight.
    """

    first: Dense
    second: Dense

    @property
    def outputs(self) -> tuple[int, ...]:
        """The axes that the second weight adds."""
        return self.second.outputs

    def __call__(self, operands: Sequence[Any], bias: Any) -> Any:
        """Return the product; see `Product`."""
        # The operands of the first product are the input of the second.
        inner, upper = operands[1 - self.second.weight].operands, operands[self.second.weight]
        x, lower = inner[1 - self.first.weight], inner[self.first.weight]
        (first, second), dtype = (self.first.axes, self.second.axes), self.second.dtype
        # The axes of the rank, as axes of the first result and as summed axes of the second
        # product.
        rank = [(a, b) for a, b in _renamed(first, second) if a in first.free]
        of_first, of_second = zip(*rank, strict=True)
        x = arranged(x, first.x, [*((a,) for a in first.data), first.contracted])
        lower = arranged(lower, first.weight, [first.contracted, of_first])
        shape = *x.shape[:-1], *(upper.shape[second.weight.index(a)] for a in second.free)
        upper = arranged(upper, second.weight, [of_second, second.free])
        factors = x.astype(dtype), lower.astype(dtype), upper.astype(dtype)
        y = _etrace_op.lora_matmul(*factors, bias=bias).reshape(shape)
        result = (*second.data, *second.free)
        return jnp.transpose(y, [result.index(a) for a in second.output])


def _renamed(first: Axes, second: Axes) -> Iterator[tuple[str, str]]:
    """Yield pairs of letters: of the first result, and of the second product's input."""
    return zip(first.output, second.x, strict=True)


def low_rank(first: Product, second: Product) -> LowRank | None:
    """Return two consecutive products as one of low rank; ``None`` if they are not."""
    if not (isinstance(first, Dense) and isinstance(second, Dense)):
        return None
    if first.axes.shared or second.axes.shared:
        return None
    produced = {b for a, b in _renamed(first.axes, second.axes) if a in first.axes.free}
    return LowRank(first, second) if produced == set(second.axes.contracted) else None


@dataclasses.dataclass(frozen=True, eq=False)
class Convolution:
    """``conv_general_dilated`` with a kernel as its weight."""

    params: Mapping[str, Any]
    dtype: Any
    outputs: tuple[int, ...]

    def __call__(self, operands: Sequence[Any], bias: Any) -> Any:
        """Return the convolution; see `Product`."""
        (x, weight), params = operands, self.params
        same = "padding", "lhs_dilation", "rhs_dilation", "dimension_numbers", "feature_group_count"
        return _etrace_op.conv(
            x.astype(self.dtype),
            weight.astype(self.dtype),
            bias,
            strides=params["window_strides"],
            **{name: params[name] for name in same},
        )


def _dense(equation: Equation, position: int) -> Dense:
    """Return a ``dot_general`` with letters for its axes; ``position``: the weight."""
    letters = dot_letters(equation)
    axes = Axes(letters[1 - position], letters[position], letters[2])
    return Dense(axes, position, equation.outvars[0].aval.dtype)


def _not_by_default(equation: Equation) -> str | None:
    """Return the reason if a product asks for a precision that ETP operations lack."""
    asked = equation.params["precision"]
    asked = asked if isinstance(asked, tuple) else (asked,)
    plain = (None, jax.lax.Precision.DEFAULT)
    if all(precision in plain for precision in asked) or jax.config.jax_default_matmul_precision:
        return None
    return (
        f"it has `precision={equation.params['precision']}`, and an ETP operation has the "
        "precision of `jax.default_matmul_precision`: set that instead"
    )


def _shape(equation: Equation, operand: int) -> tuple[int, ...]:
    shape: tuple[int, ...] = equation.invars[operand].aval.shape
    return shape
