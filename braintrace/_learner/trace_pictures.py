"""Plots of the eligibility of one weight: over time, or the current trace.

An element of a trace is the derivative of one state scalar with respect to one entry of the weight.
The plot shows the norm over all entries of the same output. For a large layer, it shows evenly
spaced units.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._arguments import NOT_NEGATIVE, check_arrays, check_option
from .._brainstate import is_watched
from .._core.layout import fans_over_samples, trace_sites
from .._errors import OptionError
from .._etrace_op import propagate
from .._graph import ETraceGraph, FlatState, Role, Traces, TraceSpec, TraceSpecs, specs_of
from .._pictures import draw_traces
from .._pictures.draw_traces import Panel
from .._rules import eligibility
from .._sharding import on_host
from .._typing import Path, PyTree, path_name
from .calls.arguments import length_of
from .learner import LEARNER, Learner

if TYPE_CHECKING:
    from .._algorithms import ETraceAlgorithm

_UNITS: tuple[Role, ...] = ("output", "state", "entry")
"""Axes that can be the units of a plot: the first of them that a trace has."""

MOST_UNITS = 512
"""Maximum number of units of a plot: about its height in pixels."""


class _Outputs(NamedTuple):
    """The output of each entry of a sparse weight, and the number of outputs."""

    of_entries: np.ndarray
    number: int


def plot_traces(
    learner: Learner, path: str | Path, *sequences: PyTree, sample: int = 0, axes: Any = None
) -> list[Any]:
    """Plot the eligibility of one weight, for every hidden state that it reaches.

    With a sequence, the learner runs over it, and each plot shows the magnitude of the trace over
    time: for every step and every output of the weight, the norm of the trace of all entries of
    that output. Without a sequence, it shows the current trace by input and output (for a sparse
    weight, by output). If there are more than 512 outputs, the plot shows 512 evenly spaced ones,
    and the label of the axis says so.

    Parameters
    ----------
    learner
        A compiled learner. It does not change: the sequence runs on a copy of its current state,
        step by step in one compiled loop.
    path
        Path of the parameter, or its name, as for `Learner.eligibility`.
    *sequences
        Arguments of the model's ``update``, time first, as for `Learner.etrace_evolve`.
    sample
        The plotted sample of a batch.
    axes
        Matplotlib axes to draw in, one for each plot; ``None``: axes of a new figure.

    Returns
    -------
    list
        The axes: one for each hidden state, and for each array if the parameter's value is a dict.

    Raises
    ------
    OptionError
        If there is no such weight, or no trace of its form: see `Learner.eligibility`.
    MissingPackageError
        Without matplotlib.

    Examples
    --------
    >>> import brainstate, braintrace, jax.numpy as jnp, matplotlib
    >>> matplotlib.use("agg")
    >>> model = braintrace.nn.IndRNN(2, 3)
    >>> learner = braintrace.compile(model, "d_rtrl", jnp.ones((1, 2)), batch_size=1)
    >>> (ax,) = braintrace.plot_traces(learner, "u", jnp.ones((20, 1, 2)))
    >>> ax.get_title(), ax.images[0].get_array().shape  # units, steps
    ('∂h / ∂u', (3, 20))
    """
    check_option("learner", learner, LEARNER)
    check_option("sample", sample, NOT_NEGATIVE)
    if is_watched():
        raise OptionError(
            "`plot_traces` draws values, which are unknown inside a transformation such as "
            "`jit`: call it outside."
        )
    algorithm = learner.algorithm
    if sequences:
        result = _norms_over_time(learner, path, sequences, sample)
        panels = [_panel(name, "step", norms.T) for name, norms in result.items()]
    else:
        matrices = _matrices(algorithm, algorithm.traces.value, path, sample)
        panels = [_panel(name, "entry", on_host(m)) for name, m in matrices.items()]
    return draw_traces(panels, axes)


def _panel(title: str, across: str, image: np.ndarray) -> Panel:
    """Return an image of at most `MOST_UNITS` units, evenly spaced."""
    units = len(image)
    if units <= MOST_UNITS:
        return Panel(title, across, "unit", image)
    shown = np.linspace(0, units - 1, MOST_UNITS).round().astype(int)
    return Panel(title, across, f"unit ({MOST_UNITS} of {units:,})", image[shown])


def _norms_over_time(
    learner: Learner, path: str | Path, sequences: tuple[PyTree, ...], sample: int
) -> dict[str, np.ndarray]:
    """Return the norms ``(steps, units)`` of the traces after every step."""
    for index, sequence in enumerate(sequences):
        check_arrays(f"sequences[{index}]", sequence)
    length_of(sequences)
    pure = learner.functional()

    def step(state: PyTree, arguments: tuple[PyTree, ...]) -> tuple[PyTree, dict[str, jax.Array]]:
        state, _ = pure.step(state, *arguments)
        matrices = _matrices(learner.algorithm, state.traces, path, sample)
        return state, {name: jnp.linalg.norm(m, axis=1) for name, m in matrices.items()}

    run = jax.jit(lambda state, sequences: jax.lax.scan(step, state, sequences)[1])
    return {name: on_host(norms) for name, norms in run(pure.state(), sequences).items()}


def _matrices(
    algorithm: ETraceAlgorithm, traces: Traces, path: str | Path, sample: int
) -> dict[str, jax.Array]:
    """Return magnitudes ``(units, entries)`` for one sample, by the title of their plot."""
    result = {}
    for name, array, axes, outputs in _arrays(algorithm, traces, path):
        unit = next(role for role in _UNITS if role in axes)
        units = [axis for axis, role in enumerate(axes) if role == unit]
        entries = [a for a, role in enumerate(axes) if role in ("input", "entry") and role != unit]
        array = _of_sample(jnp.abs(array), axes, sample)
        others = [axis for axis in range(array.ndim) if axis not in (*units, *entries)]
        norms = jnp.sqrt(jnp.sum(array**2, axis=tuple(others), keepdims=True))
        count = math.prod(array.shape[axis] for axis in units)
        matrix = jnp.transpose(norms, (*units, *entries, *others)).reshape(count, -1)
        result[name] = matrix if outputs is None else _of_outputs(matrix, outputs)
    return result


def _of_outputs(matrix: jax.Array, outputs: _Outputs) -> jax.Array:
    """Return the norms ``(outputs, 1)`` of the entries of each output, given their outputs."""
    squares = jnp.sum(matrix**2, axis=1)
    return jnp.sqrt(jax.ops.segment_sum(squares, *outputs))[:, None]


def _of_sample(array: jax.Array, axes: Sequence[Role], sample: int) -> jax.Array:
    """Return the part of one sample."""
    for axis, role in enumerate(axes):
        if role == "batch":
            if sample >= array.shape[axis]:
                raise OptionError(
                    f"`sample` is {sample}; the model is compiled for {array.shape[axis]} "
                    "samples, counted from 0."
                )
            return jax.lax.slice_in_dim(array, sample, sample + 1, axis=axis)
    return array


def _arrays(
    algorithm: ETraceAlgorithm, traces: Traces, path: str | Path
) -> Iterator[tuple[str, jax.Array, tuple[Role, ...], _Outputs | None]]:
    """Yield the traces of one weight: name, array, roles of its axes, outputs of its entries."""
    compiled = algorithm.compiled
    graph, specs = compiled.fused.graph, compiled.fused.trace_specs
    of_states = eligibility(graph, specs, compiled.as_fused(traces), path)
    weight = path if isinstance(path, str) else path_name(tuple(path))
    for state, value in of_states.items():
        leaves = value.items() if isinstance(value, dict) else [("", value)]
        for leaf, array in leaves:
            name = f"∂{state} / ∂{weight}" + (f"/{leaf}" if leaf else "")
            if graph.flat_state is not None:
                yield name, array, _axes_of_flat_state(graph.flat_state, state, array.ndim), None
                continue
            spec = _spec(graph, specs, weight, state, array.ndim)
            is_sparse = "entry" in spec.axes and "output" not in spec.axes
            outputs = _outputs_of_entries(graph, spec, array.shape[-1]) if is_sparse else None
            yield name, array, _with_samples(graph, spec), outputs


def _outputs_of_entries(graph: ETraceGraph, spec: TraceSpec, count: int) -> _Outputs:
    """Return the output that each entry of a sparse weight belongs to.

    It follows from the rule that multiplies a trace by one factor for each output.
    """
    relation = next(r for r in graph.hidden_param_op_relations if r.key == spec.relation)
    y = relation.y_var.aval
    with jax.ensure_compile_time_eval():
        factor = jnp.broadcast_to(jnp.arange(y.shape[-1], dtype=float), y.shape)
        ones = {spec.operand: jnp.ones((*y.shape[:-1], count))}
        result = propagate(relation.primitive, relation.params, factor, ones)[spec.operand]
    return _Outputs(np.asarray(result).reshape(-1, count)[0].astype(int), y.shape[-1])


def _with_samples(graph: ETraceGraph, spec: TraceSpec) -> tuple[Role, ...]:
    """Return the axes of a trace; an elementwise weight may have one trace per sample."""
    of_trace = (
        site
        for site in trace_sites(graph)
        if site.relation.key == spec.relation
        and any(state.name == spec.state for state in site.group.states)
    )
    if spec.axes[:1] == ("fan_out",) and any(fans_over_samples(graph, s) for s in of_trace):
        return ("batch", *spec.axes[1:])
    return spec.axes


def _spec(graph: ETraceGraph, specs: TraceSpecs, weight: str, state: str, ndim: int) -> TraceSpec:
    """Return the specification of the trace of one weight and one state."""
    keys = {
        relation.key
        for relation in graph.hidden_param_op_relations
        if weight in map(path_name, relation.parameter_paths)
    }
    own = (s for s in specs_of(specs) if s.relation in keys and s.state == state)
    return next(s for s in own if len(s.axes) == ndim)


def _axes_of_flat_state(flat: FlatState, state: str, ndim: int) -> tuple[Role, ...]:
    """Return the roles of the axes of the trace of one weight and one state of a sample."""
    pairs = zip(flat.leaves, flat.axes, strict=True)
    (leaf, batch), *_ = [pair for pair in pairs if pair[0].name == state]
    lead: list[Role] = [] if batch is None else ["batch"]
    of_state: list[Role] = ["state"] * (len(leaf.shape) - len(lead))
    entries: list[Role] = ["entry"] * (ndim - len(lead) - len(of_state))
    return (*lead, *of_state, *entries)
