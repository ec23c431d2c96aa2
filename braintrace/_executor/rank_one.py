r"""The random trace of rank one (UORO).

The derivative :math:`\epsilon` of the states ``S`` of a sample by all parameters is estimated by
:math:`s \otimes t`, with ``s`` like the states and ``t`` like the parameters:

.. math::

    s' = \rho_0 J s + \rho_1 \nu, \qquad t' = t / \rho_0 + \nu^\top F / \rho_1, \qquad
    \rho_0 = \sqrt{|t| / |J s|}, \quad \rho_1 = \sqrt{|\nu^\top F| / |\nu|}

with random signs :math:`\nu`. The mean of :math:`s' \otimes t'` over them is
:math:`J s \otimes t + F`: what is mixed has a factor :math:`\nu` alone. Where one factor of a
product is zero, both are left out. Neither Jacobian is built: :math:`\nu^\top F` is one cotangent
pulled back through the step, :math:`J s` one tangent pushed forward.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from .._graph import (
    ETraceGraph,
    Record,
    Records,
    Signal,
    Traces,
    TraceSpec,
    TraceSpecs,
    Weights,
)
from .passing import PassingTraces
from .random_signs import DRAWS, KEY, key_of_step, signs, specs_of_stream
from .restart import over_first_axis, where_flagged
from .sample_gradients import of_samples
from .whole_state import (
    flags_of_samples,
    from_rows,
    inputs_of_step,
    pushed_forward,
    row_dtype,
    to_rows,
    which_rows,
    whole_of,
)
from .whole_traces import entries
from .zero import as_arrays, widened

Arrays = dict[str, jax.Array]
"""By the name of a parameter, samples first."""


@dataclasses.dataclass(frozen=True)
class RankOneTraces(PassingTraces):
    """A vector like the states and one like the parameters, for every sample.

    Attributes
    ----------
    seed
        Of the random signs.
    """

    seed: int
    needs: ClassVar[frozenset[Record]] = frozenset({"step", "traces"})

    def trace_specs(self, graph: ETraceGraph, every_state: bool) -> TraceSpecs:
        """Return ``s``, ``t`` for each parameter that reaches a state, and the random stream."""
        whole = whole_of(graph)
        dtype = row_dtype(whole)
        of_parameters = {
            leaf.name: TraceSpec(
                (whole.samples, *leaf.shape),
                jnp.promote_types(dtype, leaf.dtype),
                ("batch", *entries(len(leaf.shape))),
                operand=leaf.name,
                samples=functools.partial(flags_of_samples, whole, 1 + len(leaf.shape)),
            )
            for leaf in graph.traced.leaves
            if leaf.kind == "parameter" and leaf.name in whole.reached
        }
        of_states = TraceSpec(
            (whole.samples, whole.size),
            dtype,
            ("batch", "state"),
            samples=functools.partial(which_rows, whole),
        )
        return {"s": of_states, "t": of_parameters, **specs_of_stream(self.seed)}

    def update(
        self, graph: ETraceGraph, weights: Weights, records: Records, traces: Traces
    ) -> Traces:
        """Return the traces after recorded steps, one by one."""
        advance = functools.partial(_advanced, graph, weights)
        return over_steps(advance, records, traces)

    def entry_gradient(
        self,
        graph: ETraceGraph,
        weights: Weights,
        mu: Signal,
        traces: Traces,
        zeros_select: bool = False,
    ) -> Weights:
        """Return the sum over samples of ``(mu . s) t``."""
        whole, traces = whole_of(graph), as_arrays(traces)
        arriving = to_rows(whole, [mu[leaf.name] for leaf in whole.leaves])
        s = widened(traces["s"], arriving.dtype)
        is_read = (arriving != 0).any(1)
        onto = jnp.sum(arriving * (jnp.where(arriving != 0, s, 0) if zeros_select else s), axis=1)
        gradients: Weights = jax.tree.map(jnp.zeros_like, weights)
        for name, trace in traces["t"].items():
            trace = widened(trace, onto.dtype)
            if zeros_select:
                trace = where_flagged(is_read, trace)
            found = jnp.tensordot(onto.astype(trace.dtype), trace, 1)
            gradients[name] = {"value": found.astype(weights[name]["value"].dtype)}
        return gradients


def over_steps(
    advance: Callable[[Records, Traces], Traces], records: Records, traces: Traces
) -> Traces:
    """Return traces after recorded steps, each of which is given as a chunk of one."""

    def one_step(traces: Traces, now: Any) -> tuple[Traces, None]:
        inputs, restart = jax.tree.map(lambda leaf: leaf[None], now)
        found = dataclasses.replace(records, inputs=inputs, restart=restart)
        return advance(found, traces), None

    start: Traces = as_arrays(traces)
    if records.num_steps == 1:
        return advance(records, start)
    after: Traces = jax.lax.scan(one_step, start, (records.inputs, records.restart))[0]
    return after


def _advanced(graph: ETraceGraph, weights: Weights, records: Records, traces: Traces) -> Traces:
    """Return the traces after one step."""
    whole = whole_of(graph)
    dtype = jnp.promote_types(row_dtype(whole), jnp.float32)
    inputs = inputs_of_step(graph, weights, tuple(leaf[0] for leaf in records.inputs))
    s = widened(traces["s"], dtype)
    t = widened(traces["t"], dtype)
    if records.restart is not None:  # they are selected, not multiplied by zero: they may be NaN
        goes_on = which_rows(whole, ~records.restart[0])
        s = jnp.where(goes_on, s, 0)
        t = jax.tree.map(lambda leaf: where_flagged(goes_on.any(1), leaf), t)
    pushed = to_rows(whole, pushed_forward(graph, inputs, from_rows(whole, s))).astype(dtype)
    nu = signs(key_of_step(traces, pushed), s.shape, dtype)
    if not t:
        return {**traces, DRAWS: traces[DRAWS] + jnp.uint32(1)}
    found = of_samples(graph, weights, records, from_rows(whole, nu[None]))
    entering = {name: found[name].astype(t[name].dtype) for name in t}
    (rho_0, inverse_0), (rho_1, inverse_1) = (
        balance(norms(*t.values()), norms(pushed)),
        balance(norms(*entering.values()), norms(nu)),
    )

    def combined(old: jax.Array, new: jax.Array, kept: jax.Array) -> jax.Array:
        first, second = (over_first_axis(f, new.ndim) for f in (inverse_0, inverse_1))
        return (first * old + second * new).astype(kept.dtype)

    after = over_first_axis(rho_0, 2) * pushed + over_first_axis(rho_1, 2) * nu
    return {
        "s": after.astype(traces["s"].dtype),
        "t": jax.tree.map(combined, t, entering, traces["t"]),
        KEY: traces[KEY],
        DRAWS: traces[DRAWS] + jnp.uint32(1),
    }


def norms(*arrays: jax.Array) -> jax.Array:
    """Return the norm of all numbers of every sample."""
    parts = [jnp.sum(a**2, axis=tuple(range(1, a.ndim))) for a in arrays]
    return jnp.sqrt(functools.reduce(jnp.add, parts))


def balance(above: jax.Array, below: jax.Array) -> tuple[jax.Array, jax.Array]:
    r"""Return :math:`\sqrt{|a| / |b|}` and its inverse; zeros where one of the norms is zero.

    The factors of a product with a zero factor are left out, both of them.
    """
    has_both = (above > 0) & (below > 0)
    factor = jnp.sqrt(jnp.where(has_both, above, 1) / jnp.where(has_both, below, 1))
    return jnp.where(has_both, factor, 0), jnp.where(has_both, 1 / factor, 0)
