r"""Einsum of an input with a trainable weight, mapped to other ETP operations.

.. math:: y_{d\,g\,n} = \sum_k x_{d\,g\,k}\, w_{g\,k\,n}

Each letter has one of four kinds. A *shared* letter (``g``) is in input, weight and output. A
*contracted* letter (``k``) is in input and weight, a *free* letter (``n``) in weight and output, a
*data* letter (``d``) in input and output. Each kind may have any number of letters, in any order.

An output element reads one entry of the weight for every ``k``. Its trace is therefore the trace of
a batch of matrix products (see `grouped`) or, without shared letters, of one matrix product (see
`dense`). The axes of each kind are flattened into one axis. Before that, a letter that an operand
has twice selects its diagonal, and axes of one operand alone are summed over.

Without a free letter, or without a contracted one, no elements are coupled: every input element
contributes to one output, or every output depends on one input element. The weight is then an
elementwise operation, followed by a product and a sum, and states before the input keep their
traces.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from .._errors import OptionError
from . import quantities
from .dense import bind_dense
from .elemwise import etp_elemwise_p
from .grouped import bind_grouped

Letters: TypeAlias = tuple[str, ...]
"""Names of the axes of an array."""

ELLIPSIS = "..."
EXPECTED = "letters of `x` and of the weight, and those of the result, as in 'bgk,gkn->bgn'"


@dataclasses.dataclass(frozen=True)
class Axes:
    """The letters of an einsum equation, by operand."""

    x: Letters
    weight: Letters
    output: Letters

    @property
    def data(self) -> Letters:
        """Letters of input and output alone, in the order of the input."""
        return tuple(a for a in self.x if a in self.output and a not in self.weight)

    @property
    def shared(self) -> Letters:
        """Letters of input, weight and output."""
        return tuple(a for a in self.weight if a in self.x and a in self.output)

    @property
    def contracted(self) -> Letters:
        """Letters of input and weight that are summed over."""
        return tuple(a for a in self.weight if a in self.x and a not in self.output)

    @property
    def free(self) -> Letters:
        """Letters of weight and output alone."""
        return tuple(a for a in self.weight if a not in self.x and a in self.output)


def _product(axes: Axes, x: Any, weight: Any) -> Any:
    x, weight = _summed(x, axes.x, axes.weight, axes), _summed(weight, axes.weight, axes.x, axes)
    known = {*axes.data, *axes.shared, *axes.contracted, *axes.free}
    axes = Axes(_among(axes.x, known), _among(axes.weight, known), axes.output)
    if axes.free and axes.contracted:
        return in_matrices(axes, x, weight)
    return product_and_sum(axes, x, etp_elemwise_p.bind(weight))


def _among(letters: Letters, known: set[str]) -> Letters:
    return tuple(a for a in letters if a in known)


def _summed(array: Any, letters: Letters, of_other: Letters, axes: Axes) -> Any:
    """Return the sum over the axes of this operand alone."""
    alone = [i for i, a in enumerate(letters) if a not in of_other and a not in axes.output]
    return jnp.sum(array, axis=tuple(alone)) if alone else array


def in_matrices(axes: Axes, x: Any, weight: Any) -> Any:
    """Multiply by a weight with free and contracted letters, as one matrix per group."""
    size = dict(zip((*axes.x, *axes.weight), (*x.shape, *weight.shape), strict=True))
    data, shared, free = axes.data, axes.shared, axes.free
    by_group = (shared,) if shared else ()
    x = arranged(x, axes.x, [*((a,) for a in data), *by_group, axes.contracted])
    weight = arranged(weight, axes.weight, [*by_group, axes.contracted, free])
    y = bind_grouped(x, weight) if shared else bind_dense(x, weight)
    result = (*data, *shared, *free)
    y = y.reshape([size[a] for a in result])
    return jnp.transpose(y, [result.index(a) for a in axes.output])


def arranged(array: Any, letters: Letters, kinds: Sequence[Letters]) -> Any:
    """Return an array with one axis for each kind of letters."""
    order = [letters.index(a) for kind in kinds for a in kind]
    sizes = [math.prod(array.shape[letters.index(a)] for a in kind) for kind in kinds]
    return jnp.transpose(array, order).reshape(sizes)


def product_and_sum(axes: Axes, x: Any, weight: Any) -> Any:
    """Multiply elementwise, and sum over the letters that the result does not have."""
    every = (*axes.x, *axes.free)

    def along(array: Any, letters: Letters) -> Any:
        order = [letters.index(a) for a in every if a in letters]
        missing = [i for i, a in enumerate(every) if a not in letters]
        return jnp.expand_dims(jnp.transpose(array, order), missing)

    product = along(x, axes.x) * along(weight, axes.weight)
    y = _summed(product, every, axes.output, axes)
    left = tuple(a for a in every if a in axes.output)
    return jnp.transpose(y, [left.index(a) for a in axes.output])


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
    axes = _axes(equation, x, weight)
    x, of_x = _diagonal(x, axes.x)
    weight, of_weight = _diagonal(weight, axes.weight)
    y = _product(Axes(of_x, of_weight, axes.output), x, weight)
    return quantities.attach(y, x_unit * weight_unit)


def _diagonal(array: Any, letters: Letters) -> tuple[Any, Letters]:
    """Take the diagonal along axes of the same letter; return each letter once."""
    alone = tuple(dict.fromkeys(letters))
    if alone == letters:
        return array, letters
    return jnp.einsum(array, [alone.index(a) for a in letters], [*range(len(alone))]), alone


def _axes(equation: str, x: Any, weight: Any) -> Axes:
    jax.eval_shape(functools.partial(jnp.einsum, equation), x, weight)  # with JAX's own errors
    parts = re.fullmatch(r"(.*),([^.]*)->(.*)", equation.replace(" ", ""))
    if parts is None:
        raise OptionError(
            f"`einsum`: the equation is {equation!r}; expected {EXPECTED}. The weight has no "
            "ellipsis, and the result is named."
        )
    of_x, of_weight, output = (tuple(re.findall(r"\.\.\.|.", part)) for part in parts.groups())
    more = tuple(f"{ELLIPSIS}{i}" for i in range(x.ndim - len(of_x) + 1))
    return Axes(_filled(of_x, more), of_weight, _filled(output, more))


def _filled(letters: Letters, more: Letters) -> Letters:
    """Replace the ellipsis among some letters."""
    return tuple(b for a in letters for b in (more if a == ELLIPSIS else (a,)))
