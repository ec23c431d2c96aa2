"""RTRL: real-time recurrent learning, exact; OSTL with recurrence: exact within each layer."""

from .._rules import FullTraces, LayeredTraces
from .algorithm import ETraceAlgorithm


class RTRL(ETraceAlgorithm):
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
    model, window, strict, unroll_limit, mark, trace_dtype
        See `ETraceAlgorithm`. A ``window`` has no effect: the gradient is exact without it.

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

    def window_of(self, requested: int | None = None) -> None:
        """Return None: the gradient is exact without windows."""

    @property
    def method(self) -> FullTraces:
        """Traces of the flattened state of a sample."""
        return FullTraces()


class OSTLRecurrent(ETraceAlgorithm):
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
        See `ETraceAlgorithm`. Models that `RTRL` refuses are refused. Within a ``window``, all
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

    @property
    def method(self) -> LayeredTraces:
        """Full-Jacobian traces of each layer separately."""
        return LayeredTraces()
