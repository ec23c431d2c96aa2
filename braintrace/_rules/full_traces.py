r"""Influence matrix: the derivative of the flattened state with respect to every parameter (RTRL).

.. math::

    \epsilon^t = J^t \epsilon^{t-1} + F^t \otimes x^t, \qquad
    \nabla w = \partial L / \partial w + \sum_q \mu[q]\, \epsilon^0[q]

for a chunk that starts with the trace :math:`\epsilon^0`. The partial derivative is backpropagated
through the steps of the chunk, including coupled elements, and :math:`\mu` is the adjoint of the
states before it. The trace advances once for a chunk,

.. math::

    \epsilon^K = P^0 \epsilon^0 + \sum_s (P^s F^s) \otimes x^s, \qquad
    P^s = J^K \cdots J^{s+1},

where the rows of :math:`P` are pulled back through the chunk (see `flat_state`).
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from .._core.flat_state import flat_state_of, row_dtype, to_rows, unit_rows
from .._core.in_place import unfused
from .._core.products import like
from .._core.signals import where_flagged
from .._core.step import as_chunk
from .._core.time_loops import scan_records
from .._core.traces import as_arrays, is_zero, reset_traces, widened
from .._graph import (
    ETraceGraph,
    HiddenParamOpRelation,
    Jacobian,
    Record,
    Records,
    Role,
    Signal,
    StateLeaf,
    TraceMethod,
    Traces,
    TraceSpec,
    TraceSpecs,
    Weights,
)
from .chunk_vjp import chunk_vjp


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


@dataclasses.dataclass(frozen=True)
class FullTraces(PassingTraces):
    """Trace method with a trace of the size of each parameter for every state scalar."""

    needs: ClassVar[frozenset[Record]] = frozenset({"step"})
    jacobian: ClassVar[Jacobian] = "full"

    def rows_of(self, graph: ETraceGraph, leaf: StateLeaf) -> np.ndarray:
        """Return the state scalars that a parameter's trace follows."""
        flat = flat_state_of(graph)
        return flat.rows(flat.reached[leaf.name])

    def trace_specs(self, graph: ETraceGraph, every_state: bool) -> TraceSpecs:
        """Return an array ``(samples, rows, *shape)`` for each parameter that reaches a state."""
        flat = flat_state_of(graph)
        return {
            leaf.name: TraceSpec(
                (flat.samples, len(self.rows_of(graph, leaf)), *leaf.shape),
                jnp.promote_types(row_dtype(flat), leaf.dtype),
                ("batch", "state", *entries(len(leaf.shape))),
                operand=leaf.name,
                full_shape=(flat.samples, flat.size, *leaf.shape),
            )
            for leaf in followed(graph)
        }

    def update(
        self, graph: ETraceGraph, weights: Weights, records: Records, traces: Traces
    ) -> Traces:
        """Return the traces after a recorded chunk."""
        flat = flat_state_of(graph)
        rows_of = {leaf.name: self.rows_of(graph, leaf) for leaf in followed(graph)}
        before, terms = chunk_vjp(graph, weights, records, unit_rows(flat), rows_of)
        transition = jnp.moveaxis(before, 1, 0)
        new = {}
        for name, old in traces.items():
            rows, term = rows_of[name], terms[name]
            if not is_zero(old):
                own = transition[:, rows[:, None], rows] if len(rows) < flat.size else transition
                term = term + _propagated(own, widened(old, own.dtype), records.zeros_select)
            new[name] = term.astype(old.dtype)
        return new

    def carry_in_vjp(
        self, graph: ETraceGraph, weights: Weights, mu: Signal, traces: Traces, zeros_select: bool
    ) -> Weights:
        """Return the sum over samples and rows of ``mu[q] eps[q]``."""
        arriving = arriving_rows(graph, mu)
        gradients: Weights = jax.tree.map(jnp.zeros_like, weights)
        for leaf in followed(graph):
            if not is_zero(trace := traces[leaf.name]):
                own = arriving.at[:, self.rows_of(graph, leaf)].get(mode="fill", fill_value=0)
                axes = "bq,bq...->..." if own.ndim == 2 else "bq...,bq...->..."
                result = contracted(axes, own, trace, zeros_select)
                gradients[leaf.name] = {"value": result.astype(weights[leaf.name]["value"].dtype)}
        return gradients


@dataclasses.dataclass(frozen=True)
class LayeredTraces(FullTraces):
    """The same with ``J`` and ``F`` block-diagonal by layer."""

    jacobian: ClassVar[Jacobian] = "layered"


def entries(ndim: int) -> tuple[Role, ...]:
    """Return the roles of the axes of a parameter's array."""
    entry: Role = "entry"
    return (entry,) * ndim


def followed(graph: ETraceGraph) -> list[StateLeaf]:
    """Return the parameters that reach a state."""
    reached = flat_state_of(graph).reached
    return [leaf for leaf in graph.traced.parameters if leaf.name in reached]


def arriving_rows(graph: ETraceGraph, mu: Signal) -> jax.Array:
    """Return the adjoints of the states, ``(samples, n)``; missing ones are zero."""
    flat = flat_state_of(graph)
    silent = {leaf.name: jnp.zeros(leaf.shape, leaf.dtype) for leaf in flat.leaves}
    return to_rows(flat, [{**silent, **mu}[leaf.name] for leaf in flat.leaves])


def contracted(axes: str, mu: jax.Array, trace: jax.Array, zeros_select: bool) -> jax.Array:
    """Return ``mu . eps``; with ``zeros_select``, a zero removes NaN and infinity from a trace."""
    trace = widened(trace, mu.dtype)
    if zeros_select:
        trace = where_flagged(mu != 0, trace)
    return unfused(jnp.einsum(axes, mu, trace), mu)


def _propagated(transition: jax.Array, trace: jax.Array, zeros_select: bool) -> jax.Array:
    """Return ``P eps`` of every sample."""
    if zeros_select:
        trace = where_flagged((transition != 0).any(1), trace)
    return unfused(jnp.einsum("bqr,br...->bq...", transition, trace), transition)
