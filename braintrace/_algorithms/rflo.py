"""RFLO: random feedback local online learning."""

import brainstate

from .._errors import CompilationError
from .._etrace_op import feedback_primitives
from .._graph import ETraceGraph
from .._graph.diagnostics import quoted
from .._jax import Equation
from .._jaxpr.dataflow import PRODUCTS
from .d_rtrl import D_RTRL


class RFLO(D_RTRL):
    r"""Random feedback local online learning (RFLO): D-RTRL with a random-feedback readout.

    For a leaky network :math:`h^t = (1 - 1/\tau) h^{t-1} + \phi(u^t) / \tau`, with :math:`u^t =
    h^{t-1} W`, a readout :math:`y^t = h^t W_{out}` and an error :math:`e^t = \partial L^t /
    \partial y^t`,

    .. math::

        p_{ij}^t = (1 - 1/\tau)\, p_{ij}^{t-1} + h_i^{t-1} \phi'(u_j^t) / \tau, \qquad
        \nabla W_{ij} = \sum_t (e^t B^T)_j\, p_{ij}^t, \qquad
        \nabla W_{out} = \sum_t h^t \otimes e^t.

    The traces :math:`p` are the traces of `D_RTRL`, which truncates paths between units. The
    feedback :math:`B` is a property of the readout (`feedback_matmul`,
    `braintrace.nn.FeedbackLinear`). A model without such a readout is refused.

    Parameters
    ----------
    model, **options
        See `D_RTRL`.

    Notes
    -----
    This class computes the same traces and gradients as `D_RTRL`. The paper defines the rule for
    the leaky network above; here it runs on every network with such a readout.

    References
    ----------
    .. [1] J. M. Murray, "Local online learning in recurrent networks with random feedback", eLife
       8:e43299, 2019, eqs. 3 to 5.

    Examples
    --------
    >>> import brainstate, braintrace, jax.numpy as jnp
    >>> class Network(brainstate.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.cell = braintrace.nn.LeakyRNN(2, 5)
    ...         self.readout = braintrace.nn.FeedbackLinear(5, 1)
    ...
    ...     def update(self, x):
    ...         return self.readout(self.cell(x))
    >>> learner = braintrace.compile(Network(), "rflo", jnp.ones((1, 2)), batch_size=1)
    >>> gradients = learner.etrace_grad(
    ...     jnp.ones((4, 1, 2)), step_fn=lambda x: ((learner(x) - 1.0) ** 2).sum()
    ... )
    >>> sorted(gradients)
    [('cell', 'W', 'weight'), ('readout', 'weight')]
    """

    names = ("rflo",)

    def check_model(self, graph: ETraceGraph) -> None:
        """Refuse a model whose output is not computed by a `feedback_matmul`."""
        check_feedback(graph, self.model, "RFLO")


def check_feedback(graph: ETraceGraph, model: brainstate.nn.Module, rule: str) -> None:
    """Refuse a model whose output is not computed by a `feedback_matmul`."""
    if has_feedback(graph):
        return
    states = quoted([s.name for group in graph.hidden_groups for s in group.model_states])
    raise CompilationError(
        f"`{rule}` sends errors back through the feedback of the readout, but no "
        f"`feedback_matmul` connects the hidden states {states} to the output of "
        f"`{type(model).__name__}.update`. Compute the output with `braintrace.nn.FeedbackLinear` "
        "or `braintrace.feedback_matmul`, or use `D_RTRL`, which sends errors back through the "
        "weight of the readout."
    )


def has_feedback(graph: ETraceGraph) -> bool:
    """Test whether a `feedback_matmul` leads from hidden states to the output of a model."""
    leaky = {name for readout in graph.traced.readouts for name in readout.operations}
    if not leaky.isdisjoint(primitive.name for primitive in feedback_primitives()):
        return True
    return any(_is_readout(graph, equation) for equation in graph.traced.program.equations)


def _is_readout(graph: ETraceGraph, equation: Equation) -> bool:
    """Test whether an equation is the last product between hidden states and the output.

    A separate state may follow it (a leaky readout), but not a state that the equation reads.
    """
    if equation.primitive not in feedback_primitives():
        return False
    program, outputs = graph.traced.program, graph.traced.output_atoms
    new = {
        state.in_var: var
        for group in graph.hidden_groups
        for state, var in zip(group.states, group.new_vars, strict=True)
    }
    ends = frozenset(new.values())
    x, y = equation.invars[0], equation.outvars[0]
    read = program.depends_on([x], stops=ends)
    products = PRODUCTS | {
        program.equations[index].primitive.name for index in graph.opaque_equations
    }
    if read.isdisjoint([*new, *ends]) or y not in program.depends_on(outputs, blocked=products):
        return False
    is_output = y in program.depends_on(outputs, stops=ends, blocked=products)
    own = [after for before, after in new.items() if before in read]
    return is_output or y not in program.depends_on(own)
