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
"""Most bytes of operands that deferred traces may read without need."""

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
        self,
        learner: BaseLearner,
        options: Options,
        example: Arguments,
        evolves: bool = False,
        is_one_step: bool = False,
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
        if flags is not None and not is_one_step:
            _check_fixed_weights(learner)
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
        result = user_step.run_step_function(options.step_fn, recorder, slices)
        if self._evolves:
            return jnp.zeros(()), result if options.return_outputs else None, recorder.records
        loss, aux = result if options.has_aux else (result, None)
        return user_step.check_loss(loss), aux, recorder.records

    # --- a sequence

    def run(self, values: list[PyTree], traces: Traces | None, arguments: Arguments) -> Result:
        """Return gradients, losses and auxiliary results; or outputs."""
        sequences, mask, flags, initial = arguments
        cut, count = self.cut(steps_of(sequences), traces is None), len(self._parameters)
        scales = jnp.ones(cut.steps) if mask is None else mask
        if self._options.reduction == "mean":
            total = jnp.sum(scales)
            scales = scales / jnp.where(total == 0, 1, total)
        weights, to_parameters = jax.vjp(
            lambda now: user_step.operands_of(self._learner, self._step, [*now, *values[count:]]),
            values[:count],
        )
        data, fixed = ((sequences, flags), scales), Fixed(values, weights, initial)
        run = self._forward if self._linear is None else self._backward
        (outside, of_operands), (losses, aux), written, after = run(fixed, traces, data, cut)
        if not self._defers(cut.steps, traces is None):
            after = self.finished(after, traces)
        known = values, sequences
        if self._evolves:
            found = without_derivative(known, ((aux, None), written), OptionError, NO_DERIVATIVE)
            return *found, after
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

    def _defers(self, steps: int, from_zero: bool) -> bool:
        """Test whether a program of its own computes the traces after a call, when they are read.

        After a single step it would cost a second call.
        """
        return not self._evolves and (from_zero or steps > 1)

    def overwrites(self, steps: int, from_zero: bool) -> bool:
        """Test whether the buffers of the traces before a call are free after it."""
        if not self._defers(steps, from_zero):
            return True
        has_loop = not from_zero and self._linear is None
        return has_loop and self.cut(steps, from_zero).count > 1

    def cut(self, steps: int, from_zero: bool) -> Chunks:
        """Return the chunks of a sequence, from zero traces or not."""
        if (steps, from_zero) not in self.cuts:
            self.cuts[steps, from_zero] = self._chunks(steps, from_zero)
        return self.cuts[steps, from_zero]

    def _zeros(self, fixed: Fixed) -> Gradients:
        leaves = jax.tree.leaves(fixed.values[: len(self._parameters)])
        outside = list(itertools.compress(leaves, self._runner.differentiated))
        return jax.tree.map(zero_sum, (outside, fixed.weights))

    def _forward(self, fixed: Fixed, traces: Traces | None, data: Part, cut: Chunks) -> OfChunks:
        """Run all chunks; the traces after the last one are deferred."""
        start = self._step.written_of(fixed.values), self._zeros(fixed), traces or self._zero_traces
        run_last = functools.partial(self._chunk, fixed)

        def run_chunk(carry: PyTree, chunk: Part) -> Any:
            (written, gradients, after), results = run_last(carry, chunk)
            return (written, gradients, self.finished(after, carry[2])), results

        (written, gradients, after), results = over_chunks(
            run_chunk, run_last, start, data, cut.steps, cut.length
        )
        if isinstance(after, Deferred):
            before: Any = None if is_zero(after.before) else after.before
            read = self._read_by_update(fixed.weights, after.sources[1], before)
            # XLA would compute single numbers of the gradient again inside the update.
            whole = jax.tree.map(jnp.sum, gradients)
            token = None if before is None else ordering_token(whole)
            sources = read, after.sources[1], token
            after = Deferred(sources, None if cut.count == 1 else before)
        return gradients, results, written, after

    def finish(self, sources: PyTree, before: Traces | None) -> Traces:
        """Return deferred traces, from those before the call; ``None``: they are zero."""
        run = self._updated if self._linear is None else self._replayed
        return run(sources, before)

    def finished(self, after: Any, traces: Traces | None) -> Traces:
        """Return the traces after a call as arrays, given those before it."""
        if isinstance(after, Deferred):
            before: Any = traces if after.before is None else after.before
            return self.finish(after.sources, before)
        return after

    def _updated(
        self, sources: tuple[PyTree, SourceValues, jax.Array | None], before: Traces | None
    ) -> Traces:
        """Return the traces after a chunk, from its operands, residuals, and the flag of `Records`.

        ``before`` is ``None`` if they are zero. Operands that are not read may be ``None``.
        """
        operands, residuals, token = sources
        shapes = self._operand_shapes
        filled = jax.tree.map(lambda shape, x: shape if x is None else x, shapes, operands)
        weights, before = as_arrays(filled), before or self._zero_traces
        records = dataclasses.replace(self._runner.records(residuals), token=token)

        def update(traces: Traces, records: Records) -> tuple[Traces, None]:
            if records.inputs:  # of a part of the chunk
                records = dataclasses.replace(records, steps=steps_of(records.inputs))
            return self._method.update(Chunk(self._graph, weights, records), traces), None

        steps = length = residuals.steps
        if self._passes and self._window is None:
            length = self._chunks(steps, from_zero=False).length
        if length == steps:
            return update(before, records)[0]
        return over_chunks(update, update, before, records, steps, length)[0]

    def _read_by_update(self, weights: Weights, residuals: PyTree, before: Traces | None) -> PyTree:
        """Return the operands whose values the traces after a chunk depend on, or None.

        Returning the others as well would copy them. A few are copied, without this trace.
        """
        if sum(leaf.nbytes for leaf in jax.tree.leaves(weights)) <= MOST_COPIED_BYTES:
            return weights
        update = program_of(jax.make_jaxpr(self._updated)((weights, residuals, None), before))
        read = update.depends_on(update.out_atoms)
        leaves, tree = jax.tree.flatten(weights)
        own = update.in_vars[: len(leaves)]
        result = [leaf if var in read else None for leaf, var in zip(leaves, own, strict=True)]
        return jax.tree.unflatten(tree, result)

    def _backward(self, fixed: Fixed, traces: Traces | None, data: Part, cut: Chunks) -> OfChunks:
        """Run all chunks twice; for the traces, they run once more at the next read."""
        graph, zeros = self._graph, self._zeros(fixed)
        silent = {s.name: jnp.zeros(s.shape, s.dtype) for s in graph.traced_states}
        (written, ((outside, of_operands), adjoints), results) = chunks.backward_over_chunks(
            lambda states, part: self._run_part(fixed, (states, zeros[0]), part)[0].written,
            functools.partial(self._backward_chunk, fixed),
            self._step.written_of(fixed.values),
            (zeros, sites.at_entry(graph, silent)),
            data,
            cut,
        )
        if traces is not None:
            records = Records(x={}, has_mask=self._has_mask or data[0][1] is not None)
            past = self._linear.contract(Chunk(graph, fixed.weights, records), adjoints, traces)
            of_operands = jax.tree.map(jnp.add, of_operands, past)
        return (outside, of_operands), results, written, Deferred((fixed, data), None)

    def _replayed(self, sources: tuple[Fixed, Part], before: Traces | None) -> Traces:
        """Return the traces after a sequence that runs again."""
        fixed, data = sources
        steps, (outside, _) = steps_of(data), self._zeros(fixed)

        def run(carry: PyTree, part: PyTree) -> tuple[PyTree, None]:
            states, traces = carry
            result, _, residuals = self._run_part(fixed, (states, outside), part)
            return (result.written, self._updated((fixed.weights, residuals, None), traces)), None

        start = self._step.written_of(fixed.values), before or self._zero_traces
        length = self._chunks(steps, from_zero=before is None).length
        return over_chunks(run, run, start, data, steps, length)[0][1]

    # --- a chunk

    def _chunk(self, fixed: Fixed, carry: Any, chunk: Part) -> Any:
        """Run one chunk from ``(written States, gradients, traces)``.

        Return a carry with the traces after it, deferred if the gradient does not need them, and
        the loss and the auxiliary results of every step.
        """
        (written, (outside, of_operands), traces), steps = carry, steps_of(chunk)
        result, signal, residuals = self._run_part(fixed, (written, outside), chunk)
        recorded = Chunk(self._graph, fixed.weights, self._runner.records(residuals))
        after: Any = None
        if not self._evolves:
            if steps == 1 and not is_zero(traces):  # its gradient can be read from them
                after = self._method.update(recorded, traces)
            found, later = chunk_gradient(self._method, recorded, signal, traces, after)
            after = later if after is None else after
            of_operands = jax.tree.map(jnp.add, of_operands, found)
        gradients = result.gradients, of_operands
        if after is None:
            after = Deferred((fixed.weights, residuals, ordering_token(gradients)), traces)
        return (result.written, gradients, after), (result.loss, result.aux)

    def _run_part(
        self, fixed: Fixed, start: tuple[PyTree, list[PyTree]], part: Part
    ) -> tuple[ChunkResult, Probes, SourceValues]:
        """Run a part from written States and sums of gradients; also signals and residuals."""
        values = self._values(fixed)
        result = self._runner.run(values, start, part)
        residuals = self._runner.residuals(values, result.residuals, steps_of(part))
        return result, self._signal(fixed, start[0], result.signal), residuals

    def _backward_chunk(
        self, fixed: Fixed, carry: tuple[Gradients, Adjoints], written: PyTree, part: Part
    ) -> tuple[tuple[Gradients, Adjoints], tuple[jax.Array, PyTree]]:
        """Add the gradient of a part, whose adjoints of the states after it are known.

        ``written`` are the States before it. Return the carry, and the loss and the auxiliary
        results of every step.
        """
        (outside, of_operands), after = carry
        result, signal, sources = self._run_part(fixed, (written, outside), part)

        # Step by step, no factor and no input of a product is stored.
        def pull_step(carry: tuple[Weights, Adjoints], now: Any) -> Any:
            over_time, signal = as_chunk(now)
            records = self._runner.records(SourceValues(over_time, sources.once, 1))
            recorded = Chunk(self._graph, fixed.weights, records)
            found, before = self._linear.pull_back(recorded, signal, carry[1])
            own = of_parameters(self._graph, found)
            return (jax.tree.map(jnp.add, carry[0], own), before), None

        start, steps = (of_operands, after), (sources.over_time, signal)
        (of_operands, before), _ = scan_over_time(pull_step, start, steps, reverse=True)
        return ((result.gradients, of_operands), before), (result.loss, result.aux)

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


def _check_fixed_weights(learner: BaseLearner) -> None:
    """Refuse resets in a sequence that change the weight of an ETP operation."""
    for key, held in learner.graph.held_paths.items():
        for path in learner.short_term_states.keys() & held:
            raise OptionError(
                f"The weight of '{key}' is computed from State '{path_name(path)}', which `reset` "
                "initialises. Reset it between the calls, or make it a `brainstate.LongTermState`."
            )
