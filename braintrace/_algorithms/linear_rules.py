"""Rules that carry the elementwise Jacobian: D-RTRL, e-prop, RFLO, OSTL without recurrence."""

from collections.abc import Iterator
from typing import Any, ClassVar

import brainstate

from .._checks import check_choice
from .._compiler.core.analysis import Analysis
from .._errors import CompilationError
from .._etrace_op import feedback_primitives
from .._graph import ETraceGraph
from .._graph.diagnostics import quoted
from .._jax import Atom, Equation, Var, source_line
from .._jaxpr.dataflow import PRODUCTS
from .._rules import ParameterTraces
from .algorithm import ETraceAlgorithm


class D_RTRL(ETraceAlgorithm):
    r"""Diagonal real-time recurrent learning (D-RTRL): one trace entry per weight and state.

    For the states :math:`h` of the units that a weight reaches,

    .. math::

        \epsilon^t[a] = \sum_c D^t[a, c]\, \epsilon^{t-1}[c] + D_f^t[a] \otimes x^t, \qquad
        \nabla w = \sum_t \sum_a l^t[a] \circ \epsilon^t[a].

    Here :math:`D` is the Jacobian of the states of a unit with respect to its old states,
    :math:`D_f` the derivative with respect to the output of the ETP operation, :math:`x` its input,
    and :math:`l^t[a] = \partial L^t / \partial h^t[a]` the learning signal.

    A trace has the size of its weight, for each sample and each hidden state that the weight
    reaches. The gradient equals backpropagation through time if all paths between states of
    different steps are elementwise: leaky integrators, IndRNNs, diagonal linear RNNs, and spiking
    layers without recurrent weights. Paths through recurrent weights are truncated.

    Parameters
    ----------
    model, window, strict, unroll_limit, mark, trace_dtype
        See `ETraceAlgorithm`.
    readout_filters
        Compute exact gradients also through linear readouts ``o' = kappa o + A(v)``, where ``v`` is
        an elementwise function of hidden states, ``A`` is linear and ``kappa`` is the same for all
        units. The compiler adds filters ``f' = kappa f + v``: additional states of the layer below,
        each with an additional trace of its weights. Filters are stored with the traces, and
        `learner.report()` lists them. ``False``: no filters.

    Notes
    -----
    This is the recursion of RTRL [2]_ with all derivatives between units set to zero. :math:`D`
    keeps the derivatives between several states of the same unit, such as the potential and the
    threshold of an adaptive neuron.

    References
    ----------
    .. [1] C. Wang et al., "Model-agnostic linear-memory online learning in spiking neural
       networks", Nature Communications 17:1745, 2026.
    .. [2] R. J. Williams and D. Zipser, "A learning algorithm for continually running fully
       recurrent neural networks", Neural Computation 1, 1989.

    Examples
    --------
    >>> import brainstate, braintrace, jax.numpy as jnp
    >>> class Leaky(brainstate.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.w = brainstate.ParamState(jnp.ones((2, 3)))
    ...
    ...     def init_state(self, batch_size=1):
    ...         self.h = brainstate.HiddenState(jnp.zeros((batch_size, 3)))
    ...
    ...     def update(self, x):
    ...         self.h.value = 0.5 * self.h.value + braintrace.matmul(x, self.w.value)
    ...         return self.h.value
    >>> model = Leaky()
    >>> model.init_state()
    >>> algorithm = braintrace.D_RTRL(model)
    >>> x = jnp.ones((1, 2))
    >>> algorithm.compile_graph(x)
    >>> loss = lambda: algorithm(x).sum()
    >>> gradient = brainstate.transform.grad(loss, model.states(brainstate.ParamState))
    >>> [float(gradient()[("w",)][0, 0]) for _ in range(3)]
    [1.0, 1.5, 1.75]
    """

    names: ClassVar[tuple[str, ...]] = ("d_rtrl", "three_factor")

    def __init__(
        self, model: brainstate.nn.Module, *, readout_filters: bool = True, **options: Any
    ) -> None:
        super().__init__(model, **options)
        self.readout_filters = readout_filters

    @property
    def method(self) -> ParameterTraces:
        """Parameter-dimension traces."""
        return ParameterTraces()


ParamDimVjpAlgorithm = D_RTRL


class EProp(D_RTRL):
    r"""Eligibility propagation (e-prop): D-RTRL for recurrent networks with leaky readouts.

    For units with a state :math:`s_j` and spikes :math:`z_j`, a readout :math:`y_k^t = \kappa
    y_k^{t-1} + \sum_j z_j^t W^{out}_{jk} + b_k` and an error :math:`\partial L^t / \partial y_k^t`,

    .. math::

        \epsilon_{ij}^t = \frac{\partial s_j^t}{\partial s_j^{t-1}} \epsilon_{ij}^{t-1} +
            \frac{\partial s_j^t}{\partial W_{ij}}, \qquad
        \bar e_{ij}^t = \kappa\, \bar e_{ij}^{t-1} +
            \frac{\partial z_j^t}{\partial s_j^t} \epsilon_{ij}^t, \qquad
        \nabla W_{ij} = \sum_{tk} \frac{\partial L^t}{\partial y_k^t} B_{jk}\, \bar e_{ij}^t.

    The eligibility vectors :math:`\epsilon` are the traces of `D_RTRL`. The filtered eligibility
    :math:`\bar e` is the trace of the filter that `D_RTRL` adds for a linear leaky readout
    (``readout_filters``). The feedback :math:`B` is a property of the readout: symmetric (:math:`B
    = W^{out}`) for ``braintrace.nn.Linear`` and `matmul`, random or adaptive for
    ``braintrace.nn.FeedbackLinear`` and `feedback_matmul`.

    Parameters
    ----------
    model, **options
        See `D_RTRL`.
    feedback
        ``'symmetric'`` or ``'random'``: refuse a model whose readout has different feedback.
        ``None``: the feedback of the readout.

    Raises
    ------
    CompilationError
        If the readout does not have this ``feedback``.

    Notes
    -----
    This class computes the same traces and gradients as `D_RTRL`. In the paper, the reset of the
    potential is under ``jax.lax.stop_gradient``. Here, the eligibility includes the derivative of
    the reset if the model does not stop it.

    References
    ----------
    .. [1] G. Bellec et al., "A solution to the learning dilemma for recurrent networks of spiking
       neurons", Nature Communications 11:3625, 2020, eqs. 1 to 4 and 22 to 28.

    Examples
    --------
    >>> import brainstate, braintrace, jax.numpy as jnp
    >>> import saiunit as u
    >>> class Network(brainstate.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.cell = braintrace.nn.IndRNN(2, 5)
    ...         self.readout = braintrace.nn.LeakyRateReadout(5, 1)
    ...         self.readout.W = braintrace.nn.FeedbackLinear(5, 1, adaptive=True)
    ...
    ...     def update(self, x):
    ...         return self.readout(self.cell(x))
    >>> with brainstate.environ.context(dt=1.0 * u.ms):
    ...     learner = braintrace.compile(Network(), "eprop", jnp.ones((1, 2)), batch_size=1)
    ...     gradients = learner.etrace_grad(
    ...         jnp.ones((4, 1, 2)), step_fn=lambda x: ((learner(x) - 1.0) ** 2).sum()
    ...     )
    >>> [path for path in gradients if "feedback" in path]
    [('readout', 'W', 'feedback')]
    """

    names: ClassVar[tuple[str, ...]] = ("eprop", "e_prop")

    def __init__(
        self, model: brainstate.nn.Module, *, feedback: str | None = None, **options: Any
    ) -> None:
        check_choice("feedback", feedback, None, "symmetric", "random")
        self.feedback = feedback
        super().__init__(model, **options)

    def check_model(self, graph: ETraceGraph) -> None:
        """Refuse a model whose readout does not have the feedback of the option."""
        if self.feedback == "random":
            check_feedback(graph, self.model, "EProp(feedback='random')")
        elif self.feedback == "symmetric" and has_feedback(graph):
            raise CompilationError(
                f"`feedback` is 'symmetric', but a `feedback_matmul` computes the output of "
                f"`{type(self.model).__name__}.update`. Use `braintrace.nn.Linear` or "
                "`braintrace.matmul` there, or `feedback='random'`."
            )


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
