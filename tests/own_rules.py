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
