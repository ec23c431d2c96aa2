"""Composition of several learning rules in one model, each with its own relations.

Every rule receives the model with only its relations. States, signals and Jacobians are the same
for all rules, so the gradient of each weight equals the gradient of its rule alone.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .._checks import path_name
from .._core.traces import joined, renamed
from .._errors import CompilationError
from .._graph.graph import ETraceGraph, Record, TraceSpec, TraceSpecs
from .._graph.hidden_group import HiddenParamOpRelation
from .._graph.method import Chunk, Jacobian, Signal, TraceMethod, Traces, Weights
from .._typing import Path


@dataclasses.dataclass(frozen=True)
class Part:
    """One rule, and the parameters that it applies to.

    Attributes
    ----------
    name
        The rule as text, which equal rules have in common: the name of its traces.
    method
        The rule.
    fits
        Whether it applies to the parameter at a path.
    """

    name: str
    method: TraceMethod
    fits: Callable[[Path], bool]


@dataclasses.dataclass(frozen=True)
class ComposedTraces(TraceMethod):
    """The traces of several rules; each rule's name and a slash prefix its keys.

    Attributes
    ----------
    parts
        The rules; the first one that fits a parameter is its rule.
    """

    parts: tuple[Part, ...]

    @property
    def filters_readouts(self) -> bool:
        """Whether leaky readouts get filters, from one of the rules."""
        return any(part.method.filters_readouts for part in self.parts)

    @functools.cached_property
    def rules(self) -> dict[str, TraceMethod]:
        """The rules by name."""
        return {part.name: part.method for part in self.parts}

    def of_path(self, path: Path) -> Part:
        """Return the first part that fits a parameter."""
        return next(part for part in self.parts if part.fits(path))

    def chosen(self, relation: HiddenParamOpRelation) -> str:
        """Return the name of the rule of an operation.

        Raises
        ------
        CompilationError
            If its parameters have several rules.
        """
        names = {path: self.of_path(path).name for path in relation.parameter_paths}
        if len(set(names.values())) > 1:
            listed = ", ".join(f"'{path_name(path)}': {rule}" for path, rule in names.items())
            raise CompilationError(
                f"`{relation.primitive.name}` ({relation.source}) has parameters with several "
                f"`rules` ({listed}). An operation has one rule: use the same rule for its "
                "parameters."
            )
        return next(iter(names.values()))

    @property
    def needs(self) -> frozenset[Record]:
        """The residuals that any of the rules needs."""
        return frozenset[Record]().union(*(rule.needs for rule in self.rules.values()))

    @property
    def jacobian(self) -> Jacobian:
        """The common treatment by the rules that read the past."""
        jacobians: list[Jacobian] = [rule.jacobian for rule in self.rules.values()]
        return next((one for one in jacobians if one != "none"), "none")

    def carries(self, relation: HiddenParamOpRelation) -> bool:
        """Test whether an operation has traces by its rule."""
        return self.rules[self.chosen(relation)].carries(relation)

    def check(self, graph: ETraceGraph) -> None:
        """Refuse an operation that its rule does not support.

        Raises
        ------
        PrimitiveError
            If there is one.
        CompilationError
            If a parameter of a filtered readout has a rule without filters.
        """
        for name, own in self.graphs_by_rule(graph).items():
            self.rules[name].check(own)
        for readout, paths in graph.traced.readouts.items():
            for part, path in ((self.of_path(p), p) for p in paths):
                if not part.method.filters_readouts:
                    raise CompilationError(
                        f"The gradient of parameter '{path_name(path)}' of the leaky readout "
                        f"'{readout}' is exact by filters, which `{part.name}` does not "
                        "have. Use a rule with filters for it."
                    )

    def fit(self, graph: ETraceGraph) -> "ComposedTraces":
        """Return the rules, each with what a compiled model needs."""
        fitted = (dataclasses.replace(p, method=p.method.fit(graph)) for p in self.parts)
        return ComposedTraces(tuple(fitted))

    def trace_specs(self, graph: ETraceGraph, every_state: bool) -> TraceSpecs:
        """Return the trace specifications of all rules."""
        result: dict[str, Any] = {}
        for name, own in self.graphs_by_rule(graph).items():
            specs = self.rules[name].trace_specs(own, every_state)
            result.update(_named(name, jax.tree.map(functools.partial(_of_rule, name), specs)))
        return result

    def update(self, chunk: Chunk, traces: Traces) -> Traces:
        """Return the traces after a recorded chunk."""
        new = []
        for name, own in self._chunks_by_rule(chunk).items():
            after = self.rules[name].update(own, _of_name(name, traces))
            new.append(_named(name, after))
        return joined(new)

    def gradient(
        self, chunk: Chunk, signal: Signal, before: Traces, after: Traces | None = None
    ) -> tuple[Weights, Traces | None]:
        """Return the gradient of a recorded chunk, and the traces after it if all rules do."""
        gradients = jax.tree.map(jnp.zeros_like, chunk.weights)
        chunks, known = self._chunks_by_rule(chunk), []
        for name, own in chunks.items():
            of_rule = None if after is None else _of_name(name, after)
            method, start = self.rules[name], _of_name(name, before)
            result, own_after = method.gradient(own, signal, start, of_rule)
            gradients.update(result)
            known += [] if own_after is None else [_named(name, own_after)]
        return gradients, joined(known) if len(known) == len(chunks) else None

    def carry_in_vjp(self, chunk: Chunk, mu: Signal, traces: Traces) -> Weights:
        """Return the gradient of the operands through the states before a window."""
        gradients: Weights = jax.tree.map(jnp.zeros_like, chunk.weights)
        for name, own in self._chunks_by_rule(chunk).items():
            gradients.update(self.rules[name].carry_in_vjp(own, mu, _of_name(name, traces)))
        return gradients

    def _chunks_by_rule(self, chunk: Chunk) -> dict[str, Chunk]:
        def of_rule(own: ETraceGraph) -> Chunk:
            keys = [relation.key for relation in own.hidden_param_op_relations]
            return Chunk(own, {key: chunk.weights[key] for key in keys}, chunk.records)

        return {name: of_rule(own) for name, own in self.graphs_by_rule(chunk.graph).items()}

    def graphs_by_rule(self, graph: ETraceGraph) -> dict[str, ETraceGraph]:
        """Return the compiled model with only the relations of each rule, by rule."""
        relations: dict[str, tuple[HiddenParamOpRelation, ...]] = {}
        for relation in graph.hidden_param_op_relations:
            name = self.chosen(relation)
            relations[name] = (*relations.get(name, ()), relation)
        return {
            name: dataclasses.replace(
                graph, hidden_param_op_relations=own, needs=self.rules[name].needs
            )
            for name, own in relations.items()
        }


def _named(name: str, traces: Traces) -> Traces:
    return renamed(traces, lambda key: f"{name}/{key}")


def _of_name(name: str, traces: Traces) -> Traces:
    start = f"{name}/"
    return renamed(traces, lambda key: key[len(start) :] if key.startswith(start) else None)


def _of_rule(name: str, spec: TraceSpec) -> TraceSpec:
    partner = spec.packed_with and f"{name}/{spec.packed_with}"
    return dataclasses.replace(spec, packed_with=partner, rule=name)
