"""Gradient of one chunk of a sequence: by residuals and traces, or through its steps.

The part outside the traces passes single steps, or all steps of a window; the traces contribute
the time before. Both are computed from the same recorded values (see `ChunkRunner`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from .._compiler import publish
from .._core.chunk import SourceValues, chunk_runner
from .._core.gradient import as_chunk, chunk_gradient, of_parameters
from .._core.loops import scan_over_time, zero_sum
from .._core.sites import Probes, pre_step_probe, probe_shapes, probes_of_past
from .._core.traces import examples
from .._core.windows import window_signals
from .._graph import Adjoints, LinearMethod, Records, Traces, Weights
from .._graph import Chunk as RecordedChunk
from .._model import add_to_states
from .._typing import PyTree
from .base import BaseLearner
from .chunks import Chunks, chunks_of, over_blocks, over_chunks, steps_of, windows_of
from .lost_gradients import find_lost_gradients
from .options import Options
from .user_step import PureStep

Constants: TypeAlias = tuple[Weights, PyTree]
"""Operands of the relations, and the initial values of States."""

Slices: TypeAlias = tuple[PyTree, jax.Array | None]
"""Slices of the sequences, and of the reset flags of samples."""

Chunk: TypeAlias = tuple[Slices, jax.Array]
"""Slices of several steps, time first, and the scale of every step's loss."""

Function: TypeAlias = Callable[[Any, Constants, Slices], tuple[jax.Array, PyTree, Records]]
"""``(probes, constants, slices) -> (loss, aux, records)`` of one step."""


class Fixed(NamedTuple):
    """Values that are the same in all steps.

    Attributes
    ----------
    parameters, others
        Values of the parameters, and of other States before the sequence.
    weights, initial
        Operands of the relations, and initial values of States.
    """

    parameters: list[PyTree]
    others: list[PyTree]
    weights: Weights
    initial: list[PyTree]


Gradients: TypeAlias = tuple[list[PyTree], Weights]
"""Gradients of the parameters in order, without the part through traces; and of the operands."""

TracesOrSources: TypeAlias = Traces | SourceValues
"""The traces after a chunk, or the sources of the residuals for their update."""


class SequenceChunk:
    """Chunk of a sequence.

    Parameters
    ----------
    learner
        The learner.
    function
        The step. Its perturbations are ``None`` if derivatives pass from step to step: in windows
        and under full-Jacobian rules.
    constants, slices
        Example values.
    has_mask
        Whether some steps may be masked: the scale of their loss is zero.
    options
        Chunk options.

    Attributes
    ----------
    step
        The step as a pure function.
    paths
        Path in the model of each State that is not a parameter; ``None`` for other States.
    linear
        The learning rule, if parts run twice instead of updating its traces.
    """

    def __init__(
        self,
        learner: BaseLearner,
        function: Function,
        constants: Constants,
        slices: Slices,
        has_mask: bool,
        options: Options,
    ) -> None:
        self._graph, self._method = graph, _ = learner.graph, learner.method
        self._placement, self._options, self._has_mask = learner.placement, options, has_mask
        self._window = window = learner.window_of(options.window)
        self._passes = window is not None or graph.passes_weights
        runs_twice = options.checkpoint and window is None
        method = self._method if runs_twice else None
        self.linear = method if isinstance(method, LinearMethod) else None
        # This object outlives an enclosing jit.
        with jax.ensure_compile_time_eval():
            self._probes = None if self._passes else examples(probe_shapes(graph))
        parameters, example = learner.param_states.values(), (self._probes, constants, slices)
        self.step = step = PureStep(function, list(parameters), example)
        current, others = ([s.value for s in states] for states in (parameters, step.others))
        values = (current, others, self._probes, constants)
        self._record_bytes = graph.record_bytes
        written = jax.tree.leaves(step.written_of(others))
        self._state_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in written)

        self._run = chunk_runner(
            step, values, slices, has_mask, self._passes, self.linear is not None
        )
        if not self._passes:
            self._record_bytes = self._run.count_bytes()
        paths = {id(state): path for path, state in learner.states_of_step.items()}
        self.paths = [paths.get(id(state)) for state in step.others]
        if not self._passes:
            lost = find_lost_gradients(self._run.step, self._outside())
            publish(lost, learner.compiler_options.strict)

    def _outside(self) -> dict[int, str]:
        """Describe the States outside the model, by the places of their leaves."""
        found, place = dict[int, str](), 0
        pairs = zip(self.step.others, self.paths, strict=True)
        for state, path in self.step.written_of(list(pairs)):
            for leaf in jax.tree.leaves(state.value):
                if path is None:
                    found[place] = f"A State of shape {leaf.shape} that `step_fn` writes"
                place += 1
        return found

    def cut(self, options: Options, steps: int, from_zero: bool) -> Chunks:
        """Return the chunks of a sequence; see `chunks_of` and `windows_of`."""
        if options.checkpoint and options.length_of_chunk is None:
            # The least sum of the States before each part and of the residuals of one part.
            ratio = self._state_bytes / max(1, self._record_bytes)
            length = max(1, math.ceil(math.sqrt(steps * ratio)))
            options = dataclasses.replace(options, chunk_size=length)
        if self._window is not None:
            return windows_of(self._graph, self._window, options, steps, from_zero)
        if "traces" in self._graph.needs:
            return Chunks(steps, 1, self._record_bytes)
        return chunks_of(self._graph, self._record_bytes, options, steps, from_zero)

    def start(self, fixed: Fixed) -> Gradients:
        """Return zero gradients: outside the traces, and of the operands."""
        outside = self._run.choose(jax.tree.leaves(fixed.parameters))
        zeros: Gradients = jax.tree.map(zero_sum, (outside, fixed.weights))
        return zeros

    def run(self, fixed: Fixed, carry: Any, chunk: Chunk) -> Any:
        """Run one chunk from ``(written States, gradients, traces)``.

        Returns
        -------
        carry
            ``(written States, gradients, the argument `residuals` of `traces_after`)``.
        results
            The loss and the auxiliary results of every step.
        """
        (written, (outside, of_operands), traces), weights = carry, fixed.weights
        values, steps = self._values(fixed), steps_of(chunk)

        def of_length(length: int) -> Any:
            def run(start: Any, part: Chunk) -> Any:
                result = self._run.run(values, start, part)
                signal = self._signal(fixed, start[0], result.signal)
                if length < steps:
                    signal = window_signals(self._graph, signal, length)
                over_time = (result.loss, result.aux), result.residuals, signal
                return (result.written, result.gradients), over_time

            return run

        (written, outside), (results, over_time, signal) = over_blocks(
            of_length, (written, outside), chunk, steps, self._steps_of_window(steps)
        )
        residuals = self._run.residuals(values, over_time, steps)
        recorded = RecordedChunk(self._graph, weights, self._records(residuals))
        found, after = chunk_gradient(self._method, recorded, signal, traces)
        of_operands = jax.tree.map(jnp.add, of_operands, found)
        of_traces: TracesOrSources = residuals if after is None else after
        return (written, (outside, of_operands), of_traces), results

    def _values(self, fixed: Fixed) -> tuple[Any, ...]:
        constants = fixed.weights, fixed.initial
        return fixed.parameters, fixed.others, self._probes, constants

    def forward(self, fixed: Fixed, written: PyTree, part: Chunk) -> tuple[PyTree, SourceValues]:
        """Return the written States after a part, and the residuals that its traces need."""
        values, (outside, _) = self._values(fixed), self.start(fixed)
        result = self._run.run(values, (written, outside), part)
        return result.written, self._run.residuals(values, result.residuals, steps_of(part))

    def backward(
        self, fixed: Fixed, carry: tuple[Gradients, Adjoints], written: PyTree, part: Chunk
    ) -> tuple[tuple[Gradients, Adjoints], tuple[jax.Array, PyTree]]:
        """Add the gradient of a part, whose adjoints of the states after it are known.

        ``written`` are the States before it. Return the carry, and the loss and the auxiliary
        results of every step.
        """
        ((outside, of_operands), after), weights = carry, fixed.weights
        values, linear = self._values(fixed), self.linear
        assert linear is not None
        result = self._run.run(values, (written, outside), part)
        signal = self._signal(fixed, written, result.signal)
        sources = self._run.residuals(values, result.residuals, steps_of(part))

        # Step by step, no factor and no input of a product is stored.
        def pull_step(carry: tuple[Weights, Adjoints], now: Any) -> Any:
            over_time, signal = as_chunk(now)
            records = self._records(SourceValues(over_time, sources.once, 1))
            recorded = RecordedChunk(self._graph, weights, records)
            found, before = linear.pull_back(recorded, signal, carry[1])
            own = of_parameters(self._graph, found)
            return (jax.tree.map(jnp.add, carry[0], own), before), None

        start, steps = (of_operands, after), (sources.over_time, signal)
        (of_operands, before), _ = scan_over_time(pull_step, start, steps, reverse=True)
        return ((result.gradients, of_operands), before), (result.loss, result.aux)

    def of_past(
        self, weights: Weights, adjoints: Adjoints, traces: Traces, has_resets: bool
    ) -> Weights:
        """Return the gradient of the operands through the states before a sequence."""
        assert self.linear is not None
        records = Records(x={}, has_mask=self._has_mask or has_resets)
        return self.linear.contract(RecordedChunk(self._graph, weights, records), adjoints, traces)

    def _steps_of_window(self, steps: int) -> int:
        """Return the number of steps that run together; the last window may be shorter."""
        if isinstance(self._window, int) and not self._graph.passes_weights:
            return min(steps, self._window)
        return steps

    def _signal(self, fixed: Fixed, written: list[PyTree], derivatives: list[jax.Array]) -> Probes:
        """Return the learning signals of a chunk or of a window, time first.

        If derivatives pass from step to step, only the first step has a signal: for the states
        before it.

        Parameters
        ----------
        fixed, written
            Values of the States before the chunk.
        derivatives
            Derivatives with respect to the perturbations, or to the States before the chunk.
        """
        if not self._passes:
            signal: Probes = self._run.signal_of(self._probes or {}, derivatives)
            return signal
        current = self.step.merge(fixed.others, written)
        states = {state.name: pre_step_probe(state) for state in self._graph.traced_states}

        def moved(terms: Probes) -> list[Any]:
            given = {name: terms[probe] for name, probe in states.items()}
            moved = self.step.written_of(add_to_states(self._graph, self.paths, current, given))
            return self._run.passing(jax.tree.leaves(moved))

        _, pull = jax.vjp(moved, examples(probes_of_past(self._graph)))
        before: Probes = as_chunk(pull(derivatives)[0])
        return before

    def total(
        self, gradients: Gradients, to_parameters: Callable[[Weights], list[PyTree]]
    ) -> list[PyTree]:
        """Return the gradient of every parameter."""
        outside, of_operands = gradients
        leaves, tree = jax.tree.flatten(to_parameters(of_operands))
        rest = iter(outside)
        total = [
            (leaf + next(rest)).astype(leaf.dtype) if has_more else leaf
            for leaf, has_more in zip(leaves, self._run.differentiated, strict=True)
        ]
        return list(jax.tree.unflatten(tree, total))

    def traces_after(
        self,
        weights: Weights,
        residuals: TracesOrSources,
        before: Traces,
        token: jax.Array | None = None,
    ) -> Traces:
        """Return the traces after a chunk, from the results of `run` and the traces before it.

        If the update of a full-Jacobian rule may take more memory than the gradient, it runs in
        parts. ``token`` is the flag of `Records`.
        """
        if not isinstance(residuals, SourceValues):
            return residuals
        records = dataclasses.replace(self._records(residuals), token=token)

        def update(traces: Traces, records: Records) -> tuple[Traces, None]:
            if records.inputs:  # of a part of the chunk
                records = dataclasses.replace(records, steps=steps_of(records.inputs))
            chunk = RecordedChunk(self._graph, weights, records)
            return self._method.update(chunk, traces), None

        length = residuals.steps
        if self._passes and self._window is None:
            length = self.cut(self._options, residuals.steps, from_zero=False).length
        if length == residuals.steps:
            return update(before, records)[0]
        after: Traces = over_chunks(update, update, before, records, residuals.steps, length)[0]
        return after

    def _records(self, residuals: SourceValues) -> Records:
        records: Records = self._run.records(residuals)
        if self._placement is not None:
            records = self._placement.records(records)
        return records
