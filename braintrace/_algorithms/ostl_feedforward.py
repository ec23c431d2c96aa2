"""OSTL without recurrence: online spatio-temporal learning of feed-forward networks."""

from collections.abc import Iterator

from .._compiler.core.analysis import Analysis
from .._errors import CompilationError
from .._graph import ETraceGraph
from .._graph.diagnostics import quoted
from .._jax import Atom, Var, source_line
from .d_rtrl import D_RTRL


class OSTLFeedforward(D_RTRL):
    r"""Online spatio-temporal learning (OSTL) of feed-forward networks with states.

    For layers :math:`l` of units whose states do not depend on other units of the layer,
    :math:`s_l^t = f(s_l^{t-1}, y_{l-1}^t W_l)` with the output :math:`y_l^t = g(s_l^t)`,

    .. math::

        \epsilon_l^t = \frac{\partial s_l^t}{\partial s_l^{t-1}} \epsilon_l^{t-1} +
            \frac{\partial s_l^t}{\partial W_l}, \qquad
        \nabla W_l = \sum_t \frac{\partial L^t}{\partial s_l^t}\, \epsilon_l^t.

    :math:`\partial L^t / \partial s_l^t` is backpropagated through the layers above within the
    step. For one layer, the gradient equals backpropagation through time. For several layers, the
    memory of an upper layer is truncated in the gradient of the weights below. The traces and
    gradients are the same as in `D_RTRL`; a network with a layer that reads its own past through a
    product is refused.

    Parameters
    ----------
    model, **options
        See `D_RTRL`.

    References
    ----------
    .. [1] T. Bohnstingl et al., "Online spatio-temporal learning in deep neural networks", IEEE
       Transactions on Neural Networks and Learning Systems 34, 2023 (arXiv:2007.12723), eqs. 10, 11
       and 13.

    Examples
    --------
    >>> import braintrace, jax.numpy as jnp
    >>> cell = braintrace.nn.IndRNN(2, 3)
    >>> learner = braintrace.compile(cell, "ostl_feedforward", jnp.ones((1, 2)), batch_size=1)
    >>> xs = jnp.ones((4, 1, 2))
    >>> sorted(learner.etrace_grad(xs, step_fn=lambda x: learner(x).sum()))
    [('W', 'weight'), ('u',)]
    """

    names = ("ostl_feedforward", "ostlfeedforward")

    def check_model(self, graph: ETraceGraph) -> None:
        """Refuse a network in which a state reaches the next step through a product."""
        for states, reached, where in _products_over_time(graph):
            raise CompilationError(
                "`OSTLFeedforward` needs layers without recurrent connections, but in "
                f"`{type(self.model).__name__}` the previous hidden state {quoted(states)} "
                f"reaches {quoted(reached)} through {where}, which couples units. Use "
                "`OSTLRecurrent`, or `D_RTRL`, which truncates this path."
            )


def _products_over_time(graph: ETraceGraph) -> Iterator[tuple[list[str], list[str], str]]:
    """Yield the operations that couple units on a path from one step to the next.

    Each result contains the states that the operation reads from the step before, the states that
    it reaches, and its source.
    """
    analysis, equations = Analysis(graph.traced.program), graph.traced.program.equations
    new = frozenset(var for group in graph.hidden_groups for var in group.new_vars)
    old = _carriers(graph, analysis, new)
    for group in graph.hidden_groups:
        ends = new.difference(group.new_vars)
        behind = analysis.gradient_ancestors(group.new_vars, ends)
        met: dict[int, list[Atom]] = {
            index: equations[index].invars
            for index in graph.opaque_equations
            if not behind.isdisjoint(equations[index].outvars)
        }
        for cut in [cut for cuts in group.cuts for cut in cuts if not group.delay_line]:
            met.setdefault(cut.equation, []).append(equations[cut.equation].invars[cut.operand])
        for index, operands in sorted(met.items()):
            found = analysis.gradient_ancestors(operands, ends)
            states = [name for var, name in old.items() if var in found]
            if states:
                where = f"`{equations[index].primitive.name}` [{source_line(equations[index])}]"
                yield states, [state.name for state in group.model_states], where


def _carriers(graph: ETraceGraph, analysis: Analysis, new: frozenset[Var]) -> dict[Var, str]:
    """Return the States that carry a dependence on weights over time: name by old value."""
    leaves = graph.traced.leaves
    learnt = new | {leaf.in_var for leaf in leaves if leaf.kind == "parameter"}
    return {
        leaf.in_var: leaf.name
        for leaf in leaves
        if leaf.kind in ("hidden", "other")
        and leaf.out_var is not None
        and not learnt.isdisjoint(analysis.gradient_ancestors([leaf.out_var]))
    }
