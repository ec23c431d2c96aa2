"""Sequences without a loss: evolution of states and traces, and prediction."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from .._core.sites import probe_shapes
from .._core.steps import Inputs, operand_shapes, recorded_step
from .._core.traces import examples
from .._core.windows import passed_step, plain_step
from .._errors import OptionError
from .._graph import Chunk, Traces
from .._jax import without_derivative
from .._typing import PyTree
from .base import BaseLearner
from .chunks import ChunksByLength, chunks_of, over_chunks, steps_of
from .options import Options
from .program import Arguments, Body, BodyResult, Initial
from .resets import check_fixed_weights, reset_states
from .user_step import PureStep, Recorder, example_slices, operands_of, run_step_function

NO_GRADIENT = (
    "The outputs of `etrace_evolve`, or the states after it, are differentiated, but it takes no "
    "gradient. Use `etrace_grad`, or call the learner step by step; or pass them through "
    "`jax.lax.stop_gradient`."
)


def evolving(learner: BaseLearner, options: Options, example: Arguments) -> Body:
    """Return a body that advances states and traces."""
    graph, method = learner.graph, learner.method
    chunks_by_length: ChunksByLength = {}

    def run_step(inputs: Inputs, weights: Any) -> Any:
        if graph.passes_weights:
            return passed_step(graph, inputs)
        return recorded_step(graph, inputs, weights, examples(probe_shapes(graph)))

    def step(constants: Any, inputs: tuple[PyTree, Any]) -> PyTree:
        (weights, initial), (slices, reset) = constants, inputs
        if reset is not None:
            reset_states(learner, initial, reset)
        recorder = Recorder(learner, lambda now: run_step(now, weights))
        outputs = recorder(*slices)
        records = dataclasses.replace(recorder.records, reset=reset)
        return outputs if options.return_outputs else None, records

    constants = examples(operand_shapes(graph)), example.initial
    pure = _pure(learner, step, constants, example)
    check_fixed_weights(learner, pure, example.flags is not None)
    count = len(learner.param_states)

    def run(values: list[PyTree], traces: Traces, given: Arguments) -> BodyResult:
        parameters, others = values[:count], values[count:]
        weights = operands_of(learner, pure, values)

        def one_step(written: list[PyTree], now: PyTree) -> PyTree:
            constants = weights, given.initial
            return pure(parameters, pure.merge(others, written), constants, now)

        def run_chunk(carry: PyTree, now: PyTree) -> PyTree:
            written, (outputs, records) = jax.lax.scan(one_step, carry[0], now)
            records = dataclasses.replace(records, steps=steps_of(now))
            if learner.placement is not None:
                records = learner.placement.records(records)
            return (written, method.update(Chunk(graph, weights, records), carry[1])), outputs

        length = steps_of(given.sequences)
        cut = chunks_of(graph, graph.record_bytes, options, length, from_zero=False)
        chunks_by_length[length, False] = cut
        start, data = (pure.written_of(others), traces), (given.sequences, given.flags)
        (last, traces), outputs = over_chunks(run_chunk, run_chunk, start, data, length, cut.length)
        changes = (outputs, None), last
        # These values hold the operands.
        changes = without_derivative((values, given.sequences), changes, OptionError, NO_GRADIENT)
        return *changes, traces

    return Body(run, pure.states, pure.is_written, chunks_by_length=chunks_by_length)


def _pure(learner: BaseLearner, step: Any, constants: Any, example: Arguments) -> PureStep:
    slices = example_slices((example.sequences, example.flags))
    return PureStep(step, list(learner.param_states.values()), (constants, slices))


def predicting(learner: BaseLearner, options: Options, example: Arguments) -> Body:
    """Return a body that advances the states only, and returns what the user's function does."""

    def run_plain(inputs: Inputs) -> PyTree:
        return *plain_step(learner.graph, inputs), None

    def step(initial: Initial, now: PyTree) -> PyTree:
        slices, reset = now
        if reset is not None:
            reset_states(learner, initial, reset)
        recorder = Recorder(learner, run_plain)
        if options.step_fn is None:
            return recorder(*slices)
        return run_step_function(options.step_fn, recorder, slices)

    pure = _pure(learner, step, example.initial, example)
    count = len(learner.param_states)

    def run(values: list[PyTree], traces: None, given: Arguments) -> BodyResult:
        parameters, others = values[:count], values[count:]

        def one_step(written: list[PyTree], now: PyTree) -> PyTree:
            return pure(parameters, pure.merge(others, written), given.initial, now)

        data = given.sequences, given.flags
        written, results = jax.lax.scan(one_step, pure.written_of(others), data)
        return (results, None), written, None

    return Body(run, pure.states, pure.is_written, reads="nothing")
