r"""Gradient of a recorded chunk: rows of cotangents, and products of inputs and factors.

Let ``l`` be signals for the states after each step, and ``r`` a row for the states after the last
one. In a scan backward in time,

.. math::

    \lambda^s = l^s + (D^{s+1})^\top \lambda^{s+1}, \qquad \lambda^{K+1} := r, \qquad
    \mu = (D^1)^\top \lambda^1, \qquad f^s = (D_f^s)^\top \lambda^s.

Signals give the gradient, :math:`\sum_s x^s \otimes f^s + \mu \circ \epsilon^0`. The unit row of
state ``a`` gives its trace after the chunk, :math:`\sum_s x^s \otimes f^s + \sum_c \mu[c] \circ
\epsilon^0[c]`. No Jacobian exists as an array: each step's local step is differentiated at its
recorded values.

A sample that is reset, or a step whose loss is masked, has a zero factor. The input, the state or
its trace may be NaN or infinite there (padding), and ``0 * NaN`` is NaN. With ``selects`` these
products select zeros: for the signals of a chunk with a mask, and for traces also if samples are
reset. Without a mask, a non-finite step has a non-finite loss, and its gradient must show that.

A gate that does not reach a traced state needs no trace. If one operation computes several gates as
one array, its trace contains the other outputs only (`ActiveOutputs`): those of an operation with
fewer outputs. Without this selection, a stream of 16 samples through an LSTM of 256 units takes 1.4
times as long and 3.4 times the temporary memory (CPU, 2026-11-25). For one sample nothing is
selected: XLA would fuse the padding of the gradient into the update of the weights and compute each
element behind a branch, so a stream through an LSTM of 128 units would take 2.6 times as long.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from .._etrace_op.registry import Arrays, get_primitive_spec
from .._etrace_op.rules import init_trace, propagate, pull_back, selects_outputs
from .._graph.graph import ETraceGraph
from .._graph.hidden_group import HiddenGroup, HiddenParamOpRelation, InfluenceMap
from .._graph.method import Chunk, Records, TraceMethod, Traces, Weights
from .._jax import struct_of
from .._typing import PyTree
from .local_step import States, local_step, values_of
from .over_time import scan_records
from .sites import (
    Probes,
    TraceSite,
    at_elements,
    of_past,
    probes_of_past,
    row_name,
    trace_sites,
    x_key,
)
from .traces import as_arrays, is_zero


def chunk_gradient(
    method: TraceMethod, chunk: Chunk, signal: Probes, before: Traces, after: Traces | None = None
) -> tuple[Weights, Traces | None]:
    """Return the gradient of a recorded chunk, and the traces after it if the rule returns them.

    The signal of the first step for the states before the chunk is included: the signal of outputs
    that read them, of a window, or of a full-Jacobian rule. The arguments are the same as in
    `TraceMethod.gradient`.
    """
    graph, parts = chunk.graph, []
    late = signal.keys() & probes_of_past(graph).keys()
    if late:
        parts.append(method.late_gradient(chunk, of_past(graph, signal), before, after))
        if max(map(len, signal.values())) == 1:
            signal = {name: value for name, value in signal.items() if name not in late}
    if signal or not late:
        own, after = method.gradient(chunk, signal, before, after)
        parts.append(own)
    gradients = jax.tree.map(lambda *result: sum(result[1:], result[0]), *parts)
    return of_parameters(graph, gradients), after


def of_parameters(graph: ETraceGraph, gradients: Weights) -> Weights:
    """Return gradients of operands, with zeros for operands without a parameter.

    These gradients are not used, but a loop that accumulates them would compute them.
    """
    if graph.flat_state is not None:
        return gradients
    learning = {r.key: set(r.trainable_paths) for r in graph.hidden_param_op_relations}
    return {
        key: {
            name: gradient if name in learning[key] else jnp.zeros_like(gradient)
            for name, gradient in result.items()
        }
        for key, result in gradients.items()
    }


def as_chunk(tree: PyTree) -> PyTree:
    """Add a time axis of length 1."""
    return jax.tree.map(lambda leaf: leaf[None], tree)


# --- outputs without a trace


MOST_RUNS = 16


@dataclasses.dataclass(frozen=True)
class ActiveOutputs:
    """Some entries of the last axis of an operation's output.

    Attributes
    ----------
    runs
        ``(start, stop)`` of the selected ranges, in order; ``None``: all entries.
    """

    runs: tuple[tuple[int, int], ...] | None = None

    def pick(self, value: jax.Array) -> jax.Array:
        """Return the selected entries of the last axis of an array."""
        if self.runs is None:
            return value
        parts = [value[..., start:stop] for start, stop in self.runs]
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)


EVERY_OUTPUT = ActiveOutputs()


def active_outputs_of(
    relation: HiddenParamOpRelation, influence: InfluenceMap, states: Sequence[int]
) -> ActiveOutputs:
    """Return the outputs that reach one of some states within a step.

    Other outputs never enter the traces of these states, since the entries of a carried trace have
    entered through the same outputs.
    """
    is_batched = get_primitive_spec(relation.primitive).batched
    if is_batched and relation.y_var.aval.shape[0] == 1:
        return EVERY_OUTPUT
    result = _used(influence, states)
    if result is None or result.all() or not result.any():
        return EVERY_OUTPUT
    edges = np.flatnonzero(np.diff(np.concatenate([[0], result.astype(np.int8), [0]])))
    runs = tuple((int(a), int(b)) for a, b in edges.reshape(-1, 2))
    y, traces = struct_of(relation.y_var.aval), trace_shapes(relation)
    is_possible = len(runs) <= MOST_RUNS and selects_outputs(relation.primitive, y, traces)
    return ActiveOutputs(runs) if is_possible else EVERY_OUTPUT


def _used(influence: InfluenceMap, states: Sequence[int]) -> np.ndarray | None:
    if influence.positions.ndim < 2:
        return None
    width = influence.positions.shape[-1]
    used = np.zeros(width, bool)
    for point in influence.taps:
        if point.state in states:
            if point.outputs is None:
                return None
            used[point.outputs[point.outputs >= 0] % width] = True
    return used


def trace_shapes(
    relation: HiddenParamOpRelation, active: ActiveOutputs = EVERY_OUTPUT
) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of a trace of one hidden state, for all outputs or for some."""

    def zeros() -> Arrays:
        operation, operands = (relation.primitive, dict(relation.params)), relation.trainable_vars
        every = init_trace(*operation, relation.x_var, relation.y_var, operands)
        return {name: active.pick(array) for name, array in every.items()}

    return jax.eval_shape(zeros)


# --- gradients


InputsByRelation: TypeAlias = Mapping[str, jax.Array | None]
"""Inputs of operations over time, by relation; ``None``: it has no input."""


def recorded_inputs(graph: ETraceGraph, records: Records) -> InputsByRelation:
    """Return the recorded inputs of the operations."""
    relations = graph.hidden_param_op_relations
    return {r.key: None if r.x_var is None else records.x[x_key(graph, r)] for r in relations}


def sum_products(
    chunk: Chunk, factors: Arrays, selects: bool, inputs: InputsByRelation | None = None
) -> Weights:
    """Return ``Σ x ⊗ f`` over time, batch and groups: one product for each site with factors.

    Parameters
    ----------
    chunk, factors
        The chunk, and factors by `row_name`, time first.
    selects
        Whether a zero factor has a zero result, also if the other is not finite.
    inputs
        Inputs by relation; ``None``: those that the chunk recorded.
    """
    gradients: Weights = {}
    inputs = recorded_inputs(chunk.graph, chunk.records) if inputs is None else inputs
    for site in trace_sites(chunk.graph):
        name, key = row_name(chunk.graph, site), site.relation.key
        if name in factors:
            x, factor = inputs[key], factors[name]
            if site.has_fan_out:  # without an input, one sum over all steps and samples
                factor = factor.sum((0, 1))[None] if x is None else factor.sum(1)
            x = finite_inputs(site, x, factor) if selects else x
            own = pull_back(*site.operation, x, factor, chunk.weights[key])
            gradients = add(gradients, {key: own})
    return gradients


def like(arrays: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return new arrays, gradients or traces, with the dtypes of others."""
    return jax.tree.map(lambda a, n: n.astype(a.dtype), dict(arrays), dict(new))


def add(first: Weights, second: Weights) -> Weights:
    """Add gradients; gradients of relations that only one argument has are unchanged."""
    both = {key: jax.tree.map(jnp.add, first[key], second[key]) for key in first if key in second}
    return {**first, **second, **both}


# --- the result of a zero factor is zero


def where_elements(
    site: TraceSite, active: ActiveOutputs, flags: jax.Array, trace: Arrays
) -> Arrays:
    """Return a trace with zeros for the elements of the group without a flag."""
    if is_zero(trace):
        return trace
    select = functools.partial(where_outputs, site)
    return site.each_layer(select, active.pick(site.to_outputs(flags)), trace)


def where_outputs(site: TraceSite, flags: jax.Array, trace: Arrays) -> Arrays:
    """Return a trace of one layer with zeros for the outputs without a flag."""
    entries = _entries(site, flags, trace)
    return {name: jnp.where(entries[name], leaf, 0) for name, leaf in trace.items()}


def which_entries(
    site: TraceSite, active: ActiveOutputs, positions: jax.Array, trace: Arrays
) -> Arrays:
    """Return the entries of a trace, possibly given by shapes, that belong to group elements."""
    of_layer, outputs = functools.partial(_entries, site), active.pick(site.to_outputs(positions))
    return site.each_layer(of_layer, outputs, as_arrays(trace))


def _entries(site: TraceSite, outputs: jax.Array, trace: Arrays) -> Arrays:
    """Return the entries of a trace of one layer that belong to some outputs.

    Only the rules of the operation define the output of each trace entry.
    """
    outputs = outputs.astype(site.relation.y_var.aval.dtype)
    ones = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, outputs.dtype), trace)
    result = propagate(*site.operation, outputs, ones)
    return {name: entry != 0 for name, entry in result.items()}


def times(factor: jax.Array, value: jax.Array, selects: bool) -> jax.Array:
    """Return the elementwise product; with ``selects``, it is zero where the factor is."""
    product = factor * value
    return jnp.where(factor == 0, 0, product) if selects else product


def finite_inputs(site: TraceSite, x: jax.Array | None, factor: jax.Array) -> jax.Array | None:
    """Return inputs that are finite where all factors of a step, or sample, are zero.

    Factors have the shape of the operation's outputs, time first like the inputs.
    """
    if x is None or not jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    lead = 2 if get_primitive_spec(site.relation.primitive).batched else 1
    counts = (factor != 0).any(tuple(range(lead, factor.ndim)))
    of_step = counts.reshape(*counts.shape, *(1,) * (x.ndim - lead))
    return jnp.where(of_step | jnp.isfinite(x), x, 0)


# --- rows of cotangents

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
    lead, local = row.shape[: row.ndim - len(group.shape)], local_step(graph, group)

    def step(rows: States, now: PyTree) -> tuple[States, PyTree]:
        recorded, own_signal, reset = now
        values = values_of(graph, recorded)
        cotangents = {
            a: _sum(
                [part[a] for part in (rows, own_signal) if a in part], (*lead, *group.shape)
            ).astype(own.aval.dtype)
            for a, own in local.new.items()
        }

        def pulled(cotangents: States) -> tuple[States, Outputs]:
            before, outputs = local.pull(values, cotangents)
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
