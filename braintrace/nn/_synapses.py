r"""Synapses, integrated exactly over time steps, and the currents that they cause.

The input x of a synapse is the increment of its state by the spikes of a step, usually the output
of a weight layer. It has the unit of the state: a conductance by default, a current with
``g_initializer=0.0 * saiunit.mA``. Set the time step in brainstate's environment.
"""

from typing import Any

import brainstate
import saiunit as u

from .._errors import ShapeError
from ._states import Initializers, Stateful, constant, decay, time_step


class Synapse(Stateful):
    """A population of synapses whose states start from one initialiser."""

    def __init__(self, in_size: Any, g_initializer: Any, name: str | None) -> None:
        super().__init__(name=name)
        self.in_size = in_size
        self.out_size = in_size
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
        ratio = tau_rise / tau_decay
        self.tau_decay, self.tau_rise = tau_decay, tau_rise
        self.amplitude = 1 / (ratio ** (ratio / (1 - ratio)) - ratio ** (1 / (1 - ratio)))

    def _initializers(self) -> Initializers:
        return dict.fromkeys(("g_rise", "g_decay"), (self.g_initializer, self.in_size))

    def update(self, x: Any) -> Any:
        """Advance by one step, add ``x`` and return g."""
        self.g_rise.value = decay(self.tau_rise) * self.g_rise.value + x
        self.g_decay.value = decay(self.tau_decay) * self.g_decay.value + x
        return self.amplitude * (self.g_decay.value - self.g_rise.value)


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


class Projection(brainstate.nn.Module):
    r"""Projection of several populations to one synapse, which adds their inputs.

    .. math:: g \leftarrow f(g, \sum_p W_p(x_p))

    with a weight layer :math:`W_p` for each population and the step f of the synapse. Each weight
    has its own traces; the populations share the state of the synapse.

    Parameters
    ----------
    weights : dict of str to module
        The weight layer of each population by its name: `Linear`, `SparseLinear`, `SignedWLinear`,
        … Their outputs must have one shape.
    synapse : module
        The synapse that receives the sum: `Expon`, `Alpha`, `DualExpon`, …
    name : str, optional
        Name of the module.

    Examples
    --------
    >>> import brainstate
    >>> import jax.numpy as jnp
    >>> import saiunit as u
    >>> import braintrace
    >>> from braintrace import nn
    >>> weights = {
    ...     "input": nn.Linear(3, 2, w_init=jnp.ones((3, 2)), b_init=None),
    ...     "recurrent": nn.Linear(2, 2, w_init=jnp.ones((2, 2)), b_init=None, w_sign=[1, -1]),
    ... }
    >>> projection = nn.Projection(weights, nn.Expon(2, g_initializer=0.0))
    >>> _ = brainstate.nn.init_all_states(projection)
    >>> with brainstate.environ.context(dt=1.0 * u.ms):
    ...     projection({"input": jnp.ones(3), "recurrent": jnp.ones(2)})
    Array([3., 3.], dtype=float32)
    """

    def __init__(self, weights: Any, synapse: Any, name: str | None = None) -> None:
        super().__init__(name=name)
        self.weights = dict(weights)
        self.synapse = synapse

    def update(self, inputs: Any) -> Any:
        """Advance the synapse by one step and return its output.

        Parameters
        ----------
        inputs
            A dict with the input from each population, ``(..., its size)``.

        Raises
        ------
        ShapeError
            If a population is missing or unknown.
        """
        if set(inputs) != set(self.weights):
            raise ShapeError(
                f"`Projection`: expected the populations {list(self.weights)}, got {list(inputs)}."
            )
        total, *rest = (layer(inputs[name]) for name, layer in self.weights.items())
        for y in rest:
            total = total + y
        return self.synapse(total)
