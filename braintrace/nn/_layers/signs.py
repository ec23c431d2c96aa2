"""Weights with fixed signs (Dale's law: a neuron either excites or inhibits).

The parameter has any sign, and the weight is its magnitude times the given sign. Updates never
change this sign. The derivative of the magnitude is the sign of the parameter, so that a parameter
that is exactly zero does not change.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
import saiunit

from ..._errors import OptionError


def signs_of(w_sign: Any, shape: tuple[int, int]) -> np.ndarray:
    """Return signs, for each input or for each weight, that broadcast against ``(in, out)``.

    Raises
    ------
    OptionError
        For another shape, which might be broadcast along the inputs.
    """
    signs = np.asarray(w_sign)
    if signs.shape == shape[:1]:
        signs = signs[:, None]
    if signs.shape not in ((shape[0], 1), shape):
        raise OptionError(
            f"`w_sign` has shape {signs.shape}; expected a sign for each of {shape[0]} inputs, or "
            f"for each weight {shape}."
        )
    return signs


def signed(weight: Any, signs: np.ndarray | None) -> Any:
    """Return the weight itself, or its magnitude times the signs if there are some."""
    if signs is None:
        return weight
    magnitude = saiunit.math.abs(weight)
    return magnitude * jnp.asarray(signs, magnitude.dtype)
