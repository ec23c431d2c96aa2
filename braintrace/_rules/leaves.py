"""Leaves of a rule's traces: specifications, resets, and checks of the rule's results."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from .._core.records import operands, residuals
from .._core.step import as_chunk
from .._core.traces import as_arrays, reset_traces, starting_traces
from .._errors import OptionError, ShapeError, in_words
from .._etrace_op import Arrays
from .._graph import ETraceGraph, Role, TraceMethod, Traces, TraceSpec, Weights
from .._jax import struct_of
from .protocol import Rule, Site, Trace

Where = TypeVar("Where", bound=Site)


@dataclasses.dataclass(frozen=True)
class Leaves(Generic[Where]):
    """The trace of one rule at one site.

    Attributes
    ----------
    rule, site
        The rule, and its site.
    tree
        Structure of the trace.
    specs
        Specifications of the leaves by name, in their order.
    """

    rule: Rule
    site: Where
    tree: Any
    specs: Mapping[str, TraceSpec]

    def of(self, traces: Traces) -> Arrays:
        """Return the arrays of this site among traces, in the dtypes of the rule."""
        own = as_arrays({key: traces[key] for key in self.specs})
        return {key: leaf.astype(self.specs[key].dtype) for key, leaf in own.items()}

    def without(self, arrays: Arrays, flags: jax.Array) -> Arrays:
        """Return arrays with the initial values of some samples, also if they are NaN.

        An array that all samples share has its initial value if all flags are set.
        """
        result: Arrays = {}
        for key, spec in self.specs.items():
            is_shared = spec.samples is None and "batch" not in spec.axes
            own = flags.all() if is_shared else flags
            result.update(reset_traces({key: spec}, {key: arrays[key]}, own))
        return result

    def advanced(self, arrays: Arrays, J: Any, x: Any, F: Any) -> Arrays:
        """Return the arrays after one step.

        Raises
        ------
        OptionError, ShapeError
            If the rule changes the structure or a shape.
        """
        with in_words(_called(self.rule, "advance", self.site)):
            result = self.rule.advance(self.site, self._unflattened(arrays), J, x, F)
            like = self._unflattened(self.specs)
            named = _checked(self.rule, "advance", self.site, result, like)
        return dict(zip(self.specs, named, strict=True))

    def contracted(self, arrays: Arrays, mu: Any) -> dict[str, jax.Array]:
        """Return the gradient of the site's operands.

        Raises
        ------
        OptionError, ShapeError
            If the rule does not return an array for each operand.
        """
        with in_words(_called(self.rule, "contract", self.site)):
            result = self.rule.contract(self.site, self._unflattened(arrays), mu)
            result = dict(result) if isinstance(result, Mapping) else result
            expected = dict(self.site.operands)
            named = _checked(self.rule, "contract", self.site, result, expected)
        return dict(zip(sorted(expected), named, strict=True))

    def _unflattened(self, values: Mapping[str, Any]) -> Trace:
        return jax.tree.unflatten(self.tree, [values[key] for key in self.specs])


def leaves_of(rule: Rule, site: Where) -> Leaves[Where]:
    """Return the leaves of a rule's initial trace at a site.

    Raises
    ------
    ShapeError
        For a leaf whose first axis is not the samples.
    """
    of_shapes = dataclasses.replace(site, operands=jax.tree.map(struct_of, dict(site.operands)))
    with in_words(_called(rule, "init", site)), jax.ensure_compile_time_eval():
        paths, tree = jax.tree_util.tree_flatten_with_path(rule.init(of_shapes))
        specs = {}
        for path, leaf in paths:
            name = jax.tree_util.keystr(path)
            specs[site.key + name] = _spec_of(rule, site, name, leaf)
    return Leaves(rule, site, tree, specs)


def check_method(method: TraceMethod, graph: ETraceGraph) -> None:
    """Run the first step of a sequence with shapes, which refuses wrong results of a rule."""
    inputs = {var: struct_of(var.aval) for var in graph.traced.program.in_vars}
    traces = starting_traces(method.trace_specs(graph, every_state=True))

    def gradient(values: list[Any]) -> Weights:
        now = dict(zip(inputs, values, strict=True))
        weights = operands(graph, now)
        records = as_chunk(residuals(graph, now, weights))
        after = method.update(graph, weights, records, traces)
        return method.carry_in_vjp(graph, weights, {}, after, zeros_select=False)

    jax.eval_shape(gradient, list(inputs.values()))


def _spec_of(rule: Rule, site: Site, name: str, leaf: Any) -> TraceSpec:
    if isinstance(leaf, TraceSpec):
        relation = leaf.relation or site.relation
        return dataclasses.replace(leaf, relation=relation, operand=leaf.operand or name)
    array = np.asarray(jnp.asarray(leaf))
    first = array.shape[:1]
    if site.samples and first and first != site.samples:
        raise ShapeError(
            f"`{type(rule).__name__}.init` returned shape {array.shape} at '{name}' for "
            f"{site.name}; expected {site.samples[0]} samples along the first axis. Return a "
            "`TraceSpec` if the axes run over something else."
        )
    lead: list[Role] = ["batch"] if site.samples and first else []
    entries: list[Role] = ["entry"] * (array.ndim - len(lead))
    initial = jnp.asarray(array) if array.any() else 0
    return TraceSpec(
        array.shape,
        array.dtype,
        (*lead, *entries),
        relation=site.relation,
        operand=name,
        initial=initial,
    )


def _called(rule: Rule, method: str, site: Site) -> Callable[[], str]:
    return lambda: f"`{type(rule).__name__}.{method}` was called for {site.name}"


def _checked(rule: Rule, method: str, site: Site, found: Any, expected: Any) -> list[jax.Array]:
    """Return the leaves of a rule's result, in the expected dtypes."""
    called = f"{type(rule).__name__}.{method}"
    paths, tree = jax.tree_util.tree_flatten_with_path(found)
    wanted, wanted_tree = jax.tree.flatten(expected)
    if tree != wanted_tree:
        raise OptionError(
            f"`{called}` returned {tree} for {site.name}; expected the structure {wanted_tree}."
        )
    leaves = []
    for (path, leaf), like in zip(paths, wanted, strict=True):
        if jnp.shape(leaf) != tuple(like.shape):
            raise ShapeError(
                f"`{called}` returned shape {jnp.shape(leaf)} at '{jax.tree_util.keystr(path)}' "
                f"for {site.name}; expected {tuple(like.shape)}."
            )
        leaves.append(jnp.asarray(leaf, like.dtype))
    return leaves
