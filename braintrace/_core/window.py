r"""Windows: several steps differentiated in full, plus the traces before them.

.. math::

    dL / dw = \partial L / \partial w + \sum_a \mu[a] \circ \epsilon^0[a], \qquad
    \mu[a] = \partial L / \partial h^0[a]

The partial derivatives pass all steps of the window, including everything that couples elements.
The traces contain the dependence of the states before the window on the weights.
"""

from typing import Any

import jax
import jax.numpy as jnp

from .._errors import OptionError
from .._graph import ETraceGraph, Records, Signal
from .._jax import Var
from .flat_state import step_of_layers
from .jacobian.jacobians import Inputs, operands, residuals
from .probed_step import Probes, finish, pre_step_probe, probe_shapes


def _refuse(primals: Any, tangents: Any) -> Any:
    raise OptionError(
        "The arguments of the model depend on the differentiated parameters or states, and this "
        "learning rule follows these only within `update` of the model. Compute the dependence "
        "in `update`, or pass the arguments through `jax.lax.stop_gradient`."
    )


_given: Any = jax.custom_jvp(lambda value: value)
"""An argument of a step, which has no gradient under full-Jacobian rules."""
_given.defjvp(_refuse)


def window_signals(graph: ETraceGraph, before: Signal, length: int) -> Signal:
    """Return the signals of a window's steps, from those of its first for the states before it."""

    def all_zero(steps: int, like: Any) -> jax.Array:
        return jnp.zeros((steps, *like.shape), like.dtype)

    signal = {name: all_zero(length, probe) for name, probe in probe_shapes(graph).items()}
    for name, of_first in before.items():
        signal[name] = jnp.concatenate([of_first, all_zero(length - 1, of_first[0])])
    return signal


def before_window(graph: ETraceGraph, inputs: Inputs, probes: Probes) -> Inputs:
    """Return the inputs of a first step, with a perturbation added to each traced state."""
    states = graph.traced_states
    old = {s.in_var: inputs[s.in_var] + probes[pre_step_probe(s)] for s in states}
    return {**inputs, **old}


def window_step(
    graph: ETraceGraph, inputs: Inputs, separates_layers: bool = False
) -> tuple[list[Any], dict[Var, Any], Records]:
    """Run one step of a window, differentiable in full, and return its residuals.

    With ``separates_layers``, the layers of a layered rule have no memory of each other, as outside
    of windows.

    Raises
    ------
    OptionError
        For a full-Jacobian rule, if arguments of the step have a derivative.
    """
    if graph.passes_weights:
        arguments = set(graph.traced.argument_vars)
        inputs = {v: _given(x) if v in arguments else x for v, x in inputs.items()}
    weights = operands(graph, inputs)
    if separates_layers and graph.flat_state is not None and graph.flat_state.layers:
        outputs, new_states = step_of_layers(graph, inputs)
    else:
        outputs, new_states = finish(graph.traced, inputs, {})
    return outputs, new_states, residuals(graph, inputs, weights)


def passed_step(graph: ETraceGraph, inputs: Inputs) -> tuple[list[Any], dict[Var, Any], Records]:
    """Run one step as a full-Jacobian rule differentiates it outside of windows."""
    return window_step(graph, inputs, separates_layers=True)
