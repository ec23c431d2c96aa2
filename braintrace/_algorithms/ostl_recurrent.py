"""OSTL: exact within every layer, between layers within a step."""

from .._executor import LayeredTraces
from .algorithm import ETraceAlgorithm


class OSTLRecurrent(ETraceAlgorithm):
    r"""Online spatio-temporal learning: RTRL of each layer by itself.

    For layers :math:`l` with states :math:`s_l^t = f(s_l^{t-1}, s_{l-1}^t)`, recurrent weights
    included,

    .. math::

        \epsilon_l^t = \frac{\partial s_l^t}{\partial s_l^{t-1}} \epsilon_l^{t-1} +
            \frac{\partial s_l^t}{\partial w_l}, \qquad
        \nabla w_l = \sum_t \frac{\partial L^t}{\partial s_l^t}\, \epsilon_l^t,

    where :math:`\partial L^t / \partial s_l^t` goes down through the layers above within the step.
    For one layer that is `RTRL`, and so backpropagation through time. With several, what an upper
    layer remembers of a lower one is left out, and a warning says so. Hidden states that depend on
    each other over time are one layer (the ``c`` and ``h`` of an LSTM, excitatory and inhibitory
    neurons); a leaky readout is one of its own.

    Parameters
    ----------
    model, **options
        See `ETraceAlgorithm`. What `RTRL` refuses, is refused. Within a ``window``, all layers are
        differentiated together.

    References
    ----------
    .. [1] T. Bohnstingl et al., "Online spatio-temporal learning in deep neural networks", IEEE
       Transactions on Neural Networks and Learning Systems 34, 2023 (arXiv:2007.12723).

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
        """Traces of the whole state, each layer by itself."""
        return LayeredTraces()
