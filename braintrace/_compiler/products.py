r"""Marking of ordinary products of data with a weight.

A ``dot_general`` is an einsum, whose axes have letters (`braintrace._etrace_op.einsum`). It is
marked as one matrix product, or as a batch of them.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax

from .._etrace_op.conv import conv
from .._etrace_op.einsum import in_matrices
from .._jax import Equation
from .._jaxpr.primitives import dot_letters

Product: TypeAlias = Callable[[Sequence[Any]], Any]
"""Returns the marked product of an equation's operands."""

_FORMATS = ("bcoo_", "bcsr_", "coo_", "csr_")
"""Prefixes of the names of products with a matrix in a sparse format."""

_STORED = "it holds the entries of a sparse matrix. Call `braintrace.sparse_matmul`"
_LOOKUP = "data select its entries. Call `braintrace.embedding`"


def product_of(equation: Equation, weight: int) -> Product | str | None:
    """Return a product of data with a weight as a marked product.

    Parameters
    ----------
    equation
        The equation.
    weight
        Index of the parameter-derived operand.

    Returns
    -------
    Product, str or None
        ``None``: it is not a product with a weight. A string: the reason why a product cannot be
        marked.
    """
    name, params = equation.primitive.name, equation.params
    if name == "dot_general" and params["dimension_numbers"][0][0]:
        return _unlike_default(params["precision"]) or _dot(equation, weight)
    if name == "conv_general_dilated" and weight == 1 and params["batch_group_count"] == 1:
        return _unlike_default(params["precision"]) or _convolution(equation)
    if weight == 0 and name in ("gather", "dynamic_slice"):
        return _LOOKUP
    return _STORED if weight == 0 and name.startswith(_FORMATS) else None


def _dot(equation: Equation, weight: int) -> Product:
    letters, dtype = dot_letters(equation), equation.outvars[0].aval.dtype
    of_each = letters[1 - weight], letters[weight], letters[2]

    def product(operands: Sequence[Any]) -> Any:
        x, w = operands[1 - weight].astype(dtype), operands[weight].astype(dtype)
        return in_matrices(x, w, *of_each)

    return product


def _convolution(equation: Equation) -> Product:
    params, dtype = equation.params, equation.outvars[0].aval.dtype
    same = "padding", "lhs_dilation", "rhs_dilation", "dimension_numbers", "feature_group_count"
    options = {name: params[name] for name in same}

    def product(operands: Sequence[Any]) -> Any:
        factors = (operand.astype(dtype) for operand in operands)
        return conv(*factors, strides=params["window_strides"], **options)

    return product


def _unlike_default(precision: Any) -> str | None:
    """Return the reason if a product asks for a precision that ETP operations lack."""
    asked = {*precision} if isinstance(precision, tuple) else {precision}
    if asked <= {None, jax.lax.Precision.DEFAULT} or jax.config.jax_default_matmul_precision:
        return None
    return (
        f"it has `precision={precision}`, and an ETP operation has the precision of "
        "`jax.default_matmul_precision`: set that instead"
    )
