r"""Surrogate gradients: spike functions with a custom derivative.

Every function returns ``1`` if ``x >= 0``, else ``0``. The functions differ only in their
derivative (`jax.custom_jvp`). ``x`` is the distance of the membrane potential from the threshold,
without a unit. To change an option of a neuron's function, bind it:
``LIF(10, spk_fun=functools.partial(surrogate.sigmoid, alpha=2.0))``. Divide a
potential with a unit by its unit.

References
----------
.. [1] E. O. Neftci, H. Mostafa, F. Zenke, "Surrogate gradient learning in spiking neural networks",
   IEEE Signal Processing Magazine 36, 2019 (an overview).
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import saiunit


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _spike(x: Any, derivative: Callable[[Any], Any]) -> Any:
    return jnp.asarray(x >= 0, jnp.result_type(x))


def _spike_jvp(
    derivative: Callable[[Any], Any], primals: tuple[Any], tangents: tuple[Any]
) -> tuple[Any, Any]:
    (x,), (dx,) = primals, tangents
    return _spike(x, derivative), derivative(x) * dx


_spike.defjvp(_spike_jvp)


def _potential(x: Any) -> jax.Array:
    """Return the potential as an array; one with a unit raises an error of saiunit."""
    return jnp.asarray(x.to_decimal() if isinstance(x, saiunit.Quantity) else x)


def sigmoid(x: Any, alpha: float = 4.0) -> Any:
    r"""Spike with the derivative of a logistic function.

    .. math:: \alpha\, \sigma(\alpha x) (1 - \sigma(\alpha x))

    Parameters
    ----------
    x : array of any shape
        Membrane potential relative to the threshold.
    alpha : float, optional
        Steepness.

    Returns
    -------
    array
        Zeros and ones, shaped like ``x``.

    References
    ----------
    .. [1] F. Zenke, T. P. Vogels, "The remarkable robustness of surrogate gradient learning for
       instilling complex function in spiking neural networks", Neural Computation 33, 2021.

    Examples
    --------
    >>> import jax
    >>> from braintrace.nn import surrogate
    >>> float(surrogate.sigmoid(0.5)), float(jax.grad(surrogate.sigmoid)(0.0))
    (1.0, 1.0)
    """

    def derivative(x: Any) -> Any:
        s = jax.nn.sigmoid(alpha * x)
        return alpha * s * (1 - s)

    return _spike(_potential(x), derivative)


def super_spike(x: Any, beta: float = 10.0) -> Any:
    r"""Spike with the derivative of a fast sigmoid, :math:`x / (1 + |x|)`.

    .. math:: (1 + \beta |x|)^{-2}

    Parameters
    ----------
    x : array of any shape
        Membrane potential relative to the threshold.
    beta : float, optional
        Steepness.

    Returns
    -------
    array
        Zeros and ones, shaped like ``x``.

    References
    ----------
    .. [1] F. Zenke, S. Ganguli, "SuperSpike: Supervised learning in multilayer spiking neural
       networks", Neural Computation 30, 2018.

    Examples
    --------
    >>> import jax
    >>> from braintrace.nn import surrogate
    >>> float(jax.grad(surrogate.super_spike)(0.1))
    0.25
    """
    return _spike(_potential(x), lambda x: 1 / (1 + beta * jnp.abs(x)) ** 2)


def triangle(x: Any, gamma: float = 0.3, width: float = 1.0) -> Any:
    r"""Spike with a piecewise linear derivative, also called ReLU gradient.

    .. math:: \gamma \max(0, 1 - |x| / w)

    Parameters
    ----------
    x : array of any shape
        Membrane potential relative to the threshold.
    gamma : float, optional
        Height: 1 in [1]_, damped to 0.3 in [2]_.
    width : float, optional
        Distance w from the threshold at which the derivative vanishes.

    Returns
    -------
    array
        Zeros and ones, shaped like ``x``.

    References
    ----------
    .. [1] S. K. Esser et al., "Convolutional networks for fast, energy-efficient neuromorphic
       computing", PNAS 113, 2016.
    .. [2] G. Bellec et al., "Long short-term memory and learning-to-learn in networks of spiking
       neurons", NeurIPS 2018.

    Examples
    --------
    >>> import jax
    >>> from braintrace.nn import surrogate
    >>> round(float(jax.grad(surrogate.triangle)(0.0)), 3)
    0.3
    """
    x = _potential(x)
    return _spike(x, lambda x: gamma * jax.nn.relu(1 - jnp.abs(x) / width))


def rectangle(x: Any, width: float = 1.0) -> Any:
    r"""Spike with a derivative that is constant around the threshold.

    .. math:: \frac{1}{w} \text{ where } |x| < \frac{w}{2}, \text{ else } 0

    Parameters
    ----------
    x : array of any shape
        Membrane potential relative to the threshold.
    width : float, optional
        Width w of the window.

    Returns
    -------
    array
        Zeros and ones, shaped like ``x``.

    References
    ----------
    .. [1] Y. Wu et al., "Spatio-temporal backpropagation for training high-performance spiking
       neural networks", Frontiers in Neuroscience 12, 2018, :math:`h_1`.

    Examples
    --------
    >>> import jax
    >>> from braintrace.nn import surrogate
    >>> float(jax.grad(surrogate.rectangle)(0.0))
    1.0
    """
    x = _potential(x)
    return _spike(x, lambda x: (jnp.abs(x) < width / 2).astype(x.dtype) / width)


def gaussian(x: Any, sigma: float = 0.5) -> Any:
    r"""Spike with a Gaussian derivative.

    .. math:: \mathcal N(x \mid 0, \sigma^2)

    Parameters
    ----------
    x : array of any shape
        Membrane potential relative to the threshold.
    sigma : float, optional
        Standard deviation.

    Returns
    -------
    array
        Zeros and ones, shaped like ``x``.

    References
    ----------
    .. [1] Y. Wu et al., "Spatio-temporal backpropagation for training high-performance spiking
       neural networks", Frontiers in Neuroscience 12, 2018, :math:`h_4`.

    Examples
    --------
    >>> import jax
    >>> from braintrace.nn import surrogate
    >>> round(float(jax.grad(surrogate.gaussian)(0.0)), 3)
    0.798
    """
    return _spike(_potential(x), lambda x: _normal(x, 0.0, sigma))


def multi_gaussian(x: Any, h: float = 0.15, s: float = 6.0, sigma: float = 0.5) -> Any:
    r"""Spike with a Gaussian derivative between two negative Gaussians.

    .. math:: (1 + h)\, \mathcal N(x \mid 0, \sigma^2) - h\, \mathcal N(x \mid \sigma, (s\sigma)^2)
        - h\, \mathcal N(x \mid -\sigma, (s\sigma)^2)

    Parameters
    ----------
    x : array of any shape
        Membrane potential relative to the threshold.
    h, s : float, optional
        Weight and relative width of the negative parts.
    sigma : float, optional
        Standard deviation of the middle Gaussian.

    Returns
    -------
    array
        Zeros and ones, shaped like ``x``.

    References
    ----------
    .. [1] B. Yin, F. Corradi, S. M. Bohté, "Accurate and efficient time-domain classification with
       adaptive spiking recurrent neural networks", Nature Machine Intelligence 3, 2021.

    Examples
    --------
    >>> import jax
    >>> from braintrace.nn import surrogate
    >>> round(float(jax.grad(surrogate.multi_gaussian)(0.0)), 3)
    0.878
    """

    def derivative(x: Any) -> Any:
        sides = _normal(x, sigma, s * sigma) + _normal(x, -sigma, s * sigma)
        return (1 + h) * _normal(x, 0.0, sigma) - h * sides

    return _spike(_potential(x), derivative)


def arctan(x: Any, alpha: float = 2.0) -> Any:
    r"""Spike with the derivative of an arctangent.

    .. math:: \frac{\alpha}{2} \left(1 + \left(\frac{\pi}{2} \alpha x\right)^2\right)^{-1}

    Parameters
    ----------
    x : array of any shape
        Membrane potential relative to the threshold.
    alpha : float, optional
        Steepness.

    Returns
    -------
    array
        Zeros and ones, shaped like ``x``.

    References
    ----------
    .. [1] W. Fang et al., "Incorporating learnable membrane time constant to enhance learning of
       spiking neural networks", ICCV 2021.

    Examples
    --------
    >>> import jax
    >>> from braintrace.nn import surrogate
    >>> float(jax.grad(surrogate.arctan)(0.0))
    1.0
    """
    x = _potential(x)
    return _spike(x, lambda x: alpha / 2 / (1 + (math.pi / 2 * alpha * x) ** 2))


def _normal(x: Any, mean: float, sigma: float) -> Any:
    return jnp.exp(-(((x - mean) / sigma) ** 2) / 2) / (math.sqrt(2 * math.pi) * sigma)
