r"""Products over any axes: einsum, products in groups (``etp_gmm``), and lookups (``etp_embed``).

.. math:: y_{d\,g\,n} = \sum_k x_{d\,g\,k}\, w_{g\,k\,n}

Each letter of an einsum has one of four kinds. A *shared* letter (``g``) is in input, weight and
output. A *contracted* letter (``k``) is in input and weight, a *free* letter (``n``) in weight and
output, a *data* letter (``d``) in input and output. Each kind may have any number of letters, in
any order.

An output element reads one entry of the weight for every ``k``. Its trace is therefore the trace of
one matrix product (see `dense`) or, with shared letters, of a matrix product for each group: the
weight ``(groups, in, out)``, one per sample. The axes of each kind are flattened into one axis.
Before that, a letter that an operand has twice selects its diagonal, and axes of one operand alone
are summed over.

Without a free letter, or without a contracted one, no elements are coupled: every input element
contributes to one output, or every output depends on one input element. The weight is then an
elementwise operation, followed by a product and a sum, and states before the input keep their
traces.

A lookup ``w[i]`` is a product with a one-hot input that is never built:
:math:`\partial y_{bo} / \partial w_{io}` is one if ``i`` is the index. The exact trace has the
weight's shape, one per sample. The gradient of a chunk that starts from zero traces is a sum over
the rows that were looked up. A low-pass filter of the input contains discounted counts of each
row's lookups. Its ``accumulate`` is written by hand for one step: compiled for a GPU (H200), an
update of a trace moves 2.5 times as many bytes with the derived rule.
"""

import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from .._errors import OptionError
from .._jax import to_array
from . import quantities
from .dense import bind_dense, outer_terms
from .elemwise import etp_elemwise_p
from .primitive import ETPPrimitive, register_forms
from .registry import Arrays

# Names of the axes of an array.
Letters: TypeAlias = tuple[str, ...]

ELLIPSIS = "..."
EXPECTED = "letters of `x` and of the weight, and those of the result, as in 'bgk,gkn->bgn'"


def in_matrices(x: Any, weight: Any, of_x: Letters, of_weight: Letters, output: Letters) -> Any:
    """Multiply by a weight with free and contracted letters, as one matrix per group."""
    size = dict(zip((*of_x, *of_weight), (*x.shape, *weight.shape), strict=True))
    data = tuple(a for a in of_x if a not in of_weight)
    shared = tuple(a for a in of_weight if a in of_x and a in output)
    contracted = tuple(a for a in of_weight if a not in output)
    free = tuple(a for a in of_weight if a not in of_x)
    by_group = (shared,) if shared else ()
    x = arranged(x, of_x, [*((a,) for a in data), *by_group, contracted])
    weight = arranged(weight, of_weight, [*by_group, contracted, free])
    y = bind_grouped(x, weight) if shared else bind_dense(x, weight)
    result = (*data, *shared, *free)
    y = y.reshape([size[a] for a in result])
    return jnp.transpose(y, [result.index(a) for a in output])


def arranged(array: Any, letters: Letters, kinds: Sequence[Letters]) -> Any:
    """Return an array with one axis for each kind of letters."""
    order = [letters.index(a) for kind in kinds for a in kind]
    sizes = [math.prod(array.shape[letters.index(a)] for a in kind) for kind in kinds]
    return jnp.transpose(array, order).reshape(sizes)


def product_and_sum(x: Any, weight: Any, of_x: Letters, of_weight: Letters, output: Letters) -> Any:
    """Multiply elementwise, and sum over the letters that the result does not have."""
    every = tuple(dict.fromkeys((*of_x, *of_weight)))

    def along(array: Any, letters: Letters) -> Any:
        order = [letters.index(a) for a in every if a in letters]
        missing = [i for i, a in enumerate(every) if a not in letters]
        return jnp.expand_dims(jnp.transpose(array, order), missing)

    product = along(x, of_x) * along(weight, of_weight)
    y = jnp.sum(product, axis=tuple(i for i, a in enumerate(every) if a not in output))
    left = tuple(a for a in every if a in output)
    return jnp.transpose(y, [left.index(a) for a in output])


def einsum(
    equation: str, x: Any, weight: Any, *, weight_fn: Callable[[Any], Any] | None = None
) -> Any:
    """Multiply by a weight that learns online, over any axes, as ``jnp.einsum``.

    Parameters
    ----------
    equation : str
        Letters of the axes of ``x``, of ``weight`` and of the result, as in ``'bgk,gkn->bgn'``. The
        result is required. A letter that appears twice in ``x`` or ``weight`` selects the diagonal.
        An ellipsis in ``x`` and the result matches any number of axes. The first axis of ``x`` that
        the weight does not have is the sample axis.
    x : array or Quantity
        Input.
    weight : array or Quantity
        Trainable. There is a trace of its shape for each element of the result's axes that the
        weight does not have.
    weight_fn : callable, optional
        Differentiable function of the weight, applied first.

    Returns
    -------
    array or Quantity
        Its unit is the product of the units of ``x`` and ``weight``.

    Raises
    ------
    OptionError
        If the weight has an ellipsis, or the result is not named.

    Notes
    -----
    With letters that are summed over, and letters of weight and result alone, it is a matrix
    product with transposed axes: `matmul`, or `grouped_matmul` if all three share letters. Without
    one of the two kinds (``'bgh,g->bh'``, ``'b,n->bn'``) it couples no elements: it is an
    `element_wise` weight, a product and a sum, which keeps the traces of other weights.

    Examples
    --------
    Attention heads, each with its own matrix:

    >>> import jax.numpy as jnp
    >>> import braintrace
    >>> x, weight = jnp.ones((5, 2, 3)), jnp.ones((2, 3, 4))
    >>> braintrace.einsum('bhk,hkn->bhn', x, weight).shape
    (5, 2, 4)
    """
    x, x_unit = quantities.split(x)
    weight, weight_unit = quantities.split(weight, weight_fn)
    of_x, of_weight, output = _letters(equation, x, weight)
    x, own = _reduced(x, of_x, of_weight + output)
    weight, others = _reduced(weight, of_weight, of_x + output)
    if set(others) <= set(own) or set(others) <= set(output):  # it couples no elements
        y = product_and_sum(x, etp_elemwise_p.bind(weight), own, others, output)
    else:
        y = in_matrices(x, weight, own, others, output)
    return quantities.attach(y, x_unit * weight_unit)


def _reduced(array: Any, letters: Letters, kept: Letters) -> tuple[Any, Letters]:
    """Take the diagonal along axes of the same letter, and sum over letters that are not kept."""
    alone = tuple(dict.fromkeys(a for a in letters if a in kept))
    if alone == letters:
        return array, letters
    return jnp.einsum(array, [*map(letters.index, letters)], [*map(letters.index, alone)]), alone


def _letters(equation: str, x: Any, weight: Any) -> tuple[Letters, Letters, Letters]:
    jax.eval_shape(functools.partial(jnp.einsum, equation), x, weight)  # with JAX's own errors
    parts = re.fullmatch(r"(.*),([^.]*)->(.*)", equation.replace(" ", ""))
    if parts is None:
        raise OptionError(
            f"`einsum`: the equation is {equation!r}; expected {EXPECTED}. The weight has no "
            "ellipsis, and the result is named."
        )
    of_x, of_weight, output = (tuple(re.findall(r"\.\.\.|.", part)) for part in parts.groups())
    more = tuple(f"{ELLIPSIS}{i}" for i in range(x.ndim - len(of_x) + 1))
    return _filled(of_x, more), of_weight, _filled(output, more)


def _filled(letters: Letters, more: Letters) -> Letters:
    """Replace the ellipsis among some letters."""
    return tuple(b for a in letters for b in (more if a == ELLIPSIS else (a,)))


# --- products in groups


def _grouped_impl(x: Any, weight: Any, *bias: Any, has_bias: bool = False) -> Any:
    # `einsum` would take twice as long on a CPU, as it transposes the weight or its gradient.
    return quantities.add_bias(jax.vmap(jnp.matmul, (-2, 0), -2)(x, weight), bias)


@functools.cache
def grouped_primitives() -> tuple[ETPPrimitive, ETPPrimitive]:
    """Return the primitives, for one sample and for a batch; register them at the first call."""
    return register_forms(
        "etp_gmv",
        "etp_gmm",
        impl=_grouped_impl,
        trace_axes={"weight": ("group", "input", "output"), "bias": ("group", "output")},
        linear_in_input=True,
        accumulate=outer_terms,
    )


def bind_grouped(x: Any, weight: Any, *bias: Any) -> Any:
    """Bind the form for ``x`` with any number of axes before groups and inputs."""
    forms, has_bias = grouped_primitives(), bool(bias)
    return quantities.bind_folded(forms, x, weight, *bias, axes_of_sample=2, has_bias=has_bias)


def grouped_matmul(
    x: Any,
    weight: Any,
    bias: Any = None,
    *,
    weight_fn: Callable[[Any], Any] | None = None,
    bias_fn: Callable[[Any], Any] | None = None,
) -> Any:
    """Multiply every group of features by a separate matrix that learns online.

    The value is ``jnp.einsum('...gi,gio->...go', x, weight) (+ bias)``. Uses are attention heads,
    ensembles, and block-diagonal matrices.

    Parameters
    ----------
    x : array or Quantity ``(..., groups, in)``
        One sample (2-D), a batch (3-D), or more leading axes.
    weight : array or Quantity ``(groups, in, out)``
        Trainable.
    bias : array or Quantity ``(groups, out)``, optional
        Trainable; rescaled into the unit of ``x`` times ``weight``.
    weight_fn, bias_fn : callable, optional
        Differentiable functions of weight and bias, applied first.

    Returns
    -------
    array or Quantity ``(..., groups, out)``
        Its unit is the product of the units of ``x`` and ``weight``.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import braintrace
    >>> y = braintrace.grouped_matmul(jnp.ones((5, 2, 3)), jnp.ones((2, 3, 4)))
    >>> y.shape
    (5, 2, 4)
    """
    x, x_unit = quantities.split(x)
    weight, weight_unit = quantities.split(weight, weight_fn)
    quantities.check_axes("grouped_matmul", weight, "(groups, in, out)")
    unit = x_unit * weight_unit
    shape = weight.shape[0], weight.shape[2]
    biases = quantities.bias_operands("grouped_matmul", bias, unit, shape, bias_fn)
    return quantities.attach(bind_grouped(x, weight, *biases), unit)


# --- lookups


def _lookup(indices: Any, weight: Any, *, rows: int) -> Any:
    if jnp.issubdtype(indices.dtype, jnp.inexact):  # a filter of one-hot inputs
        return indices @ weight
    return jnp.asarray(weight).at[indices].get(mode="fill")


def _one_hot(indices: jax.Array, *, rows: int) -> jax.Array:
    places = jnp.arange(rows, dtype=indices.dtype)
    now = jnp.where(indices < 0, indices + rows, indices)
    return (now[..., None] == places).astype(jnp.float32)


def _lookup_terms(
    indices: jax.Array, hidden_dim: jax.Array, weights: Arrays, *, rows: int
) -> Arrays:
    if indices.shape[0] == 1:
        # A selection that XLA fuses into the update of the trace; added rows would be a separate
        # trace first.
        hit = _one_hot(indices[0], rows=rows) != 0
        return {"weight": jnp.where(hit[..., None], hidden_dim[0][..., None, :], 0)}

    def of_sample(indices: jax.Array, factors: jax.Array) -> jax.Array:
        zero = jnp.zeros((rows, factors.shape[-1]), factors.dtype)
        return zero.at[indices].add(factors, mode="drop")

    add = jax.vmap(of_sample, in_axes=1) if indices.ndim == 2 else of_sample
    return {"weight": add(indices, hidden_dim)}


@functools.cache
def embedding_primitives() -> tuple[ETPPrimitive, ETPPrimitive]:
    """Return the primitives, for one index and for a batch; register them at the first call."""
    return register_forms(
        "etp_row",
        "etp_embed",
        impl=_lookup,
        trace_axes={"weight": ("entry", "output")},
        linear_in_input=_one_hot,
        accumulate=_lookup_terms,
    )


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
