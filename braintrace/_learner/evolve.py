"""Sequences without a loss: evolution of states and traces, and prediction."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import jax

from .._core.sites import probe_shapes
from .._core.steps import operands, recorded_step
from .._core.traces import examples
from .._core.windows import passed_step, plain_step
from .._errors import OptionError
from .._graph import Chunk, Traces
from .._jax import Var, without_derivative
from .._runtime.model_states import read_states, whole_values
from .._runtime.program import Take
from .._runtime.resets import reset_array
from .._typing import PyTree
from .base import BaseLearner
from .body import (
    Arguments,
    Body,
    BodyResult,
    HasZero,
    Initial,
    LentTraces,
    Resets,
    not_taken,
    taken,
)
from .chunks import ChunksByLength, chunks_of, over_chunks, steps_of
from .options import Options, Request
from .pure_step import PureStep
from .resets import check_fixed_weights, initial_inputs, reset_states
from .user_step import Recorder, example_slices, run_step_function

Inputs: TypeAlias = Mapping[Var, jax.Array]
"""Values of a step's inputs, by variable."""

Leaves: TypeAlias = list[jax.Array]
"""Values of the State leaves that a step writes."""


class _Steps:
    """The steps of a sequence with given initial values of States.

    Attributes
    ----------
    known
        Inputs of the first step: the leaves of the States.
    start
        The leaves that steps write.
    """

    def __init__(self, learner: BaseLearner, values: list[PyTree], initial: Initial) -> None:
        self._graph, self._states = learner.graph, learner.states_of_step
        self._compiled = learner.compiled
        self._values = dict(zip(self._states, values, strict=True))
        fresh, batch = initial_inputs(learner, self._values, initial), self._graph.batch
        leaves = {leaf.in_var: leaf for leaf in self._graph.traced.leaves}
        self._initial = {var: (value, batch.axis(leaves[var])) for var, value in fresh.items()}
        self.known = read_states(self._graph, self._states, self._values)
        self.start: Leaves = self.written(self.known)

    def inputs(
        self, state: Leaves, slices: PyTree, reset: jax.Array | None
    ) -> dict[Var, jax.Array]:
        """Return the inputs of a step."""
        current = self._compiled.inputs_of_step(self.known, state, slices)
        if reset is not None:
            for var, (fresh, axis) in self._initial.items():
                current[var] = reset_array(current[var], fresh, axis, reset)
        return current

    def written(self, new: Inputs) -> Leaves:
        """Return the leaves that are written."""
        return self._compiled.written_of(new)

    def values(self, state: Leaves) -> list[PyTree]:
        """Return the values of the States that are written, after the last step."""
        new = dict(zip(self._graph.traced.written_vars, state, strict=True))
        return list(whole_values(self._graph, new).values())


NO_GRADIENT = (
    "The outputs of `etrace_evolve`, or the states after it, are differentiated, but it takes no "
    "gradient. Use `etrace_grad`, or call the learner step by step; or pass them through "
    "`jax.lax.stop_gradient`."
)


def evolving(learner: BaseLearner, request: Request, example: Arguments) -> Body:
    """Return a body that advances states and traces."""
    learner, graph, method = learner, learner.graph, learner.method
    if example[2][0] is not None:
        check_fixed_weights(learner, learner.short_term_states, resets=True)
    returns = request.options.return_outputs
    chunks_by_length: ChunksByLength = {}

    def run(
        values: list[PyTree], traces: Traces, sequences: PyTree, mask: None, resets: Resets
    ) -> BodyResult:
        flags, initial = resets
        steps = _Steps(learner, values, initial)
        weights, probes = operands(graph, steps.known), examples(probe_shapes(graph))

        def step(state: Leaves, now: PyTree) -> PyTree:
            slices, reset = now
            inputs = steps.inputs(state, slices, reset)
            if graph.passes_weights:
                outputs, new, records = passed_step(graph, inputs)
            else:
                outputs, new, records = recorded_step(graph, inputs, weights, probes)
            if reset is not None:
                records = dataclasses.replace(records, reset=reset)
            return steps.written(new), (outputs if returns else [], records)

        def run_chunk(carry: PyTree, now: PyTree) -> PyTree:
            state, (outputs, records) = jax.lax.scan(step, carry[0], now)
            records = dataclasses.replace(records, steps=steps_of(now))
            if learner.placement is not None:
                records = learner.placement.records(records)
            return (state, method.update(Chunk(graph, weights, records), carry[1])), outputs

        length = steps_of(sequences)
        chunks_by_length[length, False] = cut = chunks_of(
            graph, graph.record_bytes, request.options, length, from_zero=False
        )
        (state, traces), outputs = over_chunks(
            run_chunk, run_chunk, (steps.start, traces), (sequences, flags), length, cut.length
        )
        known = (values, sequences), (outputs, steps.values(state))  # these hold the operands
        outputs, written = without_derivative(*known, OptionError, NO_GRADIENT)
        return outputs, written, traces

    return _body(learner, run, taken, chunks_by_length)


def predicting(learner: BaseLearner, request: Request, example: Arguments) -> Body:
    """Return a body that advances the states only."""
    if request.options.step_fn is not None:
        return _probing(learner, request.options.step_fn, example)
    graph = learner.graph

    def run(
        values: list[PyTree], traces: Traces, sequences: PyTree, mask: None, resets: Resets
    ) -> BodyResult:
        flags, initial = resets
        steps = _Steps(learner, values, initial)

        def step(state: Leaves, now: PyTree) -> PyTree:
            outputs, new = plain_step(graph, steps.inputs(state, *now))
            return steps.written(new), outputs

        state, outputs = jax.lax.scan(step, steps.start, (sequences, flags))
        return outputs, steps.values(state), None

    return _body(learner, run, not_taken, chunks_by_length={})


def _probing(learner: BaseLearner, step_fn: Callable[..., PyTree], example: Arguments) -> Body:
    """Return a body that advances the states only, and returns what the user's function does."""
    graph = learner.graph
    sequences, _, (flags, initial) = example

    def run_plain(inputs: Inputs) -> PyTree:
        return *plain_step(graph, inputs), None

    def step(initial: Initial, now: PyTree) -> PyTree:
        slices, reset = now
        if reset is not None:
            reset_states(learner, initial, reset)
        return run_step_function(step_fn, Recorder(learner, run_plain), slices)

    parameters = list(learner.param_states.values())
    pure = PureStep(learner.module, step, parameters, (initial, example_slices((sequences, flags))))
    count = len(parameters)

    def run(
        values: list[PyTree], traces: Traces, sequences: PyTree, mask: None, resets: Resets
    ) -> BodyResult:
        flags, initial = resets
        parameters, others = values[:count], values[count:]

        def one_step(written: Leaves, now: PyTree) -> PyTree:
            return pure(parameters, pure.merge(others, written), initial, now)

        written, results = jax.lax.scan(one_step, pure.written_of(others), (sequences, flags))
        return results, written, None

    states = [*parameters, *pure.others]
    return Body(
        run=run,
        states=lambda of_model: states,
        written=lambda items: pure.written_of(items[count:]),
        take=not_taken,
    )


def _body(
    learner: BaseLearner,
    run: Callable[..., BodyResult],
    take: Callable[[HasZero, Take], LentTraces],
    chunks_by_length: ChunksByLength,
) -> Body:
    """Return the body of a function of the model's own States."""
    graph, compiled = learner.graph, learner.compiled
    paths = dict.fromkeys(leaf.path for leaf in graph.traced.leaves)
    changing = {leaf.path for leaf in graph.traced.leaves if leaf.out_var is not None}
    is_written = [path in changing for path in paths]

    def written(items: Sequence[PyTree]) -> list[PyTree]:
        return [item for item, is_one in zip(items, is_written, strict=True) if is_one]

    def results(outputs: PyTree, options: Options) -> PyTree:
        if not options.return_outputs:
            return None
        return jax.tree.unflatten(graph.traced.output_tree, outputs)

    return Body(
        run=run,
        states=lambda of_model: list(compiled.find_states(of_model).values()),
        written=written,
        results=results,
        take=take,
        chunks_by_length=chunks_by_length,
    )
