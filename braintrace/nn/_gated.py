r"""Gated cells (GRU, MGU, LSTM), and cells with a complex diagonal recurrence (LRU, RTU).

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

A unit of an LRU or an RTU multiplies its state :math:`h = a + i b` by
:math:`\lambda = \rho e^{i\theta}` at every step,

.. math:: \begin{pmatrix} a_t \\ b_t \end{pmatrix} =
    \rho \begin{pmatrix} \cos\theta & -\sin\theta \\ \sin\theta & \cos\theta \end{pmatrix}
    \begin{pmatrix} a_{t-1} \\ b_{t-1} \end{pmatrix} + \dots, \qquad
    \rho = e^{-e^\nu},

The states a and b of one unit form a hidden group, so that `D_RTRL` computes the same gradient as
BPTT.
"""

import math
from collections.abc import Callable
from typing import Any

import brainstate
import jax.numpy as jnp
from brainstate.nn import init, sigmoid

from .._etrace_op.dense import matmul
from .._etrace_op.elemwise import element_wise
from ._linear import affine, joined
from ._states import Cell, Initializers, identity


class _ResetGate(brainstate.nn.RNNCell):
    """A cell whose gate acts before or after the recurrent product of its candidate."""

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
        self.reset_after = reset_after

    def _candidate(self, x: Any, h: Any, gate: Any) -> Any:
        params, inputs = self.Wh.weight.value, x.shape[-1]
        weight = params["weight"]
        if not self.reset_after:
            return self.activation(affine(joined(x, gate * h), weight, params))
        recurrent = matmul(h, weight[inputs:])
        return self.activation(affine(x, weight[:inputs], params) + gate * recurrent)


class GRUCell(_ResetGate, brainstate.nn.GRUCell):
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

    def update(self, x: Any) -> Any:
        """Advance by one step and return the hidden state ``(..., out)``."""
        h, gates = self.h.value, self.Wrz.weight.value
        gates = sigmoid(affine(joined(x, h), gates["weight"], gates))
        r, z = jnp.split(gates, 2, axis=-1)
        self.h.value = (1 - z) * h + z * self._candidate(x, h, r)
        return self.h.value


class MGUCell(_ResetGate, brainstate.nn.MGUCell):
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

    def update(self, x: Any) -> Any:
        """Advance by one step and return the hidden state ``(..., out)``."""
        h, forget = self.h.value, self.Wf.weight.value
        f = sigmoid(affine(joined(x, h), forget["weight"], forget))
        self.h.value = (1 - f) * h + f * self._candidate(x, h, f)
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


def _rotation(nu: Any, theta: Any) -> tuple[Any, Any]:
    """Return the marked real and imaginary part of lambda."""

    def part(of_angle: Callable[[Any], Any]) -> Any:
        """Return the radius times a function of the angle."""
        return element_wise(
            (nu, theta), lambda p: jnp.exp(-jnp.exp(p[0])) * of_angle(jnp.exp(p[1]))
        )

    return part(jnp.cos), part(jnp.sin)


def _ring(units: int, r_min: float, r_max: float, max_phase: float) -> tuple[Any, Any]:
    """Draw nu and log(theta), with lambda uniform on a ring or a sector of it."""
    # Open intervals: radii of one and zero have no finite nu.
    u1 = brainstate.random.uniform(1e-4, 1 - 1e-4, (units,))
    u2 = brainstate.random.uniform(1e-4, 1.0, (units,))
    nu = jnp.log(-0.5 * jnp.log(u1 * (r_max**2 - r_min**2) + r_min**2))
    return nu, jnp.log(max_phase * u2)


class LRUCell(Cell):
    r"""Linear recurrent unit.

    .. math:: h_t = \lambda \odot h_{t-1} + \gamma \odot (x_t B), \qquad
        y_t = \operatorname{Re}(h_t C) + x_t D

    with :math:`\lambda = \exp(-e^\nu + i e^{\theta})`, :math:`\gamma = e^{\gamma'}` and complex
    B and C [1]_. `D_RTRL` computes the same gradient as BPTT [2]_.

    Parameters
    ----------
    num_in, num_out : int
        Numbers of inputs and outputs.
    num_hidden : int, optional
        Number of complex units n. Default ``num_out``.
    r_min, r_max : float, optional
        Bounds of the initial :math:`|\lambda|`. Default 0 and 1.
    max_phase : float, optional
        Largest initial angle of :math:`\lambda`. Default :math:`2\pi`.
    state_init : callable or array, optional
        Initial value of both parts of h. Default ``ZeroInit()``.
    name : str, optional
        Name of the module.

    Attributes
    ----------
    recurrence : ParamState
        ``nu``, ``theta`` and ``gamma``, each ``(n,)``, as the logarithms above.
    B, C, D : ParamState
        ``(in, 2n)``, the real parts first; ``(2n, out)``, the real parts above the negative
        imaginary ones; ``(in, out)``.
    re, im : HiddenState
        Real and imaginary part of h, ``(..., n)``.

    References
    ----------
    .. [1] A. Orvieto et al., "Resurrecting recurrent neural networks for long sequences",
       ICML 2023.
    .. [2] N. Zucchet et al., "Online learning of long-range dependencies", NeurIPS 2023.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import braintrace
    >>> cell = braintrace.nn.LRUCell(3, 4, num_hidden=8, r_min=0.9, r_max=0.999)
    >>> cell.init_state(batch_size=5)
    >>> cell(jnp.ones((5, 3))).shape
    (5, 4)
    """

    def __init__(
        self,
        num_in: int,
        num_out: int,
        num_hidden: int | None = None,
        r_min: float = 0.0,
        r_max: float = 1.0,
        max_phase: float = 2 * math.pi,
        state_init: Any = init.ZeroInit(),  # noqa: B008
        name: str | None = None,
    ) -> None:
        super().__init__(num_in, num_out, state_init, identity, name)
        self.num_hidden = num_out if num_hidden is None else num_hidden
        nu, theta = _ring(self.num_hidden, r_min, r_max, max_phase)
        # gamma = sqrt(1 - |lambda|^2) makes the size of h independent of the radius.
        gamma = 0.5 * jnp.log1p(-jnp.exp(-2 * jnp.exp(nu)))
        parts = 2 * self.num_hidden
        self.recurrence = brainstate.ParamState({"nu": nu, "theta": theta, "gamma": gamma})
        self.B = brainstate.ParamState(_normal((num_in, parts), 2 * num_in))
        self.C = brainstate.ParamState(_normal((parts, num_out), self.num_hidden))
        self.D = brainstate.ParamState(_normal((num_in, num_out), num_in))

    def _initializers(self) -> Initializers:
        return dict.fromkeys(("re", "im"), (self.state_init, (self.num_hidden,)))

    def update(self, x: Any) -> Any:
        """Advance by one step and return the output ``(..., out)``."""
        params = self.recurrence.value
        cos, sin = _rotation(params["nu"], params["theta"])
        gamma = element_wise(params["gamma"], jnp.exp)
        real, imaginary = jnp.split(matmul(x, self.B.value), 2, axis=-1)
        re, im = self.re.value, self.im.value
        self.re.value = cos * re - sin * im + gamma * real
        self.im.value = sin * re + cos * im + gamma * imaginary
        y = matmul(joined(self.re.value, self.im.value), self.C.value)
        return y + matmul(x, self.D.value)


class RTUCell(Cell):
    r"""Recurrent trace units.

    .. math::
        a_t &= \phi(\rho\cos\theta \odot a_{t-1} - \rho\sin\theta \odot b_{t-1}
            + \gamma \odot (x_t W_a)) \\
        b_t &= \phi(\rho\sin\theta \odot a_{t-1} + \rho\cos\theta \odot b_{t-1}
            + \gamma \odot (x_t W_b))

    with :math:`\rho = e^{-e^\nu}`, :math:`\theta = e^{\theta'}` and
    :math:`\gamma = \sqrt{1 - \rho^2}`. The output is the concatenation of a and b [1]_. `D_RTRL`
    computes the same gradient as BPTT.

    Parameters
    ----------
    num_in, num_out : int
        Numbers of inputs and outputs, also named ``in_size`` and ``out_size``; a and b are one half
        of the outputs each.
    r_min, r_max : float, optional
        Bounds of the initial :math:`\rho`. Default 0 and 1.
    max_phase : float, optional
        Largest initial :math:`\theta`. Default :math:`2\pi`.
    w_init : callable or array, optional
        Weight ``(in, out)``, :math:`W_a` followed by :math:`W_b`. Default ``XavierNormal()``.
    state_init : callable or array, optional
        Initial value of a and b. Default ``ZeroInit()``.
    activation : str or callable, optional
        :math:`\phi`, inside the recurrence: the nonlinear form of the paper. With ``lambda h: h``
        it is the linear form, whose nonlinearity follows the cell. Default ``'tanh'``.
    name : str, optional
        Name of the module.

    References
    ----------
    .. [1] E. Elelimy et al., "Real-time recurrent learning using trace units in reinforcement
       learning", NeurIPS 2024.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import braintrace
    >>> cell = braintrace.nn.RTUCell(3, 4)
    >>> cell.init_state(batch_size=5)
    >>> cell(jnp.ones((5, 3))).shape
    (5, 4)
    """

    def __init__(
        self,
        num_in: int,
        num_out: int,
        r_min: float = 0.0,
        r_max: float = 1.0,
        max_phase: float = 2 * math.pi,
        w_init: Any = init.XavierNormal(),  # noqa: B008
        state_init: Any = init.ZeroInit(),  # noqa: B008
        activation: str | Callable[[Any], Any] = "tanh",
        name: str | None = None,
    ) -> None:
        super().__init__(num_in, num_out, state_init, activation, name)
        nu, theta = _ring(num_out // 2, r_min, r_max, max_phase)
        self.recurrence = brainstate.ParamState({"nu": nu, "theta": theta})
        self.W = brainstate.ParamState(init.param(w_init, (num_in, num_out), allow_none=False))

    def _initializers(self) -> Initializers:
        return dict.fromkeys(("a", "b"), (self.state_init, (self.num_out // 2,)))

    def update(self, x: Any) -> Any:
        """Advance by one step and return the output ``(..., out)``."""
        params = self.recurrence.value
        cos, sin = _rotation(params["nu"], params["theta"])
        gamma = element_wise(params["nu"], _gamma)
        drive_a, drive_b = jnp.split(matmul(x, self.W.value), 2, axis=-1)
        a, b = self.a.value, self.b.value
        self.a.value = self.activation(cos * a - sin * b + gamma * drive_a)
        self.b.value = self.activation(sin * a + cos * b + gamma * drive_b)
        return joined(self.a.value, self.b.value)


def _gamma(nu: Any) -> Any:
    return jnp.sqrt(-jnp.expm1(-2 * jnp.exp(nu)))


def _normal(shape: tuple[int, ...], inverse_variance: int) -> Any:
    return brainstate.random.normal(0.0, 1 / math.sqrt(inverse_variance), shape)
