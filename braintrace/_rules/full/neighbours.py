r"""Traces of the state scalars that a weight reaches within n steps (SnAp-n).

.. math::

    \epsilon^t[q, w] = \sum_{q' \in N(w)} J^t[q, q']\, \epsilon^{t-1}[q', w] + F^t[q, w],
    \quad q \in N(w), \qquad \nabla w = \sum_t \sum_{q \in N(w)} l^t[q]\, \epsilon^t[q, w].

All hidden state of one sample is a vector of scalars ``q``. ``N(w)`` are the scalars that ``w``
reaches within ``n`` steps: the scalars of this step, propagated ``n - 1`` times by the structure of
``J``. Other entries are not stored. ``J`` and ``F`` include paths between states within a step, so
``l`` is the derivative of a loss with all other new states held constant.

``J`` is computed in every step, by one vector-Jacobian product for each scalar of the state, with
the derivatives with respect to the outputs of products. For a weight that contributes to one
output, ``F`` is such a derivative times the other factor of the product. For other weights, ``F``
is pulled back from every scalar.
"""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from ..._core.flat_state import (
    StepVJP,
    flags_of_samples,
    flat_state_of,
    inputs_of_step,
    places_of,
    row_dtype,
    step_vjp,
    to_rows,
    unit_rows,
)
from ..._core.jacobian.jacobians import Inputs
from ..._core.probed_step import pre_step_probe
from ..._core.products.direct import like
from ..._core.time_loops import scan_records
from ..._core.traces import reset_traces
from ..._core.zero import as_arrays, is_zero, widened
from ..._graph import (
    ETraceGraph,
    HiddenParamOpRelation,
    Jacobian,
    ParameterUse,
    Record,
    Records,
    Signal,
    TraceMethod,
    Traces,
    TraceSpec,
    TraceSpecs,
    Weights,
)
from .chunk_vjp import of_one_step, of_product
from .neighbour_entries import Entries, Move, entries_of, of_one
from .product_uses import Product, samples_first

ByOperand = dict[str, dict[str, jax.Array]]
"""Arrays by key and name of `Entries`."""


@dataclasses.dataclass(frozen=True)
class NeighbourTraces(TraceMethod):
    """Trace method for the state scalars that a weight reaches within ``n`` steps."""

    n: int
    needs: ClassVar[frozenset[Record]] = frozenset({"step", "operands"})
    jacobian: ClassVar[Jacobian] = "sparse"

    def carries(self, relation: HiddenParamOpRelation) -> bool:
        """Return False: traces belong to parameters, marked or not, instead of operations."""
        return False

    def trace_specs(self, graph: ETraceGraph, every_state: bool) -> TraceSpecs:
        """Return an array of pairs ``(entry, scalar)`` for each array of parameters."""
        flat = flat_state_of(graph)
        specs: dict[str, dict[str, TraceSpec]] = {}
        for entries in entries_of(graph, self.n):
            use = entries.use
            specs.setdefault(entries.key, {})[entries.name] = TraceSpec(
                (flat.samples, len(entries.pairs[0])),
                entries.dtype,
                ("batch", "entry"),
                relation=None if use is None else use.key,
                operand=entries.key if use is None else entries.name,
                full_shape=(flat.samples, len(entries.kinds) * flat.size),
                samples=functools.partial(flags_of_samples, flat, 2),
            )
        return specs

    def update(
        self, graph: ETraceGraph, weights: Weights, records: Records, traces: Traces
    ) -> Traces:
        """Return the traces after a recorded chunk."""
        return self._run(graph, weights, records, None, traces)[1]

    def gradient(
        self,
        graph: ETraceGraph,
        weights: Weights,
        records: Records,
        signal: Signal,
        before: Traces,
        after: Traces | None = None,
    ) -> tuple[Weights, Traces]:
        """Return the gradient of a recorded chunk, and the traces after it."""
        arriving = _signals(graph, signal)
        if after is not None:
            now = arriving[0]
            return self._contracted(graph, weights, now, after, records.zeros_select), after
        return self._run(graph, weights, records, arriving, before)

    def carry_in_vjp(
        self, graph: ETraceGraph, weights: Weights, mu: Signal, traces: Traces, zeros_select: bool
    ) -> Weights:
        """Return the sum of ``mu[q] eps[q]`` over samples and state scalars."""
        if is_zero(traces):
            gradients: Weights = jax.tree.map(jnp.zeros_like, weights)
            return gradients
        leaves = flat_state_of(graph).leaves
        by_state = [mu.get(leaf.name, jnp.zeros(leaf.shape, leaf.dtype)) for leaf in leaves]
        arriving = to_rows(flat_state_of(graph), by_state)
        return self._contracted(graph, weights, arriving, traces, zeros_select)

    def _run(
        self,
        graph: ETraceGraph,
        weights: Weights,
        records: Records,
        arriving: jax.Array | None,
        before: Traces,
    ) -> tuple[Weights, Traces]:
        """Return the gradients for learning signals, step by step, and the final traces."""
        flat = flat_state_of(graph)
        assert flat.structure is not None
        moves = [Move.of(own, flat.structure.transition) for own in entries_of(graph, self.n)]
        dtypes = jax.tree.map(lambda leaf: leaf.dtype, dict(before))

        def step(carry: Any, now: Any) -> Any:
            gradients, traces = carry
            recorded, reset, signal = now
            if reset is not None:
                traces = reset_traces(graph.trace_specs, traces, reset)
            traces = _advanced(graph, weights, recorded, moves, traces)
            if signal is not None:
                result = self._contracted(graph, weights, signal, traces, records.zeros_select)
                gradients = jax.tree.map(jnp.add, gradients, result)
            return (gradients, traces), None

        zeros = jax.tree.map(jnp.zeros_like, weights)
        wide = widened(as_arrays(dict(before)), row_dtype(flat))
        over_time = (records.inputs, records.reset, arriving)
        (gradients, after), _ = scan_records(step, (zeros, wide), over_time, records.steps)
        return gradients, jax.tree.map(lambda leaf, dtype: leaf.astype(dtype), after, dtypes)

    def _contracted(
        self,
        graph: ETraceGraph,
        weights: Weights,
        arriving: jax.Array,
        traces: Traces,
        select: bool,
    ) -> Weights:
        """Return the sums over samples and state scalars of signal times trace."""
        gradients: Weights = jax.tree.map(jnp.zeros_like, weights)
        for entries in entries_of(graph, self.n):
            of_entry, of_number = entries.pairs
            factor = arriving[:, of_number]
            product = factor * widened(traces[entries.key][entries.name], factor.dtype)
            product = jnp.where(factor == 0, 0, product) if select else product
            total = jax.ops.segment_sum(
                jnp.sum(product, 0), of_entry, len(entries.kinds), indices_are_sorted=True
            )
            gradients[entries.key] = {
                **gradients[entries.key],
                entries.name: total.reshape(entries.shape),
            }
        return like(weights, gradients)


def _signals(graph: ETraceGraph, signal: Signal) -> jax.Array:
    """Return the learning signals of all state scalars, ``(time, samples, scalars)``.

    The next step's signal for a state before it is included; see `signals`.
    """
    leaves = flat_state_of(graph).leaves
    steps = next((len(value) for value in signal.values()), 1)
    silent = {leaf.name: jnp.zeros((steps, *leaf.shape), leaf.dtype) for leaf in leaves}
    result = {name: signal.get(name, zero) for name, zero in silent.items()}
    for leaf in leaves:
        if (name := pre_step_probe(leaf)) in signal:
            late = signal[name]
            result[leaf.name] += jnp.concatenate([late[1:], jnp.zeros_like(late[:1])])
    return to_rows(flat_state_of(graph), list(result.values()))


def _advanced(
    graph: ETraceGraph,
    weights: Weights,
    recorded: tuple[jax.Array, ...],
    moves: list[Move],
    traces: ByOperand,
) -> ByOperand:
    """Return the traces after one recorded step."""
    flat = flat_state_of(graph)
    inputs, units = inputs_of_step(graph, weights, recorded), unit_rows(flat)
    pulled = step_vjp(graph, inputs, units)
    J = jnp.moveaxis(to_rows(flat, pulled.old), 1, 0)
    others = [use for use in flat.uses if use.kind != "product"]
    of_parameters = of_one_step(graph, others, inputs, pulled, units)
    new: ByOperand = {}
    for move in moves:
        entries = move.entries
        trace = traces[entries.key][entries.name]
        use, outputs = entries.use, entries.outputs
        if use is None:
            entering = _at_pairs(entries, of_parameters[entries.key])
        elif outputs is None:
            full_F = _of_operand(graph, use, entries.name, inputs, pulled)
            entering = _at_pairs(entries, full_F)
        else:
            entering = _outer(graph, use, entries, outputs, weights, pulled)
        after = move(J, trace) + entering
        new.setdefault(entries.key, {})[entries.name] = after.astype(trace.dtype)
    return new


def _of_operand(
    graph: ETraceGraph, use: ParameterUse, name: str, inputs: Inputs, pulled: StepVJP
) -> jax.Array:
    """Return ``F`` of one operand of a product, pulled back from every state scalar."""
    (place,) = places_of(graph, use)
    result = of_product(graph, use, inputs, pulled.x[use.key][None], pulled.at[place][None])
    return result[use.operands.index(int(name))]


def _at_pairs(entries: Entries, F: jax.Array) -> jax.Array:
    """Return ``(samples, pairs)`` of an array ``(samples, scalars, *shape)``."""
    of_entry, of_number = entries.pairs
    return F.reshape(*F.shape[:2], -1)[:, of_number, of_entry]


def _outer(
    graph: ETraceGraph,
    use: ParameterUse,
    entries: Entries,
    outputs: np.ndarray,
    weights: Weights,
    pulled: StepVJP,
) -> jax.Array:
    """Return ``F`` at the pairs of an operand whose entries contribute to one output each."""
    product, (place,) = Product(graph, use), places_of(graph, use)
    of_entry, of_number = entries.pairs
    y_axis = None if use.y_axis is None else use.y_axis + 1
    at = samples_first(pulled.at[place], y_axis)
    at = at.reshape(*at.shape[:2], -1)[:, of_number, outputs[of_entry]]
    ones = jnp.ones(of_one(product.y_aval.shape, use.y_axis), product.y_aval.dtype)

    def met(x: jax.Array) -> jax.Array:
        """Return the other factor of each entry."""
        x = x if use.x_axis is None else jnp.expand_dims(x, use.x_axis)
        return product.gradients(weights[entries.key], x, ones)[entries.name].ravel()

    x = pulled.x[use.key]
    each = met(x)[None] if use.x_axis is None else jax.vmap(met, in_axes=use.x_axis)(x)
    return at * each[:, of_entry]
