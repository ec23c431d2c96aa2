"""Leaky readouts, which have a hidden state.

A leaky rate readout is linear: `D_RTRL` and `ES_D_RTRL` carry its memory by filters of its input,
and their gradient through it is exact. A spiking readout is not a linear filter: the path of
earlier spikes of the layer below through its memory is left out, as between any two layers with
hidden states.
"""

from collections.abc import Callable
from typing import Any

import saiunit as u
from brainstate.nn import init

from ..nn import surrogate
from ._linear import Linear
from ._neurons import Spiking
from ._states import Initializers, Stateful, constant, decay


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
        super().__init__(in_size, spk_fun, spk_reset, name)
        self.W = Linear(in_size, out_size, w_init=w_init, b_init=b_init)
        self.out_size = out_size
        self.tau, self.V_th, self.V_reset = tau, V_th, V_reset
        self.V_initializer = V_initializer

    def _initializers(self) -> Initializers:
        return {"V": (self.V_initializer, self.out_size)}

    def get_spike(self) -> Any:
        """Return the spikes of the current state (before an update: of the last step)."""
        V_th = constant(self.V_th)
        return self.spk_fun((self.V.value - V_th) / (V_th - constant(self.V_reset)))

    def update(self, x: Any) -> Any:
        """Advance by one step and return the spikes ``(..., out)``."""
        V_th, V_reset = constant(self.V_th), constant(self.V_reset)
        V = self._reset(self.V.value, self.get_spike(), V_th, V_reset)
        self.V.value = decay(self.tau) * V + self.W(x)
        return self.get_spike()
