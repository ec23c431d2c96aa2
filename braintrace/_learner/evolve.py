"""Sequences without a loss: with traces, and without."""

from collections.abc import Callable
from typing import Any

import jax

from .._algorithms import ETraceAlgorithm
from .._executor import operands, plain_step, recorded_step, restarted, zero_probes
from .._graph import ETraceGraph
from .._jax import Var
from .._runtime import Program, States, Take, advance, read_arguments, read_states
from .chunks import check_sequences, over_chunks
from .restart import Restarts, check_held, initial_inputs, start_anew

Runner = Callable[..., Any]
"""``(values of States, sequences, restarts, traces) -> (written States, outputs, traces)``."""


def _state_vars(graph: ETraceGraph) -> list[Var]:
    return [leaf.in_var for leaf in graph.traced.leaves]


def _merged(known: dict[Var, Any], now: Any, initial: dict[Var, Any], restart: Any) -> Any:
    """Return the program's inputs of one step."""
    current = {**known, **now}
    if restart is None:
        return current
    anew = {var: start_anew(current[var], value, restart) for var, value in initial.items()}
    return {**current, **anew}


def evolving(algorithm: ETraceAlgorithm, chunk: int) -> Runner:
    """Return a function that advances states and traces."""
    graph, method = algorithm.graph, algorithm.method
    in_vars, written = _state_vars(graph), graph.traced.written_vars

    def run(states: list[Any], sequences: Any, restarts: Restarts, traces: Any) -> Any:
        known = dict(zip(in_vars, states, strict=True))
        weights = operands(graph, known)
        probes = zero_probes(graph)
        flags, initial = restarts
        if flags is not None:
            check_held(algorithm, algorithm.short_term_states, restarts=True)
        anew = initial_inputs(algorithm, initial)

        def step(state: list[Any], now: Any) -> Any:
            slices, restart = now
            changed = {**dict(zip(written, state, strict=True)), **read_arguments(graph, slices)}
            current = _merged(known, changed, anew, restart)
            outputs, new, records = recorded_step(graph, current, weights, probes)
            if restart is not None:
                records = restarted(graph, records, restart)
            return [new[var] for var in written], (outputs, records)

        def run_chunk(carry: Any, now: Any) -> Any:
            state, (outputs, records) = jax.lax.scan(step, carry[0], now)
            return (state, method.update(graph, weights, records, carry[1])), outputs

        start = ([known[var] for var in written], traces)
        steps = check_sequences(sequences)
        (state, traces), outputs = over_chunks(
            run_chunk, run_chunk, start, (sequences, flags), steps, chunk
        )
        return state, outputs, traces

    return run


def predicting(algorithm: ETraceAlgorithm) -> Runner:
    """Return a function that advances the states only."""
    graph = algorithm.graph
    in_vars, written = _state_vars(graph), graph.traced.written_vars

    def run(states: list[Any], sequences: Any, restarts: Restarts, traces: None) -> Any:
        known = dict(zip(in_vars, states, strict=True))
        flags, initial = restarts
        anew = initial_inputs(algorithm, initial)

        def step(state: list[Any], now: Any) -> Any:
            slices, restart = now
            changed = {**dict(zip(written, state, strict=True)), **read_arguments(graph, slices)}
            outputs, new = plain_step(graph, _merged(known, changed, anew, restart))
            return [new[var] for var in written], outputs

        start = [known[var] for var in written]
        return *jax.lax.scan(step, start, (sequences, flags)), traces

    return run


class Driver:
    """A function of sequences, compiled once per shape, that moves States on.

    Parameters
    ----------
    algorithm
        The algorithm.
    function
        What it runs; see `evolving` and `predicting`.
    """

    def __init__(self, algorithm: ETraceAlgorithm, function: Runner) -> None:
        self._algorithm = algorithm
        self._program = Program(function, donated=3)

    def __call__(self, states: States, sequences: Any, restarts: Restarts) -> Any:
        """Run the model, whose States are given by path, alone, and return its outputs."""
        return self._advance(states, sequences, restarts, lambda take: (None, False))

    def with_traces(self, states: States, sequences: Any, restarts: Restarts) -> Any:
        """Run the model, move the traces on as well, and return its outputs."""
        return self._advance(states, sequences, restarts, lambda take: take())

    def _advance(
        self,
        states: States,
        sequences: Any,
        restarts: Restarts,
        taken: Callable[[Take], tuple[Any, bool]],
    ) -> Any:
        algorithm, held = self._algorithm, self._algorithm.traces
        compiled = algorithm.compiled
        of_step = compiled.find_states(states)
        inputs = read_states(compiled.graph, of_step)
        values = [inputs[var] for var in _state_vars(compiled.graph)]

        def run(take: Take) -> Any:
            traces, in_place = taken(take)
            return self._program(values, sequences, restarts, traces, in_place=in_place)

        def store(results: Any) -> None:
            new, _, traces = results
            if traces is not None:
                held.leave(lambda: traces)
            compiled.write(of_step, new)

        can_fail = self._program.can_fail(
            lambda: (values, sequences, restarts, taken(held.lend)[0])
        )
        _, outputs, _ = advance(held, can_fail, run, store)
        return jax.tree.unflatten(compiled.graph.traced.output_tree, outputs)
