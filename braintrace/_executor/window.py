r"""Windows: several steps differentiated in full, plus the traces before them.

.. math::

    dL / dw = \partial L / \partial w + \sum_a \mu[a] \circ \epsilon^0[a], \qquad
    \mu[a] = \partial L / \partial h^0[a]

The partial derivatives pass all steps of the window, including everything that couples elements.
The traces contain the dependence of the states before the window on the weights.
"""

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp

from .._errors import OptionError
from .._graph import ETraceGraph, Records, Signal, Weights
from .._jax import Var, struct_of, zeros_mapped_like
from .._typing import PyTree
from .jacobians import Inputs, jacobians, operands
from .probed_step import finish, pre_step_probe, probe_shapes, with_callback_results
from .time_loops import scan_over_time
from .whole_state import step_of_layers
from .zero import is_zero

States = TypeVar("States")
Results = TypeVar("Results")


def _itself(value: Any) -> Any:
    return value


def _refuse(value: Any) -> Any:
    raise OptionError(
        "The arguments of the model depend on the differentiated parameters or states, and this "
        "learning rule follows these only within `update` of the model. Compute the dependence "
        "in `update`, or pass the arguments through `jax.lax.stop_gradient`."
    )


def _nothing(residuals: Any, cotangent: Any) -> tuple[None]:
    return (None,)


_given = jax.custom_vjp(_itself)
"""An argument of a step, which has no gradient under full-Jacobian rules."""
_given.defvjp(_refuse, _nothing)

StateProbes = dict[str, jax.Array]
"""One array per traced hidden state, by name, in the layout of its old value."""


def run_window(
    start: States,
    step: Callable[[States, Any], tuple[States, tuple[Results, Records]]],
    sequences: Any,
) -> tuple[States, Results, Records]:
    """Run the steps of a window.

    Parameters
    ----------
    start
        The states before it: constants, with a perturbation added to each traced one.
    step
        ``(states, slices) -> (states, (results, records))``, differentiable in full.
    sequences
        Arguments of the steps, time first.

    Returns
    -------
    states, results
        The states after the window, and the results of all its steps.
    records
        Residuals of all steps, without gradients.
    """
    states, (results, records) = scan_over_time(step, start, sequences)
    return states, results, jax.lax.stop_gradient(records)


def window_signals(graph: ETraceGraph, mu: StateProbes, length: int) -> Signal:
    """Return the signals of a window's steps, from the derivatives for the states before it.

    They are signals of its first step for the states before that; see `chunk_gradient`.

    Parameters
    ----------
    graph
        The compiled model.
    mu
        The derivatives, in the form of `StateProbes`.
    length
        Number of steps.
    """
    signal = {
        name: jnp.zeros((length, *probe.shape), probe.dtype)
        for name, probe in probe_shapes(graph).items()
    }
    for state in graph.traced_states:
        of_first = mu[state.name][None]
        rest = jnp.zeros((length - 1, *of_first.shape[1:]), of_first.dtype)
        signal[pre_step_probe(state)] = jnp.concatenate([of_first, rest])
    return signal


def state_shapes(graph: ETraceGraph) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of `StateProbes`."""
    return {state.name: struct_of(state) for state in graph.traced_states}


def probes_of_past(
    graph: ETraceGraph,
    gradient: Callable[[ETraceGraph, Weights, StateProbes, PyTree, bool], Weights],
    past: tuple[Weights, PyTree],
    zeros_select: bool,
) -> StateProbes:
    """Return a zero for every traced state, whose cotangent becomes a gradient of the operands.

    Parameters
    ----------
    graph
        The compiled model.
    gradient
        `TraceMethod.entry_gradient`, or a function of another value instead of the traces.
    past
        The operands, and the traces before these states.
    zeros_select
        See `TraceMethod.entry_gradient`.
    """
    shapes = state_shapes(graph)

    def zeros(weights: Weights, traces: PyTree) -> StateProbes:
        found: StateProbes = zeros_mapped_like(shapes, (weights, traces))
        return found

    def forward(weights: Weights, traces: PyTree) -> tuple[StateProbes, tuple[Weights, PyTree]]:
        return zeros(weights, traces), (weights, traces)

    def backward(residuals: tuple[Weights, PyTree], mu: StateProbes) -> tuple[Any, None]:
        weights, traces = residuals
        before = shapes_of_zero or traces
        return gradient(graph, weights, mu, before, zeros_select), None

    probes = jax.custom_vjp(zeros)
    probes.defvjp(forward, backward)
    weights, traces = past
    shapes_of_zero = traces if is_zero(traces) else None
    arrays = None if shapes_of_zero else jax.lax.stop_gradient(traces)
    result: StateProbes = probes(weights, arrays)
    return result


Run: TypeAlias = Callable[[ETraceGraph, Inputs], tuple[list[Any], dict[Var, Any]]]
"""``(graph, inputs) -> (outputs, new states)`` of one step."""


def window_step(graph: ETraceGraph, inputs: Inputs) -> tuple[list[Any], dict[Var, Any], Records]:
    """Run one step of a window, differentiable in full, and return its residuals.

    Raises
    ------
    OptionError
        For a full-Jacobian rule, if arguments of the step have a derivative.
    """
    return _recorded(graph, inputs, _in_full)


def passed_step(graph: ETraceGraph, inputs: Inputs) -> tuple[list[Any], dict[Var, Any], Records]:
    """Run one step as a full-Jacobian rule differentiates it outside of windows.

    For a layered rule, layers have no memory of each other; see `window_step`.
    """
    is_layered = graph.whole is not None and graph.whole.layers
    return _recorded(graph, inputs, step_of_layers if is_layered else _in_full)


def _in_full(graph: ETraceGraph, inputs: Inputs) -> tuple[list[Any], dict[Var, Any]]:
    return finish(graph, inputs, {})


def _recorded(
    graph: ETraceGraph, inputs: Inputs, run: Run
) -> tuple[list[Any], dict[Var, Any], Records]:
    if graph.passes_weights:
        arguments = set(graph.traced.argument_vars)
        inputs = {v: _given(x) if v in arguments else x for v, x in inputs.items()}
    inputs = with_callback_results(graph.traced, inputs)
    weights = operands(graph, inputs)
    outputs, new_states = run(graph, inputs)
    return outputs, new_states, jacobians(graph, inputs, weights)
