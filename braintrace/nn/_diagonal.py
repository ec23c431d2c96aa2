r"""Cells with a complex diagonal recurrence, as two real states per unit.

A unit multiplies its state :math:`h = a + i b` by :math:`\lambda = \rho e^{i\theta}` at every step,

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
from brainstate.nn import init

from .. import _etrace_op
from ._linear import joined
from ._states import Initializers, Stateful, activation_function


def _rotation(nu: Any, theta: Any) -> tuple[Any, Any]:
    """Return the marked real and imaginary part of lambda."""
    real = _etrace_op.element_wise((nu, theta), lambda p: _radius(p[0]) * jnp.cos(jnp.exp(p[1])))
    imaginary = _etrace_op.element_wise(
        (nu, theta), lambda p: _radius(p[0]) * jnp.sin(jnp.exp(p[1]))
    )
    return real, imaginary


def _radius(nu: Any) -> Any:
    return jnp.exp(-jnp.exp(nu))


def _ring(units: int, r_min: float, r_max: float, max_phase: float) -> tuple[Any, Any]:
    """Draw nu and log(theta), with lambda uniform on a ring or a sector of it."""
    # Open intervals: radii of one and zero have no finite nu.
    u1 = brainstate.random.uniform(1e-4, 1 - 1e-4, (units,))
    u2 = brainstate.random.uniform(1e-4, 1.0, (units,))
    nu = jnp.log(-0.5 * jnp.log(u1 * (r_max**2 - r_min**2) + r_min**2))
    return nu, jnp.log(max_phase * u2)


class LRUCell(Stateful):
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
        super().__init__(name=name)
        self.num_in, self.num_out = num_in, num_out
        self.num_hidden = num_out if num_hidden is None else num_hidden
        self.in_size, self.out_size = (num_in,), (num_out,)
        self.state_init = state_init
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
        gamma = _etrace_op.element_wise(params["gamma"], jnp.exp)
        real, imaginary = jnp.split(_etrace_op.matmul(x, self.B.value), 2, axis=-1)
        re, im = self.re.value, self.im.value
        self.re.value = cos * re - sin * im + gamma * real
        self.im.value = sin * re + cos * im + gamma * imaginary
        y = _etrace_op.matmul(joined(self.re.value, self.im.value), self.C.value)
        return y + _etrace_op.matmul(x, self.D.value)


class RTUCell(Stateful):
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
        super().__init__(name=name)
        self.num_in, self.num_out = num_in, num_out
        self.in_size, self.out_size = (num_in,), (num_out,)
        self.state_init = state_init
        self.activation = activation_function(activation)
        nu, theta = _ring(num_out // 2, r_min, r_max, max_phase)
        self.recurrence = brainstate.ParamState({"nu": nu, "theta": theta})
        self.W = brainstate.ParamState(init.param(w_init, (num_in, num_out), allow_none=False))

    def _initializers(self) -> Initializers:
        return dict.fromkeys(("a", "b"), (self.state_init, (self.num_out // 2,)))

    def update(self, x: Any) -> Any:
        """Advance by one step and return the output ``(..., out)``."""
        params = self.recurrence.value
        cos, sin = _rotation(params["nu"], params["theta"])
        gamma = _etrace_op.element_wise(params["nu"], _gamma)
        drive_a, drive_b = jnp.split(_etrace_op.matmul(x, self.W.value), 2, axis=-1)
        a, b = self.a.value, self.b.value
        self.a.value = self.activation(cos * a - sin * b + gamma * drive_a)
        self.b.value = self.activation(sin * a + cos * b + gamma * drive_b)
        return joined(self.a.value, self.b.value)


def _gamma(nu: Any) -> Any:
    return jnp.sqrt(-jnp.expm1(-2 * jnp.exp(nu)))


def _normal(shape: tuple[int, ...], inverse_variance: int) -> Any:
    return brainstate.random.normal(0.0, 1 / math.sqrt(inverse_variance), shape)
