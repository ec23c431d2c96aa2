r"""Sparse matrix product: ``etp_sp_mm`` (a batch) and ``etp_sp_mv`` (one sample).

.. math:: y_{bo} = \sum_{e:\, c(e) = o} x_{b\,r(e)} w_e + c_o

Entry ``e`` of the matrix stands at row ``r(e)`` (an input) and column ``c(e)`` (an output).
Shapes: x ``(batch, in)`` or ``(in,)``, weight ``(nnz,)``, bias ``(out,)``. An entry reaches
one output, so the exact trace has one number per entry and sample:
:math:`\epsilon_{be}`, of instantaneous term :math:`x_{b\,r(e)} f_{b\,c(e)}`. Nothing of size
in x out is ever built. Products over many rows go through dense blocks of some columns each,
where these are not much larger than their entries: scattered numbers are added up a hundred
times slower. Of larger matrices, gradients and traces are sums over gathered rows (`sampled`), and
several samples are multiplied by a kernel (`sparse_kernel`). The form follows from sizes alone, but
for programs on several devices: entries that can be divided with their outputs are (`by_target`).
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._errors import ShapeError
from .._jax import divided_dependent, run_on_one_cpu
from . import by_target, quantities, sparse_kernel
from .dense import init_output_trace, init_trace_of_entries
from .primitive import register_primitive_spec
from .registry import Arrays, Shapes
from .rules import like_operand
from .sampled import is_large, sampled_product
from .sparse_pattern import SparsePattern, sparse_pattern
from .spec import ETPPrimitiveSpec, conventional_trainable_invars
from .sums import sum_over_samples

BLOCK_CELLS = 2**22
"""Largest dense block, in cells."""

CELLS_PER_ENTRY_FORWARD, CELLS_PER_ENTRY_BACKWARD, CELLS_PER_SAMPLED_ENTRY = 32, 128, 16
"""The density down to which dense blocks pay, measured with 32 to 2048 rows on two cores;
backward, where an entry's gradient is a sum over all rows, they pay longer, and less long where
there are so many entries that sums are taken block by block."""

FEWEST_ROWS = 16

MOST_ROWS, ROWS_AT_ONCE, MOST_TERMS = 32, 8, 2**24
"""Beyond how many rows the sparse form takes them in blocks: of a few on a processor, where what
they add up then stays in its cache, and elsewhere of as many as keep the terms within memory."""


def _pays(sparse_mat: SparsePattern, x: Any, cells_per_entry: int) -> bool:
    """Tell whether a product over the rows of ``x`` is faster through dense blocks."""
    is_dense = math.prod(sparse_mat.shape) <= cells_per_entry * sparse_mat.nnz
    return is_dense and math.prod(x.shape[:-1]) >= FEWEST_ROWS


def _blocks(
    sparse_mat: SparsePattern,
) -> Iterator[tuple[slice, np.ndarray, tuple[np.ndarray, np.ndarray]]]:
    """Yield the columns of every dense block, its entries, and their places in it."""
    outputs = sparse_mat.shape[1]
    count = min(outputs, max(2, math.ceil(math.prod(sparse_mat.shape) / BLOCK_CELLS)))
    edges = np.linspace(0, outputs, count + 1).astype(int)
    for start, stop in itertools.pairwise(edges):
        inside = (sparse_mat.columns >= start) & (sparse_mat.columns < stop)
        (entries,) = np.nonzero(inside)
        places = sparse_mat.rows[entries], sparse_mat.columns[entries] - start
        yield slice(int(start), int(stop)), entries, places


def _at(array: Any, indices: Any, sparse_mat: SparsePattern) -> Any:
    """Gather along the last axis; padding entries (beyond the end) give zero."""
    array = jnp.asarray(array)  # a constant of a user's may be one of NumPy's still
    if sparse_mat.has_padding:
        return array.at[..., indices].get(mode="fill", fill_value=0)
    # Told that no index lies outside, XLA compiles half as long for 10^7 entries.
    return array.at[..., indices].get(mode="promise_in_bounds", wrap_negative_indices=False)


def _impl(
    x: Any, weight: Any, *bias: Any, sparse_mat: SparsePattern, has_bias: bool = False
) -> Any:
    pays = _pays(sparse_mat, x, CELLS_PER_ENTRY_FORWARD)
    form = _product_dense if pays else _product_sparse
    y = _by_target(by_target.product, form, x, weight, sparse_mat)
    return y + jnp.broadcast_to(bias[0], y.shape) if has_bias else y


def _impl_on_one_cpu(
    x: Any, weight: Any, *bias: Any, sparse_mat: SparsePattern, **params: Any
) -> Any:
    """Return the same, by a kernel for the product where that is faster."""
    pays = _pays(sparse_mat, x, CELLS_PER_ENTRY_FORWARD)
    if pays or not sparse_kernel.suits(x, weight, sparse_mat):
        return _impl(x, weight, *bias, sparse_mat=sparse_mat, **params)
    y = sparse_kernel.product(x, weight, sparse_mat)
    return y + jnp.broadcast_to(bias[0], y.shape) if bias else y


def _by_target(divided: Callable[..., Any], whole: Callable[..., Any], *operands: Any) -> Any:
    """Run one of two functions of operands and of a matrix whose entries may be divided."""
    *arrays, sparse_mat = operands
    whole = functools.partial(whole, sparse_mat=sparse_mat)
    if sparse_mat.parts == 1:
        return whole(*arrays)
    divided = functools.partial(divided, sparse_mat=sparse_mat)
    return divided_dependent(*arrays, divided=divided, whole=whole)


def _product_dense(x: Any, weight: Any, sparse_mat: SparsePattern) -> Any:
    products = []
    for columns, entries, places in _blocks(sparse_mat):
        zero = jnp.zeros((sparse_mat.shape[0], columns.stop - columns.start), weight.dtype)
        products.append(x @ zero.at[places].add(weight[entries]))
    return jnp.concatenate(products, axis=-1)


def _entry_gradients(x: Any, hidden_dim: Any, sparse_mat: SparsePattern) -> Any:
    leading = tuple(range(hidden_dim.ndim - 1))
    gradient = jnp.zeros(sparse_mat.nnz, hidden_dim.dtype)
    for columns, entries, places in _blocks(sparse_mat):
        block = jnp.tensordot(x, hidden_dim[..., columns], (leading, leading))
        gradient = gradient.at[entries].set(block[places])
    return gradient


def _product_sparse(x: Any, weight: Any, sparse_mat: SparsePattern) -> Any:
    if x.ndim < 2 or x.shape[0] <= MOST_ROWS:
        return _at_once(x, weight, sparse_mat)

    def at_once(x: Any, weight: Any) -> Any:
        return _at_once(x, weight, sparse_mat)

    def in_blocks(rows: int, x: Any, weight: Any) -> Any:
        return jax.lax.map(lambda row: _at_once(row, weight, sparse_mat), x, batch_size=rows)

    most = max(ROWS_AT_ONCE, MOST_TERMS // max(1, sparse_mat.nnz))
    return jax.lax.platform_dependent(
        x,
        weight,
        cpu=functools.partial(
            divided_dependent, divided=at_once, whole=functools.partial(in_blocks, ROWS_AT_ONCE)
        ),
        default=functools.partial(in_blocks, most),
    )


def _at_once(x: Any, weight: Any, sparse_mat: SparsePattern) -> Any:
    contributions = _at(x, sparse_mat.rows, sparse_mat) * jnp.broadcast_to(
        weight, (*x.shape[:-1], *weight.shape)
    )
    sums = jax.ops.segment_sum(
        jnp.moveaxis(contributions, -1, 0),
        sparse_mat.columns,
        num_segments=sparse_mat.shape[1],
        indices_are_sorted=sparse_mat.columns_are_sorted,
        mode="drop" if sparse_mat.has_padding else "promise_in_bounds",
    )
    return jnp.moveaxis(sums, 0, -1)


def _yw_to_w(
    hidden_dim: jax.Array, trace: Arrays, *, sparse_mat: SparsePattern, has_bias: bool = False
) -> Arrays:
    result = {"weight": trace["weight"] * _of_entries(hidden_dim, sparse_mat)}
    if has_bias:
        result["bias"] = trace["bias"] * hidden_dim
    return result


def _xy_to_dw(
    x: jax.Array,
    hidden_dim: jax.Array,
    weights: Arrays,
    *,
    sparse_mat: SparsePattern,
    has_bias: bool = False,
) -> Arrays:
    x = x.astype(hidden_dim.dtype)
    product = _by_target(_summed_by_target, _summed, x, hidden_dim, sparse_mat)
    result = {"weight": like_operand(product, weights["weight"])}
    if has_bias:
        leading = tuple(range(hidden_dim.ndim - 1))
        result["bias"] = like_operand(hidden_dim.sum(leading), weights["bias"])
    return result


def _summed(x: Any, hidden_dim: Any, sparse_mat: SparsePattern) -> Any:
    in_blocks = hidden_dim.ndim == 2 and is_large(sparse_mat, len(hidden_dim))
    sparsest = CELLS_PER_SAMPLED_ENTRY if in_blocks else CELLS_PER_ENTRY_BACKWARD
    if _pays(sparse_mat, hidden_dim, sparsest):
        return _entry_gradients(x, hidden_dim, sparse_mat)
    if in_blocks:
        return sampled_product(x, hidden_dim, sparse_mat)
    return _sum_of_terms(x, hidden_dim, sparse_mat)


def _summed_by_target(x: Any, hidden_dim: Any, sparse_mat: SparsePattern) -> Any:
    if hidden_dim.ndim == 2 and len(hidden_dim) > 1:
        return by_target.sampled_product(x, hidden_dim, sparse_mat)
    return _sum_of_terms(x, hidden_dim, sparse_mat)


def _sum_of_terms(x: Any, hidden_dim: Any, sparse_mat: SparsePattern) -> Any:
    terms = functools.partial(_terms, sparse_mat=sparse_mat)
    return sum_over_samples(lambda rows: terms(*rows), (x, hidden_dim), hidden_dim.ndim - 1)


def _terms(x: Any, hidden_dim: Any, sparse_mat: SparsePattern) -> Any:
    inputs = _at(x.astype(hidden_dim.dtype), sparse_mat.rows, sparse_mat)
    return inputs * _of_entries(hidden_dim, sparse_mat)


def _of_entries(of_outputs: Any, sparse_mat: SparsePattern) -> Any:
    """Return for every entry the value of its output."""

    def picked(of_outputs: Any, sparse_mat: SparsePattern) -> Any:
        return _at(of_outputs, sparse_mat.columns, sparse_mat)

    return _by_target(by_target.of_entries, picked, of_outputs, sparse_mat)


def _accumulate(
    x: jax.Array,
    hidden_dim: jax.Array,
    weights: Arrays,
    *,
    sparse_mat: SparsePattern,
    has_bias: bool = False,
) -> Arrays:
    operands = x.astype(hidden_dim.dtype), hidden_dim, sparse_mat
    found = _by_target(_accumulated_by_target, _accumulated, *operands)
    result = {"weight": found.astype(hidden_dim.dtype)}
    if has_bias:
        result["bias"] = hidden_dim.sum(0)
    return result


def _accumulated(x: Any, hidden_dim: Any, sparse_mat: SparsePattern) -> Any:
    if is_large(sparse_mat, len(hidden_dim)):
        return sampled_product(x, hidden_dim, sparse_mat)
    return _terms(x, hidden_dim, sparse_mat).sum(0)


def _accumulated_by_target(x: Any, hidden_dim: Any, sparse_mat: SparsePattern) -> Any:
    if len(hidden_dim) > 1:
        return by_target.sampled_product(x, hidden_dim, sparse_mat)
    return _terms(x, hidden_dim, sparse_mat).sum(0)


def _entries_follow_outputs(
    parts: int, *, sparse_mat: SparsePattern, has_bias: bool = False
) -> bool:
    return sparse_mat.parts % parts == 0


def _joins_input(
    weights: Arrays,
    shapes: Shapes,
    inputs: np.ndarray,
    outputs: np.ndarray,
    *,
    sparse_mat: SparsePattern,
    has_bias: bool = False,
) -> np.ndarray:
    first, last = sparse_mat.entries_at(inputs, outputs)
    return first < last


def _input_derivative(
    weights: Arrays,
    shapes: Shapes,
    inputs: np.ndarray,
    outputs: np.ndarray,
    *,
    sparse_mat: SparsePattern,
    has_bias: bool = False,
) -> jax.Array:
    first, last = sparse_mat.entries_at(inputs, outputs)
    order, total = sparse_mat.by_place[1], jnp.zeros(inputs.shape, weights["weight"].dtype)
    for rank in range(int(np.max(last - first, initial=0))):  # several at one place add up
        entry = order[np.minimum(first + rank, len(order) - 1)]
        total = total + jnp.where(first + rank < last, weights["weight"][entry], 0)
    return total


_spec = functools.partial(
    ETPPrimitiveSpec,
    impl=_impl,
    yw_to_w=_yw_to_w,
    xy_to_dw=_xy_to_dw,
    init_drtrl=init_trace_of_entries,
    init_pp=init_output_trace,
    trainable_invars_fn=conventional_trainable_invars,
    x_invar_index=0,
    linear_in_input=True,
    accumulate=_accumulate,
    trace_axes={"weight": ("entry",), "bias": ("output",)},
    entries_follow_outputs=_entries_follow_outputs,
    joins_input=_joins_input,
    input_derivative=_input_derivative,
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
    """Multiply by a sparse matrix whose entries learn online: ``x @ sparse(weight_data)``.

    Parameters
    ----------
    x : array or Quantity ``(..., in)``
        One sample (1-D), a batch (2-D), or more leading axes.
    weight_data : array or Quantity ``(nnz,)``
        Trainable entries, in the order of ``sparse_mat.data``. One number (shape ``()`` or
        ``(1,)``) stands for all entries.
    sparse_mat : sparse matrix ``(in, out)``
        Where the entries stand: CSR, CSC or COO of ``saiunit.sparse`` or ``brainevent``, or
        JAX's BCOO or BCSR. Its own data are not used.
    bias : array or Quantity ``(out,)``, optional
        Trainable; rescaled into the unit of ``x`` times ``weight_data``.
    weight_fn, bias_fn : callable, optional
        Differentiable functions of ``weight_data`` and bias, applied first; see `matmul`.

    Returns
    -------
    array or Quantity ``(..., out)``
        With the unit of ``x`` times that of ``weight_data``.

    Notes
    -----
    An input that is not finite may reach outputs that it is not connected with.

    Raises
    ------
    ShapeError
        If the shapes do not fit.
    DtypeError
        If an operand is nothing that JAX computes with, ``sparse_mat`` is none of these matrices,
        or its structure is traced.
    OptionError
        If ``weight_fn`` or ``bias_fn`` is no function, or ``bias_fn`` has no bias.
    UnitError
        If the unit of the bias has another dimension than the product.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import saiunit
    >>> import braintrace
    >>> matrix = saiunit.sparse.CSR.fromdense(jnp.array([[0.0, 2.0], [3.0, 0.0]]))
    >>> braintrace.sparse_matmul(jnp.ones(2), matrix.data, sparse_mat=matrix)
    Array([3., 2.], dtype=float32)
    """
    x, x_unit = quantities.split("sparse_matmul", "x", x)
    weight, weight_unit = quantities.split_result(
        "sparse_matmul", "weight_data", weight_data, "weight_fn", weight_fn
    )
    pattern = sparse_pattern(sparse_mat)
    if weight.shape in ((), (1,)):
        weight = jnp.broadcast_to(weight, (pattern.nnz,))
    if weight.shape != (pattern.nnz,):
        raise ShapeError(
            f"`sparse_matmul`: expected `weight_data` of shape {(pattern.nnz,)}, one number per "
            f"entry of `sparse_mat`, got {weight.shape}."
        )
    quantities.check_features("sparse_matmul", x, pattern.shape[0], f"a {pattern} matrix")
    unit = x_unit * weight_unit
    biases = quantities.bias_operands("sparse_matmul", bias, unit, pattern.shape[1:], bias_fn)
    params = {"sparse_mat": pattern, "has_bias": bool(biases)}
    y = quantities.bind_folded(
        functools.partial(etp_sp_mv_p.bind, **params),
        functools.partial(etp_sp_mm_p.bind, **params),
        x,
        weight,
        *biases,
    )
    return quantities.attach(y, unit)
