r"""Late traces: traces of some steps ago, for delay lines.

The values in a delay line (`Line`) are those that its roots had some steps ago, so their traces
are earlier traces of the roots. Instead of one trace for each slot, only the trace of the core of
``d`` steps ago is kept, and the factors of the last ``d`` steps, which have no parameter axis:

.. math::

    \epsilon^{t-d}, \qquad (D^s, D_f^s, x^s)_{s = t-d+1 \dots t}.

A signal for a value of age ``a`` at step ``t`` is one for its root at step ``t - a``. It is pulled
back through the factors, as in `_core.local_step`, to the trace. For the oldest value of a line
these are two steps at most. A reset zeroes the trace and the factors of the steps before it, so no
signal passes it.
"""

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .._core.gradient import add, like, sum_products, times
from .._core.lines import Line, lines_of
from .._core.sites import (
    at_elements,
    at_entry,
    new_state_to_elements,
    old_state_to_elements,
    pre_step_probe,
    reachable_blocks,
    row_name,
    trace_sites,
)
from .._core.step_program import scan_records
from .._core.traces import (
    as_arrays,
    depend_on,
    is_zero,
    joined,
    of_site,
    ordering_token,
    renamed,
    unpack,
)
from .._etrace_op.registry import Arrays
from .._etrace_op.rules import has_derived_traces
from .._graph.graph import ETraceGraph, TraceSpecs
from .._graph.method import Adjoints, Chunk, Signal, Traces, Weights
from .d_rtrl import (
    ParameterTraces,
    active_outputs,
    after_reset,
    carried_gradient,
    factor_key,
    updated_traces,
)
from .factors import (
    AT,
    Factors,
    entries_of_samples,
    factors_of,
    first_steps,
    records_of,
    rows_of,
    slice_steps,
    specs_of_factors,
)

NEAR = 2
"""The largest number of steps between a trace and the oldest value of a line."""

Rows = dict[int, jax.Array]
"""Cotangents of the states of a core, per unit, by index."""


class Injection(NamedTuple):
    """Signals for a state of the core, over successive steps; ``start`` is the first of them.

    Step 0 is the trace's step, step 1 the first one whose factors are known.
    """

    root: int
    start: int
    signal: jax.Array


@dataclasses.dataclass(frozen=True)
class LateTraces(ParameterTraces):
    """Traces of the size of the weight; for delay lines, traces of some steps ago."""

    def trace_specs(self, graph: ETraceGraph, every_state: bool) -> TraceSpecs:
        """Return the traces of each site, or its core's traces and the factors of last steps."""
        specs = {**super().trace_specs(_without_lines(graph), every_state)}
        for line in _lines(graph):
            own = {**super().trace_specs(line.core, False)}
            own[_key_of_factors(line)] = specs_of_factors(line)
            of_line = functools.partial(dataclasses.replace, behind=line.printed)
            specs.update(jax.tree.map(of_line, own))
        return specs

    def update(self, chunk: Chunk, traces: Traces) -> Traces:
        """Return the traces after a recorded chunk."""
        rest = _without_lines(chunk.graph)
        parts = [super().update(chunk._replace(graph=rest), _of_graph(rest, traces))]
        for line in _lines(chunk.graph):
            new, factors = _advanced(line, chunk, *_of_line(line, traces))
            parts += [new, {_key_of_factors(line): factors}]
        return joined(parts)

    def gradient(
        self, chunk: Chunk, signal: Signal, before: Traces, after: Traces | None = None
    ) -> tuple[Weights, Traces | None]:
        """Return the gradient of a recorded chunk, without the traces after it."""
        graph = chunk.graph
        rest = chunk._replace(graph=_without_lines(graph))
        gradients, _ = super().gradient(rest, signal, _of_graph(rest.graph, before), after)
        for line in _lines(graph):
            if after is not None:
                traces, factors = _of_line(line, after)
                signals = list(_injections(line, signal, line.steps))
                own = _gradient_at_present(line, chunk, signals, traces, factors)
            else:
                own = _gradient_of_chunk(line, chunk, signal, *_of_line(line, before))
            gradients = add(gradients, own)
        return like(chunk.weights, gradients), None

    def contract(self, chunk: Chunk, adjoints: Adjoints, traces: Traces) -> Weights:
        """Return ``Σ_c μ[c] ∘ ε⁰[c]``."""
        return self._contract(chunk, adjoints, traces, traces, 0)

    def late_gradient(
        self, chunk: Chunk, mu: Signal, before: Traces, after: Traces | None
    ) -> Weights:
        """Return the same for the states before a step, by the traces after it if they are known.

        The factors of the last steps are then updated in place.
        """
        adjoints = at_entry(chunk.graph, mu)
        passed = 0 if after is None else 1
        return self._contract(chunk, adjoints, before, after or before, passed)

    def _contract(
        self, chunk: Chunk, adjoints: Adjoints, rests: Traces, traces: Traces, passed: int
    ) -> Weights:
        """Contract adjoints of the states before some steps, with traces after these for lines."""
        rest = chunk._replace(graph=_without_lines(chunk.graph))
        gradients = super().contract(rest, adjoints, rests)
        for line in _lines(chunk.graph):
            trace, past = _of_line(line, traces)
            pairs = adjoints[line.group.index].items()
            origins = ((line.origins[a], mu[None]) for a, mu in pairs)
            present = line.steps - passed
            signals = [Injection(root, present - age, mu) for (root, age), mu in origins]
            own = _gradient_at_present(line, chunk, signals, trace, past)
            gradients = add(gradients, own)
        return like(chunk.weights, gradients)


def late_traces(graph: ETraceGraph) -> ParameterTraces:
    """Return the method of a model that may have delay lines."""
    return LateTraces() if _lines(graph) else ParameterTraces()


@functools.lru_cache(maxsize=64)
def _lines(graph: ETraceGraph) -> tuple[Line, ...]:
    """Return the lines whose operations have traces that a chunk may update at once."""
    relations = {line: line.core.hidden_param_op_relations for line in lines_of(graph)}
    return tuple(
        line for line, own in relations.items() if all(has_derived_traces(r.primitive) for r in own)
    )


@functools.lru_cache(maxsize=64)
def _without_lines(graph: ETraceGraph) -> ETraceGraph:
    late = {line.group.index for line in _lines(graph)}
    if not late:
        return graph
    relations = []
    for relation in graph.hidden_param_op_relations:
        pairs = zip(relation.influences, relation.hidden_groups, strict=True)
        kept = [(influence, group) for influence, group in pairs if group.index not in late]
        if kept:
            influences, groups = zip(*kept, strict=True)
            own = dataclasses.replace(relation, influences=influences, hidden_groups=groups)
            relations.append(own)
    return dataclasses.replace(graph, hidden_param_op_relations=tuple(relations))


# --- names in the traces of a learner


def _key_of_factors(line: Line) -> str:
    names = dict.fromkeys(leaf.name for leaf in line.core_group.states)
    return f"last {line.steps} steps of {', '.join(names)}"


def _of_line(line: Line, traces: Traces) -> tuple[Traces, Factors]:
    return _of_graph(line.core, traces), unpack(traces)[_key_of_factors(line)]


def _of_graph(graph: ETraceGraph, traces: Traces) -> Traces:
    keys = {site.key(a) for site in trace_sites(graph) for a in site.influence.reached}
    return renamed(traces, lambda key: key if key in keys else None)


# --- update


def _advanced(line: Line, chunk: Chunk, traces: Traces, before: Factors) -> tuple[Traces, Factors]:
    """Return the traces and the factors after a chunk."""
    records, factors = chunk.records, factors_of(line, chunk.records)
    is_new, count = is_zero(before), records.steps
    past: Factors = as_arrays(dict(before))
    if records.reset is not None:  # what is older has no influence, and may be NaN
        ended, later = records.reset.any(0), _is_later(records.reset)
        traces = after_reset(line.core, traces, ended)
        for name, factor in factors.items():
            entries = functools.partial(entries_of_samples, line, name)
            factors[name] = jnp.where(jax.vmap(entries)(later), 0, factor)
            past[name] = jnp.where(entries(ended), 0, past[name])
    if count == 1:
        oldest = first_steps(past, 1)
        traces = as_arrays(traces) if is_new else _updated(line, chunk, oldest, traces)
        # The last factors are read before they are overwritten.
        factors = dict(depend_on(ordering_token(traces), factors))
        write = jax.lax.dynamic_update_slice_in_dim
        written = {name: write(past[name], f, past[AT], 0) for name, f in factors.items()}
        return traces, written | {AT: (past[AT] + 1) % line.steps}
    past = first_steps(past, line.steps)
    if is_new:
        past = {name: value[: max(line.steps - count, 0)] for name, value in past.items()}
        count = max(count - line.steps, 0)
    factors = {name: jnp.concatenate([past[name], factors[name]]) for name in factors}
    if count:
        traces = _updated(line, chunk, slice_steps(factors, 0, count), traces)
    last = slice_steps(factors, count, count + line.steps)
    return as_arrays(traces), last | {AT: jnp.zeros((), jnp.int32)}


def _is_later(flags: jax.Array) -> jax.Array:
    """Test for each step whether a flag is set after it."""
    counts = jnp.flip(jnp.cumsum(jnp.flip(flags, 0), 0), 0)
    return counts > flags


def _updated(line: Line, chunk: Chunk, factors: Factors, traces: Traces) -> Traces:
    """Return the traces of the core after some steps with known factors."""
    core, group, rows = line.core, line.core_group, line.carried
    if not rows:
        return traces
    unit = {c: jnp.stack([jnp.full(group.shape, float(a == c)) for a in rows]) for c in rows}
    unit = {c: row.astype(group.states[c].dtype) for c, row in unit.items()}
    mu, outputs = jax.vmap(lambda end: _pull(line, factors, end, {}))(unit)
    first = {(a, c): mu[c][rows.index(a)] for a, c in reachable_blocks(group, rows)}
    own = Chunk(
        core, chunk.weights, dataclasses.replace(records_of(factors), token=chunk.records.token)
    )
    parts = []
    for site in trace_sites(core, group):
        row, active = row_name(core, site), active_outputs(site, traces)
        picked = {
            factor_key(row, a, active): active.pick(outputs[row][k])
            for k, a in enumerate(rows)
            if row in outputs
        }
        if of_own := of_site(site, traces):
            parts.append(updated_traces(own, site, first, picked, of_own, selects=False))
    return joined(parts)


# --- gradient


def _pull(
    line: Line, factors: Factors, end: Rows, signal: Rows, selects: bool = False
) -> tuple[Rows, Arrays]:
    """Pull rows, and signals of each step, back through steps with known factors.

    With ``selects``, a zero row has a zero result, also if a factor is not finite.

    Return the rows before the first step, and the cotangents of outputs by `row_name`, time first.
    """
    group, sites = line.core_group, rows_of(line)

    def step(rows: Rows, now: tuple[Factors, Rows]) -> tuple[Rows, Arrays]:
        (factor, signal), outputs = now, dict[str, jax.Array]()
        for a, value in signal.items():
            rows = {**rows, a: rows[a] + value if a in rows else value}
        for name, site in sites.items():
            reached = [a for a in site.influence.states if a in rows]
            for a in reached:
                term = times(site.to_outputs(rows[a]), factor[f"Df {site.key(a)}"], selects)
                outputs[name] = outputs[name] + term if name in outputs else term
        before = {c: jnp.zeros_like(row) for c, row in end.items()}
        for a, c in group.transition:
            if a in rows:
                before[c] = before[c] + times(rows[a], factor[f"D {a} {c}"], selects)
        return {c: row.astype(end[c].dtype) for c, row in before.items()}, outputs

    steps = records_of(factors).steps
    return scan_records(step, end, (slice_steps(factors, 0, steps), signal), steps, reverse=True)


def _injections(line: Line, signal: Signal, first: int) -> Iterator[Injection]:
    """Yield the signals of the steps of a chunk; ``first`` is the number of its first step."""
    group = line.group
    before = [pre_step_probe(state) for state in group.states]
    kinds = (group.probes, new_state_to_elements), (before, old_state_to_elements)
    for passed, (names, convert) in enumerate(kinds):
        own = {a: convert(group, a, signal[n]) for a, n in enumerate(names) if n in signal}
        for a, value in own.items():
            root, age = line.origins[a]
            yield Injection(root, first - age, value[passed:])


def _placed(injections: Iterable[Injection], steps: int) -> Rows:
    """Return the signals of steps 0 to ``steps`` for each root; earlier ones meet no trace."""
    rows: Rows = {}
    for root, start, signal in injections:
        start, signal = max(start, 0), signal[max(-start, 0) :]
        after = steps + 1 - start - len(signal)
        own = jnp.pad(signal, [(start, after)] + [(0, 0)] * (signal.ndim - 1))
        rows[root] = rows[root] + own if root in rows else own
    return rows


def _gradient(
    line: Line, chunk: Chunk, signal: Rows, factors: Factors | None, traces: Traces
) -> Weights:
    """Return the gradient by signals of the traces' step (0) and of the steps after it."""
    group, selects = line.core_group, chunk.records.has_mask
    mu = {c: signal[c][0] for c in line.carried if c in signal}
    own, gradients = Chunk(line.core, chunk.weights, chunk.records), {}
    if factors is not None:
        end = {c: jnp.zeros(group.shape, group.states[c].dtype) for c in line.carried}
        later = {a: value[1:] for a, value in signal.items()}
        before, outputs = _pull(line, factors, end, later, selects)
        mu = {c: mu[c] + row if c in mu else row for c, row in before.items()}
        of_steps = Chunk(line.core, chunk.weights, records_of(factors))
        gradients = sum_products(of_steps, outputs, selects)
    return add(gradients, carried_gradient(own, group, mu, traces, selects))


def _gradient_of_chunk(
    line: Line, chunk: Chunk, signal: Signal, traces: Traces, past: Factors
) -> Weights:
    records, factors = chunk.records, factors_of(line, chunk.records)
    is_new = is_zero(past)
    if not is_new:
        past = first_steps(past, line.steps)
        factors = {name: jnp.concatenate([past[name], f]) for name, f in factors.items()}
    first = 1 if is_new else 1 + line.steps
    injections = _injections(line, signal, first)
    if records.reset is not None:
        injections = (_without_resets(line, records.reset, first, own) for own in injections)
    placed = _placed(injections, records_of(factors).steps)
    return _gradient(line, chunk, placed, factors, traces)


def _without_resets(line: Line, flags: jax.Array, first: int, own: Injection) -> Injection:
    """Return signals without those for values from before a reset."""
    age = first - own.start
    is_new = jax.vmap(functools.partial(at_elements, line.core, line.core_group))(flags)
    counts = jnp.cumsum(jnp.concatenate([jnp.zeros_like(is_new[:1]), is_new]), 0)
    at_root = jnp.concatenate([jnp.zeros_like(counts[:1])] * age + [counts])[
        1 : 1 + len(own.signal)
    ]
    reaches = counts[1 : 1 + len(own.signal)] == at_root
    return own._replace(signal=jnp.where(reaches, own.signal, 0))


def _gradient_at_present(
    line: Line, chunk: Chunk, injections: list[Injection], traces: Traces, past: Factors
) -> Weights:
    """Return the gradient by signals for the present values of a group's states.

    The oldest value of a line is at most two steps from the trace. The steps in between are run if
    another value has a signal: XLA knows of most programs whether it has.
    """
    if is_zero(past):
        return {}

    def found(injections: list[Injection], count: int) -> Weights:
        factors = first_steps(past, count) if count else None
        own = _gradient(line, chunk, _placed(injections, count), factors, traces)
        return like({key: chunk.weights[key] for key in own}, own)

    first = min([NEAR, *(own.start for own in injections)])
    near = [own for own in injections if own.start == first]
    far = [own for own in injections if own.start > first]
    gradients = found(near, first) if near else {}
    if far:
        has_signal = jnp.any(jnp.stack([jnp.any(own.signal != 0) for own in far]))
        every = functools.partial(found, far, line.steps)
        zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(every))
        gradients = add(gradients, jax.lax.cond(has_signal, every, lambda: zeros))
    return gradients
