r"""Sparse matrix product: ``etp_sp_mm`` (a batch) and ``etp_sp_mv`` (one sample).

.. math:: y_{bo} = \sum_{e:\, c(e) = o} x_{b\,r(e)} w_e + c_o

Entry ``e`` of the matrix is at row ``r(e)`` (an input) and column ``c(e)`` (an output). Shapes: x
``(batch, in)`` or ``(in,)``, weight ``(nnz,)``, bias ``(out,)``. An entry reaches one output, so
the exact trace has one number per entry and sample: :math:`\epsilon_{be}`, with the instantaneous
term :math:`x_{b\,r(e)} f_{b\,c(e)}`. No array of size in x out is built for a large matrix.

No axis tells which output an entry reaches, so ``at_entries`` does. The product is a segment sum,
or a kernel on one CPU. Two rules are written by hand for speed, measured on a CPU with 10^4 inputs
and outputs, 2 10^5 entries, 16 steps and 16 samples: ``xy_to_dw`` takes 1/27 of the time of the
derived rule and a tenth of its memory, ``accumulate`` 1/2.8 and half of the memory.
"""

import functools
import hashlib
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._errors import DtypeError, ShapeError
from .._jax import is_tracer
from .._jax_kernels import csr_kernel, has_csr_kernel, run_on_one_cpu, runs_on_several_devices
from . import quantities
from .primitive import register_forms
from .registry import Arrays
from .rules import like_operand
from .sums import sum_over_samples

# --- the pattern of a matrix


@dataclass(frozen=True, repr=False)
class SparsePattern:
    """Row and column of every entry; equal and hashed by content.

    Attributes
    ----------
    rows, columns : numpy array ``(nnz,)`` of int32
        Read-only.
    padding : numpy array ``(nnz,)`` of bool, or None
        The entries that contribute nothing, at row and column zero; None without any.
    shape : tuple of int
        ``(in, out)``.
    digest : str
        Hash of the content, so that the arrays need not be compared.
    """

    rows: np.ndarray = field(compare=False)
    columns: np.ndarray = field(compare=False)
    padding: np.ndarray | None = field(compare=False)
    shape: tuple[int, int]
    digest: str

    @functools.cached_property
    def columns_are_sorted(self) -> bool:
        """Whether ``columns`` never decreases."""
        return bool(np.all(np.diff(self.columns) >= 0))

    @functools.cached_property
    def by_column(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Entries sorted by column, the start of each column, and their rows."""
        order = np.argsort(self.columns, kind="stable").astype(np.int32)
        pointers = np.searchsorted(self.columns[order], np.arange(self.shape[1] + 1))
        return order, pointers.astype(np.int32), self.rows[order]

    @property
    def nnz(self) -> int:
        """Number of entries, padding included."""
        return len(self.rows)

    def __repr__(self) -> str:
        return f"sparse {self.shape[0]}x{self.shape[1]} nnz={self.nnz}"


# By the identity of index arrays that are alive: every trace of a model needs their pattern.
_known: dict[tuple[Any, ...], SparsePattern] = {}


def sparse_pattern(matrix: Any) -> SparsePattern:
    """Return the pattern of a sparse matrix of any library.

    Raises
    ------
    DtypeError
        If its class stores no rows and columns.
    """
    if isinstance(matrix, SparsePattern):
        return matrix
    # By class name: brainevent is not a dependency, and its classes only need to look alike.
    classes = (base.__name__ for base in type(matrix).__mro__)
    kind = next((name for name in classes if name in _INDICES), None)
    if kind is None:
        raise DtypeError(
            f"`sparse_matmul`: `sparse_mat` must be a matrix with rows and columns of entries "
            f"({', '.join(_INDICES)}), got {type(matrix).__name__}. Use "
            "`braintrace.matmul(x, matrix.data)` for a `brainevent.Dense`, and "
            "`brainevent.CSR.fromdense(matrix.todense())` for connections drawn in each product."
        )
    shape = (int(matrix.shape[0]), int(matrix.shape[1]))
    indices = [getattr(matrix, name) for name in _INDICES[kind]]
    if not all(isinstance(array, jax.Array) and not is_tracer(array) for array in indices):
        return _make_pattern(*_read(kind, indices), shape)
    key = (kind, shape, *map(id, indices))
    if key not in _known:
        _known[key] = _make_pattern(*_read(kind, indices), shape)
        for array in indices:
            weakref.finalize(array, _known.pop, key, None).atexit = False
    return _known[key]


def _make_pattern(rows: np.ndarray, columns: np.ndarray, shape: tuple[int, int]) -> SparsePattern:
    padding = (rows >= shape[0]) | (columns >= shape[1])
    rows, columns = (np.where(padding, 0, places).astype(np.int32) for places in (rows, columns))
    for array in (rows, columns, padding):
        array.setflags(write=False)
    digest = hashlib.sha256(b"".join(map(np.ndarray.tobytes, (rows, columns, padding))))
    present = padding if padding.any() else None
    return SparsePattern(rows, columns, present, shape, digest.hexdigest())


_INDICES = {
    "CSR": ("indices", "indptr"),
    "BCSR": ("indices", "indptr"),
    "CSC": ("indices", "indptr"),
    "COO": ("row", "col"),
    "BCOO": ("indices",),
    "TCSR": ("indices", "indptr"),
    "FixedNumPerPre": ("indices",),
    "FixedNumPerPost": ("indices",),
}


def _read(kind: str, indices: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return the row and the column of every entry."""
    arrays = [np.asarray(array).astype(np.int64) for array in indices]
    if kind == "BCOO":
        return arrays[0][:, 0], arrays[0][:, 1]
    if kind.startswith("FixedNum"):
        other = np.repeat(np.arange(len(arrays[0])), arrays[0].shape[1])
        places = other, arrays[0].ravel()
        return places if kind == "FixedNumPerPre" else places[::-1]
    minor, second = arrays
    if kind == "COO":
        return minor, second
    counts = np.diff(second)
    major = np.full(len(minor), len(counts))  # entries beyond the last pointer are padding
    major[: counts.sum()] = np.repeat(np.arange(len(counts)), counts)
    return (minor, major) if kind == "CSC" else (major, minor)


# --- products

# Terms of entries and samples that a segment sum takes at once, to bound its memory.
MOST_TERMS = 2**24

# Below these sizes, the kernel takes longer for 8 samples than segment sums.
KERNEL_FEWEST_SAMPLES, KERNEL_FEWEST_ENTRIES = 6, 2**14

KERNEL_DTYPES = frozenset(map(jnp.dtype, ("float32", "float64", "complex64", "complex128")))

# The kernel takes twice as long for more samples at once (10^4 columns, 256 samples).
SAMPLES_AT_ONCE, SIDE_BY_SIDE = 64, 8


def _picked(array: Any, indices: Any) -> Any:
    """Return elements of the first axis; all indices are in range."""
    # Without bounds checks, XLA compiles in half the time for 10^7 entries.
    return array.at[indices].get(mode="promise_in_bounds", wrap_negative_indices=False)


def _at(array: Any, indices: np.ndarray) -> Any:
    """Return elements of the last axis; all indices are in range."""
    array = jnp.asarray(array)  # a user's constant may still be a NumPy array
    return array.at[..., indices].get(mode="promise_in_bounds", wrap_negative_indices=False)


def _product(x: Any, weight: Any, pattern: SparsePattern) -> Any:
    if x.ndim < 2 or len(x) * pattern.nnz <= MOST_TERMS or runs_on_several_devices():
        return _segment_sums(x, weight, pattern)
    rows = max(1, MOST_TERMS // pattern.nnz)
    return jax.lax.map(lambda row: _segment_sums(row, weight, pattern), x, batch_size=rows)


def _segment_sums(x: Any, weight: Any, pattern: SparsePattern) -> Any:
    terms = _at(x, pattern.rows) * jnp.broadcast_to(weight, (*x.shape[:-1], pattern.nnz))
    sums = jax.ops.segment_sum(
        jnp.moveaxis(terms, -1, 0),
        pattern.columns,
        num_segments=pattern.shape[1],
        indices_are_sorted=pattern.columns_are_sorted,
        mode="promise_in_bounds",
    )
    return jnp.moveaxis(sums, 0, -1)


def _product_on_one_cpu(x: Any, weight: Any, pattern: SparsePattern) -> Any:
    is_large = len(x) >= KERNEL_FEWEST_SAMPLES and pattern.nnz >= KERNEL_FEWEST_ENTRIES
    has_dtype = x.dtype == weight.dtype and x.dtype in KERNEL_DTYPES
    if not (is_large and has_dtype and has_csr_kernel()):
        return _product(x, weight, pattern)
    order, pointers, rows = pattern.by_column
    data = _picked(weight, order)

    def of_part(x: Any) -> Any:
        shape = jax.ShapeDtypeStruct((pattern.shape[1], len(x)), x.dtype)
        return csr_kernel(shape)(data, pointers, rows, x.T).T

    samples = len(x)
    parts = math.ceil(samples / SAMPLES_AT_ONCE)
    length = math.ceil(samples / parts / SIDE_BY_SIDE) * SIDE_BY_SIDE
    x = jnp.pad(x, [(0, parts * length - samples), (0, 0)])
    results = jax.lax.map(of_part, x.reshape(parts, length, -1))
    return results.reshape(parts * length, -1)[:samples]


# --- sums of products at entries

# Gradients of a matrix of at most this size, for as many rows, are a dense product.
DENSE_CELLS, DENSE_FEWEST_ROWS = 2**17, 16

# Below these sizes, gathering the factors at once is faster: a row costs as much as 10 numbers.
FEWEST_ROWS, FEWEST_ENTRIES = 8, 2**12

# On a CPU: rows of a gather (a cache line), gathers at once, and terms of a block of entries.
PIECE, PIECES, CPU_TERMS = 16, 4, 2**18


def _sums_at_entries(x: Any, factor: Any, pattern: SparsePattern) -> Any:
    """Return the sums over the first axis of input times factor, for every entry.

    ``x`` and ``factor`` are ``(k, in)`` and ``(k, out)``, or ``(k, batch, in)`` and ``(k, batch,
    out)``. On a CPU, the rows of both are taken in parts that stay in its cache.
    """
    operands = x.astype(factor.dtype), factor

    def at_once(x: Any, factor: Any) -> Any:
        sums = functools.partial(_sddmm, pattern, len(x), 1, MOST_TERMS)
        return (sums if x.ndim == 2 else jax.vmap(sums, 1))(x, factor)

    def in_cache(x: Any, factor: Any) -> Any:
        sums = functools.partial(_sddmm, pattern, PIECE, PIECES, CPU_TERMS)
        if x.ndim == 2:
            return sums(x, factor)
        samples = jnp.swapaxes(x, 0, 1), jnp.swapaxes(factor, 0, 1)
        return jax.lax.map(lambda sample: sums(*sample), samples)

    on_cpu = at_once if runs_on_several_devices() else in_cache
    return jax.lax.platform_dependent(*operands, cpu=on_cpu, default=at_once)


def _sddmm(
    pattern: SparsePattern, piece: int, pieces: int, most_terms: int, x: Any, factor: Any
) -> Any:
    dtype = jnp.promote_types(x.dtype, jnp.float32)  # sums in half precision would stop growing
    parts = math.ceil(len(x) / (piece * pieces))
    pieces = math.ceil(len(x) / parts / piece)
    missing = [(0, parts * pieces * piece - len(x)), (0, 0)]
    cut = [jnp.pad(a, missing).reshape(parts, pieces, piece, -1) for a in (x, factor)]
    size = min(pattern.nnz, max(1, most_terms // piece))
    starts = jnp.arange(0, pattern.nnz, size)  # the last block ends with the last entry
    places = jnp.asarray(pattern.rows), jnp.asarray(pattern.columns)

    def of_part(sums: Any, part: Any) -> tuple[Any, None]:
        # Each piece is a separate array: XLA would compute the place of every element of a slice.
        pairs = [(of_x.T, of_factor.T) for of_x, of_factor in zip(*part, strict=True)]

        def of_block(start: Any) -> Any:
            rows, columns = (jax.lax.dynamic_slice_in_dim(a, start, size) for a in places)
            terms = (_picked(a, rows) * _picked(b, columns) for a, b in pairs)
            total = sum(term.astype(dtype) for term in terms)
            # XLA on a CPU would add the elements of a reduction one by one.
            return jnp.dot(total, jnp.ones(piece, dtype), precision=jax.lax.Precision.HIGHEST)

        return sums + jax.lax.map(of_block, starts), None

    blocks, _ = jax.lax.scan(of_part, jnp.zeros((len(starts), size), dtype), cut)
    rest = len(starts) * size - pattern.nnz
    return jnp.concatenate([blocks[:-1].reshape(-1), blocks[-1, rest:]])


def _is_large(factor: Any, pattern: SparsePattern) -> bool:
    return len(factor) >= FEWEST_ROWS and pattern.nnz >= FEWEST_ENTRIES


def _terms(x: Any, factor: Any, pattern: SparsePattern) -> Any:
    return _at(x.astype(factor.dtype), pattern.rows) * _at(factor, pattern.columns)


# --- the operation


def _impl(
    x: Any, weight: Any, *bias: Any, sparse_mat: SparsePattern, has_bias: bool = False
) -> Any:
    return quantities.add_bias(_product(x, weight, sparse_mat), bias)


def _impl_on_cpu(
    x: Any, weight: Any, *bias: Any, sparse_mat: SparsePattern, has_bias: bool = False
) -> Any:
    return quantities.add_bias(_product_on_one_cpu(x, weight, sparse_mat), bias)


def _at_entries(hidden_dim: jax.Array, *, sparse_mat: SparsePattern, **_: Any) -> jax.Array:
    return _at(hidden_dim, sparse_mat.columns)


def _xy_to_dw(
    x: jax.Array,
    hidden_dim: jax.Array,
    weights: Arrays,
    *,
    sparse_mat: SparsePattern,
    has_bias: bool = False,
) -> Arrays:
    is_dense = math.prod(sparse_mat.shape) <= DENSE_CELLS
    if hidden_dim.ndim == 1:
        gradient = _terms(x, hidden_dim, sparse_mat)
    elif is_dense and len(x) >= DENSE_FEWEST_ROWS:
        dense = jnp.matmul(x.T.astype(hidden_dim.dtype), hidden_dim)
        gradient = dense[sparse_mat.rows, sparse_mat.columns]
    elif _is_large(hidden_dim, sparse_mat):
        gradient = _sums_at_entries(x, hidden_dim, sparse_mat)
    else:
        gradient = sum_over_samples(
            lambda rows: _terms(rows[0], rows[1], sparse_mat), (x, hidden_dim)
        )
    result = {"weight": gradient}
    if has_bias:
        result["bias"] = hidden_dim.sum(tuple(range(hidden_dim.ndim - 1)))
    return {name: like_operand(gradient, weights[name]) for name, gradient in result.items()}


def _accumulate(
    x: jax.Array,
    hidden_dim: jax.Array,
    weights: Arrays,
    *,
    sparse_mat: SparsePattern,
    has_bias: bool = False,
) -> Arrays:
    if _is_large(hidden_dim, sparse_mat):
        terms = _sums_at_entries(x, hidden_dim, sparse_mat).astype(hidden_dim.dtype)
    else:
        terms = _terms(x, hidden_dim, sparse_mat).sum(0)
    return {"weight": terms, "bias": hidden_dim.sum(0)} if has_bias else {"weight": terms}


etp_sp_mv_p, etp_sp_mm_p = register_forms(
    "etp_sp_mv",
    "etp_sp_mm",
    impl=_impl,
    xy_to_dw=_xy_to_dw,
    trace_axes={"weight": ("entry",), "bias": ("output",)},
    at_entries=_at_entries,
    accumulate=_accumulate,
    linear_in_input=True,
)
run_on_one_cpu(etp_sp_mm_p, _impl, _impl_on_cpu)


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
        Trainable entries, in the order of ``sparse_mat.data``, or in its shape. A single number
        (shape ``()`` or ``(1,)``) is used for all entries.
    sparse_mat : sparse matrix ``(in, out)``
        The rows and columns of the entries: CSR, CSC or COO of ``saiunit.sparse`` or
        ``brainevent``, its TCSR, FixedNumPerPre or FixedNumPerPost, or JAX's BCOO or BCSR. Its own
        data are not used.
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
    if weight.ndim == 2 and weight.size == pattern.nnz:  # a fixed number of connections
        weight = weight.reshape(-1)
    if weight.shape != (pattern.nnz,) or x.shape[-1:] != pattern.shape[:1]:  # a gather clips
        raise ShapeError(
            f"`sparse_matmul`: `sparse_mat` is {pattern}; expected `x` of shape (..., "
            f"{pattern.shape[0]}) and `weight_data` of shape {(pattern.nnz,)}, got {x.shape} and "
            f"{weight.shape}."
        )
    if pattern.padding is not None:
        weight = jnp.where(pattern.padding, 0, weight)
    unit = x_unit * weight_unit
    biases = quantities.bias_operands("sparse_matmul", bias, unit, pattern.shape[1:], bias_fn)
    params: dict[str, Any] = {"sparse_mat": pattern, "has_bias": bool(biases)}
    y = quantities.bind_folded((etp_sp_mv_p, etp_sp_mm_p), x, weight, *biases, **params)
    return quantities.attach(y, unit)
