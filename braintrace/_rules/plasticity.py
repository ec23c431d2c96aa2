r"""Spike-timing-dependent plasticity: pair, triplet and reward-modulated rules.

The rules filter the spikes on both sides of an operation: :math:`x` at its input, and :math:`z` of
the neurons that it drives. Both filters count the input of a step before its spikes, which it acts
upon. A state above a threshold is a spike; override ``spikes(site)`` for another condition. The
learning signal is a modulator, passed by `three_factor_loss`.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from .._errors import OptionError
from .protocol import Site, Trace


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairSTDP:
    r"""Pair-based spike-timing-dependent plasticity (STDP) of all pairs of spikes.

    .. math::

        \bar x^t = e^{-1/\tau_+} \bar x^{t-1} + x^t, \quad
        \bar z^t = e^{-1/\tau_-} (\bar z^{t-1} + z^{t-1}), \quad
        \Delta w_{ij} = M_j\, (a_+ \bar x_i^t z_j^t - a_- x_i^t \bar z_j^t)

    A pair adds :math:`a_+ e^{-s/\tau_+}`, or :math:`-a_- e^{s/\tau_-}` if its lag :math:`s = t_z -
    t_x` is negative. Optimizers descend: the loss of a step is ``three_factor_loss(V, -M)``.

    Parameters
    ----------
    tau_plus, tau_minus, a_plus, a_minus
        Time constants in steps, and changes by a pair without a lag.
    state, threshold
        Last part of the neurons' state's path, and the number that it reaches with a spike, the
        same in all steps. Of neurons with a moving threshold (`braintrace.nn.ALIF`), name a State
        that holds the spikes, or override ``spikes(site)``.

    References
    ----------
    .. [1] A. Morrison et al., "Phenomenological models of synaptic plasticity", 2008.

    Examples
    --------
    >>> import braintrace
    >>> rule = braintrace.PairSTDP(state="mem")  # of `braintrace.nn.Leaky`
    """

    tau_plus: float = 20.0
    tau_minus: float = 20.0
    a_plus: float = 0.01
    a_minus: float = 0.012
    state: str = "V"
    threshold: float = 1.0
    jacobian = "none"

    def spikes(self, site: Site) -> jax.Array:
        """Return the neurons' spikes of a step."""
        return 1.0 * (site.new_states[_named(site, self.state)] >= self.threshold)

    def init(self, site: Site) -> Trace:
        """Return no spikes."""
        x, z = site.input_zeros(), site.output_zeros()[_named(site, self.state)]
        return {"x": x, "x_filter": x, "z": z, "z_filter": z}

    def advance(self, site: Site, trace: Trace, J: None, x: Any, F: Any) -> Trace:
        """Add the spikes of a step."""
        return {
            "x": site.filtered(0 * trace["x"], x),
            "x_filter": site.filtered(_decay(self.tau_plus) * trace["x_filter"], x),
            "z": self.spikes(site),
            "z_filter": _decay(self.tau_minus) * (trace["z_filter"] + trace["z"]),
        }

    def contract(self, site: Site, trace: Trace, mu: Any) -> dict[str, jax.Array]:
        """Return the modulated change."""
        z, z_filter = (mu[_named(site, self.state)] * trace[name] for name in ("z", "z_filter"))
        up = site.pull_back(trace["x_filter"], self.a_plus * z)
        return _change(up, site.pull_back(trace["x"], self.a_minus * z_filter))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TripletSTDP(PairSTDP):
    r"""Triplet spike-timing-dependent plasticity: pairs, and their effect on later spikes.

    With slow filters :math:`r^t = e^{-1/\tau_x} (r^{t-1} + x^{t-1})` of the inputs and :math:`o^t =
    e^{-1/\tau_y} (o^{t-1} + z^{t-1})` of the spikes, and the filters of `PairSTDP`,

    .. math::

        \Delta w_{ij} = M_j \left( \bar x_i^t z_j^t\, (a_+ + a_{3+} o_j^t)
            - x_i^t \bar z_j^t\, (a_- + a_{3-} r_i^t) \right).

    The frequency of pairs then matters as in cortex. Defaults are the published fit to the visual
    cortex (all to all), for steps of 1 ms.

    Parameters
    ----------
    tau_x, tau_y, a3_plus, a3_minus
        Time constants of the slow filters in steps, and amplitudes of triplets.
    tau_plus, tau_minus, a_plus, a_minus, state, threshold
        See `PairSTDP`.

    References
    ----------
    .. [1] J.-P. Pfister and W. Gerstner, "Triplets of spikes in a model of spike timing-dependent
       plasticity", Journal of Neuroscience 26, 2006.

    Examples
    --------
    >>> import braintrace
    >>> rule = braintrace.TripletSTDP(a_plus=0.0, a3_minus=0.0)  # the minimal model
    """

    tau_plus: float = 16.8
    tau_minus: float = 33.7
    tau_x: float = 101.0
    tau_y: float = 125.0
    a_plus: float = 5e-10
    a_minus: float = 7e-3
    a3_plus: float = 6.2e-3
    a3_minus: float = 2.3e-4

    def init(self, site: Site) -> Trace:
        """Return no spikes."""
        trace = super().init(site)
        return {**trace, "x_slow": trace["x"], "z_slow": trace["z"]}

    def advance(self, site: Site, trace: Trace, J: None, x: Any, F: Any) -> Trace:
        """Add the spikes of a step."""
        x_slow = _decay(self.tau_x) * (trace["x_slow"] + trace["x"])
        z_slow = _decay(self.tau_y) * (trace["z_slow"] + trace["z"])
        return {**super().advance(site, trace, J, x, F), "x_slow": x_slow, "z_slow": z_slow}

    def contract(self, site: Site, trace: Trace, mu: Any) -> dict[str, jax.Array]:
        """Return the modulated change."""
        modulator = mu[_named(site, self.state)]
        z = trace["z"] * (self.a_plus + self.a3_plus * trace["z_slow"])
        x = trace["x"] * (self.a_minus + self.a3_minus * trace["x_slow"])
        up = site.pull_back(trace["x_filter"], modulator * z)
        return _change(up, site.pull_back(x, modulator * trace["z_filter"]))


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardSTDP(PairSTDP):
    r"""Reward-modulated spike-timing-dependent plasticity (R-STDP): eligibility times reward.

    The changes of `PairSTDP` are an eligibility trace of each synapse, which a modulator such as
    reward or dopamine converts to a change of the weight, also long after the spikes:

    .. math::

        e_{ij}^t = e^{-1/\tau_e} e_{ij}^{t-1} + a_+ \bar x_i^t z_j^t - a_- x_i^t \bar z_j^t,
        \qquad \Delta w_{ij} = M_j^t e_{ij}^t.

    Parameters
    ----------
    tau_eligibility
        Time constant of the eligibility in steps.
    tau_plus, tau_minus, a_plus, a_minus, state, threshold
        See `PairSTDP`.

    References
    ----------
    .. [1] E. M. Izhikevich, "Solving the distal reward problem through linkage of STDP and dopamine
       signaling", Cerebral Cortex 17, 2007.
    .. [2] N. Frémaux and W. Gerstner, "Neuromodulated spike-timing-dependent plasticity, and theory
       of three-factor learning rules", Frontiers in Neural Circuits 9, 2016.

    Examples
    --------
    >>> import braintrace
    >>> rule = braintrace.RewardSTDP(tau_eligibility=1000.0)
    """

    tau_eligibility: float = 200.0

    def init(self, site: Site) -> Trace:
        """Return no spikes and no eligibility."""
        eligibility = site.zeros()[_named(site, self.state)]
        return {**super().init(site), "eligibility": eligibility}

    def advance(self, site: Site, trace: Trace, J: None, x: Any, F: Any) -> Trace:
        """Add the spikes of a step, and its pairs to the eligibility."""
        new, state = super().advance(site, trace, J, x, F), _named(site, self.state)
        up = site.outer({state: self.a_plus * new["z"]}, new["x_filter"])[state]
        down = site.outer({state: self.a_minus * new["z_filter"]}, new["x"])[state]

        def advanced(eligibility: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
            return _decay(self.tau_eligibility) * eligibility + up - down

        return {**new, "eligibility": jax.tree.map(advanced, trace["eligibility"], up, down)}

    def contract(self, site: Site, trace: Trace, mu: Any) -> dict[str, jax.Array]:
        """Return the modulated eligibility."""
        state, traces = _named(site, self.state), jax.tree.map(jnp.zeros_like, site.zeros())
        change = site.contract(mu, traces | {state: trace["eligibility"]})
        return _change(change, jax.tree.map(jnp.zeros_like, change))


def _decay(tau: float) -> float:
    return math.exp(-1.0 / tau)


def _named(site: Site, state: str) -> str:
    for name in site.states:
        if name.split("/")[-1] == state:
            return name
    raise OptionError(
        f"`state` of the rule is {state!r}, and {site.name} reaches the states "
        f"{', '.join(map(repr, site.states))}: give the last part of one of these."
    )


def _change(up: dict[str, jax.Array], down: dict[str, jax.Array]) -> dict[str, jax.Array]:
    # A bias has no presynaptic neuron.
    return {k: jnp.zeros_like(up[k]) if k == "bias" else up[k] - down[k] for k in up}
