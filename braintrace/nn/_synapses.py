r"""Synapses and leaky readouts.

The input x of a synapse is the increment of its state by the spikes of a step, usually the output
of a weight layer. It has the unit of the state: a conductance by default, a current with
``g_initializer=0.0 * saiunit.mA``. Set the time step in brainstate's environment.

A leaky rate readout is linear: `D_RTRL` and `ES_D_RTRL` carry its memory by filters of its input,
and their gradient through it is exact. A spiking readout is not a linear filter: the path of
earlier spikes of the layer below through its memory is left out, as between any two layers with
hidden states.
"""

from collections.abc import Callable
from typing import Any

import brainstate
import saiunit as u
from brainstate.nn import init

from ..nn import surrogate
from ._linear import Linear
from ._neurons import Spiking
from ._states import Initializers, Population, Stateful, constant, decay, time_step


class Synapse(Population):
    """A population of synapses whose states start from one initialiser."""

    def __init__(self, in_size: Any, g_initializer: Any, name: str | None) -> None:
        super().__init__(in_size, name)
        self.g_initializer = g_initializer


class Expon(Synapse):
    r"""Exponential synapse.

    .. math:: \dot g = -g / \tau, \qquad g \leftarrow g + x

    Parameters
    ----------
    in_size : int or tuple of int
        Shape of the population.
    tau : float, array, Quantity or ParamState, optional
        Time constant. Default 8 ms. A ``ParamState`` learns online, like a weight.
    g_initializer : callable, array or Quantity, optional
        Initial value, with the unit of the input. Default 0 mS.
    name : str, optional
        Name of the module.

    References
    ----------
    .. [1] A. Roth, M. C. W. van Rossum, "Modeling synapses", in "Computational Modeling Methods
       for Neuroscientists", MIT Press, 2009.

    Examples
    --------
    >>> import brainstate
    >>> import jax.numpy as jnp
    >>> import saiunit as u
    >>> import braintrace
    >>> synapse = braintrace.nn.Expon(2)
    >>> synapse.init_state(batch_size=3)
    >>> with brainstate.environ.context(dt=1.0 * u.ms):
    ...     synapse(jnp.ones((3, 2)) * u.mS).shape
    (3, 2)
    """

    def __init__(
        self,
        in_size: Any,
        tau: Any = 8.0 * u.ms,
        g_initializer: Any = 0.0 * u.mS,
        name: str | None = None,
    ) -> None:
        super().__init__(in_size, g_initializer, name)
        self.tau = tau

    def _initializers(self) -> Initializers:
        return {"g": (self.g_initializer, self.in_size)}

    def update(self, x: Any) -> Any:
        """Advance by one step, add ``x`` and return g."""
        self.g.value = decay(self.tau) * self.g.value + x
        return self.g.value


class Alpha(Synapse):
    r"""Alpha synapse, with the impulse response :math:`x\, (t / \tau)\, e^{-t/\tau}`.

    .. math:: \dot h = -h / \tau, \quad \dot g = (h - g) / \tau, \qquad h \leftarrow h + x

    Parameters
    ----------
    in_size : int or tuple of int
        Shape of the population.
    tau : float, array or Quantity, optional
        Time constant, also the time of the peak x / e of the response. Default 8 ms.
    g_initializer : callable, array or Quantity, optional
        Initial value of g and h, with the unit of the input. Default 0 mS.
    name : str, optional
        Name of the module.

    References
    ----------
    .. [1] W. Rall, "Distinguishing theoretical synaptic potentials computed for different
       soma-dendritic distributions of synaptic input", J. Neurophysiology 30, 1967.

    Examples
    --------
    >>> import brainstate
    >>> import jax.numpy as jnp
    >>> import saiunit as u
    >>> import braintrace
    >>> synapse = braintrace.nn.Alpha(2, g_initializer=0.0 * u.mA)
    >>> synapse.init_state(batch_size=3)
    >>> with brainstate.environ.context(dt=1.0 * u.ms):
    ...     synapse(jnp.ones((3, 2)) * u.mA).shape
    (3, 2)
    """

    def __init__(
        self,
        in_size: Any,
        tau: Any = 8.0 * u.ms,
        g_initializer: Any = 0.0 * u.mS,
        name: str | None = None,
    ) -> None:
        super().__init__(in_size, g_initializer, name)
        self.tau = tau

    def _initializers(self) -> Initializers:
        return dict.fromkeys(("g", "h"), (self.g_initializer, self.in_size))

    def update(self, x: Any) -> Any:
        """Advance by one step, add ``x`` and return g."""
        left, g, h = decay(self.tau), self.g.value, self.h.value
        self.g.value = left * (g + time_step() / constant(self.tau) * h)
        self.h.value = left * h + x
        return self.g.value


class DualExpon(Synapse):
    r"""Synapse with a rise and a decay: the response is a difference of exponentials.

    .. math:: g = A (g_d - g_r), \qquad \dot g_d = -g_d / \tau_d, \quad \dot g_r = -g_r / \tau_r,
        \qquad g_d \leftarrow g_d + x, \quad g_r \leftarrow g_r + x

    with A such that the peak of the response to one input is x.

    Parameters
    ----------
    in_size : int or tuple of int
        Shape of the population.
    tau_decay, tau_rise : float, array or Quantity, optional
        Time constants, different from each other. Default 10 and 1 ms.
    g_initializer : callable, array or Quantity, optional
        Initial value of both states, with the unit of the input. Default 0 mS.
    name : str, optional
        Name of the module.

    References
    ----------
    .. [1] A. Roth, M. C. W. van Rossum, "Modeling synapses", in "Computational Modeling Methods
       for Neuroscientists", MIT Press, 2009.

    Examples
    --------
    >>> import brainstate
    >>> import jax.numpy as jnp
    >>> import saiunit as u
    >>> import braintrace
    >>> synapse = braintrace.nn.DualExpon(2, tau_decay=5.0 * u.ms)
    >>> synapse.init_state(batch_size=3)
    >>> with brainstate.environ.context(dt=1.0 * u.ms):
    ...     synapse(jnp.ones((3, 2)) * u.mS).shape
    (3, 2)
    """

    def __init__(
        self,
        in_size: Any,
        tau_decay: Any = 10.0 * u.ms,
        tau_rise: Any = 1.0 * u.ms,
        g_initializer: Any = 0.0 * u.mS,
        name: str | None = None,
    ) -> None:
        super().__init__(in_size, g_initializer, name)
        self.tau_decay, self.tau_rise = tau_decay, tau_rise

    def _initializers(self) -> Initializers:
        return dict.fromkeys(("g_rise", "g_decay"), (self.g_initializer, self.in_size))

    def update(self, x: Any) -> Any:
        """Advance by one step, add ``x`` and return g."""
        self.g_rise.value = decay(self.tau_rise) * self.g_rise.value + x
        self.g_decay.value = decay(self.tau_decay) * self.g_decay.value + x
        ratio = constant(self.tau_rise) / constant(self.tau_decay)
        amplitude = 1 / (ratio ** (ratio / (1 - ratio)) - ratio ** (1 / (1 - ratio)))
        return amplitude * (self.g_decay.value - self.g_rise.value)


class COBA(brainstate.nn.Module):
    r"""Conductance-based current: :math:`I = g (E - V)`.

    Parameters
    ----------
    E : float, array or Quantity
        Reversal potential.
    name : str, optional
        Name of the module.

    Examples
    --------
    >>> import saiunit as u
    >>> import braintrace
    >>> current = braintrace.nn.COBA(E=0.0 * u.mV)
    >>> current(2.0 * u.mS, V=-60.0 * u.mV).to_decimal(u.uA)
    120.0
    """

    def __init__(self, E: Any, name: str | None = None) -> None:
        super().__init__(name=name)
        self.E = E

    def update(self, g: Any, V: Any) -> Any:
        """Return the current into a membrane of potential ``V``."""
        return g * (constant(self.E) - V)


class CUBA(brainstate.nn.Module):
    r"""Current-based approximation of a conductance: :math:`I = g (E - V_{rest})`.

    A synapse whose state is a current does not need this module.

    Parameters
    ----------
    E, V_rest : float, array or Quantity
        Reversal potential, and a fixed potential used instead of the membrane's.
    name : str, optional
        Name of the module.

    Examples
    --------
    >>> import saiunit as u
    >>> import braintrace
    >>> current = braintrace.nn.CUBA(E=0.0 * u.mV, V_rest=-70.0 * u.mV)
    >>> current(2.0 * u.mS).to_decimal(u.uA)
    140.0
    """

    def __init__(self, E: Any, V_rest: Any, name: str | None = None) -> None:
        super().__init__(name=name)
        self.E, self.V_rest = E, V_rest

    def update(self, g: Any) -> Any:
        """Return the current into the membrane."""
        return g * (constant(self.E) - constant(self.V_rest))


class LeakyRateReadout(Stateful):
    r"""Leaky integrators whose state is the output.

    .. math:: r_t = e^{-dt/\tau} r_{t-1} + x_t W + b

    Parameters
    ----------
    in_size, out_size : int or tuple of int
        Shapes of one input and one output; all axes but the last are equal.
    tau : float, array or Quantity, optional
        Time constant. Default 5 ms.
    w_init : callable or array, optional
        Weight ``(in, out)``. Default ``KaimingNormal()``.
    b_init : callable, array or None, optional
        Bias ``(out,)``. Default None.
    r_initializer : callable or array, optional
        Initial value of r. Default 0.
    name : str, optional
        Name of the module.

    References
    ----------
    .. [1] G. Bellec et al., "A solution to the learning dilemma for recurrent networks of spiking
       neurons", Nature Communications 11, 2020.

    Examples
    --------
    >>> import brainstate
    >>> import jax.numpy as jnp
    >>> import saiunit as u
    >>> import braintrace
    >>> readout = braintrace.nn.LeakyRateReadout(4, 2, tau=20.0 * u.ms)
    >>> readout.init_state(batch_size=3)
    >>> with brainstate.environ.context(dt=1.0 * u.ms):
    ...     readout(jnp.ones((3, 4))).shape
    (3, 2)
    """

    def __init__(
        self,
        in_size: Any,
        out_size: Any,
        tau: Any = 5.0 * u.ms,
        w_init: Any = init.KaimingNormal(),  # noqa: B008
        b_init: Any = None,
        r_initializer: Any = 0.0,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        self.W = Linear(in_size, out_size, w_init=w_init, b_init=b_init)
        self.in_size, self.out_size = self.W.in_size, self.W.out_size
        self.tau = tau
        self.r_initializer = r_initializer

    def _initializers(self) -> Initializers:
        return {"r": (self.r_initializer, self.out_size)}

    def update(self, x: Any) -> Any:
        """Advance by one step and return r ``(..., out)``."""
        self.r.value = decay(self.tau) * self.r.value + self.W(x)
        return self.r.value


class LeakySpikeReadout(Spiking):
    r"""Leaky integrators that spike.

    .. math::
        V_t &= e^{-dt/\tau} V'_{t-1} + x_t W + b \\
        z_t &= \Theta\left(\frac{V_t - V_{th}}{V_{th} - V_{reset}}\right)

    where :math:`V'` is the potential after the reset by the old spike, as for `LIF`. Potentials
    have the unit of x W, by default no unit.

    Parameters
    ----------
    in_size, out_size : int or tuple of int
        Shapes of one input and one output; all axes but the last are equal.
    tau : float, array or Quantity, optional
        Time constant. Default 5 ms.
    V_th, V_reset : float, array or Quantity, optional
        Threshold and reset potential. Default 1 and 0.
    w_init : callable or array, optional
        Weight ``(in, out)``. Default ``KaimingNormal()``.
    b_init : callable, array or None, optional
        Bias ``(out,)``. Default None.
    V_initializer : callable or array, optional
        Initial potential. Default 0.
    spk_fun : callable, optional
        Heaviside function with a surrogate gradient. Default `surrogate.triangle`.
    spk_reset : {'soft', 'hard'}, optional
        Kind of reset. Default ``'soft'``.
    name : str, optional
        Name of the module.

    References
    ----------
    .. [1] F. Zenke, S. Ganguli, "SuperSpike: Supervised learning in multilayer spiking neural
       networks", Neural Computation 30, 2018.

    Examples
    --------
    >>> import brainstate
    >>> import jax.numpy as jnp
    >>> import saiunit as u
    >>> import braintrace
    >>> readout = braintrace.nn.LeakySpikeReadout(4, 2, w_init=jnp.ones((4, 2)))
    >>> readout.init_state()
    >>> with brainstate.environ.context(dt=1.0 * u.ms):
    ...     readout(jnp.ones(4))
    Array([1., 1.], dtype=float32)
    """

    def __init__(
        self,
        in_size: Any,
        out_size: Any,
        tau: Any = 5.0 * u.ms,
        V_th: Any = 1.0,
        V_reset: Any = 0.0,
        w_init: Any = init.KaimingNormal(),  # noqa: B008
        b_init: Any = None,
        V_initializer: Any = 0.0,
        spk_fun: Callable[[Any], Any] = surrogate.triangle,
        spk_reset: str = "soft",
        name: str | None = None,
    ) -> None:
        super().__init__(in_size, V_reset, V_initializer, spk_fun, spk_reset, name)
        self.W = Linear(in_size, out_size, w_init=w_init, b_init=b_init)
        self.out_size = out_size
        self.tau, self.V_th = tau, V_th

    def update(self, x: Any) -> Any:
        """Advance by one step and return the spikes ``(..., out)``."""
        V = self._after_reset(self.get_spike(), constant(self.V_th))
        self.V.value = decay(self.tau) * V + self.W(x)
        return self.get_spike()
