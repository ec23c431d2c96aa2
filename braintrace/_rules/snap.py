r"""Traces of the state scalars that a weight reaches within n steps (SnAp-n): RTRL with a mask.

.. math::

    \epsilon^t[q, w] = \sum_{q' \in N(w)} J^t[q, q']\, \epsilon^{t-1}[q', w] + F^t[q, w],
    \quad q \in N(w), \qquad \nabla w = \sum_t \sum_{q \in N(w)} l^t[q]\, \epsilon^t[q, w].

All hidden state of one sample is a vector of scalars ``q``. ``N(w)`` are the scalars that ``w``
reaches within ``n`` steps: the scalars of this step, propagated ``n - 1`` times by the structure of
``J``. A trace stores the rows of each weight's column that are in ``N(w)``. ``J`` and ``F`` are
those of the whole step, so ``l`` is the derivative of a loss with all other new states held
constant.
"""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from .._core.flat_state import flat_state_of, row_dtype
from .._core.in_place import unfused
from .._core.products import like
from .._core.signals import flat_signals
from .._core.step import as_chunk
from .._core.time_loops import scan_records
from .._core.traces import as_arrays, reset_traces, widened
from .._graph import (
    ETraceGraph,
    Jacobian,
    Records,
    Signal,
    StateLeaf,
    Structure,
    Traces,
    Weights,
)
from .chunk_vjp import step_jacobians
from .full_traces import FullTraces, followed

TERMS_OF_A_PRODUCT = 6
"""All rows of J are multiplied if that is at most this factor more than the rows of a weight:
a term of a product takes less time than a term that is gathered."""


@dataclasses.dataclass(frozen=True)
class SparseTraces(FullTraces):
    """Trace method for the state scalars that a weight reaches within ``n`` steps."""

    n: int
    jacobian: ClassVar[Jacobian] = "sparse"

    def rows_of(self, graph: ETraceGraph, leaf: StateLeaf) -> np.ndarray:
        """Return the rows of every entry; rows beyond the state fill up the columns.

        If all entries reach the same rows, these are a vector.
        """
        structure = flat_state_of(graph).structure
        assert structure is not None
        rows = _rows_within(structure, leaf.name, self.n)
        return rows.reshape(-1, *leaf.shape) if rows.shape[1] > 1 else rows[:, 0]

    def update(
        self, graph: ETraceGraph, weights: Weights, records: Records, traces: Traces
    ) -> Traces:
        """Return the traces after a recorded chunk."""
        return self.gradient(graph, weights, records, {}, traces)[1]

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
        flat = flat_state_of(graph)
        signals = flat_signals(flat, signal)
        contract = functools.partial(
            self.carry_in_vjp, graph, weights, zeros_select=records.zeros_select
        )
        if after is not None:
            return contract(jax.tree.map(lambda value: value[0], signals), after), after
        rows = {leaf.name: self.rows_of(graph, leaf) for leaf in followed(graph)}

        def step(carry: Any, now: Any) -> Any:
            gradients, traces = carry
            inputs, reset, signal = now
            if reset is not None:
                traces = reset_traces(graph.trace_specs, traces, reset)
            one = dataclasses.replace(records, inputs=as_chunk(inputs), reset=None, steps=1)
            J, F = step_jacobians(graph, weights, one)
            traces = {name: _advanced(rows[name], J, F[name], E) for name, E in traces.items()}
            own = contract(signal, traces)
            return (jax.tree.map(jnp.add, gradients, own), traces), None

        zeros = jax.tree.map(jnp.zeros_like, weights)
        start = zeros, widened(as_arrays(dict(before)), row_dtype(flat))
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
        moved = jnp.einsum("bkm,bm...->bk...", J[:, rows[:, None], rows], E)
        return unfused(moved, J) + F[:, rows]
    samples, size = E.shape[0], rows[0].size
    # The places of E in F; a row beyond the state has none.
    places = (rows.reshape(-1, size) * size + np.arange(size)).ravel()
    if is_product := TERMS_OF_A_PRODUCT * len(rows) > J.shape[1]:
        full = jnp.zeros((samples, F[0].size), E.dtype)
        full = full.at[:, places].set(E.reshape(samples, -1), mode="drop").reshape(F.shape)
        F = F + unfused(jnp.einsum("bqr,br...->bq...", J, full), J)
    new = F.reshape(samples, -1).at[:, places].get(mode="fill", fill_value=0).reshape(E.shape)
    if is_product:
        return new

    def add(total: jax.Array, now: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        E_m, rows_m = now
        return total + J.at[:, rows, rows_m].get(mode="fill", fill_value=0) * E_m[:, None], None

    return jax.lax.scan(add, new, (jnp.moveaxis(E, 1, 0), jnp.asarray(rows)))[0]
