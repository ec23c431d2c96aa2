r"""Spiking neurons, integrated exactly over time steps of constant input.

Between spikes :math:`\tau \dot V = -(V - V_{rest}) + R I`. Over a step dt this is

.. math:: V_t = V_\infty + e^{-dt/\tau} (V' - V_\infty), \qquad V_\infty = V_{rest} + R I_t,

where V' is the old potential after the reset by the old spike. Set the time step in brainstate's
environment (``brainstate.environ.set(dt=...)``). The states of a neuron depend on each other
elementwise, so that `D_RTRL` computes the same gradient as BPTT for feedforward weights. Through
recurrent weights the gradient is approximate.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import saiunit as u

from ..nn import surrogate
from ._states import Initializers, Population, constant, decay, step_over


class Spiking(Population):
    """Neurons with a potential, a threshold, a reset and a refractory period."""

    V_th: Any

    def __init__(
        self,
        in_size: Any,
        V_reset: Any,
        V_initializer: Any,
        spk_fun: Callable[[Any], Any],
        spk_reset: str,
        name: str | None,
        tau_ref: Any = None,
    ) -> None:
        super().__init__(in_size, name)
        self.V_reset, self.V_initializer, self.tau_ref = V_reset, V_initializer, tau_ref
        self.spk_fun, self._is_hard = spk_fun, {"soft": False, "hard": True}[spk_reset]

    def _initializers(self) -> Initializers:
        wait = {} if self.tau_ref is None else {"wait": (0.0, self.out_size)}
        return {**wait, "V": (self.V_initializer, self.out_size)}

    def get_spike(self) -> Any:
        """Return the spikes of the current state (before an update: of the last step)."""
        V_th = constant(self.V_th)
        return self.spk_fun((self.V.value - V_th) / (V_th - constant(self.V_reset)))

    def _after_reset(self, spike: Any, V_th: Any) -> Any:
        """Return the potential after the reset by the last spikes."""
        V, V_reset = self.V.value, constant(self.V_reset)
        top = jax.lax.stop_gradient(V) if self._is_hard else V_th
        return V - (top - V_reset) * spike

    def _refractory(self, spike: Any, V: Any, held: Any) -> Any:
        """Return V, or ``held`` for the neurons that fired less than ``tau_ref`` ago."""
        if self.tau_ref is None:
            return V
        steps = u.math.round(1 / step_over(self.tau_ref))
        wait = jnp.where(spike > 0, steps, jnp.maximum(self.wait.value - 1, 0))
        self.wait.value = jax.lax.stop_gradient(wait).astype(self.wait.value.dtype)
        return u.math.where(self.wait.value > 0, held, V)


class LIF(Spiking):
    r"""Leaky integrate-and-fire neuron.

    .. math::
        \tau \dot V &= -(V - V_{rest}) + R I \\
        z &= \Theta\left(\frac{V - V_{th}}{V_{th} - V_{reset}}\right)

    After a spike, V is lowered by :math:`V_{th} - V_{reset}` (soft), or set to :math:`V_{reset}`
    (hard; the derivative treats the height of the drop as a constant).

    Parameters
    ----------
    in_size : int or tuple of int
        Shape of the population.
    R : float, array, Quantity or ParamState, optional
        Membrane resistance. Default 1 ohm. A ``ParamState`` learns online, like a weight; this
        holds for all constants.
    tau : float, array, Quantity or ParamState, optional
        Membrane time constant. Default 5 ms.
    V_th, V_reset, V_rest : float, array, Quantity or ParamState, optional
        Threshold, reset and resting potential. Default 1, 0 and 0 mV.
    V_initializer : callable, array or Quantity, optional
        Initial potential. Default 0 mV.
    spk_fun : callable, optional
        Heaviside function with a surrogate gradient. Default `surrogate.triangle`.
    spk_reset : {'soft', 'hard'}, optional
        Kind of reset. Default ``'soft'``.
    tau_ref : Quantity, optional
        Refractory period: for that time after a spike, V stays where the reset has put it. It is
        rounded to time steps. Default: none.
    name : str, optional
        Name of the module.

    Raises
    ------
    OptionError
        If no time step is set.

    References
    ----------
    .. [1] W. Gerstner et al., "Neuronal Dynamics", Cambridge University Press, 2014, eq. 1.5.

    Examples
    --------
    >>> import brainstate
    >>> import jax.numpy as jnp
    >>> import saiunit as u
    >>> import braintrace
    >>> neuron = braintrace.nn.LIF(2, tau=10.0 * u.ms)
    >>> neuron.init_state()
    >>> with brainstate.environ.context(dt=1.0 * u.ms):
    ...     neuron(jnp.array([5.0, 20.0]) * u.mA)
    Array([0., 1.], dtype=float32)

    Time constants that learn:

    >>> tau = brainstate.ParamState(jnp.array([5.0, 20.0]) * u.ms)
    >>> list(braintrace.nn.LIF(2, tau=tau).states(brainstate.ParamState))
    [('tau',)]
    """

    def __init__(
        self,
        in_size: Any,
        R: Any = 1.0 * u.ohm,
        tau: Any = 5.0 * u.ms,
        V_th: Any = 1.0 * u.mV,
        V_reset: Any = 0.0 * u.mV,
        V_rest: Any = 0.0 * u.mV,
        V_initializer: Any = 0.0 * u.mV,
        spk_fun: Callable[[Any], Any] = surrogate.triangle,
        spk_reset: str = "soft",
        tau_ref: Any = None,
        name: str | None = None,
    ) -> None:
        super().__init__(in_size, V_reset, V_initializer, spk_fun, spk_reset, name, tau_ref)
        self.R, self.tau, self.V_th, self.V_rest = R, tau, V_th, V_rest

    def _integrate(self, spike: Any, x: Any) -> None:
        V = self._after_reset(spike, constant(self.V_th))
        relaxed = _relaxed(V, constant(self.V_rest) + constant(self.R) * x, self.tau)
        self.V.value = self._refractory(spike, relaxed, V)

    def update(self, x: Any) -> Any:
        """Advance by one step under the current ``x`` and return the spikes."""
        self._integrate(self.get_spike(), x)
        return self.get_spike()


class ALIF(LIF):
    r"""Leaky integrate-and-fire neuron with an adaptive threshold.

    .. math::
        \tau \dot V &= -(V - V_{rest}) + R I \\
        a_t &= e^{-dt/\tau_a} a_{t-1} + z_{t-1} \\
        z_t &= \Theta\left(\frac{V_t - V_{th} - \beta a_t}{V_{th} - V_{reset}}\right)

    Parameters
    ----------
    in_size : int or tuple of int
        Shape of the population.
    R, tau, V_th, V_reset, V_rest, V_initializer, spk_fun, spk_reset, tau_ref, name
        As for `LIF`.
    tau_a : float, array, Quantity or ParamState, optional
        Time constant of the adaptation. Default 100 ms.
    beta : float, array, Quantity or ParamState, optional
        Rise of the threshold after each spike. Default 0.1 mV.
    a_initializer : callable or array, optional
        Initial adaptation. Default 0.

    References
    ----------
    .. [1] G. Bellec et al., "Long short-term memory and learning-to-learn in networks of spiking
       neurons", NeurIPS 2018.

    Examples
    --------
    >>> import brainstate
    >>> import jax.numpy as jnp
    >>> import saiunit as u
    >>> import braintrace
    >>> neuron = braintrace.nn.ALIF(2)
    >>> neuron.init_state(batch_size=3)
    >>> with brainstate.environ.context(dt=1.0 * u.ms):
    ...     neuron(jnp.ones((3, 2)) * u.mA).shape
    (3, 2)
    """

    def __init__(
        self,
        in_size: Any,
        R: Any = 1.0 * u.ohm,
        tau: Any = 5.0 * u.ms,
        tau_a: Any = 100.0 * u.ms,
        V_th: Any = 1.0 * u.mV,
        V_reset: Any = 0.0 * u.mV,
        V_rest: Any = 0.0 * u.mV,
        beta: Any = 0.1 * u.mV,
        V_initializer: Any = 0.0 * u.mV,
        a_initializer: Any = 0.0,
        spk_fun: Callable[[Any], Any] = surrogate.triangle,
        spk_reset: str = "soft",
        tau_ref: Any = None,
        name: str | None = None,
    ) -> None:
        potentials = V_th, V_reset, V_rest, V_initializer
        super().__init__(in_size, R, tau, *potentials, spk_fun, spk_reset, tau_ref, name)
        self.tau_a, self.beta, self.a_initializer = tau_a, beta, a_initializer

    def _initializers(self) -> Initializers:
        return {**super()._initializers(), "a": (self.a_initializer, self.in_size)}

    def get_spike(self) -> Any:
        """Return the spikes of the current state (before an update: of the last step)."""
        V_th, V_reset = constant(self.V_th), constant(self.V_reset)
        above = self.V.value - V_th - constant(self.beta) * self.a.value
        return self.spk_fun(above / (V_th - V_reset))

    def update(self, x: Any) -> Any:
        """Advance by one step under the current ``x`` and return the spikes."""
        spike = self.get_spike()
        self.a.value = decay(self.tau_a) * self.a.value + spike
        self._integrate(spike, x)
        return self.get_spike()


class GIF(Spiking):
    r"""Generalised integrate-and-fire neuron: two currents and a moving threshold.

    .. math::
        \dot I_j &= -k_j I_j, \quad j = 1, 2 \\
        \tau \dot V &= -(V - V_{rest}) + R (I_1 + I_2 + I) \\
        \dot V_{th} &= a (V - V_{rest}) - b (V_{th} - V_{th\infty})

    and after a spike :math:`I_j \leftarrow R_j I_j + A_j`,
    :math:`V_{th} \leftarrow \max(V_{th}, V_{th,reset})`; V is reset as for `LIF`. The soft reset
    subtracts :math:`V_{th} - V_{reset}` with the threshold that V crossed.

    Parameters
    ----------
    in_size : int or tuple of int
        Shape of the population.
    R, tau, V_rest, V_reset, V_initializer, spk_fun, spk_reset, name
        As for `LIF`. Default 20 ohm, 20 ms and three times -70 mV.
    V_th_inf, V_th_reset : float, array or Quantity, optional
        Resting value and lowest value after a spike of the threshold. Default -50, -60 mV.
    a, b : float, array or Quantity, optional
        Rates at which the threshold follows the potential and returns; ``b`` is not zero.
        Default 0 and 0.01 per ms.
    k1, k2 : float, array or Quantity, optional
        Decay rates of the currents. Default 0.2 and 0.02 per ms.
    R1, R2 : float or array, optional
        Fractions of the currents that a spike leaves. Default 0 and 1.
    A1, A2 : float, array or Quantity, optional
        Currents that a spike adds. Default 0 mA.
    V_th_initializer, I1_initializer, I2_initializer : callable, array or Quantity, optional
        Initial values. Default -50 mV, 0 mA, 0 mA.

    References
    ----------
    .. [1] S. Mihalas, E. Niebur, "A generalized linear integrate-and-fire neural model produces
       diverse spiking behaviors", Neural Computation 21, 2009.

    Examples
    --------
    >>> import brainstate
    >>> import jax.numpy as jnp
    >>> import saiunit as u
    >>> import braintrace
    >>> neuron = braintrace.nn.GIF(2, A2=-0.6 * u.mA)
    >>> neuron.init_state(batch_size=3)
    >>> with brainstate.environ.context(dt=1.0 * u.ms):
    ...     neuron(1.5 * jnp.ones((3, 2)) * u.mA).shape
    (3, 2)
    """

    def __init__(
        self,
        in_size: Any,
        R: Any = 20.0 * u.ohm,
        tau: Any = 20.0 * u.ms,
        V_rest: Any = -70.0 * u.mV,
        V_reset: Any = -70.0 * u.mV,
        V_th_inf: Any = -50.0 * u.mV,
        V_th_reset: Any = -60.0 * u.mV,
        a: Any = 0.0 / u.ms,
        b: Any = 0.01 / u.ms,
        k1: Any = 0.2 / u.ms,
        k2: Any = 0.02 / u.ms,
        R1: Any = 0.0,
        R2: Any = 1.0,
        A1: Any = 0.0 * u.mA,
        A2: Any = 0.0 * u.mA,
        V_initializer: Any = -70.0 * u.mV,
        V_th_initializer: Any = -50.0 * u.mV,
        I1_initializer: Any = 0.0 * u.mA,
        I2_initializer: Any = 0.0 * u.mA,
        spk_fun: Callable[[Any], Any] = surrogate.triangle,
        spk_reset: str = "soft",
        name: str | None = None,
    ) -> None:
        super().__init__(in_size, V_reset, V_initializer, spk_fun, spk_reset, name)
        self.R, self.tau, self.V_rest = R, tau, V_rest
        self.V_th_inf, self.V_th_reset = V_th_inf, V_th_reset
        self.a, self.b, self.k1, self.k2 = a, b, k1, k2
        self.R1, self.R2, self.A1, self.A2 = R1, R2, A1, A2
        self.V_th_initializer = V_th_initializer
        self.I1_initializer, self.I2_initializer = I1_initializer, I2_initializer

    def _initializers(self) -> Initializers:
        initializers = self.V_th_initializer, self.I1_initializer, self.I2_initializer
        others = zip(("V_th", "I1", "I2"), initializers, strict=True)
        return {**super()._initializers(), **{name: (own, self.in_size) for name, own in others}}

    def get_spike(self) -> Any:
        """Return the spikes of the current state (before an update: of the last step)."""
        V_th = self.V_th.value
        return self.spk_fun((self.V.value - V_th) / (V_th - constant(self.V_reset)))

    def update(self, x: Any) -> Any:
        """Advance by one step under the current ``x`` and return the spikes."""
        spike, V_th = self.get_spike(), self.V_th.value
        V_rest, b = constant(self.V_rest), constant(self.b)
        V = self._after_reset(spike, V_th)
        I1 = _current(self.I1.value, spike, self.R1, self.A1, self.k1)
        I2 = _current(self.I2.value, spike, self.R2, self.A2, self.k2)
        V_th = V_th + (u.math.maximum(V_th, constant(self.V_th_reset)) - V_th) * spike
        V_th_end = constant(self.V_th_inf) + constant(self.a) / b * (V - V_rest)
        self.V_th.value = _relaxed(V_th, V_th_end, 1 / b)
        self.V.value = _relaxed(V, V_rest + constant(self.R) * (I1 + I2 + x), self.tau)
        self.I1.value, self.I2.value = I1, I2
        return self.get_spike()


class Leaky(Population):
    r"""Leaky integrate-and-fire neuron without units, as `snn.Leaky` of snnTorch.

    .. math::
        z_t &= \Theta(m_t - \vartheta) \\
        m_t &= \beta m_{t-1} + x_t - z_{t-1} \vartheta

    The reset has no gradient. It takes effect one step after the spike.

    Parameters
    ----------
    in_size : int or tuple of int
        Shape of the population.
    beta : float, array or ParamState, optional
        Decay, clipped to [0, 1]. Default 0.9. A ``ParamState`` learns online, like a weight;
        beyond the bounds its gradient is zero.
    threshold : float, array or ParamState, optional
        Threshold. Default 1.
    spk_fun : callable, optional
        Heaviside function with a surrogate gradient. Default `surrogate.arctan`.
    reset : {'subtract', 'zero', 'none'}, optional
        What a spike does in the next step: lower the membrane by the threshold, set it to zero, or
        nothing. Default ``'subtract'``.
    name : str, optional
        Name of the module.

    References
    ----------
    .. [1] J. K. Eshraghian et al., "Training spiking neural networks using lessons from deep
       learning", Proceedings of the IEEE 111, 2023, section II.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import braintrace
    >>> neuron = braintrace.nn.Leaky(2, beta=0.9)
    >>> neuron.init_state(batch_size=1)
    >>> neuron(jnp.array([[0.5, 1.5]]))
    Array([[0., 1.]], dtype=float32)
    >>> neuron.mem.value
    Array([[0.5, 1.5]], dtype=float32)
    """

    def __init__(
        self,
        in_size: Any,
        beta: Any = 0.9,
        threshold: Any = 1.0,
        spk_fun: Callable[[Any], Any] = surrogate.arctan,
        reset: str = "subtract",
        name: str | None = None,
    ) -> None:
        super().__init__(in_size, name)
        self.beta, self.threshold = beta, threshold
        self.spk_fun, self.reset = spk_fun, reset

    def _initializers(self) -> Initializers:
        return {"mem": (0.0, self.in_size)}

    def update(self, x: Any) -> Any:
        """Advance by one step and return the spikes; ``mem`` is the membrane."""
        beta, threshold = constant(self.beta), constant(self.threshold)
        fired = self.mem.value >= threshold  # without a derivative
        mem = jnp.clip(beta, 0, 1) * self.mem.value + x
        fall = {"subtract": threshold, "zero": mem, "none": 0.0}[self.reset]
        self.mem.value = mem - fired * fall
        return self.spk_fun(self.mem.value - threshold)


def _current(current: Any, spike: Any, left: Any, added: Any, rate: Any) -> Any:
    current = current + ((constant(left) - 1) * current + constant(added)) * spike
    return current * decay(1 / constant(rate))


def _relaxed(value: Any, end: Any, tau: Any) -> Any:
    """Relax a value exponentially towards another for one time step."""
    return end + (value - end) * decay(tau)
