"""Helpers of layers with a weight matrix."""

from typing import Any

import jax.numpy as jnp
import saiunit

from .. import _etrace_op


def affine(x: Any, weight: Any, params: dict[str, Any]) -> Any:
    """Return ``x @ weight``, marked, plus the bias in ``params`` if there is one."""
    return _etrace_op.matmul(x, weight, row(params.get("bias"), weight.shape[-1]))


def row(bias: Any, size: int) -> Any:
    """Return a bias as a vector; a single number is used for every output."""
    return None if bias is None else saiunit.math.broadcast_to(bias, (size,))


def joined(*parts: Any) -> Any:
    """Concatenate arrays along the last axis."""
    return jnp.concatenate(parts, axis=-1)
