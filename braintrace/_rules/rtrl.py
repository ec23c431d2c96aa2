r"""Influence matrix: the derivative of the flattened state with respect to every parameter.

RTRL carries all of it,

.. math::

    \epsilon^t = J^t \epsilon^{t-1} + F^t \otimes x^t, \qquad
    \nabla w = \partial L / \partial w + \sum_q \mu[q]\, \epsilon^0[q]

for a chunk that starts with the trace :math:`\epsilon^0`. The partial derivative is backpropagated
through the steps of the chunk, including coupled elements, and :math:`\mu` is the adjoint of the
states before it. The trace advances once for a chunk,

.. math::

    \epsilon^K = P^0 \epsilon^0 + \sum_s (P^s F^s) \otimes x^s, \qquad
    P^s = J^K \cdots J^{s+1},

where the rows of :math:`P` are pulled back through the chunk (see `chunk_vjp`).

SnAp-n is RTRL with a mask. All hidden state of one sample is a vector of scalars ``q``. ``N(w)``
are the scalars that ``w`` reaches within ``n`` steps: the scalars of this step, propagated
``n - 1`` times by the structure of ``J``. A trace stores the rows of a weight's column in ``N(w)``,

.. math::

    \epsilon^t[q, w] = \sum_{q' \in N(w)} J^t[q, q']\, \epsilon^{t-1}[q', w] + F^t[q, w],
    \quad q \in N(w), \qquad \nabla w = \sum_t \sum_{q \in N(w)} l^t[q]\, \epsilon^t[q, w].

``J`` and ``F`` belong to the whole step, so ``l`` is the derivative of a loss with all other new
states held constant.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from .._core.flat_state import flat_state_of, row_dtype, to_rows
from .._core.gradient import as_chunk, like
from .._core.sites import flat_signals, where_flagged
from .._core.step_program import scan_records
from .._core.traces import as_arrays, is_zero, reset_traces, unfused, widened
from .._graph.flat_state import Structure
from .._graph.graph import ETraceGraph, Record, Role, TraceSpec, TraceSpecs
from .._graph.hidden_group import HiddenParamOpRelation
from .._graph.method import Chunk, Jacobian, Signal, TraceMethod, Traces, Weights
from .._graph.traced_model import StateLeaf
from .chunk_vjp import jacobians


@dataclasses.dataclass(frozen=True)
class PassingTraces(TraceMethod):
    """The parts of a rule whose gradient is backpropagated through the steps of a chunk."""

    def carries(self, relation: HiddenParamOpRelation) -> bool:
        """Return False: traces belong to parameters, marked or not, instead of operations."""
        return False

    def gradient(
        self, chunk: Chunk, signal: Signal, before: Traces, after: Traces | None = None
    ) -> tuple[Weights, Traces | None]:
        """Return zero: the gradient is backpropagated through the steps."""
        return jax.tree.map(jnp.zeros_like, chunk.weights), after


@dataclasses.dataclass(frozen=True)
class NoTraces(PassingTraces):
    """Trace method without residuals and without traces: the states before a step are constant."""

    needs = frozenset[Record]()
    jacobian = "none"

    def trace_specs(self, graph: ETraceGraph, every_state: bool) -> TraceSpecs:
        """Return no specifications."""
        return {}

    def update(self, chunk: Chunk, traces: Traces) -> Traces:
        """Return the traces unchanged."""
        return traces

    def carry_in_vjp(self, chunk: Chunk, mu: Signal, traces: Traces) -> Weights:
        """Return zero."""
        return gradients_like(chunk.weights, {})


@dataclasses.dataclass(frozen=True)
class FullTraces(PassingTraces):
    """Trace method with a trace of the size of each parameter for every state scalar."""

    needs = frozenset({"step"})
    jacobian: ClassVar[Jacobian] = "full"

    def rows_of(self, graph: ETraceGraph, name: str) -> np.ndarray:
        """Return the state scalars that a parameter's trace follows."""
        flat = flat_state_of(graph)
        return flat.rows(flat.reached[name])

    def trace_specs(self, graph: ETraceGraph, every_state: bool) -> TraceSpecs:
        """Return an array ``(samples, rows, *shape)`` for each parameter that reaches a state."""
        flat = flat_state_of(graph)
        return {
            leaf.name: TraceSpec(
                (flat.samples, len(self.rows_of(graph, leaf.name)), *leaf.shape),
                jnp.promote_types(row_dtype(flat), leaf.dtype),
                ("batch", "state", *entries(len(leaf.shape))),
                operand=leaf.name,
            )
            for leaf in followed(graph)
        }

    def update(self, chunk: Chunk, traces: Traces) -> Traces:
        """Return the traces after a recorded chunk."""
        # Of a chunk, the derivative by old states is `P`.
        (P, terms), new = jacobians(chunk), {}
        for name, old in traces.items():
            rows = self.rows_of(chunk.graph, name)
            term = _pick_rows(terms[name], rows)
            if not is_zero(old):
                term = term + advance_rows(P, rows, old, chunk.records.zeros_select)
            new[name] = term.astype(old.dtype)
        return new

    def carry_in_vjp(self, chunk: Chunk, mu: Signal, traces: Traces) -> Weights:
        """Return the sum over samples and rows of ``mu[q] eps[q]``."""
        arriving, found = arriving_rows(chunk.graph, mu), {}
        for name, trace in traces.items():
            if not is_zero(trace):
                rows = self.rows_of(chunk.graph, name)
                own = arriving.at[:, rows].get(mode="fill", fill_value=0)
                axes = "bq,bq...->..." if own.ndim == 2 else "bq...,bq...->..."
                found[name] = multiply(axes, own, trace, chunk.records.zeros_select)
        return gradients_like(chunk.weights, found)


@dataclasses.dataclass(frozen=True)
class LayeredTraces(FullTraces):
    """The same with ``J`` and ``F`` block-diagonal by layer."""

    jacobian = "layered"


@dataclasses.dataclass(frozen=True)
class SparseTraces(FullTraces):
    """Trace method for the state scalars that a weight reaches within ``n`` steps."""

    n: int
    jacobian = "sparse"

    def rows_of(self, graph: ETraceGraph, name: str) -> np.ndarray:
        """Return the rows of every entry; rows beyond the state fill up the columns.

        If all entries reach the same rows, these are a vector.
        """
        structure = flat_state_of(graph).structure
        assert structure is not None
        rows = _rows_within(structure, name, self.n)
        shape = next(leaf.shape for leaf in graph.traced.parameters if leaf.name == name)
        return rows.reshape(-1, *shape) if rows.shape[1] > 1 else rows[:, 0]

    def update(self, chunk: Chunk, traces: Traces) -> Traces:
        """Return the traces after a recorded chunk."""
        return self.gradient(chunk, {}, traces)[1]

    def gradient(
        self, chunk: Chunk, signal: Signal, before: Traces, after: Traces | None = None
    ) -> tuple[Weights, Traces]:
        """Return the gradient of a recorded chunk, and the traces after it."""
        graph, weights, records = chunk
        flat = flat_state_of(graph)
        signals = flat_signals(flat, signal)
        contract = functools.partial(self.carry_in_vjp, chunk)
        if after is not None:
            return contract(jax.tree.map(lambda value: value[0], signals), after), after

        def step(carry: tuple[Weights, Traces], now: Any) -> tuple[tuple[Weights, Traces], None]:
            (gradients, traces), (inputs, reset, signal) = carry, now
            one, traces = step_and_traces(chunk, traces, inputs, reset)
            J, F = jacobians(one)
            rows = {name: self.rows_of(graph, name) for name in traces}
            traces = {name: _advanced(rows[name], J, F[name], E) for name, E in traces.items()}
            gradients = jax.tree.map(jnp.add, gradients, contract(signal, traces))
            return (gradients, traces), None

        start = gradients_like(weights, {}), widened(as_arrays(dict(before)), row_dtype(flat))
        over_time = records.inputs, records.reset, signals
        (gradients, new), _ = scan_records(step, start, over_time, records.steps)
        return gradients, like(before, new)


@functools.lru_cache(maxsize=256)
def _rows_within(structure: Structure, name: str, n: int) -> np.ndarray:
    """Return the rows of each entry of a parameter, a column for each; one if all are equal."""
    first, onward = structure.of_parameters[name], structure.transition.astype(np.float32)
    reach = first
    for _ in range(n - 1):
        reach = first | (onward @ reach.astype(np.float32) > 0)
    order = np.argsort(~reach, axis=0, kind="stable")[: reach.sum(0).max(initial=0)]
    rows = np.where(np.take_along_axis(reach, order, 0), order, len(reach))
    return rows[:, :1] if np.all(rows == rows[:, :1]) else rows


def _advanced(rows: np.ndarray, J: jax.Array, F: jax.Array, E: jax.Array) -> jax.Array:
    """Return the trace of one parameter after a step, all arrays with samples first.

    ``E'[k, w] = sum_m J[R[k, w], R[m, w]] E[m, w] + F[R[k, w], w]`` with the rows ``R``.
    """
    if rows.ndim == 1:
        return advance_rows(J, rows, E, False) + _pick_rows(F, rows)

    def add(total: jax.Array, now: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        E_m, rows_m = now
        return total + J.at[:, rows, rows_m].get(mode="fill", fill_value=0) * E_m[:, None], None

    # The places of the trace in F; a row beyond the state has none.
    size = rows[0].size
    places = (rows.reshape(-1, size) * size + np.arange(size)).ravel()
    flat = F.reshape(len(F), -1)
    new = flat.at[:, places].get(mode="fill", fill_value=0).reshape(E.shape)
    return jax.lax.scan(add, new, (jnp.moveaxis(E, 1, 0), jnp.asarray(rows)))[0]


# --- shared with the random rules, and with user-defined ones


def step_and_traces(
    chunk: Chunk, traces: Traces, inputs: tuple[jax.Array, ...], reset: jax.Array | None
) -> tuple[Chunk, Traces]:
    """Return one recorded step as a chunk, and the traces before it after a reset."""
    if reset is not None:
        specs = chunk.graph.trace_specs
        traces = reset_traces({key: specs[key] for key in traces}, traces, reset)
    one = dataclasses.replace(chunk.records, inputs=as_chunk(inputs), reset=None, steps=1)
    return chunk._replace(records=one), traces


def over_steps(advance: Callable[[Chunk, Traces], Traces], chunk: Chunk, traces: Traces) -> Traces:
    """Return traces after recorded steps, each of which is a chunk of one step."""

    def one_step(traces: Traces, now: tuple[Any, jax.Array | None]) -> tuple[Traces, None]:
        one, before = step_and_traces(chunk, traces, *now)
        return like(traces, advance(one, before)), None

    records = chunk.records
    over_time = records.inputs, records.reset
    return scan_records(one_step, as_arrays(traces), over_time, records.steps)[0]


def gradients_like(weights: Weights, found: dict[str, jax.Array]) -> Weights:
    """Return gradients of parameters in their dtypes; those that are not found are zero."""
    zeros = jax.tree.map(jnp.zeros_like, weights)
    return like(weights, {**zeros, **{name: {"value": value} for name, value in found.items()}})


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


def _pick_rows(array: jax.Array, rows: np.ndarray) -> jax.Array:
    return array[:, rows] if len(rows) < array.shape[1] else array


def advance_rows(J: jax.Array, rows: np.ndarray, trace: jax.Array, zeros_select: bool) -> jax.Array:
    """Return ``J E`` for the trace of some state scalars."""
    own = J[:, rows[:, None], rows] if len(rows) < J.shape[1] else J
    return multiply("bqr,br...->bq...", own, trace, zeros_select)


def multiply(axes: str, factor: jax.Array, trace: jax.Array, zeros_select: bool) -> jax.Array:
    """Return the product of a factor with a trace.

    With ``zeros_select``, a zero removes NaN and infinity from the trace.
    """
    trace = widened(trace, factor.dtype)
    if zeros_select:
        used = factor != 0
        trace = where_flagged(used.any(1) if axes.startswith("bqr") else used, trace)
    return unfused(jnp.einsum(axes, factor, trace), factor)
