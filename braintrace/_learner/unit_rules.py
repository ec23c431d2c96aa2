"""Learners with local rules: D-RTRL, e-prop, RFLO, OSTL without recurrence, ES-D-RTRL, OTTT."""

from typing import Any, ClassVar

import brainstate
import numpy as np

from .._errors import OptionError
from .._graph.method import TraceMethod
from .._rules.d_rtrl import ParameterTraces
from .._rules.feedback import FeedbackTraces
from .._rules.filters import FilterTraces
from .._rules.late import late_traces
from .learner import Learner


class D_RTRL(Learner):
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
    model, window, strict, mark, trace_dtype
        See `Learner`.

    Notes
    -----
    Gradients are exact also through leaky readouts ``o' = kappa o + z W + b``, where ``z`` is an
    elementwise function of hidden states and ``kappa`` is one number for all units. The readout may
    be scaled, and ``kappa`` may depend on parameters, but not on data. The compiler adds filters
    ``f' = kappa f + z``: additional states of the layer below, each with an additional trace of its
    weights. Filters are stored with the traces, and `learner.report()` lists them.

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
    method: TraceMethod = ParameterTraces(late_traces)


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
    :math:`\bar e` is the trace of the filter that `D_RTRL` adds for a linear leaky readout. The
    feedback :math:`B` is a property of the readout: symmetric (:math:`B
    = W^{out}`) for ``braintrace.nn.Linear`` and `matmul`, random or adaptive for
    ``braintrace.nn.FeedbackLinear`` and `feedback_matmul`.

    Parameters
    ----------
    model, **options
        See `D_RTRL`.

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

    names = ("eprop", "e_prop")


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
    method = FeedbackTraces(late_traces)


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
    gradients are the same as in `D_RTRL`, which also truncates a product through which a layer
    reads its own past.

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


def _decay(value: float) -> float:
    if not 0 <= value < 1:
        raise OptionError(
            f"The decay is {value}; expected a float in [0, 1), or a rank, an integer of at least "
            "1, which gives the decay (rank - 1) / (rank + 1)."
        )
    return float(value)


class ES_D_RTRL(Learner):
    r"""Exponentially smoothed D-RTRL (ES-D-RTRL, pp-prop): traces as large as inputs and outputs.

    For an ETP operation with input :math:`x`,

    .. math::

        \epsilon_x^t = \alpha\, \epsilon_x^{t-1} + x^t, \qquad
        \epsilon_f^t[a] = \alpha \sum_c D^t[a, c]\, \epsilon_f^{t-1}[c] + (1 - \alpha)\, D_f^t[a],

    .. math::

        \nabla w = \sum_t \left( \sum_a \frac{l^t[a]}{1 - \alpha^t}\, \epsilon_f^t[a] \right)
        \otimes \epsilon_x^t,

    with :math:`D`, :math:`D_f` and :math:`l` as in `D_RTRL`. The product of the two filters
    replaces the trace of a weight, so memory grows with the number of neurons, not of weights. The
    factor :math:`1 - \alpha^t`, with :math:`t` the number of steps since a reset, corrects the bias
    of filters that start from zero.

    Parameters
    ----------
    model
        See `Learner`.
    decay_or_rank
        A float in ``[0, 1)`` is the decay ``α`` of both filters; an integer ``r ≥ 1`` means ``α =
        (r - 1) / (r + 1)``.
    **options
        ``window``, ``strict``, ``mark`` and ``trace_dtype``; see
        `Learner`.

    Raises
    ------
    OptionError
        If ``decay_or_rank`` is neither such a float nor such an integer.

    References
    ----------
    .. [1] C. Wang et al., "Model-agnostic linear-memory online learning in spiking neural
       networks", Nature Communications 17:1745, 2026.

    Examples
    --------
    >>> import brainstate, braintrace
    >>> braintrace.ES_D_RTRL(brainstate.nn.Module(), decay_or_rank=3).decay
    0.5
    """

    names = ("es_d_rtrl", "esd_rtrl", "pp_prop")

    def __init__(
        self, model: brainstate.nn.Module, decay_or_rank: float | int = 0.9, **options: Any
    ) -> None:
        super().__init__(model, **options)
        is_rank = isinstance(decay_or_rank, (int, np.integer))
        self.decay = _decay((decay_or_rank - 1) / (decay_or_rank + 1) if is_rank else decay_or_rank)
        self.method, self.rule = FilterTraces(self.decay), f"{self.rule}(decay={self.decay!r})"


pp_prop = IODimVjpAlgorithm = ES_D_RTRL


class OTTT(Learner):
    r"""Online training through time (OTTT): low-pass filters of the inputs, for spiking networks.

    For an ETP operation with input :math:`x`, with :math:`D_f` and :math:`l` as in `D_RTRL`,

    .. math::

        \epsilon_x^t = \lambda\, \epsilon_x^{t-1} + x^t, \qquad
        \nabla w = \sum_t \left( \sum_a l^t[a]\, D_f^t[a] \right) \otimes \epsilon_x^t.

    There is one filter for each input of an ETP operation, for any number of units and states. This
    is the least memory of all rules with traces. The filter replaces the derivative of a leaky
    membrane with leak ``decay``; the effects of resets, adaptation and synapses on this derivative
    are ignored. Learning signals are backpropagated through the layers of the same step. A bias or
    an elementwise weight has no input to filter: its gradient is the gradient of each step.

    Parameters
    ----------
    model
        See `Learner`.
    decay
        ``λ`` of the filters, a float in ``[0, 1)``: usually the leak of the membranes. With zero,
        the gradient is the gradient of the single steps, as with `Immediate`.
    **options
        ``window``, ``strict``, ``mark`` and ``trace_dtype``; see
        `Learner`.

    Raises
    ------
    OptionError
        If ``decay`` is not a float in ``[0, 1)``.

    Notes
    -----
    The paper derives the rule for LIF neurons, with the leak as decay. Here, :math:`D_f` is the
    derivative of any model's step, so the rule runs on every model; ``decay`` is not compared with
    the leak of the model.

    References
    ----------
    .. [1] M. Xiao, Q. Meng, Z. Zhang, D. He, Z. Lin, "Online training through time for spiking
       neural networks", NeurIPS 2022, arXiv:2210.04195, section 4.1.

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
    >>> xs = jnp.ones((3, 1, 2))
    >>> learner = braintrace.compile(Leaky(), "ottt", xs[0], batch_size=1, decay=0.5)
    >>> gradients = learner.etrace_grad(xs, step_fn=lambda x: learner(x).sum(), reduction="sum")
    >>> float(gradients[("w",)][0, 0])
    4.25
    """

    names = ("ottt",)

    def __init__(self, model: brainstate.nn.Module, decay: float, **options: Any) -> None:
        super().__init__(model, **options)
        self.method = FilterTraces(_decay(decay), filters_outputs=False)
        self.rule = f"{self.rule}(decay={decay!r})"
