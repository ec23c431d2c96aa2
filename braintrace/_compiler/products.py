r"""Marking of ordinary products of data with a weight.

A ``dot_general`` is an einsum, whose axes have letters
(`braintrace._etrace_op.operations.einsum.Axes`). It is marked in the same way as that einsum.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax

from .. import _etrace_op
from .._etrace_op.einsum import Axes, in_matrices, product_and_sum
from .._jax import Equation, Var
from .._jaxpr import BindingTime, dot_letters, times_of_operands

Product: TypeAlias = Callable[[Sequence[Any]], Any]
"""Returns the marked product of an equation's operands."""

_FORMATS = ("bcoo_", "bcsr_", "coo_", "csr_")
"""Prefixes of the names of products with a matrix in a sparse format."""

_STORED = "it holds the entries of a sparse matrix. Call `braintrace.sparse_matmul`"
_LOOKUP = "data select its entries. Call `braintrace.embedding`"


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
    name = equation.primitive.name
    if len(positions) != 1 or BindingTime.DATA not in times_of_operands(equation, times):
        return None
    if name == "dot_general" and not (
        is_outer(equation) or is_sum_with_weights(equation, positions)
    ):
        return in_one_product(equation, positions[0])
    x_rank = len(equation.invars[0].aval.shape)
    is_plain = equation.params.get("batch_group_count") == 1
    if name == "conv_general_dilated" and positions == (1,) and x_rank > 2 and is_plain:
        return _not_by_default(equation) or _convolution(equation)
    if positions == (0,) and name in ("gather", "dynamic_slice"):
        return _LOOKUP
    return _STORED if positions == (0,) and name.startswith(_FORMATS) else None


def is_product(equation: Equation, positions: Sequence[int], times: dict[Var, BindingTime]) -> bool:
    """Test whether an equation is a product with a weight, markable or not."""
    return product_of(equation, positions, times) is not None


def in_one_product(equation: Equation, weight: int) -> Product | str:
    """Return a ``dot_general`` as one matrix product, or as a batch of them."""
    axes = _axes(equation, weight)
    return _not_by_default(equation) or (
        lambda operands: in_matrices(axes, *_factors(equation, weight, operands))
    )


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
    axes = _axes(equation, positions[0])
    return bool(axes.contracted) and not axes.free


def sum_with_weights(equation: Equation, operands: Sequence[Any], weight: int) -> Any:
    """Run the same product as an elementwise product and a sum."""
    return product_and_sum(_axes(equation, weight), *_factors(equation, weight, operands))


def _axes(equation: Equation, weight: int) -> Axes:
    letters = dot_letters(equation)
    return Axes(letters[1 - weight], letters[weight], letters[2])


def _factors(equation: Equation, weight: int, operands: Sequence[Any]) -> tuple[Any, Any]:
    """Return input and weight in the dtype of the result."""
    dtype = equation.outvars[0].aval.dtype
    return operands[1 - weight].astype(dtype), operands[weight].astype(dtype)


def _convolution(equation: Equation) -> Product:
    params, dtype = equation.params, equation.outvars[0].aval.dtype
    same = "padding", "lhs_dilation", "rhs_dilation", "dimension_numbers", "feature_group_count"
    options = {name: params[name] for name in same}

    def product(operands: Sequence[Any]) -> Any:
        factors = (operand.astype(dtype) for operand in operands)
        return _etrace_op.conv(*factors, strides=params["window_strides"], **options)

    return product


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
