r"""Sites: the places where a learning rule has a trace, with the products for its update.

An ETP operation has a site for each hidden group that it reaches, with arrays in the layout of its
output. A full-Jacobian rule has one site: all hidden states of a sample as one vector, with all
parameters that reach them. Both have the same products with a trace :math:`E` of the shape of the
parameters, so one rule runs with every Jacobian:

.. math:: J E, \qquad F x, \qquad < \mu, E >.
"""

import abc
import dataclasses
import functools
import operator
from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from ..._core.flat_state import flat_state_of
from ..._core.layout import TraceSite, filter_key, trace_sites
from ..._core.products.active_outputs import EVERY_OUTPUT
from ..._core.zero import unfused
from ..._errors import OptionError
from ..._etrace_op import (
    Arrays,
    accumulate,
    add_to_filter,
    contract,
    propagate,
    pull_back_filtered,
)
from ..._graph import ETraceGraph, TraceSpec, Weights
from ..._typing import PyTree
from ..elementwise.filter_specs import check_filtered_inputs, spec_of_input, spec_of_output
from ..elementwise.parameter_specs import specs_of_site
from ..full.influence_matrix import FullTraces

Trace: TypeAlias = PyTree
"""The trace of one site: arrays in any pytree."""


@dataclasses.dataclass(frozen=True, eq=False)
class Site(abc.ABC):
    """The place of one trace of a `Rule`: an operation and hidden states that it reaches.

    An ETP operation has a site for each group of hidden states that it reaches. With a ``jacobian``
    of ``'layered'`` or ``'full'``, a model has a single site: all hidden states, and all parameters
    that reach them.

    Attributes
    ----------
    name
        The operation, its parameters and the line of the call, for messages.
    key
        Prefix of the names of its traces.
    relation
        Key of the operation in the report; ``None`` for all hidden states at once.
    states
        Names of the hidden states.
    samples
        Shape of an array with one number for each sample: ``(5,)``, or ``()`` without a batch.
    operands
        Arrays that have gradients, by the operation's names (``'weight'``, ``'bias'``), or
        parameters by path. In `Rule.init`, their shapes and dtypes.

    Notes
    -----
    The products take and return traces of the form of `zeros`. They are linear in each argument.

    Examples
    --------
    >>> import braintrace, dataclasses, jax.numpy as jnp
    >>> @dataclasses.dataclass(frozen=True)
    ... class LastStep:
    ...     jacobian = "none"
    ...
    ...     def init(self, site):
    ...         return site.zeros()
    ...
    ...     def advance(self, site, trace, J, x, F):
    ...         return site.outer(F, x)
    ...
    ...     def contract(self, site, trace, mu):
    ...         return site.contract(mu, trace)
    >>> x = jnp.ones((5, 2))
    >>> learner = braintrace.compile(braintrace.nn.IndRNN(2, 3), LastStep(), x, batch_size=5)
    >>> for name, trace in learner.functional().state().traces.items():
    ...     print(name, trace.shape)
    W/weight@mm1>h['h']['bias'] (5, 3)
    W/weight@mm1>h['h']['weight'] (5, 2, 3)
    u@elemwise0>h['h']['weight'] (5, 3)
    """

    name: str
    key: str
    relation: str | None
    states: tuple[str, ...]
    samples: tuple[int, ...]
    operands: Mapping[str, Any]

    @abc.abstractmethod
    def zeros(self) -> Trace:
        """Return a trace of zeros for `Rule.init`: the derivative of the states by the operands.

        It is ``{state: {operand: leaf}}``, or for all hidden states ``{parameter: leaf}`` with
        leaves ``(samples, entries of the states, *shape)``. A leaf is a `TraceSpec`.
        """

    def input_zeros(self) -> Any:
        """Return zeros for `Rule.init` like the operation's input, to filter it; see `filtered`.

        The result is ``None``, an empty pytree, for an operation without an input.

        Raises
        ------
        PrimitiveError
            If the derivative of the operation is not linear in its input.
        """
        raise self._has_no_operation("input_zeros")

    def output_zeros(self) -> dict[str, TraceSpec]:
        """Return zeros for `Rule.init` like ``F``, for every state."""
        raise self._has_no_operation("output_zeros")

    def filtered(self, x_trace: Any, x: Any) -> Any:
        """Return ``x_trace + x``, a sum of inputs; for indices, a table of counts."""
        raise self._has_no_operation("filtered")

    def pull_back(self, x_trace: Any, signal: jax.Array) -> dict[str, jax.Array]:
        """Return the gradient of each operand from a derivative of the output, summed over samples.

        ``x_trace`` replaces the input, and ``signal`` has the layout of the output.
        """
        raise self._has_no_operation("pull_back")

    def _has_no_operation(self, method: str) -> OptionError:
        return OptionError(
            f"`Site.{method}` needs one operation, but with a `jacobian` of 'layered' or 'full' a "
            "site is all hidden states. Use another `jacobian`, or `Site.zeros`."
        )

    @abc.abstractmethod
    def multiply(self, J: Any, trace: Trace) -> Trace:
        """Return ``J E``, the trace propagated by one step."""

    @abc.abstractmethod
    def outer(self, F: Any, x: Any) -> Trace:
        """Return ``F x``, the derivative of the new states with the old ones held constant."""

    @abc.abstractmethod
    def contract(self, mu: Any, trace: Trace) -> dict[str, jax.Array]:
        """Return ``<mu, E>``, the gradient of each operand, summed over samples."""


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
        return None if x is None else add_to_filter(self.place.relation.primitive, x_trace, x)

    def pull_back(self, x_trace: Any, signal: jax.Array) -> dict[str, jax.Array]:
        """Return the gradient of each operand, with a filter in place of the input."""
        at_output = signal.sum(0) if self.place.has_fan_out else signal
        inputs = None if x_trace is None else x_trace[None]
        operands = dict(self.operands)
        result = pull_back_filtered(*self.place.operation, inputs, at_output[None], operands)
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
        result = {}
        for name, old in trace.items():
            rows = self.rows(name)
            block = J[:, rows[:, None], rows]
            result[name] = unfused(jnp.einsum("bqr,br...->bq...", block, old), block)
        return result

    def outer(self, F: Arrays, x: None) -> Arrays:
        """Return ``F``, which already contains the inputs."""
        return dict(F)

    def contract(self, mu: jax.Array, trace: Trace) -> dict[str, jax.Array]:
        """Return ``mu E``, summed over samples and entries of the states."""
        result = {}
        for name, own in trace.items():
            factor = mu[:, self.rows(name)]
            result[name] = unfused(jnp.einsum("bq,bq...->...", factor, own), factor)
        return result

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
            states=tuple(site.group.states[a].name for a in site.influence.reached),
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
