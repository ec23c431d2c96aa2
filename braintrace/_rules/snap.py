r"""SnAp-n: RTRL with a mask.

All hidden state of one sample is a vector of scalars ``q``. ``N(w)`` are the scalars that ``w``
reaches within ``n`` steps: the scalars of this step, propagated ``n - 1`` times by the structure of
``J``. A trace stores the rows of a weight's column in ``N(w)``,

.. math::

    \epsilon^t[q, w] = \sum_{q' \in N(w)} J^t[q, q']\, \epsilon^{t-1}[q', w] + F^t[q, w],
    \quad q \in N(w), \qquad \nabla w = \sum_t \sum_{q \in N(w)} l^t[q]\, \epsilon^t[q, w].

``J`` and ``F`` are those of the whole step, so ``l`` is the derivative of a loss with all other new
states held constant.

Let ``M`` be ``J`` with zeros where no ``N(w)`` contains both ``q`` and ``q'``. If ``M`` leads from
no ``N(w)`` to a scalar outside of it, the recursion is RTRL with ``M`` in place of ``J``. A chunk
is then pulled back as in RTRL, and scalars that are in no common ``N(w)`` share a unit row (a
color), since ``M`` keeps them apart. With ``n = 1``, all units of a recurrent layer are one row: it
is pulled back through the weights that lead from a unit to itself. Otherwise (sparse weights, ``n``
from 2 on) traces advance step by step.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._core.flat_state import (
    ByState,
    StepVJP,
    equation_of,
    flat_state_of,
    from_rows,
    row_dtype,
    step_vjp,
    to_rows,
)
from .._core.gradient import like
from .._core.loops import scan_records
from .._core.sites import flat_signals, where_flagged
from .._core.steps import Inputs
from .._core.traces import as_arrays, is_zero, widened
from .._graph import (
    Chunk,
    ETraceGraph,
    ParameterUse,
    Signal,
    Structure,
    Traces,
    Weights,
)
from .._jax import Equation, bind
from .._jaxpr import Rule
from .chunk_vjp import chunk_vjp, jacobians
from .rtrl import FullTraces, gradients_like, multiply, step_and_traces


@dataclasses.dataclass(frozen=True)
class SparseTraces(FullTraces):
    """Trace method for the state scalars that a weight reaches within ``n`` steps."""

    n: int
    jacobian = "sparse"

    def rows_of(self, graph: ETraceGraph, name: str) -> np.ndarray:
        """Return the rows of every entry; rows beyond the state fill up the columns.

        If all entries reach the same rows, these are a vector.
        """
        shape = next(leaf.shape for leaf in graph.traced.parameters if leaf.name == name)
        return _rows_within(_structure_of(graph), name, self.n, shape)

    def update(self, chunk: Chunk, traces: Traces) -> Traces:
        """Return the traces after a recorded chunk."""
        graph, _, records = chunk
        if (merged := _merge_rows(graph, self.n)) is None:
            return self.advance_by_steps(chunk, {}, traces)[1]
        flat, every = flat_state_of(graph), np.arange(merged.colors.max() + 1)
        units = jnp.asarray(merged.colors == every[:, None], row_dtype(flat))[:, None]
        units = jnp.broadcast_to(units, (every.size, flat.samples, flat.size))
        P, F = chunk_vjp(chunk, from_rows(flat, units), merged.pull)
        factors = merged.colors, jnp.moveaxis(P, 1, 0)

        def advance(name: str, E: Any) -> jax.Array:
            rows = self.rows_of(graph, name)
            return _advanced(rows, *factors, F[name], E, records.zeros_select).astype(E.dtype)

        return {name: advance(name, E) for name, E in traces.items()}

    def gradient(
        self, chunk: Chunk, signal: Signal, before: Traces, after: Traces | None = None
    ) -> tuple[Weights, Traces | None]:
        """Return the gradient of a recorded chunk, and the traces after it if it needs them."""
        graph, weights, records = chunk
        flat = flat_state_of(graph)
        signals = flat_signals(flat, signal)
        if after is not None:
            now = jax.tree.map(lambda value: value[0], signals)
            return self.carry_in_vjp(chunk, now, after), after
        if (merged := _merge_rows(graph, self.n)) is None:
            return self.advance_by_steps(chunk, signals, before)
        silent = [jnp.zeros((1, *leaf.shape), leaf.dtype) for leaf in flat.leaves]
        over_time = [
            signals.get(leaf.name, jnp.repeat(zero, records.steps, axis=0))
            for leaf, zero in zip(flat.leaves, silent, strict=True)
        ]
        row, found = chunk_vjp(chunk, silent, merged.pull, over_time)
        mu = dict(zip(flat.names, (value[0] for value in from_rows(flat, row)), strict=True))
        of_past = self.carry_in_vjp(chunk, mu, before)
        own = gradients_like(weights, {name: value.sum((0, 1)) for name, value in found.items()})
        return jax.tree.map(jnp.add, own, of_past), None

    def advance_by_steps(
        self, chunk: Chunk, signals: Signal, before: Traces
    ) -> tuple[Weights, Traces]:
        """Return the gradient of a recorded chunk, and the traces after it."""
        graph, weights, records = chunk
        flat = flat_state_of(graph)
        every = np.arange(flat.size)

        def step(carry: tuple[Weights, Traces], now: Any) -> tuple[tuple[Weights, Traces], None]:
            (gradients, traces), (inputs, reset, signal) = carry, now
            one, traces = step_and_traces(chunk, traces, inputs, reset)
            J, F = jacobians(one)
            traces = {
                name: _advanced(self.rows_of(graph, name), every, J, F[name], E, False)
                for name, E in traces.items()
            }
            added = self.carry_in_vjp(chunk, signal, traces)
            return (jax.tree.map(jnp.add, gradients, added), traces), None

        start = gradients_like(weights, {}), widened(as_arrays(dict(before)), row_dtype(flat))
        over_time = records.inputs, records.reset, signals
        (gradients, new), _ = scan_records(step, start, over_time, records.steps)
        return gradients, like(before, new)


def _structure_of(graph: ETraceGraph) -> Structure:
    structure = flat_state_of(graph).structure
    assert structure is not None
    return structure


@functools.lru_cache(maxsize=256)
def _reach(structure: Structure, name: str, n: int) -> np.ndarray:
    """Return the state scalars within ``n`` steps of each entry of a parameter."""
    first, onward = structure.of_parameters[name], structure.transition.astype(np.float32)
    reach = first
    for _ in range(n - 1):
        reach = first | (onward @ reach.astype(np.float32) > 0)
    return reach


@functools.lru_cache(maxsize=256)
def _rows_within(structure: Structure, name: str, n: int, shape: tuple[int, ...]) -> np.ndarray:
    """Return the rows of each entry of a parameter; one entry along axes where all are equal."""
    reach = _reach(structure, name, n)
    order = np.argsort(~reach, axis=0, kind="stable")[: reach.sum(0).max(initial=0)]
    rows = np.where(np.take_along_axis(reach, order, 0), order, len(reach)).reshape(-1, *shape)
    for axis in range(1, rows.ndim):
        if np.all(rows == (first := rows[(slice(None),) * axis + (slice(1),)])):
            rows = first
    return rows if rows[:1].size > 1 else rows.ravel()


def _advanced(
    rows: np.ndarray,
    colors: np.ndarray,
    P: jax.Array,
    F: jax.Array,
    E: Any,
    zeros_select: bool,
) -> jax.Array:
    """Return the trace of one parameter, all arrays with samples first.

    ``E'[k, w] = sum_m P[c(R[k, w]), R[m, w]] E[m, w] + F[c(R[k, w]), w]`` with the rows ``R`` and
    the colors ``c``; a row beyond the state has none.
    """
    index = np.append(colors, P.shape[1])[rows]
    if rows.ndim == 1:
        of_old = P[:, index[:, None], rows]
        terms = [] if is_zero(E) else [multiply("bqr,br...->bq...", of_old, E, zeros_select)]
        return sum(terms, F[:, index])
    new = F[:, : len(index)]
    if np.any(index != np.arange(len(index)).reshape(-1, *(1,) * (rows.ndim - 1))):
        new = jnp.take_along_axis(F, index[None], axis=1, mode="fill", fill_value=0)
    if is_zero(E):
        return new

    for m, of_m in enumerate(rows):
        factor = P.at[:, index, of_m].get(mode="fill", fill_value=0)
        E_m = widened(E[:, m], P.dtype)
        if zeros_select:
            E_m = where_flagged((factor != 0).any(1), E_m)
        new = new + factor * E_m[:, None]
    return new


# --- unit rows that are pulled back together


class MergedRows(NamedTuple):
    """Unit rows of RTRL with ``M`` in place of ``J``.

    Attributes
    ----------
    colors
        The row of each state scalar; -1: the scalar is in no trace.
    alone, shared
        Flags of the scalars without and with another one in their row.
    rules
        Products for shared rows, with the weights that ``M`` keeps; by equation.
    """

    colors: np.ndarray
    alone: np.ndarray
    shared: np.ndarray
    rules: dict[int, Rule]

    def pull(self, graph: ETraceGraph, inputs: Inputs, cotangents: ByState) -> StepVJP:
        """Pull rows back through one step."""
        flat, rows = flat_state_of(graph), to_rows(flat_state_of(graph), cotangents)

        def pull(flags: np.ndarray, rules: dict[int, Rule] | None) -> jax.Array:
            own = from_rows(flat, jnp.where(flags, rows, 0))
            return to_rows(flat, step_vjp(graph, inputs, own, rules).old)

        pairs = (self.alone, None), (self.shared, self.rules)
        terms = (pull(flags, rules) for flags, rules in pairs if flags.any())
        old = sum(terms, jnp.zeros_like(rows))
        kept = from_rows(flat, jnp.where(self.alone | self.shared, old, 0))
        return step_vjp(graph, inputs, cotangents)._replace(old=kept)


@functools.lru_cache(maxsize=8)
def _merge_rows(graph: ETraceGraph, n: int) -> MergedRows | None:
    """Return how rows are merged; None if ``M`` leads out of some ``N(w)``."""
    flat, structure = flat_state_of(graph), _structure_of(graph)
    reach = [_reach(structure, name, n).astype(np.float32) for name in structure.of_parameters]
    both = sum((own @ own.T for own in reach), np.zeros(structure.transition.shape)) > 0
    M = (structure.transition & both).astype(np.float32)
    if any(((M @ own > 0) & (own == 0)).any() for own in reach):
        return None
    is_kept, colors = both.diagonal(), np.full(flat.size, -1)
    for row in np.flatnonzero(is_kept):
        colors[row] = min(set(range(flat.size)) - set(colors[both[row]]))
    alone = is_kept & ((colors == colors[:, None]).sum(0) == 1)
    shared, rules, through = is_kept & ~alone, dict[int, Rule](), structure.direct
    for use in (use for use in flat.uses if use.kind == "product"):
        of_x, of_y = structure.of_inputs[use.key], structure.of_outputs[use.key]
        wanted = (both & shared[:, None]).astype(np.float32).T @ of_y
        with jax.ensure_compile_time_eval():
            mask, outputs = _mask_weight(use, equation_of(graph, use), of_x.T, wanted)
        rules[use.equation or 0] = functools.partial(_pull_through, use, mask)
        through = through | (of_y @ outputs.T > 0)
    paths = np.where(alone[:, None], structure.transition, through)[is_kept][:, is_kept]
    has_others = (paths & ~both[is_kept][:, is_kept]).any()
    return None if has_others else MergedRows(colors, alone, shared, rules)


def _mask_weight(
    use: ParameterUse, equation: Equation, of_x: np.ndarray, wanted: np.ndarray
) -> tuple[Any, np.ndarray]:
    """Return a mask of the weights on wanted paths, and the outputs they reach from old scalars."""
    if len(use.operands) > 1 or use.x_axis is None or use.y_axis is None:
        return 1, np.outer(of_x.any(1), np.ones(wanted.shape[1]))
    rows = [
        jnp.moveaxis(
            jnp.asarray(flags, aval.dtype).reshape(-1, *np.delete(aval.shape, axis)), 0, axis
        )
        for flags, aval, axis in (
            (of_x, equation.invars[use.x or 0].aval, use.x_axis),
            (wanted, equation.outvars[0].aval, use.y_axis),
        )
    ]
    (place,) = use.operands

    def run(weight: jax.Array) -> jax.Array:
        values = [weight if i == place else rows[0] for i in range(len(equation.invars))]
        return bind(equation, values)[0]

    weight = equation.invars[place].aval
    (counts,) = jax.vjp(run, jnp.zeros(weight.shape, weight.dtype))[1](rows[1])
    mask = (counts > 0).astype(weight.dtype)
    outputs = np.moveaxis(np.asarray(run(mask), np.float32), use.y_axis, 0)
    return np.asarray(mask), outputs.reshape(len(outputs), -1)


def _pull_through(
    use: ParameterUse, mask: Any, equation: Equation, operands: list[Any]
) -> list[Any]:
    """Run a product whose derivative by its input has masked weights."""

    def run(*values: Any) -> list[Any]:
        return list(bind(equation, values))

    def backward(values: tuple[Any, ...], cotangents: list[Any]) -> tuple[Any, ...]:
        masked = [v * mask if i in use.operands else v for i, v in enumerate(values)]
        return tuple(jax.vjp(run, *masked)[1](cotangents))

    product = jax.custom_vjp(run)
    product.defvjp(lambda *values: (run(*values), values), backward)
    return list(product(*operands))
