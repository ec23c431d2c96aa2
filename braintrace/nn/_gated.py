r"""Gated recurrent cells: GRU, MGU, LSTM, UR-LSTM.

x ``(..., in)`` is the input, h ``(..., out)`` the hidden state, which is also the output,
:math:`[x, h]` their concatenation and :math:`\sigma` the logistic function. The gates of a cell
share one matrix product.

The candidate of a GRU or an MGU can be written in two ways, with the gate r before or after the
recurrent product:

.. math:: \phi([x, r \odot h] W + b) \qquad \text{or} \qquad
    \phi(x W_x + b + r \odot (h W_h)), \quad W = [W_x; W_h]

In the first form, which `brainstate.nn` has, the weight of r is nested: it reaches h only through
W, and a trace cannot carry it. In the second form, from cuDNN, r acts on the recurrent product
elementwise, so that every weight has a trace. The second is the default; ``reset_after=False``
selects the first. Both have the same parameters.
"""

from collections.abc import Callable
from typing import Any

import brainstate
import jax.numpy as jnp
from brainstate.nn import init, sigmoid

from .. import _etrace_op
from ._linear import affine, joined


def _gate_before_product(x: Any, h: Any, gate: Any, params: dict[str, Any]) -> Any:
    return affine(joined(x, gate * h), params["weight"], params)


def _gate_after_product(x: Any, h: Any, gate: Any, params: dict[str, Any]) -> Any:
    weight, inputs = params["weight"], x.shape[-1]
    recurrent = _etrace_op.matmul(h, weight[inputs:])
    return affine(x, weight[:inputs], params) + gate * recurrent


class GRUCell(brainstate.nn.GRUCell):
    r"""Gated recurrent unit with the reset gate after the recurrent product.

    .. math::
        [r_t, z_t] &= \sigma([x_t, h_{t-1}] W_{rz} + b_{rz}) \\
        \tilde h_t &= \phi(x_t W_x + b_h + r_t \odot (h_{t-1} W_h)) \\
        h_t &= (1 - z_t) \odot h_{t-1} + z_t \odot \tilde h_t

    ``Wh`` contains :math:`W_x` above :math:`W_h`. With ``reset_after=False`` the candidate is
    :math:`\phi([x_t, r_t \odot h_{t-1}] [W_x; W_h] + b_h)`, as in `brainstate.nn.GRUCell`, and
    the weight of the reset gate has no trace.

    Parameters
    ----------
    num_in, num_out : int
        Numbers of inputs and hidden units, also named ``in_size`` and ``out_size``.
    w_init, b_init : callable or array, optional
        Weights ``Wrz`` ``(in + out, 2 out)`` and ``Wh`` ``(in + out, out)``, and their biases.
        Default ``Orthogonal()``, ``ZeroInit()``.
    state_init : callable or array, optional
        Initial hidden state. Default ``ZeroInit()``.
    activation : str or callable, optional
        :math:`\phi`. Default ``'tanh'``.
    name : str, optional
        Name of the module.
    reset_after : bool, optional
        Whether the reset gate acts after the recurrent product. Default True.

    References
    ----------
    .. [1] K. Cho et al., "Learning phrase representations using RNN encoder-decoder for
       statistical machine translation", EMNLP 2014. The default form is the one in version 1 of the
       preprint, arXiv:1406.1078v1.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import braintrace
    >>> cell = braintrace.nn.GRUCell(3, 4)
    >>> cell.init_state(batch_size=5)
    >>> cell(jnp.ones((5, 3))).shape
    (5, 4)
    """

    def __init__(
        self,
        num_in: int,
        num_out: int,
        w_init: Any = init.Orthogonal(),  # noqa: B008
        b_init: Any = init.ZeroInit(),  # noqa: B008
        state_init: Any = init.ZeroInit(),  # noqa: B008
        activation: str | Callable[[Any], Any] = "tanh",
        name: str | None = None,
        reset_after: bool = True,
    ) -> None:
        super().__init__(num_in, num_out, w_init, b_init, state_init, activation, name)
        self._candidate = _gate_after_product if reset_after else _gate_before_product

    def update(self, x: Any) -> Any:
        """Advance by one step and return the hidden state ``(..., out)``."""
        h, gates = self.h.value, self.Wrz.weight.value
        gates = sigmoid(affine(joined(x, h), gates["weight"], gates))
        r, z = jnp.split(gates, 2, axis=-1)
        candidate = self.activation(self._candidate(x, h, r, self.Wh.weight.value))
        self.h.value = (1 - z) * h + z * candidate
        return self.h.value


class MGUCell(brainstate.nn.MGUCell):
    r"""Minimal gated unit with the gate after the recurrent product.

    .. math::
        f_t &= \sigma([x_t, h_{t-1}] W_f + b_f) \\
        \tilde h_t &= \phi(x_t W_x + b_h + f_t \odot (h_{t-1} W_h)) \\
        h_t &= (1 - f_t) \odot h_{t-1} + f_t \odot \tilde h_t

    ``Wh`` contains :math:`W_x` above :math:`W_h`. With ``reset_after=False`` the candidate is
    :math:`\phi([x_t, f_t \odot h_{t-1}] [W_x; W_h] + b_h)`, as in `brainstate.nn.MGUCell`, and
    the trace of :math:`W_f` leaves out its path through the candidate.

    Parameters
    ----------
    num_in, num_out : int
        Numbers of inputs and hidden units, also named ``in_size`` and ``out_size``.
    w_init, b_init : callable or array, optional
        Weights ``Wf`` and ``Wh`` ``(in + out, out)``, and their biases. Default
        ``Orthogonal()``, ``ZeroInit()``.
    state_init : callable or array, optional
        Initial hidden state. Default ``ZeroInit()``.
    activation : str or callable, optional
        :math:`\phi`. Default ``'tanh'``.
    name : str, optional
        Name of the module.
    reset_after : bool, optional
        Whether the gate acts after the recurrent product. Default True.

    References
    ----------
    .. [1] G.-B. Zhou et al., "Minimal gated unit for recurrent neural networks", International
       Journal of Automation and Computing 13, 2016.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import braintrace
    >>> cell = braintrace.nn.MGUCell(3, 4)
    >>> cell.init_state(batch_size=5)
    >>> cell(jnp.ones((5, 3))).shape
    (5, 4)
    """

    def __init__(
        self,
        num_in: int,
        num_out: int,
        w_init: Any = init.Orthogonal(),  # noqa: B008
        b_init: Any = init.ZeroInit(),  # noqa: B008
        state_init: Any = init.ZeroInit(),  # noqa: B008
        activation: str | Callable[[Any], Any] = "tanh",
        name: str | None = None,
        reset_after: bool = True,
    ) -> None:
        super().__init__(num_in, num_out, w_init, b_init, state_init, activation, name)
        self._candidate = _gate_after_product if reset_after else _gate_before_product

    def update(self, x: Any) -> Any:
        """Advance by one step and return the hidden state ``(..., out)``."""
        h, forget = self.h.value, self.Wf.weight.value
        f = sigmoid(affine(joined(x, h), forget["weight"], forget))
        candidate = self.activation(self._candidate(x, h, f, self.Wh.weight.value))
        self.h.value = (1 - f) * h + f * candidate
        return self.h.value


class LSTMCell(brainstate.nn.LSTMCell):
    r"""Long short-term memory with its four gates in one product.

    .. math::
        [i_t, g_t, f_t, o_t] &= [x_t, h_{t-1}] W + b \\
        c_t &= \sigma(f_t + 1) \odot c_{t-1} + \sigma(i_t) \odot \phi(g_t) \\
        h_t &= \sigma(o_t) \odot \phi(c_t)

    Only c is carried elementwise from step to step, so that traces are stored for c alone. The
    forget gate has an additional bias of one [2]_.

    Parameters
    ----------
    num_in, num_out : int
        Numbers of inputs and hidden units, also named ``in_size`` and ``out_size``.
    w_init, b_init : callable or array, optional
        Weight ``W`` ``(in + out, 4 out)`` and its bias. Default ``XavierNormal()``,
        ``ZeroInit()``.
    state_init : callable or array, optional
        Initial value of h and c. Default ``ZeroInit()``.
    activation : str or callable, optional
        :math:`\phi`. Default ``'tanh'``.
    name : str, optional
        Name of the module.

    References
    ----------
    .. [1] S. Hochreiter, J. Schmidhuber, "Long short-term memory", Neural Computation 9, 1997.
    .. [2] R. Jozefowicz, W. Zaremba, I. Sutskever, "An empirical exploration of recurrent
       network architectures", ICML 2015 (the forget gate's bias of one).

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import braintrace
    >>> cell = braintrace.nn.LSTMCell(3, 4)
    >>> cell.init_state(batch_size=5)
    >>> cell(jnp.ones((5, 3))).shape
    (5, 4)
    """

    def update(self, x: Any) -> Any:
        """Advance by one step and return the hidden state ``(..., out)``."""
        params = self.W.weight.value
        gates = affine(joined(x, self.h.value), params["weight"], params)
        i, g, f, o = jnp.split(gates, 4, axis=-1)
        c = sigmoid(f + 1.0) * self.c.value + sigmoid(i) * self.activation(g)
        self.c.value = c
        self.h.value = sigmoid(o) * self.activation(c)
        return self.h.value
