r"""Cells with one hidden state: vanilla, leaky, IndRNN, MinimalRNN, minGRU, minLSTM, CFN.

x ``(..., in)`` is the input, h ``(..., out)`` the hidden state, which is also the output,
:math:`[x, h]` their concatenation and :math:`\sigma` the logistic function. The gates of `MiniGRU`
and `MiniLSTM` depend on the input alone. Their recurrence is therefore elementwise, and `D_RTRL`
computes the same gradient as BPTT.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import brainstate
import jax
import jax.numpy as jnp
from brainstate.nn import init, sigmoid

from .._etrace_op.elemwise import element_wise
from ._linear import Linear, affine, joined
from ._states import Cell, identity


class ValinaRNNCell(brainstate.nn.ValinaRNNCell):
    r"""Vanilla recurrent cell.

    .. math:: h_t = \phi([x_t, h_{t-1}] W + b)

    The new state depends on the old one by a matrix product only. `D_RTRL` therefore carries no
    trace, and its gradient is the gradient of the current step. `LeakyRNN` has an elementwise path,
    hence traces.

    Parameters
    ----------
    num_in, num_out : int
        Numbers of inputs and hidden units, also named ``in_size`` and ``out_size``.
    state_init : callable or array, optional
        Initial hidden state. Default ``ZeroInit()``.
    w_init, b_init : callable or array, optional
        Weight ``(in + out, out)`` and bias ``(out,)``. Default ``XavierNormal()``, ``ZeroInit()``.
    activation : str or callable, optional
        :math:`\phi`. Default ``'relu'``.
    name : str, optional
        Name of the module.

    References
    ----------
    .. [1] J. L. Elman, "Finding structure in time", Cognitive Science 14, 1990.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import braintrace
    >>> cell = braintrace.nn.ValinaRNNCell(3, 4)
    >>> cell.init_state(batch_size=5)
    >>> cell(jnp.ones((5, 3))).shape
    (5, 4)
    """

    def update(self, x: Any) -> Any:
        """Advance by one step and return the hidden state ``(..., out)``."""
        params = self.W.weight.value
        xh = joined(x, self.h.value)
        self.h.value = self.activation(affine(xh, params["weight"], params))
        return self.h.value


class LeakyRNN(Cell):
    r"""Leaky integrator with a nonlinear recurrent drive.

    .. math:: h_t = (1 - \alpha) h_{t-1} + \alpha \phi([x_t, h_{t-1}] W + b)

    Parameters
    ----------
    num_in, num_out : int
        Numbers of inputs and hidden units, also named ``in_size`` and ``out_size``.
    alpha : float or array, optional
        Time step over time constant, in (0, 1]. Default 0.2.
    state_init : callable or array, optional
        Initial hidden state. Default ``ZeroInit()``.
    w_init, b_init : callable or array, optional
        Weight ``(in + out, out)`` and bias ``(out,)``. Default ``XavierNormal()``, ``ZeroInit()``.
    activation : str or callable, optional
        :math:`\phi`. Default ``'relu'``.
    name : str, optional
        Name of the module.

    References
    ----------
    .. [1] G. R. Yang et al., "Task representations in neural networks trained to perform many
       cognitive tasks", Nature Neuroscience 22, 2019, eq. 1.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import braintrace
    >>> cell = braintrace.nn.LeakyRNN(3, 4, alpha=0.1)
    >>> cell.init_state(batch_size=5)
    >>> cell(jnp.ones((5, 3))).shape
    (5, 4)
    """

    def __init__(
        self,
        num_in: int,
        num_out: int,
        alpha: Any = 0.2,
        state_init: Any = init.ZeroInit(),  # noqa: B008
        w_init: Any = init.XavierNormal(),  # noqa: B008
        b_init: Any = init.ZeroInit(),  # noqa: B008
        activation: str | Callable[[Any], Any] = "relu",
        name: str | None = None,
    ) -> None:
        super().__init__(num_in, num_out, state_init, activation, name)
        self.alpha = alpha
        self.W = Linear(num_in + num_out, num_out, w_init=w_init, b_init=b_init)

    def update(self, x: Any) -> Any:
        """Advance by one step and return the hidden state ``(..., out)``."""
        h = self.h.value
        drive = self.activation(self.W(joined(x, h)))
        self.h.value = (1 - self.alpha) * h + self.alpha * drive
        return self.h.value


class IndRNN(Cell):
    r"""Independently recurrent cell (IndRNN): every unit feeds only itself.

    .. math:: h_t = \phi(x_t W + u \odot h_{t-1} + b)

    `D_RTRL` computes the same gradient as BPTT.

    Parameters
    ----------
    num_in, num_out : int
        Numbers of inputs and hidden units, also named ``in_size`` and ``out_size``.
    state_init : callable or array, optional
        Initial hidden state. Default ``ZeroInit()``.
    w_init, b_init : callable or array, optional
        Weight ``(in, out)`` and bias ``(out,)``. Default ``XavierNormal()``, ``ZeroInit()``.
    u_init : callable or array, optional
        Recurrent weight ``(out,)``. Default ``Uniform(0, 1)``.
    activation : str or callable, optional
        :math:`\phi`. Default ``'relu'``.
    name : str, optional
        Name of the module.

    References
    ----------
    .. [1] S. Li et al., "Independently recurrent neural network (IndRNN): Building a longer and
       deeper RNN", CVPR 2018, eq. 2.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import braintrace
    >>> cell = braintrace.nn.IndRNN(3, 4)
    >>> cell.init_state(batch_size=5)
    >>> cell(jnp.ones((5, 3))).shape
    (5, 4)
    """

    def __init__(
        self,
        num_in: int,
        num_out: int,
        state_init: Any = init.ZeroInit(),  # noqa: B008
        w_init: Any = init.XavierNormal(),  # noqa: B008
        b_init: Any = init.ZeroInit(),  # noqa: B008
        u_init: Any = init.Uniform(0.0, 1.0),  # noqa: B008
        activation: str | Callable[[Any], Any] = "relu",
        name: str | None = None,
    ) -> None:
        super().__init__(num_in, num_out, state_init, activation, name)
        self.W = Linear(num_in, num_out, w_init=w_init, b_init=b_init)
        self.u = brainstate.ParamState(init.param(u_init, (num_out,), allow_none=False))

    def update(self, x: Any) -> Any:
        """Advance by one step and return the hidden state ``(..., out)``."""
        u = element_wise(self.u.value)
        self.h.value = self.activation(self.W(x) + u * self.h.value)
        return self.h.value


class MinimalRNNCell(Cell):
    r"""Minimal recurrent network: an encoded input and an update gate.

    .. math::
        z_t &= \phi(x_t W_x + b_x) \\
        u_t &= \sigma([h_{t-1}, z_t] W_u + b_u) \\
        h_t &= u_t \odot h_{t-1} + (1 - u_t) \odot z_t

    :math:`W_x` acts on h directly and, through z, on the gate. A trace carries the direct path. For
    the other path the compiler reports nested weights.

    Parameters
    ----------
    num_in, num_out : int
        Numbers of inputs and hidden units, also named ``in_size`` and ``out_size``.
    state_init : callable or array, optional
        Initial hidden state. Default ``ZeroInit()``.
    w_init, b_init : callable or array, optional
        Weights ``(in, out)`` and ``(2 out, out)``, biases ``(out,)``. Default ``Orthogonal()``,
        ``ZeroInit()``.
    activation : str or callable, optional
        :math:`\phi`. Default ``'tanh'``.
    name : str, optional
        Name of the module.

    References
    ----------
    .. [1] M. Chen, "MinimalRNN: Toward more interpretable and trainable recurrent neural
       networks", arXiv:1711.06788, 2017.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import braintrace
    >>> cell = braintrace.nn.MinimalRNNCell(3, 4)
    >>> cell.init_state(batch_size=5)
    >>> cell(jnp.ones((5, 3))).shape
    (5, 4)
    """

    def __init__(
        self,
        num_in: int,
        num_out: int,
        state_init: Any = init.ZeroInit(),  # noqa: B008
        w_init: Any = init.Orthogonal(),  # noqa: B008
        b_init: Any = init.ZeroInit(),  # noqa: B008
        activation: str | Callable[[Any], Any] = "tanh",
        name: str | None = None,
    ) -> None:
        super().__init__(num_in, num_out, state_init, activation, name)
        self.Wx = Linear(num_in, num_out, w_init=w_init, b_init=b_init)
        self.Wu = Linear(2 * num_out, num_out, w_init=w_init, b_init=b_init)

    def update(self, x: Any) -> Any:
        """Advance by one step and return the hidden state ``(..., out)``."""
        h = self.h.value
        z = self.activation(self.Wx(x))
        gate = brainstate.nn.sigmoid(self.Wu(joined(h, z)))
        self.h.value = gate * h + (1 - gate) * z
        return self.h.value


class _OfInput(Cell):
    """A cell whose gates and candidate are one product of the input.

    Attributes
    ----------
    parts
        Number of gates and candidates.
    """

    parts: ClassVar[int]

    def __init__(
        self,
        num_in: int,
        num_out: int,
        w_init: Any = init.XavierNormal(),  # noqa: B008
        b_init: Any = init.ZeroInit(),  # noqa: B008
        state_init: Any = init.ZeroInit(),  # noqa: B008
        activation: str | Callable[[Any], Any] = identity,
        name: str | None = None,
    ) -> None:
        super().__init__(num_in, num_out, state_init, activation, name)
        self.W = Linear(num_in, self.parts * num_out, w_init=w_init, b_init=b_init)


class MiniGRU(_OfInput):
    r"""Gated recurrent unit with gate and candidate from the input alone (minGRU).

    .. math::
        [z_t, \hat h_t] &= x_t W + b \\
        h_t &= (1 - \sigma(z_t)) \odot h_{t-1} + \sigma(z_t) \odot \phi(\hat h_t)

    `D_RTRL` computes the same gradient as BPTT.

    Parameters
    ----------
    num_in, num_out : int
        Numbers of inputs and hidden units, also named ``in_size`` and ``out_size``.
    w_init, b_init : callable or array, optional
        Weight ``W`` ``(in, 2 out)``, the gate's columns first, and its bias. Default
        ``XavierNormal()``, ``ZeroInit()``.
    state_init : callable or array, optional
        Initial hidden state. Default ``ZeroInit()``.
    activation : str or callable, optional
        :math:`\phi`. Default: the identity, as in the paper.
    name : str, optional
        Name of the module.

    References
    ----------
    .. [1] L. Feng et al., "Were RNNs all we needed?", arXiv:2410.01201, 2024.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import braintrace
    >>> cell = braintrace.nn.MiniGRU(3, 4)
    >>> cell.init_state(batch_size=5)
    >>> cell(jnp.ones((5, 3))).shape
    (5, 4)
    """

    parts = 2

    def update(self, x: Any) -> Any:
        """Advance by one step and return the hidden state ``(..., out)``."""
        z, candidate = jnp.split(self.W(x), self.parts, axis=-1)
        z = sigmoid(z)
        self.h.value = (1 - z) * self.h.value + z * self.activation(candidate)
        return self.h.value


class MiniLSTM(_OfInput):
    r"""Long short-term memory with gates and candidate from the input alone (minLSTM).

    .. math::
        [f_t, i_t, \hat h_t] &= x_t W + b \\
        h_t &= \frac{\sigma(f_t) \odot h_{t-1} + \sigma(i_t) \odot \phi(\hat h_t)}
            {\sigma(f_t) + \sigma(i_t)}

    `D_RTRL` computes the same gradient as BPTT.

    Parameters
    ----------
    num_in, num_out : int
        Numbers of inputs and hidden units, also named ``in_size`` and ``out_size``.
    w_init, b_init : callable or array, optional
        Weight ``W`` ``(in, 3 out)``, in the order of the equation, and its bias. Default
        ``XavierNormal()``, ``ZeroInit()``.
    state_init : callable or array, optional
        Initial hidden state. Default ``ZeroInit()``.
    activation : str or callable, optional
        :math:`\phi`. Default: the identity, as in the paper.
    name : str, optional
        Name of the module.

    References
    ----------
    .. [1] L. Feng et al., "Were RNNs all we needed?", arXiv:2410.01201, 2024.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import braintrace
    >>> cell = braintrace.nn.MiniLSTM(3, 4)
    >>> cell.init_state(batch_size=5)
    >>> cell(jnp.ones((5, 3))).shape
    (5, 4)
    """

    parts = 3

    def update(self, x: Any) -> Any:
        """Advance by one step and return the hidden state ``(..., out)``."""
        f, i, candidate = jnp.split(self.W(x), self.parts, axis=-1)
        # f / (f + i), also if both gates are too small for this quotient
        keep = sigmoid(jax.nn.log_sigmoid(f) - jax.nn.log_sigmoid(i))
        self.h.value = keep * self.h.value + (1 - keep) * self.activation(candidate)
        return self.h.value


class CFNCell(Cell):
    r"""Chaos-free network: without input, the state of every unit decays to zero.

    .. math::
        [\theta_t, \eta_t] &= \sigma([x_t, h_{t-1}] W_g + b) \\
        h_t &= \theta_t \odot \phi(h_{t-1}) + \eta_t \odot \phi(x_t W)

    Parameters
    ----------
    num_in, num_out : int
        Numbers of inputs and hidden units, also named ``in_size`` and ``out_size``.
    w_init, b_init : callable or array, optional
        Weights ``Wg`` ``(in + out, 2 out)`` and ``W`` ``(in, out)``, and the bias of the first.
        Default ``XavierNormal()``, ``ZeroInit()``.
    state_init : callable or array, optional
        Initial hidden state. Default ``ZeroInit()``.
    activation : str or callable, optional
        :math:`\phi`. Default ``'tanh'``.
    name : str, optional
        Name of the module.

    References
    ----------
    .. [1] T. Laurent, J. von Brecht, "A recurrent neural network without chaos", ICLR 2017
       (arXiv:1612.06212).

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import braintrace
    >>> cell = braintrace.nn.CFNCell(3, 4)
    >>> cell.init_state(batch_size=5)
    >>> cell(jnp.ones((5, 3))).shape
    (5, 4)
    """

    def __init__(
        self,
        num_in: int,
        num_out: int,
        w_init: Any = init.XavierNormal(),  # noqa: B008
        b_init: Any = init.ZeroInit(),  # noqa: B008
        state_init: Any = init.ZeroInit(),  # noqa: B008
        activation: str | Callable[[Any], Any] = "tanh",
        name: str | None = None,
    ) -> None:
        super().__init__(num_in, num_out, state_init, activation, name)
        self.Wg = Linear(num_in + num_out, 2 * num_out, w_init=w_init, b_init=b_init)
        self.W = Linear(num_in, num_out, w_init=w_init, b_init=None)

    def update(self, x: Any) -> Any:
        """Advance by one step and return the hidden state ``(..., out)``."""
        h = self.h.value
        forget, drive = jnp.split(sigmoid(self.Wg(joined(x, h))), 2, axis=-1)
        self.h.value = forget * self.activation(h) + drive * self.activation(self.W(x))
        return self.h.value
