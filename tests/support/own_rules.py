"""Learning rules from outside the package: with its public names alone."""

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Decaying:
    """``E' = decay E + F x``: every trace fades by a factor, whatever the model remembers."""

    decay: float
    jacobian = "none"

    def init(self, site):
        return site.zeros()

    def advance(self, site, trace, J, x, F):
        return jax.tree.map(lambda E, new: self.decay * E + new, trace, site.outer(F, x))

    def contract(self, site, trace, mu):
        return site.contract(mu, trace)


@dataclasses.dataclass(frozen=True)
class Carrying:
    """``E' = J E + F x``: D-RTRL, SnAp-1, OSTL or RTRL, by the kind of Jacobian."""

    jacobian: str

    def init(self, site):
        return site.zeros()

    def advance(self, site, trace, J, x, F):
        return jax.tree.map(jnp.add, site.multiply(J, trace), site.outer(F, x))

    def contract(self, site, trace, mu):
        return site.contract(mu, trace)


@dataclasses.dataclass(frozen=True)
class Filtering:
    """``w' = sum mu F x_`` with ``x_' = decay x_ + x``: OTTT, in the memory of the inputs."""

    decay: float
    jacobian = "none"

    def init(self, site):
        return {"x": site.input_zeros(), "F": site.output_zeros()}

    def advance(self, site, trace, J, x, F):
        faded = jax.tree.map(lambda kept: self.decay * kept, trace["x"])
        return {"x": site.filtered(faded, x), "F": {**trace["F"], **F}}

    def contract(self, site, trace, mu):
        return site.pull_back(trace["x"], sum(mu[h] * trace["F"][h] for h in site.states))
