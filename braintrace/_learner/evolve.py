"""Sequences without a loss: evolution of states and traces, and prediction."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeAlias

import jax

from .._core.sites import probe_shapes
from .._core.steps import Inputs, operands, recorded_step
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
from .pure_step import PureStep
from .resets import check_fixed_weights, reset_array, reset_states
from .user_step import Recorder, example_slices, run_step_function

Leaves: TypeAlias = list[jax.Array]
"""Values of the State leaves that a step writes."""

InputsOfStep: TypeAlias = Callable[[Leaves, tuple[PyTree, jax.Array | None]], Inputs]
"""``(written leaves, (slices, flags)) -> inputs`` of a step."""

NO_GRADIENT = (
    "The outputs of `etrace_evolve`, or the states after it, are differentiated, but it takes no "
    "gradient. Use `etrace_grad`, or call the learner step by step; or pass them through "
    "`jax.lax.stop_gradient`."
)


def _from(
    learner: BaseLearner, values: list[PyTree], initial: Initial
) -> tuple[Inputs, InputsOfStep]:
    """Return the inputs of the first step, and the function of those of each step."""
    step, states = learner.compiled, learner.states_of_step
    fresh = dict(zip(learner.short_term_states, initial, strict=True)) if initial else {}
    known = step.read(values)
    at_start = step.read([fresh.get(p, v) for p, v in zip(states, values, strict=True)])
    leaves = [leaf for leaf in step.graph.traced.leaves if leaf.path in fresh]

    def inputs(written: Leaves, now: tuple[PyTree, jax.Array | None]) -> Inputs:
        slices, reset = now
        current = step.inputs_of_step(known, written, slices)
        if reset is not None:
            for leaf in leaves:
                pair, axis = (
                    (current[leaf.in_var], at_start[leaf.in_var]),
                    step.graph.batch.axis(leaf),
                )
                current[leaf.in_var] = reset_array(*pair, axis, reset)
        return current

    return known, inputs


def evolving(learner: BaseLearner, options: Options, example: Arguments) -> Body:
    """Return a body that advances states and traces."""
    compiled, graph, method = learner.compiled, learner.graph, learner.method
    if example.flags is not None:
        check_fixed_weights(learner, learner.short_term_states, resets=True)
    returns = options.return_outputs
    chunks_by_length: ChunksByLength = {}

    def run(values: list[PyTree], traces: Traces, given: Arguments) -> BodyResult:
        known, inputs = _from(learner, values, given.initial)
        weights, probes = operands(graph, known), examples(probe_shapes(graph))

        def step(written: Leaves, now: PyTree) -> PyTree:
            known = inputs(written, now)
            if graph.passes_weights:
                outputs, new, records = passed_step(graph, known)
            else:
                outputs, new, records = recorded_step(graph, known, weights, probes)
            if given.flags is not None:
                records = dataclasses.replace(records, reset=now[1])
            return compiled.written_of(new), (outputs if returns else [], records)

        def run_chunk(carry: PyTree, now: PyTree) -> PyTree:
            written, (outputs, records) = jax.lax.scan(step, carry[0], now)
            records = dataclasses.replace(records, steps=steps_of(now))
            if learner.placement is not None:
                records = learner.placement.records(records)
            return (written, method.update(Chunk(graph, weights, records), carry[1])), outputs

        length = steps_of(given.sequences)
        chunks_by_length[length, False] = cut = chunks_of(
            graph, graph.record_bytes, options, length, from_zero=False
        )
        start, data = (compiled.written_of(known), traces), (given.sequences, given.flags)
        (last, traces), outputs = over_chunks(run_chunk, run_chunk, start, data, length, cut.length)
        shown = jax.tree.unflatten(graph.traced.output_tree, outputs) if returns else None
        changes = (shown, None), compiled.whole(compiled.by_var(last))
        # These values hold the operands.
        changes = without_derivative((values, given.sequences), changes, OptionError, NO_GRADIENT)
        return *changes, traces

    return compiled.body(run, chunks_by_length=chunks_by_length)


def predicting(learner: BaseLearner, options: Options, example: Arguments) -> Body:
    """Return a body that advances the states only."""
    if options.step_fn is not None:
        return _probing(learner, options.step_fn, example)
    compiled, graph = learner.compiled, learner.graph

    def run(values: list[PyTree], traces: None, given: Arguments) -> BodyResult:
        known, inputs = _from(learner, values, given.initial)

        def step(written: Leaves, now: PyTree) -> PyTree:
            outputs, new = plain_step(graph, inputs(written, now))
            return compiled.written_of(new), outputs

        last, outputs = jax.lax.scan(
            step, compiled.written_of(known), (given.sequences, given.flags)
        )
        shown = jax.tree.unflatten(graph.traced.output_tree, outputs)
        return (shown, None), compiled.whole(compiled.by_var(last)), None

    return compiled.body(run, reads="nothing")


def _probing(learner: BaseLearner, step_fn: Callable[..., PyTree], example: Arguments) -> Body:
    """Return a body that advances the states only, and returns what the user's function does."""
    sequences, _, flags, initial = example

    def run_plain(inputs: Inputs) -> PyTree:
        return *plain_step(learner.graph, inputs), None

    def step(initial: Initial, now: PyTree) -> PyTree:
        slices, reset = now
        if reset is not None:
            reset_states(learner, initial, reset)
        return run_step_function(step_fn, Recorder(learner, run_plain), slices)

    parameters = list(learner.param_states.values())
    pure = PureStep(learner.module, step, parameters, (initial, example_slices((sequences, flags))))
    count = len(parameters)

    def run(values: list[PyTree], traces: None, given: Arguments) -> BodyResult:
        parameters, others = values[:count], values[count:]

        def one_step(written: Leaves, now: PyTree) -> PyTree:
            return pure(parameters, pure.merge(others, written), given.initial, now)

        data = given.sequences, given.flags
        written, results = jax.lax.scan(one_step, pure.written_of(others), data)
        return (results, None), written, None

    states = [*parameters, *pure.others]
    return Body(run, states, lambda items: pure.written_of(items[count:]), reads="nothing")
