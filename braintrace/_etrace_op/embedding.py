r"""Embedding lookup: ``etp_embed`` (a batch) and ``etp_row`` (one index).

.. math:: y_{bo} = w_{i_b o}

Shapes: indices ``(batch,)`` or ``()``, weight ``(rows, out)``, y ``(batch, out)`` or ``(out,)``. It
is a product with a one-hot input that is never built: :math:`\partial y_{bo} / \partial w_{io}` is
one if ``i`` is the index. The exact trace has the weight's shape, one per sample. The gradient of a
chunk that starts from zero traces is a sum over the rows that were looked up. A low-pass filter of
the input contains discounted counts of each row's lookups.

``accumulate`` is written by hand for one step: compiled for a GPU (H200), an update of a trace
moves 2.5 times as many bytes with the derived rule.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .._jax import to_array
from . import quantities
from .derive import derived_terms
from .primitive import get_primitive_spec, on_demand
from .registry import Arrays
from .spec import ETPPrimitiveSpec


def _impl(indices: Any, weight: Any, *, rows: int) -> Any:
    return jnp.asarray(weight).at[indices].get(mode="fill")


def _accumulate(indices: jax.Array, hidden_dim: jax.Array, weights: Arrays, *, rows: int) -> Arrays:
    if indices.shape[0] > 1:
        vector, batch = embedding_primitives()
        spec = get_primitive_spec(batch if indices.ndim == 2 else vector)
        return derived_terms(spec, {"rows": rows}, indices, hidden_dim, weights)
    # A selection that XLA fuses into the update of the trace; added rows would be a separate trace
    # first.
    places = jnp.arange(rows, dtype=indices.dtype)
    now = jnp.where(indices[0] < 0, indices[0] + rows, indices[0])
    hit = now[..., None] == places
    return {"weight": jnp.where(hit[..., None], hidden_dim[0][..., None, :], 0)}


_spec = functools.partial(
    ETPPrimitiveSpec,
    impl=_impl,
    trace_axes={"weight": ("entry", "output")},
    looks_up=True,
    accumulate=_accumulate,
)
embedding_primitives = on_demand(
    vector=_spec(name="etp_row"), batch=_spec(name="etp_embed", batched=True)
)
"""Return the primitives, for one index and for a batch."""


def embedding(indices: Any, weight: Any, *, weight_fn: Callable[[Any], Any] | None = None) -> Any:
    """Look up rows of a table that learns online: ``weight[indices]``.

    Parameters
    ----------
    indices : array of integers, of any shape
        Negative indices count from the last row. An index out of range gives NaN, as in `jnp.take`,
        and does not change the gradient of the table.
    weight : array or Quantity ``(rows, ...)``
        Trainable: one row for each index.
    weight_fn : callable, optional
        Differentiable function of the weight, applied first.

    Returns
    -------
    array or Quantity
        Its shape is the shape of ``indices`` followed by the shape of a row; it has the unit of
        ``weight``.

    Notes
    -----
    `D_RTRL` carries a trace of the size of the table for every index of a step, unless no later
    step reads it; the gradient of a chunk that starts from zero traces needs none. `ES_D_RTRL`
    carries one number for each row and index, and a chunk of steps has these for every step: give a
    small ``chunk_size`` if there are thousands of rows. If the rows reach hidden states only
    through another ETP operation, the table is a nested weight, which learns by the gradient of
    each step.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import braintrace
    >>> table = jnp.array([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]])
    >>> braintrace.embedding(jnp.array([2, 0]), table)
    Array([[4., 5.],
           [0., 1.]], dtype=float32)
    """
    indices = to_array(indices)
    weight, unit = quantities.split(weight, weight_fn)
    if indices.dtype.itemsize < 4:  # small integers cannot count all rows
        indices = indices.astype(jnp.int32)
    rows, *shape = weight.shape
    weight = weight.reshape(rows, math.prod(shape))
    forms = embedding_primitives()
    y = quantities.bind_folded(forms, indices, weight, axes_of_sample=0, rows=rows)
    return quantities.attach(y.reshape(*indices.shape, *shape), unit)
