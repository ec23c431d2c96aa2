r"""The input/output-dimension trace (ES-D-RTRL, pp-prop).

.. math::

    \epsilon_x^t = \alpha\, \epsilon_x^{t-1} + x^t, \qquad
    \epsilon_f^t[u, a] = \alpha \sum_c D^t[p(u), a, c]\, \epsilon_f^{t-1}[u, c]
                         + (1 - \alpha)\, D_f^t[u, a],

.. math::

    \nabla w = \sum_t \Big( \sum_a \hat l^t[p(u), a]\, \epsilon_f^t[u, a] \Big) \otimes
    \epsilon_x^t, \qquad \hat l^t = l^t / (1 - \alpha^t),

with ``t`` counted in steps since the traces were last zero. A chunk scans the two small
traces and takes the gradient as products over time and batch.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from .._errors import PrimitiveError
from .._etrace_op import Arrays, get_primitive_spec, pull_back_filtered, zero_filter
from .._graph import (
    Boundary,
    ETraceGraph,
    HiddenParamOpRelation,
    Record,
    Records,
    Role,
    Signal,
    Traces,
    TraceSpec,
    TraceSpecs,
    Weights,
)
from .._jax import struct_of
from .._jaxpr import Kind, kinds_of
from .direct import add, like
from .filters import (
    Filters,
    counts_of,
    filters_of,
    outputs_of,
    recorded_inputs,
    run_filters,
    specs_of_inputs,
    specs_of_outputs,
    steps_key,
    traces_of,
    whole,
)
from .layout import filter_key, old_state_to_positions, output_keys, trace_sites
from .products import PLAIN, SELECTING, Products, products_of_gradient
from .recursion import scan_block, scan_records, signals
from .restart import at_positions
from .zero import as_arrays, widened

BLOCK_BYTES = 2**23
"""What a block of steps may write of filtered inputs and factors, to stay in the caches."""
SHORTEST_BLOCK = 16


@dataclasses.dataclass(frozen=True)
class InputOutputTraces:
    """A filter of every operation's input, and one of the sensitivity to every output.

    Attributes
    ----------
    decay
        ``α`` of both.
    """

    decay: float
    needs: ClassVar[frozenset[Record]] = frozenset({"x", "D", "Df"})
    boundary: ClassVar[Boundary] = "cut"

    def carries(self, relation: HiddenParamOpRelation) -> bool:
        """Tell that every relation has traces."""
        return True

    def check(self, graph: ETraceGraph) -> None:
        """Raise unless every operation can be pulled back with a filter in place of its input.

        Raises
        ------
        PrimitiveError
            Naming the first operation that is not linear in its input and does not say what to
            filter.
        """
        for relation in graph.hidden_param_op_relations:
            spec = get_primitive_spec(relation.primitive)
            is_known = spec.linear_in_input or spec.input_filter is not None
            if relation.x_var is None or is_known or _is_linear_in_input(relation):
                continue
            raise PrimitiveError(
                f"ES_D_RTRL filters the input of '{relation.key}' ({relation.source}), but "
                f"`xy_to_dw` of `{relation.primitive}` is not linear in that input. Give its "
                "specification an `input_filter`, which says what to filter instead, or "
                "`linear_in_input=True` if JAX cannot see that it is linear; or use `D_RTRL`."
            )

    def trace_specs(self, graph: ETraceGraph, every_state: bool) -> TraceSpecs:
        """Return the two filters, shared where operations share them, and a count of steps."""
        counts = _samples(graph)
        of_samples: tuple[Role, ...] = ("batch",) if counts else ()
        return {
            "x": specs_of_inputs(graph),
            "f": specs_of_outputs(graph, every_state),
            steps_key(self.decay): TraceSpec(
                counts, jnp.dtype("int32"), of_samples, takes_trace_dtype=False
            ),
        }

    def signal(self, graph: ETraceGraph, records: Records, signal: Signal) -> Signal:
        """Return the learning signals as they are."""
        return signal

    def update(
        self, graph: ETraceGraph, weights: Weights, records: Records, traces: Traces
    ) -> Traces:
        """Return the traces after a recorded chunk."""
        over_chunk = functools.partial(
            scan_records, records=recorded_inputs(graph, records), steps=records.num_steps
        )
        start = filters_of(graph, traces)
        after, _ = run_filters(graph, self.decay, lambda *_: None, start, over_chunk)
        counts = counts_of(self.decay, graph, records, traces)
        return traces_of(self.decay, graph, after, counts[-1])

    def gradient(
        self,
        graph: ETraceGraph,
        weights: Weights,
        records: Records,
        signal: Signal,
        before: Traces,
        after: Traces | None = None,
    ) -> tuple[Weights, Traces]:
        """Return the gradient of a recorded chunk, and the traces after it.

        It is that of the traces before the chunk alone: those after it lack the states that no
        later step reads. Where filtered inputs and factors of a chunk are larger than the caches,
        the gradient is added up in blocks of steps: they are then read back before they have left
        the caches.
        """
        by_group = {group.index: signals(group, signal) for group in graph.traced_groups}
        counts = counts_of(self.decay, graph, records, before)
        corrected = jax.vmap(functools.partial(_corrected, self.decay, graph))(by_group, counts)
        recorded = recorded_inputs(graph, records, corrected)
        products = products_of_gradient(records)

        def of_step(eps_x: Arrays, eps_f: Arrays, now: Arrays) -> tuple[Arrays, Arrays]:
            return eps_x, _factors(graph, now, eps_f, products)

        def run(start: Filters, scan: Callable[..., Any]) -> tuple[Filters, Weights]:
            over_records = functools.partial(scan, records=recorded)
            last, (eps_x, factors) = run_filters(graph, self.decay, of_step, start, over_records)
            return last, _contract(graph, weights, eps_x, factors, products)

        steps, start = records.num_steps, filters_of(graph, before)
        length = _block_length(steps, start)
        if length == steps:
            last, gradients = run(start, functools.partial(scan_records, steps=steps))
        else:
            last, gradients = _added_up(run, start, weights, steps, length)
        return like(weights, gradients), traces_of(self.decay, graph, last, counts[-1])

    def entry_gradient(
        self,
        graph: ETraceGraph,
        weights: Weights,
        mu: Signal,
        traces: Traces,
        zeros_select: bool = False,
    ) -> Weights:
        """Return the gradient that reaches the operands through the states before a window."""
        traces, products = as_arrays(traces), SELECTING if zeros_select else PLAIN
        dtype = jnp.result_type(*mu.values())
        eps_x = {key: widened(x, dtype) for key, x in traces["x"].items()}
        eps_f = widened(whole(graph, traces["f"]), dtype)
        by_group = {
            group.index: {
                a: old_state_to_positions(group, a, mu[state.name])
                for a, state in enumerate(group.states)
                if state.name in mu
            }
            for group in graph.traced_groups
        }
        steps = traces[steps_key(self.decay)]
        corrected = _corrected(self.decay, graph, by_group, steps)
        found = eps_x, _factors(graph, corrected, eps_f, products)
        eps_x, factors = jax.tree.map(lambda leaf: leaf[None], found)
        return _contract(graph, weights, eps_x, factors, products)


def _is_linear_in_input(relation: HiddenParamOpRelation) -> bool:
    operation = relation.primitive, relation.params
    filtered = jax.eval_shape(lambda: zero_filter(*operation, relation.x_var, relation.y_var))
    weights = {name: struct_of(var.aval) for name, var in relation.trainable_vars.items()}

    def pulled_back(x: jax.Array, factor: jax.Array, weights: Arrays) -> Arrays:
        return pull_back_filtered(*operation, x[None], factor[None], weights)

    try:
        kinds = kinds_of(pulled_back, filtered, struct_of(relation.y_var.aval), weights)
    except Exception:  # a rule for integers, such as an index, may fail for anything else
        return False
    return Kind.OTHER not in kinds


def _samples(graph: ETraceGraph) -> tuple[int, ...]:
    """Return the shape of the count of steps: one per sample, or one for all.

    Samples can start anew one by one where all states have the same first axis.
    """
    leads = {state.shape[:1] for group in graph.traced_groups for state in group.states}
    return leads.pop() if len(leads) == 1 else ()


def _corrected(
    alpha: float, graph: ETraceGraph, signal: dict[int, dict[int, jax.Array]], steps: jax.Array
) -> Arrays:
    """Return ``l / (1 - α^t)`` of one step in the layout of each operation's output, by trace.

    After ``t`` steps the filters have seen ``1 - α^t`` of a constant. ``signal`` has one array
    per state and position of each group; the result is in single precision at least, since it
    may be larger than a number in half precision.
    """
    log_alpha = math.log(alpha) if alpha else -math.inf
    seen = -jnp.expm1(log_alpha * jnp.maximum(steps, 1))
    in_slots = {}
    for key, (site, a) in outputs_of(graph).items():
        found = signal[site.group.index].get(a)
        if found is not None:
            wide = widened(found, jnp.float32)
            in_slots[key] = site.to_slots(wide / at_positions(site.group, seen.astype(wide.dtype)))
    return in_slots


def _block_length(steps: int, filters: Filters) -> int:
    """Return the length of blocks of steps, about equal, whose arrays fit the caches.

    A step writes about as much as the filters hold.
    """
    written = sum(int(leaf.size * leaf.dtype.itemsize) for leaf in jax.tree.leaves(filters))
    fitting = max(SHORTEST_BLOCK, BLOCK_BYTES // max(1, written))
    return math.ceil(steps / math.ceil(steps / fitting))


def _added_up(
    run: Callable[..., tuple[Filters, Weights]],
    start: Filters,
    weights: Weights,
    steps: int,
    length: int,
) -> tuple[Filters, Weights]:
    """Return the filters after all blocks of steps, and the sum of their gradients."""

    def add_block(
        carry: tuple[Filters, Weights], first: jax.Array | int, size: int
    ) -> tuple[Filters, Weights]:
        after, gradients = run(carry[0], functools.partial(scan_block, first=first, length=size))
        return after, jax.tree.map(jnp.add, carry[1], gradients)

    # Sums in half precision would stop growing.
    carry = (start, widened(jax.tree.map(jnp.zeros_like, weights), jnp.float32))
    rest = steps % length
    firsts = jnp.arange(0, steps - rest, length)
    carry, _ = jax.lax.scan(lambda c, first: (add_block(c, first, length), None), carry, firsts)
    return add_block(carry, steps - rest, rest) if rest else carry


def _factors(graph: ETraceGraph, signal: Arrays, eps_f: Arrays, products: Products) -> Arrays:
    """Return ``Σ_a l̂[a] ε_f[a]`` of one step, by the name of the first state's trace."""
    factors: Arrays = {}
    shared = output_keys(graph)
    for site in trace_sites(graph):
        keys = [shared[site.key(a)] for a in site.influence.reached]
        shown = [key for key in keys if key in signal and key in eps_f]
        terms = [products.times(signal[key], eps_f[key]) for key in shown]
        if terms and keys[0] not in factors:
            total = sum(terms[1:], terms[0])
            total = jnp.sum(total, axis=0) if site.has_fan_out else total
            factors[keys[0]] = total.astype(site.relation.y_var.aval.dtype)
    return factors


def _contract(
    graph: ETraceGraph, weights: Weights, eps_x: Arrays, factors: Arrays, products: Products
) -> Weights:
    """Return the gradients of all relations, over time and batch at once."""
    gradients = jax.tree.map(jnp.zeros_like, weights)
    shared = output_keys(graph)
    for site in trace_sites(graph):
        relation, name = site.relation, shared[site.key(site.influence.reached[0])]
        if name in factors:
            x = None if relation.x_var is None else eps_x[filter_key(graph, relation)]
            x = products.inputs(site, x, factors[name])
            part = pull_back_filtered(*site.operation, x, factors[name], weights[relation.key])
            gradients = add(gradients, {relation.key: part})
    return like(weights, gradients)
