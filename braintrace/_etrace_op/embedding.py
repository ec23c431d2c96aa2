r"""Rows of a table: ``etp_embed`` (a batch of indices) and ``etp_row`` (one index).

.. math:: y_{bo} = w_{i_b o}

Shapes: indices ``(batch,)`` or ``()``, weight ``(rows, out)``, y ``(batch, out)`` or ``(out,)``. It
is a product with a one-hot input that is never built: :math:`\partial y_{bo} / \partial w_{io}` is
one where ``i`` is the index, and the exact trace has the weight's shape, one per sample. The
gradient of a chunk that starts from zero traces is a sum over looked-up rows alone. A low-pass of
the input counts how often, and how long ago, each row was looked up; along a chunk the factors of
outputs are filtered instead, and added to the rows.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import saiunit

from .._errors import DtypeError, ShapeError
from . import quantities
from .dense import init_output_trace
from .input_filter import InputFilter
from .on_demand import on_demand
from .registry import Arrays, Pick, Shapes
from .rules import like_operand
from .spec import ETPPrimitiveSpec, conventional_trainable_invars


def _impl(indices: Any, weight: Any, *, rows: int) -> Any:
    return jnp.take(weight, indices, axis=0, mode="fill")


def _yw_to_w(hidden_dim: jax.Array, trace: Arrays, *, rows: int) -> Arrays:
    return {"weight": trace["weight"] * hidden_dim[..., None, :]}


def _xy_to_dw(indices: jax.Array, hidden_dim: jax.Array, weights: Arrays, *, rows: int) -> Arrays:
    weight = weights["weight"]
    return {"weight": like_operand(_added_to_rows(indices, hidden_dim, rows), weight)}


def _added_to_rows(indices: jax.Array, values: jax.Array, rows: int) -> jax.Array:
    """Return zeros with values added to the rows of their indices."""
    zero = jnp.zeros((rows, *values.shape[indices.ndim :]), values.dtype)
    return zero.at[indices].add(values, mode="drop")


def _accumulate(indices: jax.Array, hidden_dim: jax.Array, weights: Arrays, *, rows: int) -> Arrays:
    if indices.shape[0] == 1:
        # A selection that XLA fuses into the update of the trace, where added rows would be a
        # trace of their own first.
        places = jnp.arange(rows, dtype=indices.dtype)
        now = jnp.where(indices[0] < 0, indices[0] + rows, indices[0])
        hit = now[..., None] == places
        return {"weight": jnp.where(hit[..., None], hidden_dim[0][..., None, :], 0)}
    added: Callable[..., Any] = functools.partial(_added_to_rows, rows=rows)
    if indices.ndim == 2:
        added = jax.vmap(added, in_axes=1)
    return {"weight": added(indices, hidden_dim)}


def _squared_norms(
    indices: jax.Array, hidden_dim: jax.Array, weights: Arrays, *, rows: int
) -> Arrays:
    of_output = jnp.sum((hidden_dim[0] * hidden_dim[0].conj()).real, axis=-1)
    has_row = (-rows <= indices[0]) & (indices[0] < rows)
    return {"weight": jnp.where(has_row, of_output, 0)}


def _select_outputs(weights: Arrays, pick: Pick, *, rows: int) -> Arrays:
    return {"weight": pick(weights["weight"])}


def _joins_input(
    weights: Arrays, shapes: Shapes, inputs: np.ndarray, outputs: np.ndarray, *, rows: int
) -> np.ndarray:
    return np.zeros(inputs.shape, bool)


def _input_derivative(
    weights: Arrays, shapes: Shapes, inputs: np.ndarray, outputs: np.ndarray, *, rows: int
) -> jax.Array:
    return jnp.zeros(inputs.shape, weights["weight"].dtype)


def _init_drtrl(
    x_var: Any, y_var: Any, weight_vars: Mapping[str, Any], num_hidden_state: int
) -> Arrays:
    y = y_var.aval
    shape = (*y.shape[:-1], *weight_vars["weight"].aval.shape, num_hidden_state)
    return {"weight": jnp.zeros(shape, y.dtype)}


# --- the low-pass of the input


def _init_counts(x_var: Any, y_var: Any, *, rows: int) -> jax.Array:
    return jnp.zeros((*x_var.aval.shape, rows), y_var.aval.dtype)


def _count(counts: jax.Array, indices: jax.Array, *, rows: int) -> jax.Array:
    def counted(own: jax.Array, index: jax.Array) -> jax.Array:
        return own.at[index].add(1, mode="drop")

    return (jax.vmap(counted) if indices.ndim else counted)(counts, indices)


def _count_steps(
    counts: jax.Array, indices: jax.Array, factors: jax.Array, *, rows: int
) -> jax.Array:
    def counted(own: jax.Array, index: jax.Array, factor: jax.Array) -> jax.Array:
        return own.at[index].add(factor.astype(own.dtype), mode="drop")

    if indices.ndim == 2:
        counted = jax.vmap(counted, in_axes=(0, 1, 1))
    return counted(counts, indices, factors)


def _pull_back_counts(
    counts: jax.Array, hidden_dim: jax.Array, weights: Arrays, *, rows: int
) -> Arrays:
    product = jnp.einsum("...i,...o->io", counts.astype(hidden_dim.dtype), hidden_dim)
    return {"weight": like_operand(product, weights["weight"])}


_spec = functools.partial(
    ETPPrimitiveSpec,
    impl=_impl,
    yw_to_w=_yw_to_w,
    xy_to_dw=_xy_to_dw,
    init_drtrl=_init_drtrl,
    init_pp=init_output_trace,
    trainable_invars_fn=conventional_trainable_invars,
    x_invar_index=0,
    input_filter=InputFilter(_init_counts, _count, _pull_back_counts, _count_steps),
    accumulate=_accumulate,
    squared_norms=_squared_norms,
    select_outputs=_select_outputs,
    trace_axes={"weight": ("entry", "output")},
    joins_input=_joins_input,
    input_derivative=_input_derivative,
)
embedding_primitives = on_demand(
    vector=_spec(name="etp_row"), batch=_spec(name="etp_embed", batched=True)
)
"""Returns the primitives, of one index and of a batch."""


def embedding(indices: Any, weight: Any, *, weight_fn: Callable[[Any], Any] | None = None) -> Any:
    """Look up rows of a table that learns online: ``weight[indices]``.

    Parameters
    ----------
    indices : array of integers, of any shape
        Negative ones count from the last row. One that no row has gives NaN, as in `jnp.take`, and
        changes no gradient of the table.
    weight : array or Quantity ``(rows, ...)``
        Trainable: one row for each index.
    weight_fn : callable, optional
        Differentiable function of the weight, applied first.

    Returns
    -------
    array or Quantity
        Of the shape of ``indices`` and that of a row, with the unit of ``weight``.

    Raises
    ------
    ShapeError
        If ``weight`` has no axis.
    DtypeError
        If ``indices`` are no integers, or ``weight`` is nothing that JAX computes with.
    OptionError
        If ``weight_fn`` is no function.

    Notes
    -----
    `D_RTRL` carries a trace of the size of the table for every index of a step, unless no later
    step reads it; the gradient of a chunk that starts from zero traces needs none. `ES_D_RTRL`
    carries one number for each row and index. Where the rows go through another marked operation
    before they reach a hidden state, the table is a weight behind a weight and learns by the
    gradient of each step.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import braintrace
    >>> table = jnp.array([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]])
    >>> braintrace.embedding(jnp.array([2, 0]), table)
    Array([[4., 5.],
           [0., 1.]], dtype=float32)
    """
    indices, unit = quantities.split("embedding", "indices", indices)
    if not jnp.issubdtype(indices.dtype, jnp.integer) or unit != saiunit.UNITLESS:
        of_unit = "" if unit == saiunit.UNITLESS else f" and unit `{unit}`"
        raise DtypeError(
            f"`embedding`: expected `indices` to be integers without a unit, got dtype "
            f"{indices.dtype}{of_unit}."
        )
    weight, unit = quantities.split_result("embedding", "weight", weight, "weight_fn", weight_fn)
    if weight.shape[:1] in ((), (0,)):
        raise ShapeError(
            "`embedding`: expected `weight` of shape (rows, ...), with a row or more, got shape "
            f"{weight.shape}."
        )
    if indices.dtype.itemsize < 4:  # which cannot count all rows
        indices = indices.astype(jnp.int32)
    rows, *shape = weight.shape
    weight = weight.reshape(rows, math.prod(shape))
    row, batch = (
        functools.partial(primitive.bind, rows=rows) for primitive in embedding_primitives()
    )
    y = quantities.bind_folded(row, batch, indices, weight, axes_of_sample=0)
    return quantities.attach(y.reshape(*indices.shape, *shape), unit)
