r"""Sparse matrix product: ``etp_sp_mm`` (a batch) and ``etp_sp_mv`` (one sample).

.. math:: y_{bo} = \sum_{e:\, c(e) = o} x_{b\,r(e)} w_e + c_o

Entry ``e`` of the matrix is at row ``r(e)`` (an input) and column ``c(e)`` (an output). Shapes: x
``(batch, in)`` or ``(in,)``, weight ``(nnz,)``, bias ``(out,)``. An entry reaches one output, so
the exact trace has one number per entry and sample: :math:`\epsilon_{be}`, with the instantaneous
term :math:`x_{b\,r(e)} f_{b\,c(e)}`. No array of size in x out is ever built
(see `sparse_products`).

No axis tells which output an entry reaches, so ``at_entries`` does. Two rules are written by hand
for speed, measured on a CPU with 10^4 inputs and outputs, 2 10^5 entries, 16 steps and 16 samples:
``xy_to_dw`` takes 1/27 of the time of the derived rule and a tenth of its memory, ``accumulate``
1/2.8 and half of the memory.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .._errors import ShapeError
from .._jax import run_on_one_cpu
from . import quantities, sparse_products
from .derive import like_operand
from .primitive import register_primitive_spec
from .registry import Arrays
from .sparse_pattern import SparsePattern, sparse_pattern
from .spec import ETPPrimitiveSpec


def _impl(
    x: Any, weight: Any, *bias: Any, sparse_mat: SparsePattern, has_bias: bool = False
) -> Any:
    y = sparse_products.product(x, weight, sparse_mat)
    return y + jnp.broadcast_to(bias[0], y.shape) if has_bias else y


def _impl_on_one_cpu(
    x: Any, weight: Any, *bias: Any, sparse_mat: SparsePattern, has_bias: bool = False
) -> Any:
    y = sparse_products.product_on_one_cpu(x, weight, sparse_mat)
    return y + jnp.broadcast_to(bias[0], y.shape) if has_bias else y


def _at_entries(hidden_dim: jax.Array, *, sparse_mat: SparsePattern, **_: Any) -> jax.Array:
    return sparse_products.of_entries(hidden_dim, sparse_mat)


def _xy_to_dw(
    x: jax.Array,
    hidden_dim: jax.Array,
    weights: Arrays,
    *,
    sparse_mat: SparsePattern,
    has_bias: bool = False,
) -> Arrays:
    gradient = sparse_products.entry_gradients(x, hidden_dim, sparse_mat)
    result = {"weight": like_operand(gradient, weights["weight"])}
    if has_bias:
        leading = tuple(range(hidden_dim.ndim - 1))
        result["bias"] = like_operand(hidden_dim.sum(leading), weights["bias"])
    return result


def _accumulate(
    x: jax.Array,
    hidden_dim: jax.Array,
    weights: Arrays,
    *,
    sparse_mat: SparsePattern,
    has_bias: bool = False,
) -> Arrays:
    result = {"weight": sparse_products.terms_of_steps(x, hidden_dim, sparse_mat)}
    if has_bias:
        result["bias"] = hidden_dim.sum(0)
    return result


_spec = functools.partial(
    ETPPrimitiveSpec,
    impl=_impl,
    xy_to_dw=_xy_to_dw,
    linear_in_input=True,
    accumulate=_accumulate,
    trace_axes={"weight": ("entry",), "bias": ("output",)},
    at_entries=_at_entries,
)
etp_sp_mm_p = register_primitive_spec(_spec(name="etp_sp_mm", batched=True))
run_on_one_cpu(etp_sp_mm_p, _impl, _impl_on_one_cpu)
etp_sp_mv_p = register_primitive_spec(_spec(name="etp_sp_mv", batched_form=etp_sp_mm_p))


def sparse_matmul(
    x: Any,
    weight_data: Any,
    *,
    sparse_mat: Any,
    bias: Any = None,
    weight_fn: Callable[[Any], Any] | None = None,
    bias_fn: Callable[[Any], Any] | None = None,
) -> Any:
    """Multiply by a sparse matrix whose entries learn online: ``x @ sparse(data)``.

    Parameters
    ----------
    x : array or Quantity ``(..., in)``
        One sample (1-D), a batch (2-D), or more leading axes.
    weight_data : array or Quantity ``(nnz,)``
        Trainable entries, in the order of ``sparse_mat.data``. A single number (shape ``()`` or
        ``(1,)``) is used for all entries.
    sparse_mat : sparse matrix ``(in, out)``
        The rows and columns of the entries: CSR, CSC or COO of ``saiunit.sparse`` or
        ``brainevent``, or JAX's BCOO or BCSR. Its own data are not used.
    bias : array or Quantity ``(out,)``, optional
        Trainable; rescaled into the unit of ``x`` times ``weight_data``.
    weight_fn, bias_fn : callable, optional
        Differentiable functions of ``weight_data`` and bias, applied first; see `matmul`.

    Returns
    -------
    array or Quantity ``(..., out)``
        Its unit is the product of the units of ``x`` and ``weight_data``.

    Notes
    -----
    An input that is NaN or infinite may affect outputs that it is not connected with.

    Raises
    ------
    ShapeError
        If the shapes do not fit.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import saiunit
    >>> import braintrace
    >>> matrix = saiunit.sparse.CSR.fromdense(jnp.array([[0.0, 2.0], [3.0, 0.0]]))
    >>> braintrace.sparse_matmul(jnp.ones(2), matrix.data, sparse_mat=matrix)
    Array([3., 2.], dtype=float32)
    """
    x, x_unit = quantities.split(x)
    weight, weight_unit = quantities.split(weight_data, weight_fn)
    pattern = sparse_pattern(sparse_mat)
    if weight.shape in ((), (1,)):
        weight = jnp.broadcast_to(weight, (pattern.nnz,))
    if weight.shape != (pattern.nnz,) or x.shape[-1:] != pattern.shape[:1]:  # a gather clips
        raise ShapeError(
            f"`sparse_matmul`: `sparse_mat` is {pattern}; expected `x` of shape (..., "
            f"{pattern.shape[0]}) and `weight_data` of shape {(pattern.nnz,)}, got {x.shape} and "
            f"{weight.shape}."
        )
    unit = x_unit * weight_unit
    biases = quantities.bias_operands("sparse_matmul", bias, unit, pattern.shape[1:], bias_fn)
    params: dict[str, Any] = {"sparse_mat": pattern, "has_bias": bool(biases)}
    y = quantities.bind_folded((etp_sp_mv_p, etp_sp_mm_p), x, weight, *biases, **params)
    return quantities.attach(y, unit)
