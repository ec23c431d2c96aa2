"""e-prop (eligibility propagation) as a configuration of D-RTRL."""

from typing import Any, ClassVar

import brainstate

from .._checks import check_choice
from .._errors import CompilationError
from .._graph import ETraceGraph
from .d_rtrl import D_RTRL
from .rflo import check_feedback, has_feedback


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
