"""The order of axes."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp


def moved(array: Any, axes: Sequence[int]) -> Any:
    """Return an array with its axes in another order, or itself where that is the same."""
    return array if list(axes) == list(range(array.ndim)) else jnp.transpose(array, axes)
