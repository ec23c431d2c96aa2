r"""Random rank-one trace (UORO).

The derivative :math:`\epsilon` of the states ``S`` of a sample with respect to all parameters is
estimated by :math:`s \otimes t`, with ``s`` shaped like the states and ``t`` like the parameters:

.. math::

    s' = \rho_0 J s + \rho_1 \nu, \qquad t' = t / \rho_0 + \nu^\top F / \rho_1, \qquad
    \rho_0 = \sqrt{|t| / |J s|}, \quad \rho_1 = \sqrt{|\nu^\top F| / |\nu|}

with random signs :math:`\nu`. The mean of :math:`s' \otimes t'` over the signs is :math:`J s
\otimes t + F`, since the mixed terms have a factor :math:`\nu`. If one factor of a product is zero,
both are set to zero. Neither Jacobian is built: :math:`\nu^\top F` is one vector-Jacobian product
of the step, and :math:`J s` one Jacobian-vector product.
"""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp

from ..._core.flat_state import (
    flags_of_samples,
    flat_state_of,
    from_rows,
    inputs_of_step,
    row_dtype,
    step_jvp,
    to_rows,
    which_rows,
)
from ..._core.products.in_place import depend_on
from ..._core.resets import over_first_axis, where_flagged
from ..._core.zero import as_arrays, unfused, widened
from ..._graph import (
    ETraceGraph,
    Record,
    Records,
    Signal,
    Traces,
    TraceSpec,
    TraceSpecs,
    Weights,
)
from .influence_matrix import entries
from .passing import PassingTraces, over_steps
from .random_signs import DRAWS, KEY, signs, specs_of_stream
from .sample_gradients import norms_of, of_samples, squares, written

Arrays = dict[str, jax.Array]
"""Arrays by the name of a parameter, samples first."""


@dataclasses.dataclass(frozen=True)
class RankOneTraces(PassingTraces):
    """Trace method with a vector like the states and one like the parameters, for every sample.

    Attributes
    ----------
    seed
        Seed of the random signs.
    """

    seed: int
    needs: ClassVar[frozenset[Record]] = frozenset({"step", "traces"})

    def trace_specs(self, graph: ETraceGraph, every_state: bool) -> TraceSpecs:
        """Return ``s``, ``t`` for each parameter that reaches a state, and the random stream."""
        flat = flat_state_of(graph)
        dtype = row_dtype(flat)
        of_parameters = {
            leaf.name: TraceSpec(
                (flat.samples, *leaf.shape),
                jnp.promote_types(dtype, leaf.dtype),
                ("batch", *entries(len(leaf.shape))),
                operand=leaf.name,
                samples=functools.partial(flags_of_samples, flat, 1 + len(leaf.shape)),
            )
            for leaf in graph.traced.parameters
            if leaf.name in flat.reached
        }
        of_states = TraceSpec(
            (flat.samples, flat.size),
            dtype,
            ("batch", "state"),
            samples=functools.partial(which_rows, flat),
        )
        return {"s": of_states, "t": of_parameters, **specs_of_stream(self.seed)}

    def update(
        self, graph: ETraceGraph, weights: Weights, records: Records, traces: Traces
    ) -> Traces:
        """Return the traces after recorded steps, one step at a time."""
        return over_steps(functools.partial(_advanced, graph, weights), graph, records, traces)

    def carry_in_vjp(
        self, graph: ETraceGraph, weights: Weights, mu: Signal, traces: Traces, zeros_select: bool
    ) -> Weights:
        """Return the sum over samples of ``(mu . s) t``."""
        traces = as_arrays(traces)
        onto, is_read = _onto(graph, mu, traces["s"], zeros_select)
        return _added_up(weights, onto, traces["t"], is_read if zeros_select else None)


def _onto(
    graph: ETraceGraph, mu: Signal, s: jax.Array, zeros_select: bool
) -> tuple[jax.Array, jax.Array]:
    """Return ``mu . s`` of every sample, and whether the sample has a nonzero ``mu``."""
    flat = flat_state_of(graph)
    arriving = to_rows(flat, [mu[leaf.name] for leaf in flat.leaves])
    s = widened(s, arriving.dtype)
    is_read = arriving != 0
    return jnp.sum(arriving * (jnp.where(is_read, s, 0) if zeros_select else s), 1), is_read.any(1)


def _added_up(
    weights: Weights, factors: jax.Array, t: Arrays, is_read: jax.Array | None
) -> Weights:
    """Return the sum of ``t`` over samples, times factors; unread samples are selected away."""
    gradients: Weights = jax.tree.map(jnp.zeros_like, weights)
    for name, trace in t.items():
        trace = widened(trace, factors.dtype)
        if is_read is not None:
            trace = where_flagged(is_read, trace)
        result = unfused(jnp.tensordot(factors.astype(trace.dtype), trace, 1), factors)
        gradients[name] = {"value": result.astype(weights[name]["value"].dtype)}
    return gradients


def _advanced(graph: ETraceGraph, weights: Weights, records: Records, traces: Traces) -> Traces:
    """Return the traces after one step."""
    flat = flat_state_of(graph)
    dtype = jnp.promote_types(row_dtype(flat), jnp.float32)
    inputs = inputs_of_step(graph, weights, tuple(leaf[0] for leaf in records.inputs))
    s = widened(traces["s"], dtype)
    t = widened(depend_on(records.token, traces["t"]), dtype)
    pushed = to_rows(flat, step_jvp(graph, inputs, from_rows(flat, s))).astype(dtype)
    nu = signs(traces, pushed, s.shape, dtype)
    draws = traces[DRAWS] + jnp.uint32(1)
    if not t:
        return {**traces, DRAWS: draws}
    gradients = of_samples(graph, weights, records, from_rows(flat, nu[None]))
    (rho_0, inverse_0), (rho_1, _) = (
        balance(norms(*t.values()), norms(pushed)),
        balance(norms_of(graph, inputs, gradients).astype(dtype), norms(nu)),
    )
    entering = gradients.over(jnp.where(rho_1 > 0, rho_1, jnp.inf))
    added = written(graph, inputs, entering)

    def combined(name: str) -> jax.Array:
        carried = over_first_axis(inverse_0, t[name].ndim) * t[name]
        return (carried + added[name].astype(carried.dtype)).astype(traces["t"][name].dtype)

    after = over_first_axis(rho_0, 2) * pushed + over_first_axis(rho_1, 2) * nu
    new_t = {name: combined(name) for name in t}
    return {"s": after.astype(traces["s"].dtype), "t": new_t, KEY: traces[KEY], DRAWS: draws}


def norms(*arrays: jax.Array) -> jax.Array:
    """Return the norm of all entries of every sample."""
    return jnp.sqrt(squares(*arrays))


def balance(above: jax.Array, below: jax.Array) -> tuple[jax.Array, jax.Array]:
    r"""Return :math:`\sqrt{|a| / |b|}` and its inverse; zeros if one of the norms is zero.

    Both factors of a product with a zero factor are then zero.
    """
    has_both = (above > 0) & (below > 0)
    factor = jnp.sqrt(jnp.where(has_both, above, 1) / jnp.where(has_both, below, 1))
    return jnp.where(has_both, factor, 0), jnp.where(has_both, 1 / factor, 0)
