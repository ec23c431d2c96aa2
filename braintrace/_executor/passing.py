"""Common parts of full-Jacobian rules, whose gradients are backpropagated through the steps."""

import dataclasses
from typing import ClassVar

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
from .._typing import PyTree


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
        """Not called: the gradient is backpropagated through the steps."""
        raise NotImplementedError

    def step(
        self, graph: ETraceGraph, weights: Weights, records: Records, traces: Traces
    ) -> tuple[Traces, PyTree]:
        """Return the traces after a single step, and the argument ``past`` of `past_gradient`."""
        return self.update(graph, weights, records, traces), traces

    def past_gradient(
        self, graph: ETraceGraph, weights: Weights, mu: Signal, past: PyTree, zeros_select: bool
    ) -> Weights:
        """Return the gradient through the states before a single step; see `entry_gradient`.

        It is called after the step. Traces from before the step that it reads cannot be
        overwritten.
        """
        return self.entry_gradient(graph, weights, mu, past, zeros_select)
