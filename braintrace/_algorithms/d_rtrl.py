"""D-RTRL: real-time recurrent learning with elementwise recurrent Jacobians."""

from typing import Any, ClassVar

import brainstate

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
