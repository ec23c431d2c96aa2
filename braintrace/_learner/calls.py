"""Programs without a loss: single calls of a learner, evolution of traces, and prediction.

Single calls may be differentiated by the user: zeros with a gradient of their own receive the
signals.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from .._core.gradient import as_chunk
from .._core.loops import scan_over_time
from .._core.sites import of_past, probe_shapes, probes_of_past
from .._core.steps import Inputs, operand_shapes, operands, recorded_step
from .._core.traces import examples
from .._core.windows import before_window, passed_step, plain_step, window_step, with_gradient
from .._errors import OptionError
from .._graph import Chunk, Records, Traces, Weights
from .._jax import Var
from .._jax_kernels import without_derivative
from .._model import States, find_states, leaves_by_var, whole_values
from .._typing import PyTree
from .arguments import Options, read_arguments
from .base import BaseLearner
from .body import Arguments, Body, BodyResult
from .chunks import ChunksByLength, chunks_of, over_chunks, steps_of
from .resets import check_fixed_weights, reset_states
from .user_step import PureStep, Recorder, example_slices, operands_of, run_step_function


def calling(learner: BaseLearner, kind: str) -> Body:
    """Return the body of a call: ``"step"``, ``"steps"``, ``"window"``, or ``"one"`` step of it."""
    graph = learner.graph
    states = find_states(graph, learner.states_of_model, learner.compiled.outside)
    run: Callable[..., BodyResult] = getattr(Call(learner, states), kind)
    is_written = [path in graph.traced.written_paths for path in states]
    return Body(run, list(states.values()), is_written, batch_axis=0 if kind == "step" else 1)


class Call:
    """The pure functions of the values of the States that a step uses."""

    def __init__(self, learner: BaseLearner, states: States) -> None:
        self.compiled, self.graph, self.states = learner.compiled, learner.graph, states

    def _start(self, values: list[PyTree], arguments: tuple[PyTree, ...]) -> dict[Var, Any]:
        read = read_arguments(self.graph, arguments)
        return self._with_constants({**read, **leaves_by_var(self.graph, self.states, values)})

    def _with_constants(self, inputs: Inputs) -> dict[Var, Any]:
        """Hold the states before a step constant: traces contain how they depend on parameters."""
        written = self.graph.traced.written_vars
        return {**inputs, **{var: jax.lax.stop_gradient(inputs[var]) for var in written}}

    def _written(self, values: Mapping[Var, Any]) -> list[Any]:
        return [values[var] for var in self.graph.traced.written_vars]

    def _inputs(self, start: Inputs, written: Sequence[Any], slices: Any) -> dict[Var, Any]:
        new = zip(self.graph.traced.written_vars, written, strict=True)
        return {**start, **dict(new), **read_arguments(self.graph, slices)}

    def _result(self, outputs: list[Any], written: list[Any], traces: Any) -> BodyResult:
        output = jax.tree.unflatten(self.graph.traced.output_tree, outputs)
        new = dict(zip(self.graph.traced.written_vars, written, strict=True))
        return (output, None), list(whole_values(self.graph, new).values()), traces

    def step(self, values: list[PyTree], traces: Any, given: Arguments) -> BodyResult:
        """Run one step."""
        start = self._start(values, given.sequences)
        outputs, new, traces = self.compiled.one_step(start, traces)
        return self._result(outputs, self._written(new), traces)

    def steps(self, values: list[PyTree], traces: Any, given: Arguments) -> BodyResult:
        """Run several steps, each differentiated alone."""
        inputs = self._start(values, jax.tree.map(lambda leaf: leaf[0], given.sequences))

        def step(carry: tuple[list[Any], Any], slices: Any) -> Any:
            current = self._with_constants(self._inputs(inputs, carry[0], slices))
            outputs, new, traces = self.compiled.one_step(current, carry[1])
            return (self._written(new), traces), outputs

        start = self._written(inputs), traces
        (last, traces), outputs = jax.lax.scan(step, start, given.sequences)
        return self._result(outputs, last, traces)

    def one(self, values: list[PyTree], traces: Any, given: Arguments) -> BodyResult:
        """Run a window of one step."""
        results, written, after = self.window(values, traces, as_chunk(given))
        return jax.tree.map(lambda leaf: leaf[0], results), written, after

    def window(self, values: list[PyTree], traces: Any, given: Arguments) -> BodyResult:
        """Run the steps of a window, which is differentiated in full."""
        sequences, graph, method = given.sequences, self.graph, self.compiled.method
        inputs = self._start(values, jax.tree.map(lambda leaf: leaf[0], sequences))
        weights = operands(graph, inputs)

        def step(written: list[Any], slices: Any) -> Any:
            outputs, new, records = window_step(graph, self._inputs(inputs, written, slices))
            return self._written(new), (outputs, records)

        def gradient(weights: Weights, traces: Any, signal: Any) -> Weights:
            chunk = Chunk(graph, weights, Records(x={}))
            return method.carry_in_vjp(chunk, of_past(graph, as_chunk(signal)), traces)

        constants, before = jax.lax.stop_gradient((weights, traces))
        probes = with_gradient(probes_of_past(graph), gradient, weights, before)
        start = self._written(before_window(graph, inputs, probes))
        last, (outputs, records) = scan_over_time(step, start, sequences)
        records = dataclasses.replace(jax.lax.stop_gradient(records), steps=steps_of(sequences))
        after = method.update(Chunk(graph, constants, records), before)
        return self._result(outputs, last, after)


# --- sequences

NO_GRADIENT = (
    "The outputs of `etrace_evolve`, or the states after it, are differentiated, but it takes no "
    "gradient. Use `etrace_grad`, or call the learner step by step; or pass them through "
    "`jax.lax.stop_gradient`."
)


def evolving(
    learner: BaseLearner, options: Options, example: Arguments, advances: bool = True
) -> Body:
    """Return a body that advances states, and traces unless it only predicts.

    Its result is that of the model, or of the user's function.
    """
    graph, method, placement = learner.graph, learner.method, learner.placement
    chunks_by_length: ChunksByLength = {}

    def step(constants: Any, inputs: tuple[PyTree, Any]) -> PyTree:
        (weights, initial), (slices, reset) = constants, inputs
        if reset is not None:
            reset_states(learner, initial, reset)

        def run_step(inputs: Inputs) -> Any:
            if not advances:
                return *plain_step(graph, inputs), None
            if graph.passes_weights:
                return passed_step(graph, inputs)
            return recorded_step(graph, inputs, weights, examples(probe_shapes(graph)))

        recorder = Recorder(learner, run_step)
        if options.step_fn is None:
            outputs = recorder(*slices)
        else:
            outputs = run_step_function(options.step_fn, recorder, slices)
        records = recorder.records
        records = dataclasses.replace(records, reset=reset) if advances else None
        return outputs if options.return_outputs else None, records

    weights = examples(operand_shapes(graph)) if advances else None
    slices = example_slices((example.sequences, example.flags))
    known = (weights, example.initial), slices
    pure = PureStep(step, list(learner.param_states.values()), known)
    if advances:
        check_fixed_weights(learner, pure, example.flags is not None)

    def run(values: list[PyTree], traces: Traces, given: Arguments) -> BodyResult:
        weights: Any = operands_of(learner, pure, values) if advances else None
        start, data = pure.written_of(values), (given.sequences, given.flags)

        def one_step(written: list[PyTree], now: PyTree) -> PyTree:
            return pure(pure.merge(values, written), (weights, given.initial), now)

        if not advances:
            written, (outputs, _) = jax.lax.scan(one_step, start, data)
            return (outputs, None), written, None

        def run_chunk(carry: PyTree, now: PyTree) -> PyTree:
            written, (outputs, records) = jax.lax.scan(one_step, carry[0], now)
            records = dataclasses.replace(records, steps=steps_of(now))
            records = records if placement is None else placement.records(records)
            return (written, method.update(Chunk(graph, weights, records), carry[1])), outputs

        length = steps_of(given.sequences)
        cut = chunks_of(graph, graph.record_bytes, options, length, from_zero=False)
        chunks_by_length[length, False] = cut
        (last, traces), outputs = over_chunks(
            run_chunk, run_chunk, (start, traces), data, length, cut.length
        )
        changes = (outputs, None), last
        # These values hold the operands.
        changes = without_derivative((values, given.sequences), changes, OptionError, NO_GRADIENT)
        return *changes, traces

    reads: Any = "arrays" if advances else "nothing"
    return Body(run, pure.states, pure.is_written, reads, chunks_by_length=chunks_by_length)
