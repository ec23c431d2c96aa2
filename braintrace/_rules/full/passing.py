"""Common parts of rules whose gradients are backpropagated through the steps of a chunk."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ..._core.products.direct import like
from ..._core.step import as_chunk
from ..._core.time_loops import scan_records
from ..._core.traces import reset_traces
from ..._core.zero import as_arrays
from ..._graph import (
    ETraceGraph,
    HiddenParamOpRelation,
    Jacobian,
    Record,
    Records,
    Signal,
    TraceMethod,
    Traces,
    TraceSpecs,
    Weights,
)


@dataclasses.dataclass(frozen=True)
class PassingTraces(TraceMethod):
    """The parts of a `TraceMethod` that are the same for all these rules."""

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


@dataclasses.dataclass(frozen=True)
class NoTraces(PassingTraces):
    """Trace method without residuals and without traces: the states before a step are constant."""

    needs: ClassVar[frozenset[Record]] = frozenset()
    jacobian: ClassVar[Jacobian] = "none"

    def trace_specs(self, graph: ETraceGraph, every_state: bool) -> TraceSpecs:
        """Return no specifications."""
        return {}

    def update(
        self, graph: ETraceGraph, weights: Weights, records: Records, traces: Traces
    ) -> Traces:
        """Return the traces unchanged."""
        return traces

    def carry_in_vjp(
        self, graph: ETraceGraph, weights: Weights, mu: Signal, traces: Traces, zeros_select: bool
    ) -> Weights:
        """Return zero."""
        zeros: Weights = jax.tree.map(jnp.zeros_like, weights)
        return zeros


def over_steps(
    advance: Callable[[Records, Traces], Traces],
    graph: ETraceGraph,
    records: Records,
    traces: Traces,
) -> Traces:
    """Return traces after recorded steps, each of which is a chunk of one step.

    Traces are reset before ``advance`` receives them.
    """

    def one_step(traces: Traces, now: tuple[Any, jax.Array | None]) -> tuple[Traces, None]:
        inputs, reset = now
        if reset is not None:
            specs = {key: graph.trace_specs[key] for key in traces}
            traces = reset_traces(specs, traces, reset)
        one = dataclasses.replace(records, inputs=as_chunk(inputs), reset=None, steps=1)
        return like(traces, advance(one, traces)), None

    over_time = records.inputs, records.reset
    after: Traces = scan_records(one_step, as_arrays(traces), over_time, records.steps)[0]
    return after
