"""Dense layers: plain, grouped, signed, standardised, with feedback matrix.

Some weights have fixed signs (Dale's law: a neuron either excites or inhibits). The parameter has
any sign, and the weight is its magnitude times the given sign. Updates never change this sign. The
derivative of the magnitude is the sign of the parameter, so that a parameter that is exactly zero
does not change.
"""

from typing import Any

import brainstate
import jax.numpy as jnp
import numpy as np
import saiunit
from brainstate.nn import init

from .._errors import OptionError
from .._etrace_op.dense import feedback_matmul, matmul
from .._etrace_op.einsum import grouped_matmul


def affine(x: Any, weight: Any, params: dict[str, Any]) -> Any:
    """Return ``x @ weight``, marked, plus the bias in ``params`` if there is one."""
    return matmul(x, weight, row(params.get("bias"), weight.shape[-1]))


def row(bias: Any, size: int) -> Any:
    """Return a bias as a vector; a single number is used for every output."""
    return None if bias is None else saiunit.math.broadcast_to(bias, (size,))


def joined(*parts: Any) -> Any:
    """Concatenate arrays along the last axis."""
    return jnp.concatenate(parts, axis=-1)


class Linear(brainstate.nn.Linear):
    """Dense layer whose weight and bias learn online: ``y = x @ weight + bias``.

    With a mask the product is ``x @ (weight * w_mask)``, with signs
    ``x @ (abs(weight) * w_sign)``, and with both ``x @ (abs(weight) * w_sign * w_mask)``.

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
    w_sign : array or None, optional
        1 or -1 for each input ``(in,)``, as in Dale's law, or for each weight ``(in, out)``.
        Updates never change these signs. Default None: weights of any sign.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import braintrace
    >>> layer = braintrace.nn.Linear(3, 2, w_init=jnp.ones((3, 2)))
    >>> layer(jnp.ones(3))
    Array([3., 3.], dtype=float32)

    Two excitatory inputs and an inhibitory one, with one missing connection:

    >>> mask = jnp.array([[1.0, 1.0], [0.0, 1.0], [1.0, 1.0]])
    >>> options = {"w_init": -jnp.ones((3, 2)), "w_mask": mask, "w_sign": [1, 1, -1]}
    >>> braintrace.nn.Linear(3, 2, **options)(jnp.ones(3))
    Array([0., 1.], dtype=float32)
    """

    def __init__(
        self,
        in_size: Any,
        out_size: Any,
        w_init: Any = init.KaimingNormal(),  # noqa: B008
        b_init: Any = init.ZeroInit(),  # noqa: B008
        w_mask: Any = None,
        name: str | None = None,
        param_type: type = brainstate.ParamState,
        w_sign: Any = None,
    ) -> None:
        super().__init__(in_size, out_size, w_init, b_init, w_mask, name, param_type)
        shape = (self.in_size[-1], self.out_size[-1])
        self.w_sign = None if w_sign is None else signs_of(w_sign, shape)

    def update(self, x: Any) -> Any:
        """Return the layer's output ``(..., out)`` for an input ``(..., in)``."""
        params = self.weight.value
        weight = signed(params["weight"], self.w_sign)
        return affine(x, weight if self.w_mask is None else weight * self.w_mask, params)


class FeedbackLinear(Linear):
    r"""Dense layer with a feedback matrix for gradients: ``y = x @ weight + bias``.

    .. math:: \bar x = \bar y B^T, \qquad \bar W = x^T \bar y

    Gradients pass from the output back to the input by a matrix B instead of the weight [1]_ (see
    `feedback_matmul`). This holds for every learning rule and for backpropagation through time.

    Parameters
    ----------
    in_size, out_size : int or tuple of int
        Shapes of one input and one output; all axes but the last are equal.
    w_init : callable or array, optional
        Weight ``(in, out)``. Default ``KaimingNormal()``. May carry a unit.
    b_init : callable, array or None, optional
        Bias ``(out,)``. Default ``ZeroInit()``; None for no bias.
    feedback_init : callable or array, optional
        The matrix B ``(in, out)``. Default ``KaimingNormal()``. Without a unit, it has the unit of
        the weight.
    adaptive : bool, optional
        Whether B learns by the gradient of the weight [2]_. If the optimizer decays both, they
        converge to each other. Default False: B is constant.
    name : str, optional
        Name of the module.
    param_type : type, optional
        Kind of state of the parameters. Default ``brainstate.ParamState``. B has this kind if it is
        adaptive; otherwise it is a ``brainstate.LongTermState``.

    References
    ----------
    .. [1] T. P. Lillicrap et al., "Random synaptic feedback weights support error
       backpropagation for deep learning", Nature Communications 7, 2016.
    .. [2] J. F. Kolen, J. B. Pollack, "Backpropagation without weight transport", IEEE
       International Conference on Neural Networks, 1994.

    Examples
    --------
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import braintrace
    >>> options = {"w_init": jnp.ones((3, 2)), "feedback_init": 5 * jnp.ones((3, 2))}
    >>> layer = braintrace.nn.FeedbackLinear(3, 2, **options)
    >>> layer(jnp.ones(3))
    Array([3., 3.], dtype=float32)
    >>> jax.grad(lambda x: layer(x).sum())(jnp.ones(3))
    Array([10., 10., 10.], dtype=float32)
    """

    def __init__(
        self,
        in_size: Any,
        out_size: Any,
        w_init: Any = init.KaimingNormal(),  # noqa: B008
        b_init: Any = init.ZeroInit(),  # noqa: B008
        feedback_init: Any = init.KaimingNormal(),  # noqa: B008
        adaptive: bool = False,
        name: str | None = None,
        param_type: type = brainstate.ParamState,
    ) -> None:
        super().__init__(in_size, out_size, w_init, b_init, name=name, param_type=param_type)
        weight = self.weight.value["weight"]
        feedback = init.param(feedback_init, weight.shape, allow_none=False)
        unit = saiunit.get_unit(weight)
        if saiunit.is_unitless(feedback) and not unit.is_unitless:
            feedback = saiunit.Quantity(feedback, unit=unit)
        self.feedback = (param_type if adaptive else brainstate.LongTermState)(feedback)

    def update(self, x: Any) -> Any:
        """Return the layer's output ``(..., out)`` for an input ``(..., in)``."""
        params = self.weight.value
        weight, bias = params["weight"], params.get("bias")
        bias = row(bias, weight.shape[-1])
        return feedback_matmul(x, weight, self.feedback.value, bias)


class GroupedLinear(brainstate.nn.Module):
    """One dense layer per group: ``y[..., g, :] = x[..., g, :] @ weight[g]``.

    Parameters
    ----------
    in_size, out_size : tuple of int
        Shapes ``(..., groups, in)`` and ``(..., groups, out)`` of one input and one output; all
        axes but the last are equal, and axes before the groups share the weight.
    w_init : callable or array, optional
        Weight ``(groups, in, out)``; a function draws the matrix ``(in, out)`` of each group.
        Default ``KaimingNormal()``. May carry a unit.
    b_init : callable, array or None, optional
        Bias ``(groups, out)``. Default ``ZeroInit()``; None for no bias.
    name : str, optional
        Name of the module.
    param_type : type, optional
        Kind of state of the parameters. Default ``brainstate.ParamState``.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import braintrace
    >>> layer = braintrace.nn.GroupedLinear((2, 3), (2, 4))
    >>> layer(jnp.ones((5, 2, 3))).shape
    (5, 2, 4)
    """

    def __init__(
        self,
        in_size: Any,
        out_size: Any,
        w_init: Any = init.KaimingNormal(),  # noqa: B008
        b_init: Any = init.ZeroInit(),  # noqa: B008
        name: str | None = None,
        param_type: type = brainstate.ParamState,
    ) -> None:
        super().__init__(name=name)
        self.in_size, self.out_size = in_size, out_size
        (*_, groups, inputs), outputs = self.in_size, self.out_size[-1]
        if callable(w_init):
            drawn = [init.param(w_init, (inputs, outputs)) for _ in range(groups)]
            weight = saiunit.math.stack(drawn)
        else:
            weight = init.param(w_init, (groups, inputs, outputs), allow_none=False)
        params = {"weight": weight}
        if b_init is not None:
            params["bias"] = init.param(b_init, (groups, outputs))
        self.weight = param_type(params)

    def update(self, x: Any) -> Any:
        """Return the layer's output ``(..., groups, out)`` for ``(..., groups, in)``."""
        params = self.weight.value
        weight, bias = params["weight"], params.get("bias")
        if bias is not None:
            bias = saiunit.math.broadcast_to(bias, (weight.shape[0], weight.shape[2]))
        return grouped_matmul(x, weight, bias)


class ScaledWSLinear(brainstate.nn.ScaledWSLinear):
    r"""Dense layer with standardised weights.

    .. math:: y = x \hat W + b, \qquad
        \hat W_{io} = g_o \frac{W_{io} - \mu_o}{\sqrt{\max(N \sigma_o^2, \epsilon)}}

    with the mean and the variance over the N inputs of output o [1]_.

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

    The result has the unit of the weight.
    """
    weight, unit = saiunit.split_mantissa_unit(params["weight"])
    result = brainstate.nn.weight_standardization(weight, eps, params.get("gain"))
    return result if unit.is_unitless else saiunit.Quantity(result, unit=unit)


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
