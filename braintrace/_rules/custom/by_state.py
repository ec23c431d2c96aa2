r"""Trace methods of user-defined rules with one trace for all hidden states and parameters.

.. math::

    E^t = advance(E^{t-1}, J^t, F^t), \qquad
    \nabla w = \sum_t \partial L^t / \partial w + contract(E^{t-1}, \mu^t), \qquad
    \mu^t = \partial L^t / \partial S^{t-1}

with all hidden states of a sample as a vector :math:`S`. Each step is differentiated separately.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from ..._core.local_step import operand_shapes
from ..._core.products.direct import like
from ..._graph import (
    ETraceGraph,
    Jacobian,
    Record,
    Records,
    Signal,
    Traces,
    TraceSpecs,
    Weights,
)
from ..full.chunk_vjp import step_jacobians
from ..full.influence_matrix import arriving_rows
from ..full.passing import PassingTraces, over_steps
from .leaves import check_method, leaves_of
from .protocol import Rule
from .site import full_site


@dataclasses.dataclass(frozen=True)
class FullRuleTraces(PassingTraces):
    """`TraceMethod` of a rule whose Jacobian is full, or block-diagonal by layer.

    Attributes
    ----------
    rule
        The rule.
    """

    rule: Rule
    needs: ClassVar[frozenset[Record]] = frozenset({"step", "traces"})

    @property
    def jacobian(self) -> Jacobian:
        """The rule's."""
        return "layered" if self.rule.jacobian == "layered" else "full"

    def check(self, graph: ETraceGraph) -> None:
        """Refuse wrong results of the rule."""
        check_method(self, graph)

    def trace_specs(self, graph: ETraceGraph, every_state: bool) -> TraceSpecs:
        """Return the leaves of the site."""
        return leaves_of(self.rule, full_site(graph, operand_shapes(graph))).specs

    def update(
        self, graph: ETraceGraph, weights: Weights, records: Records, traces: Traces
    ) -> Traces:
        """Return the traces after recorded steps, one step at a time."""
        leaves = leaves_of(self.rule, full_site(graph, weights))

        def advance(records: Records, traces: Traces) -> Traces:
            J, of_parameters = step_jacobians(graph, weights, records)
            site = leaves.site
            F = {name: of_parameters[name][:, site.rows(name)] for name in site.operands}
            return leaves.advanced(leaves.of(traces), J, None, F)

        return over_steps(advance, graph, records, traces)

    def carry_in_vjp(
        self, graph: ETraceGraph, weights: Weights, mu: Signal, traces: Traces, zeros_select: bool
    ) -> Weights:
        """Return the rule's gradient for the adjoints of the states before a step or window."""
        gradients = jax.tree.map(jnp.zeros_like, weights)
        leaves = leaves_of(self.rule, full_site(graph, weights))
        arriving = arriving_rows(graph, mu)
        arrays = leaves.of(traces)
        if zeros_select:
            arrays = leaves.without(arrays, (arriving == 0).all(1))
        for name, result in leaves.contracted(arrays, arriving).items():
            gradients[name] = {"value": result}
        return like(weights, gradients)
