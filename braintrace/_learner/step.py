"""Compiled step: a compiled model, and the programs of a learner's single calls."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import brainstate
import jax

from .._core.gradient import as_chunk
from .._core.loops import scan_over_time
from .._core.sites import of_past, probes_of_past
from .._core.steps import Inputs, operands
from .._core.traces import Pairs, pairs_of, reset_traces, stored_specs
from .._core.windows import before_window, single_step, window_step, with_gradient
from .._graph import Chunk, ETraceGraph, Records, TraceMethod, Weights
from .._jax import Var
from .._model import States, find_states, leaves_by_var, whole_values
from .._typing import Path, PyTree, path_name
from ..sharding import Placement
from .arguments import read_arguments
from .program import Arguments, Body, BodyResult, Program


@dataclasses.dataclass(eq=False)
class CompiledStep:
    """A compiled model with its learning rule.

    Attributes
    ----------
    graph, method
        The compiled model, and the rule.
    outside
        States outside the model that a step uses.
    every_state, trace_dtype
        Which states have traces, and the dtype in which traces are stored; see `CompilerOptions`
        and `Learner`.
    placement
        Placement of its arrays on a mesh; ``None``: no mesh.
    trace_specs
        Specifications of the stored traces.
    followed
        Paths of the model's hidden States that the traces follow, sorted: another step of the model
        may read them in another order.
    """

    graph: ETraceGraph
    outside: States
    method: TraceMethod
    every_state: bool
    trace_dtype: Any
    placement: Placement | None = None

    def __post_init__(self) -> None:
        self.trace_specs = stored_specs(self.graph.trace_specs, self.trace_dtype)
        followed = {s.path for s in self.graph.traced_states if s.path not in self.outside}
        self.followed = tuple(sorted(followed, key=path_name)) if self.trace_specs else ()
        self.reset = jax.jit(functools.partial(reset_traces, self.trace_specs))
        self._found: tuple[States, dict[Path, brainstate.State]] = {}, {}
        self._programs: dict[str, Program] = {}

    @property
    def follows_every_state(self) -> bool:
        """Whether traces follow every hidden state, including states that no later step reads."""
        if self.graph.flat_state is not None:
            return True
        if any(group.downstream or group.delay_line for group in self.graph.hidden_groups):
            return False
        every = stored_specs(self.method.trace_specs(self.graph, True), self.trace_dtype)
        return bool(jax.tree.structure(every) == jax.tree.structure(self.trace_specs))

    def carries_like(self, other: CompiledStep) -> bool:
        """Test whether another step has the same traces and filters, which mean the same."""

        def carried(step: CompiledStep) -> Any:
            specs = jax.tree.map(
                lambda s: (s.shape, str(s.dtype), s.axes, s.rule), step.trace_specs
            )
            filters = {leaf.name: (leaf.shape, leaf.dtype) for leaf in step.graph.traced.filters}
            return specs, filters

        return bool(carried(self) == carried(other))

    # --- values of States

    def find_states(self, states: States) -> dict[Path, brainstate.State]:
        """Return the States that the step uses, of the model and outside it."""
        before, result = self._found
        if before is not states:
            result = find_states(self.graph, states, self.outside)
            self._found = states, result
        return result

    def read(self, values: Sequence[PyTree]) -> dict[Var, jax.Array]:
        """Return the leaves of the values of these States, by input variable."""
        return leaves_by_var(self.graph, self._found[1], values)

    def whole(self, new: Mapping[Var, Any]) -> list[PyTree]:
        """Return the values of the written States from their leaves."""
        return list(whole_values(self.graph, new).values())

    def written_of(self, by_var: Mapping[Var, Any]) -> list[Any]:
        """Return the leaves that a step writes."""
        return [by_var[var] for var in self.graph.traced.written_vars]

    def inputs_of_step(self, start: Inputs, written: Sequence[Any], slices: Any) -> dict[Var, Any]:
        """Return the inputs of a step in a sequence.

        Parameters
        ----------
        start
            Inputs of the first step.
        written
            Current leaves of the States that steps write, as `written_of` returns them.
        slices
            Arguments of the step.
        """
        return {**start, **self.by_var(written), **read_arguments(self.graph, slices)}

    def body(self, run: Callable[..., BodyResult], **attributes: Any) -> Body:
        """Return the body of a function of the values of these States."""
        is_written = [path in self.graph.traced.written_paths for path in self._found[1]]

        def written(items: Sequence[Any]) -> list[Any]:
            return [item for item, is_one in zip(items, is_written, strict=True) if is_one]

        return Body(run, list(self._found[1].values()), written, **attributes)

    # --- single calls

    def program(self, name: str) -> Program:
        """Return the program of a call: ``"step"``, ``"steps"``, ``"window"`` or ``"one"``.

        ``"one"`` is a window of one step.
        """
        if name not in self._programs:
            body = self.body(getattr(self, f"_{name}"), batch_axis=0 if name == "step" else 1)
            paths = {id(state): path for path, state in self._found[1].items()}
            placed = self.pairs, self.placement, paths
            self._programs[name] = Program(body, *placed, self.followed)
        return self._programs[name]

    @property
    def pairs(self) -> Pairs:
        """Traces that share an array."""
        return pairs_of(self.trace_specs)

    def one_step(self, inputs: Inputs, traces: Any, reset: jax.Array | None = None) -> Any:
        """Return one step, with its residuals placed on the mesh; see `single_step`."""
        step = self.graph, self.method, inputs, traces, reset
        return single_step(*step, *(() if self.placement is None else (self.placement.records,)))

    def _start(self, values: list[PyTree], arguments: tuple[PyTree, ...]) -> dict[Var, Any]:
        return self._held({**read_arguments(self.graph, arguments), **self.read(values)})

    def _held(self, inputs: Inputs) -> dict[Var, Any]:
        """Hold the states before a step constant: traces contain how they depend on parameters."""
        written = self.graph.traced.written_vars
        return {**inputs, **{var: jax.lax.stop_gradient(inputs[var]) for var in written}}

    def _result(self, outputs: list[Any], new: Mapping[Var, Any], traces: Any) -> BodyResult:
        tree = self.graph.traced.output_tree
        return (jax.tree.unflatten(tree, outputs), None), self.whole(new), traces

    def _step(self, values: list[PyTree], traces: Any, given: Arguments) -> BodyResult:
        return self._result(*self.one_step(self._start(values, given.sequences), traces))

    def _steps(self, values: list[PyTree], traces: Any, given: Arguments) -> BodyResult:
        sequences = given.sequences
        inputs = self._start(values, jax.tree.map(lambda leaf: leaf[0], sequences))

        def step(carry: tuple[list[Any], Any], slices: Any) -> Any:
            current = self._held(self.inputs_of_step(inputs, carry[0], slices))
            outputs, new, traces = self.one_step(current, carry[1])
            return (self.written_of(new), traces), outputs

        (last, traces), outputs = jax.lax.scan(step, (self.written_of(inputs), traces), sequences)
        return self._result(outputs, self.by_var(last), traces)

    def _one(self, values: list[PyTree], traces: Any, given: Arguments) -> BodyResult:
        results, written, after = self._window(values, traces, as_chunk(given))
        return jax.tree.map(lambda leaf: leaf[0], results), written, after

    def _window(self, values: list[PyTree], traces: Any, given: Arguments) -> BodyResult:
        sequences = given.sequences
        inputs = self._start(values, jax.tree.map(lambda leaf: leaf[0], sequences))
        graph, method = self.graph, self.method
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
        return self._result(
            outputs, self.by_var(last), method.update(Chunk(graph, held, records), before)
        )

    def by_var(self, written: Sequence[Any]) -> dict[Var, Any]:
        """Return leaves that a step writes by input variable; see `written_of`."""
        return dict(zip(self.graph.traced.written_vars, written, strict=True))
