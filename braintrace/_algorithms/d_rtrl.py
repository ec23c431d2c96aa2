"""D-RTRL: real-time recurrent learning with a position-by-position transition."""

from typing import Any, ClassVar

import brainstate

from .._arguments import BOOLEAN, check_option
from .._executor import ParameterTraces
from .algorithm import ETraceAlgorithm


class D_RTRL(ETraceAlgorithm):
    r"""Online learning with parameter-dimension traces.

    The trace of a weight has the size of the weight, per sample and hidden state that it
    reaches. The gradient equals backpropagation through time exactly wherever every path from
    state to state is position by position: leaky integrators, IndRNNs, diagonal linear RNNs,
    spiking layers without recurrent weights. Recurrent mixing is left out.

    Parameters
    ----------
    model, window, strict, unroll_limit, mark, trace_dtype
        See `ETraceAlgorithm`.
    readout_filters
        Exact through linear readouts ``o' = kappa o + A(v)`` as well: ``v`` a function of hidden
        states position by position, ``A`` linear, ``kappa`` one number for all units. What the
        readout remembers is that of filters ``f' = kappa f + v``: further states of the layer
        below, and for each of them a further trace of its weights. They live with the traces, and
        `learner.report()` lists them; ``False``: none.

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

    names: ClassVar[tuple[str, ...]] = ("d_rtrl",)

    def __init__(
        self, model: brainstate.nn.Module, *, readout_filters: bool = True, **options: Any
    ) -> None:
        super().__init__(model, **options)
        check_option("readout_filters", readout_filters, BOOLEAN)
        self.readout_filters = readout_filters

    @property
    def method(self) -> ParameterTraces:
        """Parameter-dimension traces."""
        return ParameterTraces()


ParamDimVjpAlgorithm = D_RTRL
