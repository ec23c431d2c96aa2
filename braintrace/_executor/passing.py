"""Common parts of full-Jacobian rules, whose gradients are backpropagated through the steps."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from .._graph import (
    ETraceGraph,
    HiddenParamOpRelation,
    Jacobian,
    Records,
    Signal,
    TraceMethod,
    Traces,
    Weights,
)


@dataclasses.dataclass(frozen=True)
class PassingTraces(TraceMethod):
    """The parts of a `TraceMethod` that are the same for all full-Jacobian rules."""

    jacobian: ClassVar[Jacobian] = "full"

    def carries(self, relation: HiddenParamOpRelation) -> bool:
        """Return False: traces belong to parameters, marked or not, instead of operations."""
        return False

    def gradient(
        self,
        graph: ETraceGraph,
        weights: Weights,
        records: Records,
        signal: Signal,
        before: Traces,
        after: Traces | None = None,
    ) -> tuple[Weights, Traces | None]:
        """Return zero: the gradient is backpropagated through the steps."""
        return jax.tree.map(jnp.zeros_like, weights), after
