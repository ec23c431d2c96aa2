"""OSTL with recurrence: exact within each layer, truncated between layers over time."""

from .._executor import LayeredTraces
from .algorithm import ETraceAlgorithm


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
