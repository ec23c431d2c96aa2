"""Compiled step: a compiled model and its programs, each traced once per shape."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import brainstate
import jax

from .._core.gradient import as_chunk
from .._core.loops import scan_over_time
from .._core.sites import of_past, probes_of_past
from .._core.steps import Inputs, operands
from .._core.traces import reset_traces, stored_specs
from .._core.windows import before_window, single_step, window_step, with_gradient
from .._graph import Chunk, ETraceGraph, Records, TraceMethod, Weights
from .._jax import Var, for_devices
from .._typing import Path, path_name
from ..sharding import Placement
from .model_states import States, find_states, leaves_by_var, read_arguments
from .program import Program


class CompiledStep:
    """Programs of an algorithm: one step, or a window of steps, on the values of States.

    Parameters
    ----------
    graph
        The compiled model.
    outside
        States outside the model that a step uses.
    method
        The learning rule.
    every_state, trace_dtype
        Which states have traces, and the dtype in which traces are stored; see `CompilerOptions`
        and `compile_step`.
    parameters
        The model's parameters.
    placement
        Placement of its arrays on a mesh; ``None``: no mesh.

    Attributes
    ----------
    trace_specs
        Specifications of the stored traces.
    followed
        Paths of the model's hidden States that the traces follow, sorted: another step of the model
        may read them in another order.
    """

    def __init__(
        self,
        graph: ETraceGraph,
        outside: States,
        method: TraceMethod,
        every_state: bool,
        trace_dtype: Any,
        parameters: Iterable[brainstate.State],
        placement: Placement | None = None,
    ) -> None:
        self.graph = graph
        self.outside = outside
        self.trace_specs = stored_specs(graph.trace_specs, trace_dtype)
        followed = {s.path for s in graph.traced_states if s.path not in outside}
        self.followed = tuple(sorted(followed, key=path_name)) if self.trace_specs else ()
        self.parameters = tuple(parameters)
        self.placement = placement
        self._method = method
        self._every_state = every_state
        self._trace_dtype = trace_dtype
        self._in_vars = graph.traced.program.in_vars
        self._written = graph.traced.written_vars
        self._leaves = {leaf.in_var: leaf for leaf in graph.traced.leaves}
        self._found: tuple[States, dict[Path, brainstate.State]] = {}, {}
        self.single_step = Program(self._placed_program(self._single_step))
        self.steps = Program(self._placed_program(self._steps))
        self.window = Program(self._placed_program(self._window))
        self.reset = jax.jit(self._reset)

    @property
    def follows_every_state(self) -> bool:
        """Whether traces follow every hidden state, including states that no later step reads."""
        if self.graph.flat_state is not None:
            return True
        if any(group.downstream or group.delay_line for group in self.graph.hidden_groups):
            return False
        every = stored_specs(self._method.trace_specs(self.graph, True), self._trace_dtype)
        return bool(jax.tree.structure(every) == jax.tree.structure(self.trace_specs))

    def placed(self, placement: Placement) -> "CompiledStep":
        """Return this step with a placement on a mesh."""
        options = self._every_state, self._trace_dtype, self.parameters, placement
        return CompiledStep(self.graph, self.outside, self._method, *options)

    def find_states(self, states: States) -> dict[Path, brainstate.State]:
        """Return the States that the step uses, of the model and outside it."""
        before, result = self._found
        if before is not states:
            result = find_states(self.graph, states, self.outside)
            self._found = states, result
        return result

    def inputs(
        self, states: States, values: Sequence[Any], arguments: tuple[Any, ...]
    ) -> list[Any]:
        """Return the values of the program's inputs; see `leaves_by_var`."""
        of_states = leaves_by_var(self.graph, states, values)
        if self.placement is not None:
            arguments = self.placement.by_sample(arguments, axis=0)
        inputs = {**read_arguments(self.graph, arguments), **of_states}
        if self.placement is None:
            return [inputs[var] for var in self._in_vars]
        return [self._placed(var, inputs[var]) for var in self._in_vars]

    def _with_constant_states(self, inputs: Inputs) -> dict[Var, Any]:
        """Hold the states before a step constant: traces contain how they depend on parameters."""
        return {**inputs, **{v: jax.lax.stop_gradient(inputs[v]) for v in self._written}}

    def _placed(self, var: Var, value: Any) -> Any:
        """Place the value of an input of the program, if it belongs to a State."""
        leaf = self._leaves.get(var)
        if leaf is None or self.placement is None:
            return value
        return self.placement.leaf(leaf.path, leaf.leaf, value)

    def inputs_of_step(self, start: Inputs, written: list[Any], slices: Any) -> dict[Var, Any]:
        """Return the program's inputs in one step of a sequence.

        Parameters
        ----------
        start
            Inputs of the first step.
        written
            Current values of the States that steps write, as `written_of` returns them.
        slices
            Arguments of the step.
        """
        states = dict(zip(self._written, written, strict=True))
        return {**start, **states, **read_arguments(self.graph, slices)}

    def written_of(self, values: Mapping[Var, Any]) -> list[Any]:
        """Return the values of the State leaves that a step writes."""
        return [values[var] for var in self._written]

    def _placed_program(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of values, traces and sequences, placed on the mesh.

        ``function`` takes the values by input variable.
        """

        def by_var(values: list[Any]) -> dict[Var, Any]:
            return self._with_constant_states(dict(zip(self._in_vars, values, strict=True)))

        def of_values(values: list[Any], traces: Any, *sequences: Any) -> Any:
            if self.placement is None:
                return function(by_var(values), traces, *sequences)
            held = {var: self._placed(var, value) for var, value in by_var(values).items()}
            placement = self.placement
            sequences = placement.by_sample(sequences, axis=1)
            with for_devices(placement.devices):
                outputs, written, after = function(held, placement.traces(traces), *sequences)
            written = list(map(self._placed, self._written, written))
            return outputs, written, placement.traces(after)

        return of_values

    def step_on_its_own(self, inputs: Inputs, traces: Any, reset: jax.Array | None = None) -> Any:
        """Return one step, with its residuals placed on the mesh; see `single_step`."""
        step = self.graph, self._method, inputs, traces, reset
        if self.placement is None:
            return single_step(*step)
        return single_step(*step, self.placement.records)

    def _single_step(self, inputs: Inputs, traces: Any) -> Any:
        outputs, new_states, after = self.step_on_its_own(inputs, traces)
        return outputs, self.written_of(new_states), after

    def _steps(self, inputs: Inputs, traces: Any, sequences: Any) -> Any:
        def step(carry: tuple[list[Any], Any], slices: Any) -> Any:
            written, traces = carry
            current = self.inputs_of_step(inputs, written, slices)
            outputs, written, traces = self._single_step(
                self._with_constant_states(current), traces
            )
            return (written, traces), outputs

        start = (self.written_of(inputs), traces)
        (last, traces), outputs = jax.lax.scan(step, start, sequences)
        return outputs, last, traces

    def _reset(self, traces: Any, flags: jax.Array) -> Any:
        return reset_traces(self.trace_specs, traces, flags)

    def _window(self, inputs: Inputs, traces: Any, sequences: Any) -> Any:
        graph, method = self.graph, self._method
        weights = operands(graph, inputs)

        def step(written: list[Any], slices: Any) -> Any:
            current = self.inputs_of_step(inputs, written, slices)
            outputs, new_states, records = window_step(graph, current)
            return self.written_of(new_states), (outputs, records)

        def gradient(weights: Weights, traces: Any, signal: Any) -> Weights:
            chunk = Chunk(graph, weights, Records(x={}))
            return method.carry_in_vjp(chunk, of_past(graph, as_chunk(signal)), traces)

        held, before = jax.lax.stop_gradient((weights, traces))
        probes = with_gradient(probes_of_past(graph), gradient, weights, before)
        start = self.written_of(before_window(graph, inputs, probes))
        last, (outputs, records) = scan_over_time(step, start, sequences)
        steps: int = jax.tree.leaves(sequences)[0].shape[0]
        records = dataclasses.replace(jax.lax.stop_gradient(records), steps=steps)
        return outputs, last, method.update(Chunk(graph, held, records), before)


def carries_alike(one: CompiledStep, other: CompiledStep) -> bool:
    """Test whether two steps carry the same traces and filters, which mean the same."""

    def carried(step: CompiledStep) -> Any:
        specs = jax.tree.map(lambda s: (s.shape, str(s.dtype), s.axes, s.rule), step.trace_specs)
        filters = {leaf.name: (leaf.shape, leaf.dtype) for leaf in step.graph.traced.filters}
        return specs, filters

    return bool(carried(one) == carried(other))
