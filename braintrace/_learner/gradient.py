"""Sequence gradient: the gradient of a loss over a sequence, compiled once per step function.

One step is the user's ``step_fn``, run on a learner that records. Steps run chunk by chunk. In a
chunk, the part outside the traces passes single steps, or all steps of a window; the traces
contribute the time before. Both are computed from the same recorded values (see `ChunkRunner`). The
gradient of the operands is pulled back to the parameters once, at the end: the operations between
them (a mask, a transpose, a product of parameters) are loop-invariant.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from .._checks import check_choice, path_name
from .._compiler import lost_gradients, publish
from .._core import sites
from .._core.chunk import ChunkResult, chunk_runner
from .._core.gradient import (
    Inputs,
    as_chunk,
    chunk_gradient,
    of_parameters,
    operand_shapes,
    probed_step,
    residuals,
)
from .._core.sites import Probes
from .._core.step_program import SourceValues, scan_over_time, zero_sum
from .._core.traces import as_arrays, examples, is_zero, ordering_token
from .._core.windows import window_step
from .._errors import OptionError
from .._from_function import gradients_for
from .._graph.method import Adjoints, Chunk, Records, Traces, Weights
from .._jax_kernels import without_derivative
from .._jaxpr.program import program_of
from .._model import Values, add_to_states
from .._rules.d_rtrl import ParameterTraces
from .._typing import PyTree
from . import chunks, user_step
from .arguments import Options
from .base import BaseLearner
from .carried import Deferred
from .chunks import Chunks, over_chunks, steps_of
from .program import Arguments, Program, Result

NO_DERIVATIVE = (
    "The results of `etrace_grad`, `etrace_online` and `etrace_evolve` have no derivative. Pass "
    "them through `jax.lax.stop_gradient`, call the learner step by step, or differentiate "
    "`predict`: this is backpropagation through time."
)

MOST_COPIED_BYTES = 2**16
"""Most bytes of operands that deferred traces hold without need: to find them takes a trace."""

# Results of `etrace_grad` for ``return_value``, for ``has_aux``, and for both.
GradientAndLosses = collections.namedtuple("GradientAndLosses", "gradients losses")
GradientAndAux = collections.namedtuple("GradientAndAux", "gradients aux")
GradientLossesAndAux = collections.namedtuple("GradientLossesAndAux", "gradients losses aux")


class Fixed(NamedTuple):
    """Values that are the same in all steps.

    Attributes
    ----------
    values
        Values of the parameters, and of other States before the sequence.
    weights, initial
        Operands of the relations, and initial values of States.
    """

    values: list[PyTree]
    weights: Weights
    initial: Values | None


Part: TypeAlias = tuple[tuple[PyTree, jax.Array | None], jax.Array]
"""Slices of the sequences and of the reset flags, time first, and the scale of every loss."""

Gradients: TypeAlias = tuple[list[PyTree], Weights]
"""Gradients of the parameters in order, without the part through traces; and of the operands."""

OfChunks: TypeAlias = tuple[Gradients, PyTree, list[PyTree], Traces | Deferred]
"""Gradients, results over time, written States, traces."""


class SequenceGradient(Program):
    """The gradient of a sequence; or with ``evolves``, only its outputs and the traces after it."""

    reads = "zero"

    def __init__(
        self, learner: BaseLearner, options: Options, example: Arguments, evolves: bool = False
    ) -> None:
        self._learner, self._options, self._evolves = learner, options, evolves
        self._graph, self._method = graph, method = learner.graph, learner.compiled.method
        check_choice("reduction", options.reduction, "mean", "sum")
        sequences, mask, flags, initial = example
        self._has_mask = mask is not None
        self._window = None if evolves else learner.window_of(options.window)
        self._passes = self._window is not None or graph.passes_weights
        runs_twice = options.checkpoint and self._window is None
        self._linear: Any = method if runs_twice and isinstance(method, ParameterTraces) else None
        self._operand_shapes, self._zero_traces = operand_shapes(graph), learner.starting_traces()
        shapes = {**sites.probe_shapes(graph), **sites.probes_of_past(graph)}
        self._probes = None if self._passes else examples(shapes)
        self._parameters = [*learner.param_states]
        slices = user_step.example_slices((sequences, flags))
        constants = examples(self._operand_shapes), initial
        given = list(learner.param_states.values()), (self._probes, constants, slices)
        self._step = step = user_step.PureStep(self._recorded_step, *given)
        super().__init__(learner, step.states, step.is_written)
        fixed = Fixed([state.value for state in step.states], *constants)
        # Full-Jacobian rules read their traces before each window: it is a chunk of its own.
        window = (0 if graph.passes_weights else self._window) if self._passes else None
        asked = self._has_mask, window, self._linear is not None
        self._runner = chunk_runner(step, self._values(fixed), slices, *asked)
        written = jax.tree.leaves(step.written_of(fixed.values))
        sizes = self._runner.count_bytes(), sum(leaf.nbytes for leaf in written)
        self._chunks = functools.partial(chunks.cut_sequence, graph, options, self._window, *sizes)
        if not evolves and not self._passes:
            self._report_lost_gradients(fixed)

    def _report_lost_gradients(self, fixed: Fixed) -> None:
        pairs = self._step.written_of(list(zip(self.paths, fixed.values, strict=True)))
        is_own = [path is not None for path, value in pairs for _ in jax.tree.leaves(value)]
        step, places = self._runner.step, list(self._runner.losses.places)
        carried = list(zip(step.carried, step.written, is_own, strict=True))
        read = {*step.parameters, *step.probes}
        lost = lost_gradients(step.program, step.results[0], read, carried)
        early = user_step.untraced_reads(
            self._learner, self._runner.signal_of(self._probes or {}, places)
        )
        publish([*lost, *early], self._learner.compiler_options.strict)

    def _values(self, fixed: Fixed) -> tuple[Any, ...]:
        count = len(self._parameters)
        parameters, others = fixed.values[:count], fixed.values[count:]
        return parameters, others, self._probes, (fixed.weights, fixed.initial)

    def _recorded_step(
        self, probes: PyTree, constants: tuple[PyTree, Any], inputs: tuple[PyTree, PyTree]
    ) -> PyTree:
        """Return the loss of a step, its auxiliary results, and its records.

        Perturbations are ``None`` if derivatives pass from step to step.
        """
        (weights, initial), (slices, reset), graph = constants, inputs, self._graph
        if reset is not None:
            if self._options.every > 1 or not self._options.updates:
                self._check_fixed_weights()
            self._learner.reset_samples(initial, reset)
            if probes is not None:
                probes = sites.probes_after_reset(graph, probes, reset)

        def run(inputs: Inputs) -> Any:
            if probes is None:
                is_single = self._window is None
                outputs, new_states, records = window_step(graph, inputs, is_single)
            else:
                outputs, new_states = probed_step(graph, inputs, weights, probes)
                records = residuals(graph, inputs, weights)
            records = dataclasses.replace(records, reset=reset, has_mask=self._has_mask)
            return outputs, new_states, records

        recorder, options = user_step.Recorder(self._learner, run, probes), self._options
        result = recorder.run(options.step_fn, slices)
        if self._evolves:
            return jnp.zeros(()), result if options.return_outputs else None, recorder.records
        loss, aux = result if options.has_aux else (result, None)
        return user_step.check_loss(loss), aux, recorder.records

    def _check_fixed_weights(self) -> None:
        """Refuse resets in a sequence that change the weight of an ETP operation."""
        for key, held in self._graph.held_paths.items():
            for path in self._learner.short_term_states.keys() & held:
                raise OptionError(
                    f"The weight of '{key}' is computed from State '{path_name(path)}', which "
                    "`reset` initialises. Reset it between the calls, or make it a "
                    "`brainstate.LongTermState`."
                )

    # --- a sequence

    def run(self, values: list[PyTree], traces: Traces | None, arguments: Arguments) -> Result:
        """Return gradients, losses and auxiliary results; or outputs."""
        sequences, mask, flags, initial = arguments
        steps, count = steps_of(sequences), len(self._parameters)
        scales = jnp.ones(steps) if mask is None else mask
        if self._options.reduction == "mean":
            total = jnp.sum(scales)
            scales = scales / jnp.where(total == 0, 1, total)
        weights, to_parameters = jax.vjp(
            lambda now: user_step.operands_of(self._learner, self._step, [*now, *values[count:]]),
            values[:count],
        )
        data, fixed = ((sequences, flags), scales), Fixed(values, weights, initial)
        if self._linear is None:
            found = self._forward(fixed, traces, data, learns=not self._evolves)
        else:
            found = self._backward(fixed, traces, data)
        (outside, of_operands), (losses, aux), written, after = found
        known = values, sequences
        if self._evolves:
            result = without_derivative(known, ((aux, None), written), OptionError, NO_DERIVATIVE)
            return *result, self.finished(after, traces)
        of_operands = jax.tree.map(lambda w, g: g.astype(w.dtype), weights, of_operands)
        leaves, tree = jax.tree.flatten(to_parameters(of_operands)[0])
        rest = iter(outside)
        every = [
            (leaf + next(rest)).astype(leaf.dtype) if has_more else leaf
            for leaf, has_more in zip(leaves, self._runner.differentiated, strict=True)
        ]
        gradients = tree.unflatten(without_derivative(known, every, OptionError, NO_DERIVATIVE))
        if mask is not None:  # the loss of a masked step may be NaN
            losses = jnp.where(mask == 0, 0, losses)
        return ((gradients, losses, aux), None), written, after

    def named(self, results: PyTree, options: Options) -> PyTree:
        """Return the results for the user: gradients by path, and names for several results."""
        if self._evolves:
            return results
        gradients, losses, aux = results
        by_path = dict(zip(self._parameters, gradients, strict=True))
        own = gradients_for(self._learner.module, by_path)
        if options.return_value:
            both = GradientAndLosses(own, losses)
            return GradientLossesAndAux(*both, aux) if options.has_aux else both
        return GradientAndAux(own, aux) if options.has_aux else own

    def overwrites(self, steps: int, from_zero: bool) -> bool:
        """Test whether the buffers of the traces before a call are free after it."""
        has_loop = self._linear is None and self.cut(steps, from_zero).count > 1
        return steps == 1 or self._evolves or has_loop

    def cut(self, steps: int, from_zero: bool) -> Chunks:
        """Return the chunks of a sequence, from zero traces or not."""
        key = steps, from_zero
        return self.cuts.get(key) or self.cuts.setdefault(key, self._chunks(*key))

    def _zeros(self, fixed: Fixed) -> Gradients:
        leaves = jax.tree.leaves(fixed.values[: len(self._parameters)])
        outside = list(itertools.compress(leaves, self._runner.differentiated))
        return jax.tree.map(zero_sum, (outside, fixed.weights))

    def _forward(self, fixed: Fixed, traces: Traces | None, data: Part, learns: bool) -> OfChunks:
        """Run all chunks; the traces after a single one of several steps are deferred."""
        graph, method, cut = self._graph, self._method, self.cut(steps_of(data), traces is None)

        def run_chunk(carry: PyTree, chunk: Part) -> tuple[PyTree, tuple[jax.Array, PyTree]]:
            written, (outside, of_operands), before = carry
            result, signal, residuals = self._run_part(fixed, (written, outside), chunk)
            recorded = Chunk(graph, fixed.weights, self._runner.records(residuals))
            after: Any = None
            if residuals.steps == 1 and not is_zero(before):  # its gradient can be read from them
                after = method.update(recorded, before)
            if learns:
                found, later = chunk_gradient(method, recorded, signal, before, after)
                after = later if after is None else after
                of_operands = jax.tree.map(jnp.add, of_operands, found)
            gradients = result.gradients, of_operands
            if after is None:
                old = None if is_zero(before) else before
                # XLA would compute single numbers of the gradient again inside the update.
                sums = jax.tree.map(jnp.sum, gradients)
                token = None if old is None or not learns else ordering_token(sums)
                finish = self.finish if cut.count > 1 else self._deferred
                after = finish((fixed.weights, residuals, token), old)
            return (result.written, gradients, after), (result.loss, result.aux)

        start = self._step.written_of(fixed.values), self._zeros(fixed), traces or self._zero_traces
        (written, gradients, after), results = over_chunks(run_chunk, start, data, cut.length)
        return gradients, results, written, after

    def _backward(self, fixed: Fixed, traces: Traces | None, data: Part) -> OfChunks:
        """Run all chunks, and again from the last to the first, from the States before each."""
        graph, zeros = self._graph, self._zeros(fixed)
        cut = self.cut(steps_of(data), traces is None)

        def forward(states: PyTree, part: Part) -> tuple[PyTree, PyTree]:
            return self._run_part(fixed, (states, zeros[0]), part)[0].written, as_chunk(states)

        def backward(carry: tuple[Gradients, Adjoints], now: tuple[jax.Array, Part]) -> Any:
            ((outside, of_operands), after), (steps, part) = carry, now
            states = jax.tree.map(lambda leaf: leaf[steps[0] // cut.length], starts)
            result, signal, residuals = self._run_part(fixed, (states, outside), part)

            # Step by step, no factor and no input of a product is stored.
            def pull_step(carry: tuple[Weights, Adjoints], now: Any) -> Any:
                over_time, signal = as_chunk(now)
                records = self._runner.records(SourceValues(over_time, residuals.once, 1))
                recorded = Chunk(graph, fixed.weights, records)
                found, before = self._linear.pull_back(recorded, signal, carry[1])
                own = of_parameters(graph, found)
                return (jax.tree.map(jnp.add, carry[0], own), before), None

            over_time = residuals.over_time, signal
            end, _ = scan_over_time(pull_step, (of_operands, after), over_time, reverse=True)
            return ((result.gradients, end[0]), end[1]), (result.loss, result.aux)

        start = self._step.written_of(fixed.values)
        written, starts = over_chunks(forward, start, data, cut.length)
        silent = {s.name: jnp.zeros(s.shape, s.dtype) for s in graph.traced_states}
        end, numbered = (zeros, sites.at_entry(graph, silent)), (jnp.arange(cut.steps), data)
        ((outside, of_operands), adjoints), results = over_chunks(
            backward, end, numbered, cut.length, reverse=True
        )
        if traces is not None:
            records = Records(x={}, has_mask=self._has_mask or data[0][1] is not None)
            past = self._linear.contract(Chunk(graph, fixed.weights, records), adjoints, traces)
            of_operands = jax.tree.map(jnp.add, of_operands, past)
        return (outside, of_operands), results, written, Deferred((fixed, data), None)

    def finished(self, after: Any, traces: Traces | None) -> Traces:
        """Return the traces after a call as arrays, given those before it."""
        return self.finish(after.sources, traces) if isinstance(after, Deferred) else after

    def finish(self, sources: PyTree, before: Traces | None) -> Traces:
        """Return deferred traces, from those before the call; ``None``: they are zero.

        They are computed from the operands that they depend on, the residuals of the last chunk,
        and the flag of `Records`; or a checkpointed sequence runs again.
        """
        if self._linear is not None and isinstance(sources[0], Fixed):
            after = self._forward(sources[0], before, sources[1], learns=False)[3]
            return self.finished(after, before)
        operands, residuals, token = sources
        weights = as_arrays({**self._operand_shapes, **operands})
        records = self._runner.records(residuals)

        def update(traces: Traces, records: Records) -> tuple[Traces, None]:
            recorded = Chunk(self._graph, weights, dataclasses.replace(records, token=token))
            return self._method.update(recorded, traces), None

        def update_part(traces: Traces, records: Records) -> tuple[Traces, None]:
            return update(traces, dataclasses.replace(records, steps=steps_of(records.inputs)))

        start = before or self._zero_traces
        if not self._passes or self._window is not None:
            return update(start, records)[0]
        length = self._chunks(residuals.steps, from_zero=False).length
        return over_chunks(update_part, start, records, length)[0]

    def _deferred(self, sources: PyTree, before: Traces | None) -> Deferred:
        """Return deferred traces; operands that they do not depend on would be copied."""
        weights, *rest = sources
        if sum(leaf.nbytes for leaf in jax.tree.leaves(weights)) <= MOST_COPIED_BYTES:
            return Deferred(sources, None)
        update = program_of(jax.make_jaxpr(self.finish)(sources, before))
        read, leaves = update.depends_on(update.out_atoms), iter(update.in_vars)
        own = {key: [next(leaves) for _ in weights[key]] for key in sorted(weights)}
        known = {key: weights[key] for key, them in own.items() if not read.isdisjoint(them)}
        return Deferred((known, *rest), None)

    # --- a chunk

    def _run_part(
        self, fixed: Fixed, start: tuple[PyTree, list[PyTree]], part: Part
    ) -> tuple[ChunkResult, Probes, SourceValues]:
        """Run a part from written States and sums of gradients; also signals and residuals."""
        values = self._values(fixed)
        result = self._runner.run(values, start, part)
        residuals = self._runner.residuals(values, result.residuals, steps_of(part))
        return result, self._signal(fixed, start[0], result.signal), residuals

    def _signal(self, fixed: Fixed, written: list[PyTree], derivatives: list[jax.Array]) -> Probes:
        """Return the learning signals of a chunk, time first.

        If derivatives pass from step to step, they are those for the States before the first step
        of each window. ``written`` are the States before the chunk.
        """
        if not self._passes:
            return self._runner.signal_of(self._probes or {}, derivatives)
        current = self._step.merge(fixed.values, written)
        states = {state.name: sites.pre_step_probe(state) for state in self._graph.traced_states}

        def moved(terms: Probes) -> list[Any]:
            given = {name: terms[probe] for name, probe in states.items()}
            new = self._step.written_of(add_to_states(self._graph, self.paths, current, given))
            return self._runner.loops.passing(jax.tree.leaves(new))

        _, pull = jax.vjp(moved, examples(sites.probes_of_past(self._graph)))
        return dict(jax.vmap(pull)(derivatives)[0])
