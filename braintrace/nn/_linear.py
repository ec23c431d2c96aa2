"""Dense layers."""

from typing import Any

import brainstate
import saiunit

from .. import _etrace_op
from ._affine import affine
from ._checked import checked


@checked
class Linear(brainstate.nn.Linear):
    """Dense layer whose weight and bias learn online: ``y = x @ (weight * w_mask) + bias``.

    Parameters
    ----------
    in_size, out_size : int or tuple of int
        Shapes of one input and one output; all axes but the last are equal.
    w_init : callable or array, optional
        Weight ``(in, out)``. Default ``KaimingNormal()``. May carry a unit.
    b_init : callable, array or None, optional
        Bias ``(out,)``. Default ``ZeroInit()``; None for no bias.
    w_mask : array, callable or None, optional
        Factor of the weight.
    name : str, optional
        Name of the module.
    param_type : type, optional
        Kind of state of the parameters. Default ``brainstate.ParamState``.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import braintrace
    >>> layer = braintrace.nn.Linear(3, 2, w_init=jnp.ones((3, 2)))
    >>> layer(jnp.ones(3))
    Array([3., 3.], dtype=float32)
    """

    def update(self, x: Any) -> Any:
        """Return the layer's output ``(..., out)`` for an input ``(..., in)``."""
        params = self.weight.value
        weight = params["weight"]
        return affine(x, weight if self.w_mask is None else weight * self.w_mask, params)


@checked
class SignedWLinear(brainstate.nn.SignedWLinear):
    """Dense layer whose weights keep their signs: ``y = x @ (abs(weight) * w_sign)``.

    Parameters
    ----------
    in_size, out_size : int
        Numbers of inputs and outputs.
    w_init : callable or array, optional
        Weight ``(in, out)``. Default ``KaimingNormal()``.
    w_sign : array or None, optional
        Signs, broadcast against the weight (``(in, 1)`` gives each input a sign, as Dale's law
        asks). None makes all weights positive.
    name : str, optional
        Name of the module.
    param_type : type, optional
        Kind of state of the parameters. Default ``brainstate.ParamState``.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import braintrace
    >>> signs = jnp.array([[1.0], [1.0], [-1.0]])
    >>> layer = braintrace.nn.SignedWLinear(3, 2, w_init=-jnp.ones((3, 2)), w_sign=signs)
    >>> layer(jnp.ones(3))
    Array([1., 1.], dtype=float32)
    """

    def update(self, x: Any) -> Any:
        """Return the layer's output ``(..., out)`` for an input ``(..., in)``."""
        weight = saiunit.math.abs(self.weight.value)
        return _etrace_op.matmul(x, weight if self.w_sign is None else weight * self.w_sign)


@checked
class ScaledWSLinear(brainstate.nn.ScaledWSLinear):
    r"""Dense layer with standardised weights.

    .. math:: y = x \hat W + b, \qquad
        \hat W_{io} = g_o \frac{W_{io} - \mu_o}{\sqrt{\max(N \sigma_o^2, \epsilon)}}

    with the mean and the variance over the N inputs of output o.

    Parameters
    ----------
    in_size, out_size : int or tuple of int
        Shapes of one input and one output; all axes but the last are equal.
    w_init, b_init : callable, array or None, optional
        Weight ``(in, out)`` and bias ``(out,)``. Default ``KaimingNormal()`` and ``ZeroInit()``.
        The standardised weight has the unit of the weight.
    w_mask : array, callable or None, optional
        Factor ``(in, 1)`` of the standardised weight.
    ws_gain : bool, optional
        Whether the gain g ``(1, out)`` is a parameter (initially one). Default True.
    eps : float, optional
        Lower bound of the denominator's square. Default ``1e-4``.
    name : str, optional
        Name of the module.
    param_type : type, optional
        Kind of state of the parameters. Default ``brainstate.ParamState``.

    References
    ----------
    .. [1] S. Qiao et al., "Micro-batch training with batch-channel normalization and weight
       standardization", arXiv:1903.10520, 2019.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import braintrace
    >>> braintrace.nn.ScaledWSLinear(3, 2)(jnp.ones((5, 3))).shape
    (5, 2)
    """

    def update(self, x: Any) -> Any:
        """Return the layer's output ``(..., out)`` for an input ``(..., in)``."""
        params = self.weight.value
        weight = standardized(params, self.eps)
        return affine(x, weight if self.w_mask is None else weight * self.w_mask, params)


def standardized(params: dict[str, Any], eps: float) -> Any:
    """Return the weight with zero mean and the norm of its gain, for each output.

    It is standardized in its own unit, which it keeps.
    """
    weight, unit = saiunit.split_mantissa_unit(params["weight"])
    found = brainstate.nn.weight_standardization(weight, eps, params.get("gain"))
    return found if unit.is_unitless else saiunit.Quantity(found, unit=unit)
