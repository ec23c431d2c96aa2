"""Single calls of a learner: one step, the steps of a `MultiStepData`, and windows of them.

They may be differentiated by the user: zeros with a gradient of their own receive the signals.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from .._core.gradient import as_chunk
from .._core.loops import scan_over_time
from .._core.sites import of_past, probes_of_past
from .._core.steps import Inputs, operands
from .._core.windows import before_window, window_step, with_gradient
from .._graph import Chunk, Records, Weights
from .._jax import Var
from .._model import States, find_states, leaves_by_var, whole_values
from .._typing import PyTree
from .arguments import read_arguments
from .base import BaseLearner
from .program import Arguments, Body, BodyResult


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

    def _result(self, outputs: list[Any], new: Mapping[Var, Any], traces: Any) -> BodyResult:
        output = jax.tree.unflatten(self.graph.traced.output_tree, outputs)
        return (output, None), list(whole_values(self.graph, new).values()), traces

    def step(self, values: list[PyTree], traces: Any, given: Arguments) -> BodyResult:
        """Run one step."""
        return self._result(*self.compiled.one_step(self._start(values, given.sequences), traces))

    def steps(self, values: list[PyTree], traces: Any, given: Arguments) -> BodyResult:
        """Run several steps, each differentiated alone."""
        inputs = self._start(values, jax.tree.map(lambda leaf: leaf[0], given.sequences))

        def step(carry: tuple[list[Any], Any], slices: Any) -> Any:
            current = self._with_constants(self._inputs(inputs, carry[0], slices))
            outputs, new, traces = self.compiled.one_step(current, carry[1])
            return (self._written(new), traces), outputs

        start = self._written(inputs), traces
        (last, traces), outputs = jax.lax.scan(step, start, given.sequences)
        new = dict(zip(self.graph.traced.written_vars, last, strict=True))
        return self._result(outputs, new, traces)

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
        steps: int = jax.tree.leaves(sequences)[0].shape[0]
        records = dataclasses.replace(jax.lax.stop_gradient(records), steps=steps)
        new = dict(zip(graph.traced.written_vars, last, strict=True))
        return self._result(outputs, new, method.update(Chunk(graph, constants, records), before))
