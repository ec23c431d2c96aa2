"""Low-pass filters of inputs and of sensitivities over a recorded chunk.

See `io_dim` for their equations. Along a chunk they have all outputs of an operation. Between
chunks the outputs that are always zero are not stored.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from ..._core.jacobian.jacobians import transition_key
from ..._core.layout import TraceSite, output_keys, trace_sites
from ..._core.products.active_outputs import ActiveOutputs, active_outputs_of
from ..._core.resets import at_elements, over_first_axis
from ..._core.time_loops import scan_records
from ..._core.zero import widened
from ..._errors import OptionError
from ..._etrace_op import ETP_RULES_INIT_PP, Arrays
from ..._graph import ETraceGraph, HiddenParamOpRelation, Records, Role, TraceSpec
from ..._typing import PyTree
from .input_filters import operand_axes, take_in

Result = TypeVar("Result")

Filters = dict[str, Arrays]
"""Filters of inputs, ``'x'``, and of outputs, ``'f'``, with all outputs of the operations."""


def outputs_of(graph: ETraceGraph) -> dict[str, tuple[TraceSite, int]]:
    """Return the site and state of each output-shaped trace, by its name.

    Operations that share a trace are represented by the first of them.
    """
    shared = output_keys(graph)
    every = [(site, a) for site in trace_sites(graph) for a in site.influence.reached]
    return {site.key(a): (site, a) for site, a in every if shared[site.key(a)] == site.key(a)}


def _active_outputs(graph: ETraceGraph, outputs: Mapping[str, Any]) -> dict[str, ActiveOutputs]:
    """Return the stored outputs of each output-shaped trace; other outputs are always zero."""
    found = {}
    for key, (site, _) in outputs_of(graph).items():
        stored = [a for a in site.influence.reached if site.key(a) in outputs]
        if key in outputs:
            found[key] = active_outputs_of(site.relation, site.influence, stored)
    return found


def specs_of_outputs(
    graph: ETraceGraph, stored_states: Callable[[TraceSite], Iterable[int]]
) -> dict[str, TraceSpec]:
    """Return the specifications of the output-shaped traces of some states, by name."""
    shared, dtypes = output_keys(graph), {}
    for site in trace_sites(graph):
        for a in stored_states(site):
            dtypes[shared[site.key(a)]] = dtype_of_outputs(site.relation)
    active = _active_outputs(graph, dtypes)
    return {
        key: spec_of_output(graph, *outputs_of(graph)[key], active[key], dtype)
        for key, dtype in dtypes.items()
    }


def dtype_of_outputs(relation: HiddenParamOpRelation) -> np.dtype:
    rule = ETP_RULES_INIT_PP[relation.primitive]
    variables = dict(relation.trainable_vars)
    zero = jax.eval_shape(lambda: rule(relation.x_var, relation.y_var, variables, 1))
    dtype: np.dtype = np.dtype(zero.dtype)
    return dtype


def spec_of_output(
    graph: ETraceGraph, site: TraceSite, state: int, active: ActiveOutputs, dtype: np.dtype
) -> TraceSpec:
    whole = jax.ShapeDtypeStruct(site.influence.output_shape, dtype)
    stored = jax.eval_shape(active.pick, whole)
    lead: tuple[Role, ...] = ("fan_out",) if site.has_fan_out else ()
    return TraceSpec(
        stored.shape,
        dtype,
        (*lead, *operand_axes(site.relation, len(stored.shape) - len(lead), "output")),
        relation=site.relation.key,
        state=site.group.states[state].name,
        operand="output",
        full_shape=whole.shape,
        samples=functools.partial(_outputs_of_samples, graph, site, active),
    )


def _outputs_of_samples(
    graph: ETraceGraph, site: TraceSite, active: ActiveOutputs, flags: jax.Array
) -> jax.Array:
    """Return the entries of an output-shaped trace that belong to samples whose flag is set."""
    found = site.to_outputs(at_elements(graph, site.group, flags))
    return active.pick(found)


def of_active(graph: ETraceGraph, outputs: Arrays) -> Arrays:
    """Return output-shaped traces in the form in which they are stored between chunks."""
    active = _active_outputs(graph, outputs)
    return {key: active[key].pick(output) for key, output in outputs.items()}


def whole(graph: ETraceGraph, outputs: Arrays) -> Arrays:
    """Return stored output-shaped traces with zeros for the outputs that are not stored."""
    found, by_key = dict(outputs), outputs_of(graph)
    for key, active in _active_outputs(graph, outputs).items():
        if active.runs is None:
            continue
        site, _ = by_key[key]
        example = jnp.zeros(site.influence.output_shape, outputs[key].dtype)
        (found[key],) = jax.linear_transpose(active.pick, example)(outputs[key])
    return found


def _at_outputs(graph: ETraceGraph, records: Records) -> dict[str, dict[str, jax.Array]]:
    """Return ``D[a, c]`` in the layout of each operation's output: ``{trace a: {trace c: D}}``."""
    at_outputs: dict[str, dict[str, jax.Array]] = {}
    for key, (site, a) in outputs_of(graph).items():
        group, reached = site.group, site.influence.reached
        at_outputs[key] = {
            site.key(c): site.to_outputs(records.D[transition_key(group, a, c)])
            for b, c in group.transition
            if b == a and c in reached
        }
    return at_outputs


def run_filters(
    graph: ETraceGraph,
    decays: tuple[float, float],
    result: Callable[[Arrays, Arrays, PyTree], Result],
    start: Filters,
    records: Records,
    signal: PyTree = None,
) -> tuple[Filters, Result]:
    """Return the filters after a recorded chunk, and ``result(ε_x, ε_f, signal)`` of every step.

    ``decays`` are the decays of inputs and of sensitivities. With zero, the filter of sensitivities
    is ``Df`` of the step.
    """
    (of_inputs, alpha), by_key = decays, outputs_of(graph)
    dtypes = {key: site.relation.y_var.aval.dtype for key, (site, _) in by_key.items()}

    def step(stored: Filters, recorded: PyTree) -> tuple[Filters, Result]:
        x, Df, D, reset, signal_now = recorded
        eps_x, stored_x = take_in(graph, of_inputs, stored["x"], x, reset)
        before = {key: widened(eps, dtypes[key]) for key, eps in stored["f"].items()}
        if reset is not None:
            before = _reset_outputs(graph, before, reset)
        eps_f = {}
        for key, (site, _) in by_key.items():
            terms = [alpha * D[key][c] * before[c] for c in D.get(key, ()) if c in before]
            terms += [(1 - alpha) * Df[key]] if key in Df else []
            if terms or key in before:
                zero = jnp.zeros(site.influence.output_shape, dtypes[key])
                eps_f[key] = sum(terms[1:], terms[0]) if terms else zero
        stored_f = {key: eps_f[key].astype(old.dtype) for key, old in stored["f"].items()}
        return {"x": stored_x, "f": stored_f}, result(eps_x, eps_f, signal_now)

    D = _at_outputs(graph, records) if alpha else {}
    recorded = records.x, records.Df, D, records.reset, signal
    return scan_records(step, start, recorded, records.steps)


def counts_of(records: Records, before: jax.Array) -> jax.Array:
    """Return the number of steps since a reset, for the traces of every step."""
    index = over_first_axis(1 + jnp.arange(records.steps), 1 + before.ndim)
    index = index.astype(before.dtype)
    if records.reset is None:
        return before + index
    if records.reset.ndim > index.ndim:
        raise OptionError(
            "All samples share a hidden state, and this algorithm counts steps since a reset, so "
            "it cannot reset single samples. Give one flag per step, or use `D_RTRL`."
        )
    reset = over_first_axis(records.reset, index.ndim)
    began = jax.lax.cummax(jnp.where(reset, index, 0), axis=0)
    return jnp.where(began == 0, before + index, index - began + 1)


def _reset_outputs(graph: ETraceGraph, outputs: Arrays, reset: jax.Array) -> Arrays:
    """Return output-shaped traces that are reset for some samples, or all."""
    found, by_key = {}, outputs_of(graph)
    for key, output in outputs.items():
        site, _ = by_key[key]
        is_new = site.to_outputs(at_elements(graph, site.group, reset))
        found[key] = jnp.where(is_new, 0, output)
    return found
