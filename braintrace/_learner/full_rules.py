"""Learners that follow all paths (RTRL, OSTL with recurrence, SnAp, KF-RTRL, UORO), and none."""

from typing import Any

import brainstate

from .._rules.random_factors import KroneckerTraces, RankOneTraces
from .._rules.rtrl import FullTraces, LayeredTraces, NoTraces, SparseTraces
from .learner import Learner


class RTRL(Learner):
    r"""Real-time recurrent learning (RTRL): the exact gradient, forward in time.

    For all hidden state :math:`S` of a sample as one vector,

    .. math::

        \epsilon^t = J^t \epsilon^{t-1} + \frac{\partial S^t}{\partial w}, \qquad
        \nabla w = \sum_t \frac{\partial L^t}{\partial S^t}\, \epsilon^t, \qquad
        J^t = \frac{\partial S^t}{\partial S^{t-1}}.

    The gradient equals backpropagation through time over the whole history, for every
    differentiable model with independent samples: recurrent weights, stacked layers, leaky
    readouts, and every parameter, with or without an ETP operation. Memory is constant in sequence
    length.

    The cost is high: with ``n`` state scalars, a parameter of size ``|w|`` has a trace of ``n |w|``
    scalars for each sample. Traces advance once per chunk of ``K`` steps, by products over time, so
    a step takes about ``n² |w| / K + n |w| + n³`` operations per sample.

    Parameters
    ----------
    model, window, strict, mark, trace_dtype
        See `Learner`. A ``window`` has no effect: the gradient is exact without it.

    Raises
    ------
    CompilationError
        When compiled: for samples that are coupled, for a nonlinear backward rule on the path to a
        state, and for a floating-point State that passes gradients between steps and is not a
        `brainstate.HiddenState`.
    OptionError
        When differentiated: if arguments of the model depend on parameters or states.

    Notes
    -----
    Initial values of states are constants. The paper advances the recursion at each step, for one
    fully recurrent layer. Here, the steps of a chunk are combined, which gives the same gradient,
    and parameters are constant within a chunk.

    References
    ----------
    .. [1] R. J. Williams and D. Zipser, "A learning algorithm for continually running fully
       recurrent neural networks", Neural Computation 1, 1989.

    Examples
    --------
    >>> import brainstate, braintrace, jax, jax.numpy as jnp
    >>> class Vanilla(brainstate.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.w = brainstate.ParamState(0.5 * jnp.ones((3, 3)))
    ...
    ...     def init_state(self, batch_size=1):
    ...         self.h = brainstate.HiddenState(jnp.ones((batch_size, 3)))
    ...
    ...     def update(self, x):
    ...         self.h.value = jnp.tanh(x + self.h.value @ self.w.value)
    ...         return self.h.value
    >>> model, xs = Vanilla(), 0.1 * jnp.ones((20, 1, 3))
    >>> learner = braintrace.compile(model, "rtrl", xs[0], batch_size=1)
    >>> (gradient,) = learner.etrace_grad(xs, step_fn=lambda x: learner(x).sum()).values()
    >>> def loss(w):
    ...     step = lambda h, x: (jnp.tanh(x + h @ w), jnp.tanh(x + h @ w).sum())
    ...     return jax.lax.scan(step, jnp.ones((1, 3)), xs)[1].mean()
    >>> bool(jnp.allclose(gradient, jax.grad(loss)(model.w.value), rtol=1e-4))
    True
    """

    names = ("rtrl",)
    method = FullTraces()

    def window_of(self, requested: int | None = None) -> None:
        """Return None: the gradient is exact without windows."""


class OSTLRecurrent(Learner):
    r"""Online spatio-temporal learning (OSTL): RTRL of each layer separately.

    For layers :math:`l` with states :math:`s_l^t = f(s_l^{t-1}, s_{l-1}^t)`, including recurrent
    weights,

    .. math::

        \epsilon_l^t = \frac{\partial s_l^t}{\partial s_l^{t-1}} \epsilon_l^{t-1} +
            \frac{\partial s_l^t}{\partial w_l}, \qquad
        \nabla w_l = \sum_t \frac{\partial L^t}{\partial s_l^t}\, \epsilon_l^t.

    :math:`\partial L^t / \partial s_l^t` is backpropagated through the layers above within the
    step. For one layer, this is `RTRL`, and equals backpropagation through time. For several
    layers, the memory of an upper layer is truncated in the gradient of the weights below, with a
    warning. Hidden states that depend on each other over time are one layer (the ``c`` and ``h`` of
    an LSTM, excitatory and inhibitory neurons). A leaky readout is a separate layer.

    Parameters
    ----------
    model, **options
        See `Learner`. Models that `RTRL` refuses are refused. Within a ``window``, all
        layers are differentiated together.

    References
    ----------
    .. [1] T. Bohnstingl et al., "Online spatio-temporal learning in deep neural networks", IEEE
       Transactions on Neural Networks and Learning Systems 34, 2023 (arXiv:2007.12723), the form
       for generic recurrent networks.

    Examples
    --------
    >>> import braintrace, jax.numpy as jnp
    >>> model = braintrace.nn.GRUCell(2, 3)
    >>> learner = braintrace.compile(model, "ostl_recurrent", jnp.ones((1, 2)), batch_size=1)
    >>> gradients = learner.etrace_grad(jnp.ones((4, 1, 2)), step_fn=lambda x: learner(x).sum())
    >>> learner.report().diagnostics
    ()
    """

    names = ("ostl_recurrent", "ostlrecurrent")
    method = LayeredTraces()


class SnAp(Learner):
    r"""Sparse n-step approximation (SnAp) of real-time recurrent learning.

    The derivative of all hidden states with respect to a weight is sparse in the first steps after
    the weight's effect. SnAp keeps the entries that are nonzero within ``n`` steps, and sets the
    others to zero.

    Every parameter, marked or not, has a trace for each scalar of the state of all layers that it
    reaches within ``n`` steps, by the structure of the model: the element that an input weight
    drives with ``n = 1``, the entries of a sparse matrix or of a weight times a constant mask, all
    units of a dense matrix from ``n = 2`` on, and units of upper layers that are reached in the
    same step. These traces follow all paths of the model, so a dense recurrent layer has the
    gradient of `RTRL` from ``n = 2`` on. Use it for sparse connectivity: ``report`` contains the
    bytes of the traces, and of the full influence matrix. Each step computes the derivatives of all
    new states by old states and by weights, as `RTRL` does, so a network is limited to sizes for
    which one step of `RTRL` fits into memory.

    Parameters
    ----------
    model
        See `Learner`.
    n
        Number of steps.
    **options
        ``window``, ``strict``, ``mark`` and ``trace_dtype``; see
        `Learner`.

    Raises
    ------
    OptionError
        If ``n`` is not a positive integer.
    CompilationError
        For every model that `RTRL` refuses, such as models with coupled samples.

    References
    ----------
    .. [1] J. Menick et al., "Practical real time recurrent learning with a sparse approximation",
       ICLR 2021 (arXiv:2006.07232), section 3.

    Examples
    --------
    A recurrent cell, whose past is truncated by `D_RTRL`:

    >>> import braintrace, jax.numpy as jnp
    >>> x = jnp.ones((5, 2))
    >>> learner = braintrace.compile(braintrace.nn.ValinaRNNCell(2, 3), "snap", x, batch_size=5)
    >>> learner(x).shape
    (5, 3)
    """

    names = ("snap",)

    def __init__(self, model: brainstate.nn.Module, n: int = 1, **options: Any) -> None:
        super().__init__(model, **options)
        self.method, self.rule = SparseTraces(n), f"{self.rule}(n={n!r})"


class KF_RTRL(Learner):
    r"""Kronecker-factored RTRL (KF-RTRL): unbiased random estimate of the gradient of RTRL.

    For a weight that multiplies an input :math:`x`, `RTRL` carries the derivative of all hidden
    states of a sample with respect to the weight. This rule estimates it by a product :math:`u
    \otimes A` of a vector shaped like the input and a matrix of states by outputs:

    .. math::

        u' = p_0 u + p_1 \nu x, \qquad A' = J A / p_0 + \nu F / p_1.

    :math:`J` and :math:`F` are the derivatives of the new states with respect to the old states and
    to the output of the product. There is one random sign :math:`\nu` per weight, sample and step.
    The factors :math:`p_0 = \sqrt{|J A| / |u|}` and :math:`p_1 = \sqrt{|F| / |x|}` balance the
    norms. The derivative of the step itself is exact; only the derivative of earlier steps is
    estimated. A bias is a weight of the constant input 1. An elementwise parameter (a leak, a gain)
    has the exact trace of `RTRL`, which is as large as an :math:`A`.

    The mean over random signs is the gradient of `RTRL`: backpropagation through time over the
    whole past, for every parameter, marked or not. One estimate has much less variance than with
    `UORO`. Memory is states times outputs of each product, per sample. A step costs one product of
    :math:`J` with that matrix, which is cheaper than RTRL by the number of inputs.

    Parameters
    ----------
    model
        See `Learner`.
    seed
        Seed of the random signs. A reset does not restart the random stream, so sequences have
        independent noise.
    **options
        ``window``, ``strict``, ``mark`` and ``trace_dtype``; see
        `Learner`. Gradients are exact within a ``window``, and estimated for the time
        before it: longer windows have less noise.

    Raises
    ------
    OptionError
        If ``seed`` is not an integer of 32 bits.
    PrimitiveError
        When compiled: for a weight that multiplies several parts of its input (a convolution), or
        whose gradient is not linear in the input.

    Notes
    -----
    The paper draws two independent signs per step. One sign gives the same distribution, because
    only the product of the two signs matters. If one norm of a ratio is zero, both terms of that
    product are zero here. See `UORO` for the trace ``"key"`` and for ``vmap``.

    References
    ----------
    .. [1] A. Mujika, F. Meier and A. Steger, "Approximating real-time recurrent learning with
       random Kronecker factors", NeurIPS 2018 (arXiv:1805.10842), Algorithm 1.

    Examples
    --------
    >>> import braintrace, jax.numpy as jnp
    >>> x, cell = jnp.ones((5, 2)), braintrace.nn.LeakyRNN(2, 3)
    >>> learner = braintrace.compile(cell, "kf_rtrl", x, batch_size=5, seed=7)
    >>> [A.shape for A in learner.traces.value["A"].values()]
    [(5, 3, 3)]
    """

    names = ("kf_rtrl",)

    def __init__(self, model: brainstate.nn.Module, *, seed: int = 0, **options: Any) -> None:
        super().__init__(model, **options)
        self.method = KroneckerTraces(int(seed))


class UORO(Learner):
    r"""Unbiased online recurrent optimization (UORO): a random rank-one estimate of RTRL.

    `RTRL` carries the derivative of all hidden states of a sample with respect to all parameters.
    This rule estimates it by a product :math:`s \otimes t` of a vector shaped like the states and a
    vector shaped like the parameters:

    .. math::

        s' = \rho_0 J s + \rho_1 \nu, \qquad t' = t / \rho_0 + \nu^\top F / \rho_1.

    :math:`J` and :math:`F` are the derivatives of the new states with respect to the old states and
    to the parameters, and :math:`\nu` are random signs. The factors :math:`\rho_0 = \sqrt{|t| / |J
    s|}` and :math:`\rho_1 = \sqrt{|\nu^\top F| / |\nu|}` balance the norms. The derivative of the
    step itself is exact. The derivative of earlier steps is the estimate :math:`(\mu \cdot s)\, t`,
    with :math:`\mu` the derivative of the loss with respect to the states before the step.

    The mean over random signs is the gradient of RTRL: backpropagation through time over the whole
    past, for every model that RTRL accepts and every parameter, marked or not. One estimate is
    noisy, and the noise grows with the number of states and steps; use small learning rates or many
    samples. Memory is one copy of the parameters per sample. A step costs a few passes over this
    copy, without a Jacobian.

    Parameters
    ----------
    model
        See `Learner`.
    seed
        Seed of the random signs, drawn for each sample and step. A reset does not restart the
        random stream, so sequences have independent noise.
    **options
        ``window``, ``strict``, ``mark`` and ``trace_dtype``; see
        `Learner`. Gradients are exact within a ``window``, and estimated for the time
        before it: longer windows have less noise.

    Raises
    ------
    OptionError
        If ``seed`` is not an integer of 32 bits.

    Notes
    -----
    The paper adds a small constant to :math:`\rho_0` and :math:`\rho_1` for numerical stability.
    Here, both terms of a product are zero if one norm of its ratio is zero.

    The trace ``"key"`` determines the next signs; it is saved and restored with the other traces.
    Learners under ``vmap`` (`Learner.functional`) draw the same signs, unless they are given
    different keys.

    References
    ----------
    .. [1] C. Tallec and Y. Ollivier, "Unbiased online recurrent optimization", ICLR 2018
       (arXiv:1702.05043), Algorithm 1.

    Examples
    --------
    >>> import braintrace, jax.numpy as jnp
    >>> x = jnp.ones((5, 2))
    >>> learner = braintrace.compile(braintrace.nn.GRUCell(2, 3), "uoro", x, batch_size=5, seed=7)
    >>> learner.traces.value["s"].shape
    (5, 3)
    """

    names = ("uoro",)

    def __init__(self, model: brainstate.nn.Module, *, seed: int = 0, **options: Any) -> None:
        super().__init__(model, **options)
        self.method = RankOneTraces(int(seed))


class Immediate(Learner):
    """Gradient of single steps without traces; with a ``window``, truncated BPTT.

    The gradient is the sum of the gradients of the single steps, with the states before each step
    held constant. It needs no memory, and is the baseline for every rule with traces. It covers
    every weight, marked or not, and every model with a hidden state.

    With a ``window`` of ``K`` steps, it is truncated backpropagation through time: each window is
    differentiated in full, with the states before it held constant.

    Parameters
    ----------
    model, window, strict, mark, trace_dtype
        See `Learner`. ``trace_dtype`` and ``strict`` have no effect: the rule has no traces
        and no truncated paths to report.

    Notes
    -----
    The paper's BPTT(h; h') backpropagates over ``h`` steps every ``h'`` steps, so its ranges may
    overlap. Windows do not overlap: this is BPTT(K; K).

    References
    ----------
    .. [1] R. J. Williams and J. Peng, "An efficient gradient-based algorithm for on-line training
       of recurrent network trajectories", Neural Computation 2, 1990 (the algorithm BPTT(h; h')).

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
    ...         self.h.value = 0.5 * self.h.value + x @ self.w.value
    ...         return self.h.value
    >>> xs = jnp.ones((4, 1, 2))
    >>> learner = braintrace.compile(Leaky(), "immediate", xs[0], batch_size=1)
    >>> def gradient(**options):
    ...     step_fn = lambda x: learner(x).sum()
    ...     gradients = learner.etrace_grad(xs, step_fn=step_fn, reduction="sum", **options)
    ...     return float(gradients[("w",)][0, 0])
    >>> gradient()
    4.0

    Windows of two steps: the second step of each window adds half of the first.

    >>> gradient(window=2)
    5.0
    """

    names = ("immediate",)
    method = NoTraces()
