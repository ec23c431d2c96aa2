r"""Rows of cotangents, pulled back through the local steps of a chunk.

Let ``l`` be signals for the states after each step, and ``r`` a row for the states after the last
one. In a scan backward in time,

.. math::

    \lambda^s = l^s + (D^{s+1})^\top \lambda^{s+1}, \qquad \lambda^{K+1} := r, \qquad
    \mu = (D^1)^\top \lambda^1, \qquad f^s = (D_f^s)^\top \lambda^s.

Signals give the gradient, :math:`\sum_s x^s \otimes f^s + \mu \circ \epsilon^0`. The unit row of
state ``a`` gives its trace after the chunk, :math:`\sum_s x^s \otimes f^s + \sum_c \mu[c] \circ
\epsilon^0[c]`. No Jacobian exists as an array: each step's local step is differentiated at its
recorded values.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from .._graph import ETraceGraph, HiddenGroup, Records
from .._typing import PyTree
from .layout import row_name, trace_sites
from .local_step import LocalStep, States, values_of
from .over_time import scan_records
from .signals import at_elements

Outputs = dict[str, jax.Array]
"""Arrays in the layout of an operation's output, by `row_name`."""


def pull(
    graph: ETraceGraph,
    group: HiddenGroup,
    records: Records,
    end: States,
    signal: States,
    emit: Callable[[Outputs], PyTree],
    selects: bool,
) -> tuple[States, PyTree]:
    """Pull rows of cotangents of the states of a group back through a chunk.

    Parameters
    ----------
    graph, group, records
        The compiled model, one of its groups, and the recorded steps of a chunk.
    end
        Rows for the last states, per unit, with leading axes of their own.
    signal
        Signals for the states after each step, time first; empty: none.
    emit
        Selects what is returned of each step's cotangents of outputs.
    selects
        Whether a zero cotangent has a zero result, also if the derivative is not finite.

    Returns
    -------
    before
        Rows for the states before the chunk that its first step reads.
    emitted
        The results of ``emit``, time first.
    """
    row = next(iter(end.values()), jnp.zeros(group.shape))
    lead = row.shape[: row.ndim - len(group.shape)]

    def step(rows: States, now: PyTree) -> tuple[States, PyTree]:
        values, own_signal, reset = now
        local = LocalStep(graph, group, values_of(graph, values))
        new, back = jax.vjp(local, local.old, local.taps)
        cotangents = {
            a: _sum(
                [part[a] for part in (rows, own_signal) if a in part], (*lead, *value.shape)
            ).astype(value.dtype)
            for a, value in new.items()
        }

        def pulled(cotangents: States) -> tuple[States, Outputs]:
            of_old, of_taps = back(cotangents)
            before, outputs = local.rows_of_old(of_old), local.rows_of_outputs(of_taps)
            if selects:
                is_zero = jnp.all(jnp.stack([value == 0 for value in cotangents.values()]), 0)
                before = {c: jnp.where(is_zero, 0, value) for c, value in before.items()}
                sites = {row_name(graph, s): s for s in trace_sites(graph, group)}
                outputs = {
                    name: jnp.where(sites[name].to_outputs(is_zero), 0, row)
                    for name, row in outputs.items()
                }
            return before, outputs

        for _ in lead:
            pulled = jax.vmap(pulled)
        before, outputs = pulled(cotangents)
        if reset is not None:
            is_new = at_elements(graph, group, reset)
            before = {c: jnp.where(is_new, 0, value) for c, value in before.items()}
        carried = {
            c: before[c].astype(row.dtype) if c in before else jnp.zeros_like(row)
            for c, row in rows.items()
        }
        return carried, emit(outputs)

    now = (records.values, signal, records.reset)
    return scan_records(step, end, now, records.steps, reverse=True)


def _sum(terms: list[jax.Array], shape: tuple[int, ...]) -> jax.Array:
    return sum(terms[1:], terms[0]) if terms else jnp.zeros(shape)
