"""Sites of the operations of a model, and of its flattened state, with their products."""

import dataclasses
import functools
import operator
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from .._core.active_outputs import EVERY_OUTPUT
from .._core.flat_state import flat_state_of
from .._core.sites import TraceSite, filter_key, trace_sites
from .._etrace_op.registry import Arrays
from .._etrace_op.rules import accumulate, contract, linear_input, propagate, pull_back
from .._graph.graph import ETraceGraph, TraceSpec
from .._graph.method import Weights
from .d_rtrl import specs_of_site
from .filters import check_filtered_inputs, spec_of_input, spec_of_output
from .protocol import Site, Trace
from .rtrl import FullTraces, advance_rows, multiply


@dataclasses.dataclass(frozen=True, eq=False)
class OperationSite(Site):
    """An ETP operation and one group; ``J``, ``F`` and ``mu`` are dicts by names of states.

    Their arrays have the layout of the operation's output, with its fan-out as the first axis.
    """

    graph: ETraceGraph
    place: TraceSite

    @property
    def indices(self) -> dict[str, int]:
        """Index in the group of each state."""
        return dict(zip(self.states, self.place.influence.reached, strict=True))

    def zeros(self) -> dict[str, dict[str, TraceSpec]]:
        """Return the trace arrays of the operation, for every state."""
        every_state = self.place.influence.reached
        specs = specs_of_site(self.graph, self.place, every_state, EVERY_OUTPUT)
        return {state: specs[self.place.key(a)] for state, a in self.indices.items()}

    def input_zeros(self) -> TraceSpec | None:
        """Return the initial filter of the operation's input; ``None`` without an input."""
        relation = self.place.relation
        if relation.x_var is None:
            return None
        check_filtered_inputs(self.graph, "This rule")
        spec = spec_of_input(self.graph, filter_key(self.graph, relation))
        samples = spec.samples if "batch" in spec.axes else None
        return dataclasses.replace(spec, relation=self.relation, samples=samples)

    def output_zeros(self) -> dict[str, TraceSpec]:
        """Return an array in the layout of the output for every state."""
        every = self.indices.items()
        return {state: spec_of_output(self.graph, self.place, a) for state, a in every}

    def filtered(self, x_trace: Any, x: Any) -> Any:
        """Return a filter of inputs after one more input."""
        return None if x is None else x_trace + linear_input(*self.place.operation, x)

    def pull_back(self, x_trace: Any, signal: jax.Array) -> dict[str, jax.Array]:
        """Return the gradient of each operand, with a filter in place of the input."""
        at_output = signal.sum(0) if self.place.has_fan_out else signal
        inputs = None if x_trace is None else x_trace[None]
        operands = dict(self.operands)
        result = pull_back(*self.place.operation, inputs, at_output[None], operands)
        return dict(result)

    def multiply(self, J: Mapping[tuple[str, str], jax.Array], trace: Trace) -> dict[str, Arrays]:
        """Return ``sum_c J[a, c] E[c]`` for every state ``a``."""

        def carried(factor: jax.Array, of_old: Arrays) -> Arrays:
            return propagate(*self.place.operation, factor, of_old)

        result = {}
        for new in self.states:
            terms = [
                self.place.each_layer(carried, factor, trace[old])
                for (to, old), factor in J.items()
                if to == new
            ]
            zeros = jax.tree.map(jnp.zeros_like, trace[new])
            result[new] = _sum(terms or [zeros])
        return result

    def outer(self, F: Mapping[str, jax.Array], x: Any) -> dict[str, Arrays]:
        """Return ``F[a] x`` for every state ``a``."""
        inputs = None if x is None else x[None]

        def added(factor: jax.Array) -> Arrays:
            return accumulate(*self.place.operation, inputs, factor[None], dict(self.operands))

        return {
            state: self.place.each_layer(added, F[state])
            if state in F
            else {name: jnp.zeros(spec.shape, spec.dtype) for name, spec in zeros.items()}
            for state, zeros in self.zeros().items()
        }

    def contract(self, mu: Mapping[str, jax.Array], trace: Trace) -> dict[str, jax.Array]:
        """Return ``sum_a mu[a] E[a]``, summed over samples and the fan-out."""

        def product(signal: jax.Array, of_state: Arrays) -> Arrays:
            return contract(*self.place.operation, signal, of_state, dict(self.operands))

        terms = [self.place.each_layer(product, mu[state], trace[state]) for state in self.states]
        if self.place.has_fan_out:
            terms = jax.tree.map(lambda layers: jnp.sum(layers, axis=0), terms)
        return _sum(terms)


@dataclasses.dataclass(frozen=True, eq=False)
class FullSite(Site):
    """All hidden states as one vector of ``n`` entries for each sample.

    ``J`` is ``(samples, n, n)``, new entries by old ones. ``F`` has an array ``(samples, entries,
    *shape)`` for each parameter, for the entries that it reaches. ``x`` is None. ``mu`` is
    ``(samples, n)``.
    """

    graph: ETraceGraph

    def zeros(self) -> dict[str, TraceSpec]:
        """Return an array for each parameter that reaches a state."""
        return dict(FullTraces().trace_specs(self.graph, every_state=True))

    def multiply(self, J: jax.Array, trace: Trace) -> Arrays:
        """Return ``J E`` for every sample."""
        return {name: advance_rows(J, self.rows(name), E, False) for name, E in trace.items()}

    def outer(self, F: Arrays, x: None) -> Arrays:
        """Return ``F``, which already contains the inputs."""
        return dict(F)

    def contract(self, mu: jax.Array, trace: Trace) -> dict[str, jax.Array]:
        """Return ``mu E``, summed over samples and entries of the states."""
        axes = "bq,bq...->..."
        return {n: multiply(axes, mu[:, self.rows(n)], E, False) for n, E in trace.items()}

    def rows(self, name: str) -> Any:
        """Return the entries of the states that a parameter reaches."""
        flat = flat_state_of(self.graph)
        return flat.rows(flat.reached[name])


def sites_of(graph: ETraceGraph, weights: Weights) -> list[OperationSite]:
    """Return the sites of all ETP operations."""
    return [
        OperationSite(
            name=f"`{site.relation.primitive.name}` of "
            f"'{', '.join(site.relation.printed_paths)}' ({site.relation.source})",
            key=site.first_key,
            relation=site.relation.key,
            states=tuple(site.group.names[a] for a in site.influence.reached),
            samples=() if graph.batch.samples is None else (graph.batch.samples,),
            operands=weights[site.relation.key],
            graph=graph,
            place=site,
        )
        for site in trace_sites(graph)
    ]


def full_site(graph: ETraceGraph, weights: Weights) -> FullSite:
    """Return the site of all hidden states."""
    flat = flat_state_of(graph)
    return FullSite(
        name="the hidden states",
        key="",
        relation=None,
        states=tuple(leaf.name for leaf in flat.leaves),
        samples=(flat.samples,),
        operands={name: weights[name]["value"] for name in flat.reached},
        graph=graph,
    )


def _sum(terms: list[Arrays]) -> Arrays:
    return functools.reduce(functools.partial(jax.tree.map, operator.add), terms)
