"""Weights with fixed signs (Dale's law: a neuron either excites or inhibits).

The parameter has any sign, and the weight is its magnitude times the given sign. Updates never
change this sign. The derivative of the magnitude is the sign of the parameter, so that a parameter
that is exactly zero does not change.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
import saiunit

from ..._arguments import shown
from ..._errors import OptionError


def signs_of(w_sign: Any, shape: tuple[int, int], layer: str) -> np.ndarray:
    """Return signs that broadcast against a weight ``(in, out)``.

    Parameters
    ----------
    w_sign
        1 or -1 for each input or for each weight.
    shape
        ``(in, out)``.
    layer
        Name of the layer, for messages.

    Raises
    ------
    OptionError
        For other numbers, or another shape.
    """
    signs = np.asarray(w_sign)
    if signs.shape == shape[:1]:
        signs = signs[:, None]
    if signs.shape not in ((shape[0], 1), shape):
        raise OptionError(
            f"`{layer}`: `w_sign` is {shown(w_sign)}; expected a sign for each of {shape[0]} "
            f"inputs, or for each weight {shape}."
        )
    if not np.all(np.abs(signs) == 1):
        raise OptionError(f"`{layer}`: `w_sign` has values other than 1 and -1.")
    return signs


def signed(weight: Any, signs: np.ndarray | None) -> Any:
    """Return the weight itself, or its magnitude times the signs if there are some."""
    if signs is None:
        return weight
    magnitude = saiunit.math.abs(weight)
    return magnitude * jnp.asarray(signs, magnitude.dtype)
