"""A `TraceMethod` that the package does not register: records of a step, contracted, and no trace.

Every step learns from itself alone, `sum_s x^s (x) (Df^s . l^s)`: what older steps have left in the
states counts as constant. It is the gradient of `braintrace.Immediate`, by the records.
"""

import dataclasses

import jax
import jax.numpy as jnp

import braintrace
from braintrace._core.layout import new_state_to_elements
from braintrace._core.products.direct import add, direct_gradient, like
from braintrace._core.products.nan_safe import products_of_gradient


@dataclasses.dataclass(frozen=True)
class OfRecords:
    """The learning rule; see `braintrace._graph.TraceMethod`."""

    needs = frozenset({"x", "Df"})
    jacobian = "elementwise"

    def carries(self, relation):
        return True

    def check(self, graph):
        pass

    def trace_specs(self, graph, every_state):
        return {}

    def update(self, graph, weights, records, traces):
        return traces

    def gradient(self, graph, weights, records, signal, before, after=None):
        gradients = jax.tree.map(jnp.zeros_like, weights)
        products = products_of_gradient(records)
        for group in graph.traced_groups:
            arriving = {
                a: new_state_to_elements(group, a, signal[state.name])
                for a, state in enumerate(group.states)
            }
            found = direct_gradient(graph, group, weights, records, arriving, products)
            gradients = add(gradients, found)
        return like(weights, gradients), before

    def carry_in_vjp(self, graph, weights, mu, traces, zeros_select):
        return jax.tree.map(jnp.zeros_like, weights)


class NoPast(braintrace.ETraceAlgorithm):
    """The algorithm by its names."""

    names = ("no_past", "of_records")

    @property
    def method(self):
        return OfRecords()
