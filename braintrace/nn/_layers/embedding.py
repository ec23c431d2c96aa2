"""Embedding layer: rows of a table, looked up by integers."""

import math
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import saiunit
from brainstate.nn import init

from ... import _etrace_op
from ..._errors import OptionError

SMALLEST = 1e-8
"""Added to a norm before a division by it."""


class Embedding(brainstate.nn.Embedding):
    """Table whose rows learn online: ``y = weight[indices]``.

    Parameters
    ----------
    num_embeddings : int
        Number of rows.
    embedding_size : int or tuple of int
        Shape of a row.
    embedding_init : callable or array, optional
        The table ``(num_embeddings, *embedding_size)``. Default ``LecunUniform()``. May carry a
        unit.
    padding_idx : int, optional
        A row that does not learn; it is initialised with zeros.
    max_norm : float, optional
        Largest norm of a looked-up row, in the unit of the table. Longer rows are scaled down by a
        factor that counts as a constant. The table itself does not change.
    norm_type : float, optional
        Order of this norm. Default 2.
    scale_grad_by_freq : bool, optional
        Not accepted: the frequency of an index in a batch is unknown to a single sample.
    freeze : bool, optional
        Whether to keep the whole table constant. Default False.
    name : str, optional
        Name of the module.
    param_type : type, optional
        Kind of state of the parameters. Default ``brainstate.ParamState``.

    Notes
    -----
    An index out of range gives NaN; `brainstate.nn.Embedding` gives the nearest row. For the size
    of the traces of a table see `braintrace.embedding`.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import braintrace
    >>> table = jnp.array([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]])
    >>> braintrace.nn.Embedding(3, 2, table)(jnp.array([2, 0]))
    Array([[4., 5.],
           [0., 1.]], dtype=float32)
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_size: Any,
        embedding_init: Any = init.LecunUniform(),  # noqa: B008
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        freeze: bool = False,
        name: str | None = None,
        param_type: type = brainstate.ParamState,
    ) -> None:
        if scale_grad_by_freq:
            raise OptionError(
                "`scale_grad_by_freq` must be False: the frequency of an index in a batch is not a "
                "property of one sample."
            )
        super().__init__(
            num_embeddings,
            embedding_size,
            embedding_init,
            max_norm=max_norm,
            norm_type=norm_type,
            freeze=freeze,
            name=name,
            param_type=param_type,
        )
        if padding_idx is not None:
            weight, axes = self.weight.value, tuple(range(1, 1 + len(self.embedding_size)))
            is_padding = np.expand_dims(np.arange(num_embeddings) == padding_idx, axes)
            self.weight.value = saiunit.math.where(
                is_padding, saiunit.math.zeros_like(weight), weight
            )
        self.padding_idx = padding_idx

    def update(self, indices: Any) -> Any:
        """Return rows ``(..., *embedding_size)`` for integers of any shape."""
        weight = self.weight.value
        fixed = jax.lax.stop_gradient(weight) if self.freeze else weight
        rows = _etrace_op.embedding(indices, fixed)
        result = rows if self.max_norm is None else self._shortened(rows)
        if self.padding_idx is None:
            return result
        is_padding = self._over_rows(jnp.asarray(indices) == self.padding_idx)
        return saiunit.math.where(is_padding, jax.lax.stop_gradient(rows), result)

    def _shortened(self, rows: Any) -> Any:
        """Scale rows down to a norm of at most ``max_norm``."""
        values = saiunit.get_mantissa(rows)
        lead = values.shape[: values.ndim - len(self.embedding_size)]
        flat = values.reshape(*lead, math.prod(self.embedding_size))
        norms = jnp.linalg.norm(flat, ord=self.norm_type, axis=-1)
        scale = jnp.minimum(1, self.max_norm / (norms + SMALLEST))
        scale = self._over_rows(scale.astype(values.dtype))
        return rows + jax.lax.stop_gradient(rows * scale - rows)

    def _over_rows(self, values: Any) -> Any:
        """Return one number for each index, with the axes of a row."""
        return values.reshape(*values.shape, *(1,) * len(self.embedding_size))
