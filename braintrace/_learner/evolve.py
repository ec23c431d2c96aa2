"""Sequences without a loss: with traces, and without."""

from collections.abc import Callable
from typing import Any

import jax

from .._algorithms import ETraceAlgorithm, read_arguments
from .._executor import operands, plain_step, recorded_step, zero_probes
from .chunks import check_sequences, over_chunks

Runner = Callable[[list[Any], Any, Any], Any]
"""``(program inputs, traces, sequences) -> ((written States, traces), outputs)``."""


def evolving(algorithm: ETraceAlgorithm, chunk: int) -> Runner:
    """Return a compiled function that advances states and traces."""
    graph, method = algorithm.graph, algorithm.method
    in_vars, written = graph.traced.program.in_vars, graph.traced.written_vars

    def run(inputs: list[Any], traces: Any, sequences: Any) -> Any:
        known = dict(zip(in_vars, inputs, strict=True))
        weights = operands(graph, known)
        probes = zero_probes(graph)

        def step(state: list[Any], slices: Any) -> Any:
            current = {**known, **dict(zip(written, state, strict=True))}
            current.update(read_arguments(graph, slices))
            outputs, new, records = recorded_step(graph, current, weights, probes)
            return [new[var] for var in written], (outputs, records)

        def run_chunk(carry: Any, slices: Any) -> Any:
            state, (outputs, records) = jax.lax.scan(step, carry[0], slices)
            return (state, method.update(graph, weights, records, carry[1])), outputs

        start = [known[var] for var in written]
        steps = check_sequences(sequences)
        return over_chunks(run_chunk, run_chunk, (start, traces), sequences, steps, chunk)

    return jax.jit(run)


def predicting(algorithm: ETraceAlgorithm) -> Runner:
    """Return a compiled function that advances the states only."""
    graph = algorithm.graph
    in_vars, written = graph.traced.program.in_vars, graph.traced.written_vars

    def run(inputs: list[Any], traces: Any, sequences: Any) -> Any:
        known = dict(zip(in_vars, inputs, strict=True))

        def step(state: list[Any], slices: Any) -> Any:
            current = {**known, **dict(zip(written, state, strict=True))}
            current.update(read_arguments(graph, slices))
            outputs, new = plain_step(graph, current)
            return [new[var] for var in written], outputs

        state, outputs = jax.lax.scan(step, [known[var] for var in written], sequences)
        return (state, traces), outputs

    return jax.jit(run)


def run_sequence(algorithm: ETraceAlgorithm, runner: Runner, sequences: Any) -> Any:
    """Run a compiled function from the current States, and write what it returns to them."""
    compiled = algorithm.compiled
    states = algorithm.states_of_step
    inputs = compiled.inputs(states, jax.tree.map(lambda leaf: leaf[0], sequences))
    (new, traces), outputs = runner(inputs, algorithm.traces.value, sequences)
    compiled.write(states, new)
    algorithm.traces.value = traces
    return jax.tree.unflatten(algorithm.graph.traced.output_tree, outputs)
