"""Gradient of one chunk of a sequence: by residuals and traces, or through windows.

Both classes have the same methods: ``cut`` (the length of a chunk), ``start`` (a zero gradient),
``run`` (add one chunk's gradient, and return the residuals for the update of the traces),
``known_traces`` (the traces after the chunk if `run` has computed them), ``traces_after`` (that
update) and ``total`` (the gradient by parameter).
"""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

import brainstate
import jax
import jax.numpy as jnp

from .._algorithms import ETraceAlgorithm, Window
from .._executor import (
    Probes,
    as_chunk,
    chunk_gradient,
    examples,
    pre_step_probe,
    probes_of_past,
    run_window,
    window_signals,
    zero_probes,
)
from .._graph import Records, Traces, Weights, inputs_for
from .._runtime import add_to_states
from .._typing import PyTree
from .chunk_costs import work_of
from .chunk_runner import chunk_runner
from .chunks import Chunks, chunks_of, over_blocks, over_chunks, steps_of, windows_of
from .options import Options
from .over_time import zero_sum
from .pure_step import PureStep
from .recording import Kept
from .uncounted_steps import leaving_gradients_alone

Held: TypeAlias = tuple[Weights, PyTree]
"""Operands of the relations, and the initial values of States."""

Slices: TypeAlias = tuple[PyTree, jax.Array | None]
"""Slices of the sequences, and of the reset flags of samples."""

Chunk: TypeAlias = tuple[Slices, jax.Array]
"""Slices of several steps, time first, and the scale of every step's loss."""

Function: TypeAlias = Callable[[Any, Held, Slices], tuple[jax.Array, PyTree, Records]]
"""``(probes, held, slices) -> (loss, aux, records)`` of one step."""

Gradients: TypeAlias = tuple[list[PyTree], Weights]
"""Gradients of the parameters in order, without the part through traces; and of the operands."""

KeptOfChunk: TypeAlias = Traces | Kept
"""The traces after a chunk, or the sources of the residuals for their update."""


class RecordedChunk:
    """Chunk with the gradient through traces at every step; see `braintrace._executor.param_dim`.

    Parameters
    ----------
    algorithm
        The algorithm.
    function
        The step.
    parameters
        The model's parameters.
    held, slices
        Example values.
    has_mask
        Whether masked steps have no backward pass.
    options, steps
        Chunk options, and the length of the first sequence.
    """

    def __init__(
        self,
        algorithm: ETraceAlgorithm,
        function: Function,
        parameters: list[brainstate.State],
        held: Held,
        slices: Slices,
        has_mask: bool,
        options: Options,
        steps: int,
    ) -> None:
        self._graph, self._method = algorithm.graph, algorithm.method
        self._placement = algorithm.placement
        # This object outlives an enclosing jit.
        with jax.ensure_compile_time_eval():
            probes = zero_probes(self._graph)
        model, example = algorithm.model, (probes, held, slices)
        self.step = step = PureStep(model, function, parameters, example)
        current, others = ([s.value for s in states] for states in (parameters, step.others))
        values = (current, others, probes, held)

        work = work_of(algorithm, record_bytes=0)

        def length_of(record_bytes: int) -> int:
            recording = dataclasses.replace(work, record_bytes=record_bytes)
            return chunks_of(recording, options, steps, from_zero=True).length

        self._run = chunk_runner(step, values, slices, has_mask, length_of)
        self._probes, self._recording = probes, self._run.recording
        self._work = dataclasses.replace(work, record_bytes=self._recording.bytes_per_step)

    def cut(self, options: Options, steps: int, from_zero: bool) -> Chunks:
        """Return the chunks of a sequence; see `chunks_of`."""
        return chunks_of(self._work, options, steps, from_zero)

    def start(self, parameters: list[PyTree], weights: Weights) -> Gradients:
        """Return zero gradients: outside the traces, and of the operands."""
        outside = self._recording.chosen(jax.tree.leaves(parameters))
        zeros: Gradients = jax.tree.map(zero_sum, (outside, weights))
        return zeros

    def run(
        self,
        parameters: list[PyTree],
        others: list[PyTree],
        held: Held,
        carry: Any,
        chunk: Chunk,
    ) -> Any:
        """Run one chunk from ``(written States, gradients, traces)``.

        Returns
        -------
        carry
            ``(written States, gradients, the argument `kept` of `traces_after`)``.
        results
            The loss and the auxiliary results of every step.
        """
        written, (outside, of_operands), traces = carry
        weights, _ = held
        result = self._run((parameters, others, self._probes, held), (written, outside), chunk)
        records = self._records(result.kept)
        found, after = chunk_gradient(
            self._graph, self._method, weights, records, result.signal, traces
        )
        of_operands = jax.tree.map(jnp.add, of_operands, found)
        kept: KeptOfChunk = result.kept if after is None else after
        return (result.written, (result.gradients, of_operands), kept), (result.loss, result.aux)

    def total(
        self, gradients: Gradients, to_parameters: Callable[[Weights], list[PyTree]]
    ) -> list[PyTree]:
        """Return the gradient of every parameter."""
        outside, of_operands = gradients
        leaves, tree = jax.tree.flatten(to_parameters(of_operands))
        rest = iter(outside)
        total = [
            (leaf + next(rest)).astype(leaf.dtype) if has_more else leaf
            for leaf, has_more in zip(leaves, self._recording.differentiated, strict=True)
        ]
        return list(jax.tree.unflatten(tree, total))

    def known_traces(self, kept: KeptOfChunk) -> Traces | None:
        """Return the traces after a chunk where `run` has computed them anyway, else None."""
        return None if isinstance(kept, Kept) else kept

    def traces_after(
        self,
        weights: Weights,
        kept: KeptOfChunk,
        before: Traces,
        token: jax.Array | None = None,
    ) -> Traces:
        """Return the traces after a chunk, from the results of `run` and the traces before it.

        ``token`` is the flag of `Records`.
        """
        if not isinstance(kept, Kept):
            return kept
        records = dataclasses.replace(self._records(kept), token=token)
        return self._method.update(self._graph, weights, records, before)

    def _records(self, kept: Kept) -> Records:
        records = self._recording.records(kept)
        if self._placement is not None:
            records = self._placement.records(records)
        return dataclasses.replace(records, x=inputs_for(self._method.needs, records.x))


class WindowChunk:
    """Chunk whose gradient passes all its steps in reverse, then the traces before it.

    Parameters
    ----------
    algorithm, function, parameters, held, slices, has_mask, options
        As for `RecordedChunk`; the perturbations of ``function`` are ``None``.
    window
        Length of a window, which changes the gradient; ``None``: the chunk of a full-Jacobian rule,
        whose length does not.
    """

    def __init__(
        self,
        algorithm: ETraceAlgorithm,
        function: Function,
        parameters: list[brainstate.State],
        held: Held,
        slices: Slices,
        has_mask: bool,
        options: Options,
        window: Window,
    ) -> None:
        self._graph, self._method, self._options = algorithm.graph, algorithm.method, options
        is_window = window is not None
        self._work = None if is_window else work_of(algorithm, self._graph.record_bytes)
        self._window = window
        self._has_mask = has_mask
        self.step = PureStep(algorithm.model, function, parameters, (None, held, slices))
        paths = {id(state): path for path, state in algorithm.states_of_step.items()}
        self._paths = [paths.get(id(state)) for state in self.step.others]

    def _length(self, steps: int) -> int:
        """Return the number of steps of the windows in a chunk; the last may be shorter."""
        if isinstance(self._window, int) and not self._graph.passes_weights:
            return min(steps, self._window)
        return steps

    def cut(self, options: Options, steps: int, from_zero: bool) -> Chunks:
        """Return the chunks of a sequence; see `chunks_of` and `windows_of`."""
        if self._work is None:
            return windows_of(self._graph, self._window, options, steps, from_zero)
        if "traces" in self._graph.needs:
            return Chunks(steps, 1, self._work.record_bytes)
        return chunks_of(self._work, options, steps, from_zero)

    def start(self, parameters: list[PyTree], weights: Weights) -> Gradients:
        """Return zero gradients: through the window, and of the operands."""
        zeros: Gradients = jax.tree.map(zero_sum, (parameters, weights))
        return zeros

    def run(
        self,
        parameters: list[PyTree],
        others: list[PyTree],
        held: Held,
        carry: Any,
        chunk: Chunk,
    ) -> Any:
        """Run one chunk, window by window; see `RecordedChunk.run`."""
        weights, _ = held
        written, sums, traces = carry
        inside, before = sums
        steps, window = steps_of(chunk), self._length(steps_of(chunk))
        zeros: Probes = examples(probes_of_past(self._graph))

        def of_length(length: int) -> Any:
            def run(carry: Any, part: Chunk) -> Any:
                written, inside = carry
                (_, (written, results, records)), (found, mu) = self._differentiate(
                    parameters, zeros, others, held, written, part
                )
                is_one = length == steps
                signal = as_chunk(mu) if is_one else window_signals(self._graph, mu, length)
                return (written, jax.tree.map(jnp.add, inside, found)), (results, records, signal)

            return run

        start = (written, inside)
        (written, inside), found = over_blocks(of_length, start, chunk, steps, window)
        results, records, signal = found
        past, _ = chunk_gradient(self._graph, self._method, weights, records, signal, traces)
        sums = inside, jax.tree.map(jnp.add, before, past)
        return (written, sums, records), tuple(results)

    def _differentiate(
        self,
        parameters: list[PyTree],
        probes: Probes,
        others: list[PyTree],
        held: Held,
        written: list[PyTree],
        part: Chunk,
    ) -> Any:
        """Return values and gradients of a window, by parameters and perturbations."""
        current = self.step.merge(others, written)

        def step(parameters: list[PyTree], written: list[PyTree], inputs: PyTree) -> Any:
            others, held, slices = inputs
            return self.step(parameters, self.step.merge(others, written), None, held, slices)

        def window(parameters: list[PyTree], probes: Probes) -> Any:
            def scaled(written: list[PyTree], now: Chunk) -> Any:
                slices, scale = now
                arguments = parameters, written, (others, held, slices)
                if self._has_mask:
                    written, results = leaving_gradients_alone(step)(scale != 0, *arguments)
                else:
                    written, results = step(*arguments)
                loss, aux, records = results
                return written, ((loss * scale, loss, aux), records)

            traced = self._graph.traced_states
            terms = {state.name: probes[pre_step_probe(state)] for state in traced}
            states = add_to_states(self._graph, self._paths, current, terms)
            start = self.step.written_of(states)
            written, (scaled_losses, *results), records = run_window(start, scaled, part)
            return jnp.sum(scaled_losses), (written, results, records)

        return jax.value_and_grad(window, argnums=(0, 1), has_aux=True)(parameters, probes)

    def total(
        self, gradients: Gradients, to_parameters: Callable[[Weights], list[PyTree]]
    ) -> list[PyTree]:
        """Return the gradient of every parameter."""
        inside, before = gradients
        past = to_parameters(before)
        return list(jax.tree.map(lambda a, b: (a + b).astype(b.dtype), inside, past))

    def known_traces(self, kept: Records) -> None:
        """Return None: the gradient of a window computes no traces."""

    def traces_after(
        self, weights: Weights, kept: Records, before: Traces, token: jax.Array | None = None
    ) -> Traces:
        """Return the traces after a window; see `RecordedChunk.traces_after`.

        If the update may take more memory than the gradient, it runs in parts.
        """
        steps = kept.num_steps
        length = steps if self._work is None else self.cut(self._options, steps, False).length

        def update(traces: Traces, records: Records) -> tuple[Traces, None]:
            return self._method.update(self._graph, weights, records, traces), None

        if length == steps:
            return update(before, dataclasses.replace(kept, token=token))[0]
        after: Traces = over_chunks(update, update, before, kept, steps, length)[0]
        return after
