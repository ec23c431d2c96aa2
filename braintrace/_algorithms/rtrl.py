"""RTRL: real-time recurrent learning, exact."""

from .._executor import WholeTraces
from .algorithm import ETraceAlgorithm


class RTRL(ETraceAlgorithm):
    r"""Exact online learning: the trace of a parameter for every number of the state.

    The gradient is that of full backpropagation through time, over the whole history, for every
    model that has a derivative: recurrent mixing, layers on layers, leaky readouts, and every
    parameter, whether an ETP operation uses it or not. Its memory does not grow with time.

    It is dear: with ``n`` numbers of state, a parameter of size ``|w|`` has a trace of ``n |w|``
    for every sample. Over a sequence the traces move on once for a chunk of ``K`` steps, by
    products over time: a step takes about ``n² |w| / K + n |w| + n³`` per sample.

    Parameters
    ----------
    model, window, strict, unroll_limit, mark, trace_dtype
        See `ETraceAlgorithm`. A ``window`` has no effect: the gradient is exact without.

    Raises
    ------
    CompilationError
        When compiled: for samples that mix, for a ``while`` loop of unknown length or a backward
        rule that bends gradients on the way to a state, and for another floating-point State than
        a `brainstate.HiddenState` that carries gradients from step to step.
    OptionError
        When differentiated: if what the model is called with depends on parameters or states.

    Notes
    -----
    The values that states start from are constants.

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

    def window_of(self, asked: int | None = None) -> None:
        """Return None: the gradient is exact without windows."""

    @property
    def method(self) -> WholeTraces:
        """Traces of the whole state."""
        return WholeTraces()
