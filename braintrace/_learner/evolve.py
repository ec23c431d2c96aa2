"""Sequences without a loss: with traces, and without."""

from typing import Any

import jax

from .._algorithms import find_states, read_arguments
from .._executor import operands, plain_step, recorded_step, zero_probes
from .chunks import check_sequences, over_chunks


def evolve(learner: Any, sequences: Any, chunk: int) -> Any:
    """Advance states and traces; return the outputs, stacked over time."""
    algorithm = learner.algorithm
    graph = algorithm.graph
    method = algorithm.method
    steps = check_sequences(sequences)

    def make() -> Any:
        in_vars = graph.traced.program.in_vars
        written = [leaf.in_var for leaf in graph.traced.leaves if leaf.out_var is not None]

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
            return over_chunks(run_chunk, (start, traces), sequences, steps, chunk)

        return jax.jit(run)

    key = ("evolve", steps, chunk, id(graph))
    if key not in learner._runners:
        learner._runners[key] = (make(), graph)
    compiled = algorithm.compiled
    states = find_states(graph, algorithm.model, compiled.outside)
    inputs = compiled.inputs(states, jax.tree.map(lambda leaf: leaf[0], sequences))
    (new, traces), outputs = learner._runners[key][0](inputs, algorithm.traces.value, sequences)
    compiled.write(states, new)
    algorithm.traces.value = traces
    return jax.tree.unflatten(graph.traced.output_tree, outputs)


def predict(learner: Any, sequences: Any) -> Any:
    """Advance the states only; return the outputs, stacked over time."""
    algorithm = learner.algorithm
    graph = algorithm.graph

    def make() -> Any:
        in_vars = graph.traced.program.in_vars
        written = [leaf.in_var for leaf in graph.traced.leaves if leaf.out_var is not None]

        def run(inputs: list[Any], sequences: Any) -> Any:
            known = dict(zip(in_vars, inputs, strict=True))

            def step(state: list[Any], slices: Any) -> Any:
                current = {**known, **dict(zip(written, state, strict=True))}
                current.update(read_arguments(graph, slices))
                outputs, new = plain_step(graph, current)
                return [new[var] for var in written], outputs

            return jax.lax.scan(step, [known[var] for var in written], sequences)

        return jax.jit(run)

    key = ("predict", id(graph))
    if key not in learner._runners:
        learner._runners[key] = (make(), graph)
    compiled = algorithm.compiled
    states = find_states(graph, algorithm.model, compiled.outside)
    inputs = compiled.inputs(states, jax.tree.map(lambda leaf: leaf[0], sequences))
    new, outputs = learner._runners[key][0](inputs, sequences)
    compiled.write(states, new)
    return jax.tree.unflatten(graph.traced.output_tree, outputs)
