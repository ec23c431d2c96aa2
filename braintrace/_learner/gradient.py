"""Sequence gradient: the gradient of a loss over a sequence, compiled once per step function.

One step is the user's ``step_fn``, run on a learner that records. Steps run chunk by chunk (see
`sequence_chunk`). The gradient of the operands is pulled back to the parameters once, at the end:
the operations between them (a mask, a transpose, a product of parameters) are loop-invariant.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from .._core.chunk import SourceValues
from .._core.sites import at_entry, probes_after_reset
from .._core.steps import Inputs, operand_shapes, recorded_step
from .._core.traces import as_arrays, examples, is_zero, ordering_token
from .._core.windows import passed_step, window_step
from .._errors import OptionError
from .._graph import Traces, Weights
from .._jax import without_derivative
from .._jaxpr import program_of
from .._typing import PyTree
from .base import BaseLearner
from .chunks import Chunks, ChunksByLength, backward_over_chunks, over_chunks, steps_of
from .options import Options
from .program import Arguments, Body, BodyResult, DeferredTraces, Initial
from .resets import check_fixed_weights, reset_states
from .sequence_chunk import Fixed, SequenceChunk
from .user_step import Recorder, example_slices, loss_of, operands_of, with_unit, with_units

NO_DERIVATIVE = (
    "The gradients of `etrace_grad` or `etrace_online` are differentiated, but they are computed "
    "from traces and residuals that are held constant. Pass them through `jax.lax.stop_gradient`, "
    "or differentiate backpropagation through time (`predict`) twice."
)


OfChunks: TypeAlias = tuple[PyTree, PyTree, list[PyTree], Traces | DeferredTraces]
"""Gradients, results over time, written States, traces."""


class SequenceGradient:
    """The gradient of sequences for one learner, step function and shape of slices.

    Parameters
    ----------
    learner, options
        The learner, and the options of the call.
    example
        Example arguments.

    Attributes
    ----------
    body
        The body for a driver.
    """

    def __init__(self, learner: BaseLearner, options: Options, example: Arguments) -> None:
        self._learner = learner
        self._options = options
        self._parameters = self._learner.param_states
        self._window = self._learner.window_of(self._options.window)
        sequences, mask, flags, initial = example
        slices = example_slices((sequences, flags))
        self._operand_shapes = operand_shapes(self._learner.graph)
        self._chunks = SequenceChunk(
            self._learner,
            self._recorded_step(mask is not None, self._options.step_fn),
            (examples(self._operand_shapes), initial),
            slices,
            mask is not None,
            self._options,
        )
        self._cuts: ChunksByLength = {}
        pure = self._chunks.step
        check_fixed_weights(self._learner, pure, flags is not None)
        pure.check_unused(self._learner.carried)
        self._zero_traces = self._learner.starting_traces()
        self.body: Body = Body(
            run=self._sequence,
            states=pure.states,
            is_written=pure.is_written,
            reads="zero",
            finish=self._updated if self._chunks.linear is None else self._replayed,
            parameters=tuple(self._parameters),
            cut=self._cut if self._chunks.linear is None else None,
            chunks_by_length=self._cuts,
        )

    def _recorded_step(
        self, has_mask: bool, step_fn: Callable[..., PyTree]
    ) -> Callable[..., PyTree]:
        """Return the recorded step as a function of perturbations, fixed values, and slices."""
        in_full, graph = passed_step if self._window is None else window_step, self._learner.graph

        def step(
            probes: PyTree, constants: tuple[PyTree, Initial], inputs: tuple[PyTree, PyTree]
        ) -> PyTree:
            (weights, initial), (slices, reset) = constants, inputs
            if reset is not None:
                reset_states(self._learner, initial, reset)

            def run(inputs: Inputs) -> Any:
                if probes is None:
                    outputs, new_states, records = in_full(graph, inputs)
                else:
                    added = probes if reset is None else probes_after_reset(graph, probes, reset)
                    outputs, new_states, records = recorded_step(graph, inputs, weights, added)
                records = dataclasses.replace(records, reset=reset, has_mask=has_mask)
                return outputs, new_states, records

            recorder = Recorder(self._learner, run)
            has_aux, unit_aware = self._options.has_aux, self._options.unit_aware
            loss, self._loss_unit, aux = loss_of(step_fn, recorder, slices, has_aux, unit_aware)
            return loss, aux, recorder.records

        return step

    def _sequence(
        self, values: list[PyTree], traces: Traces | None, given: Arguments
    ) -> BodyResult:
        sequences, mask, flags, initial = given
        parameters, others = values[: len(self._parameters)], values[len(self._parameters) :]
        cut = self._cut(steps_of(sequences), traces is None)
        scales = self._scales(jnp.ones(cut.steps) if mask is None else mask)
        weights, to_parameters = jax.vjp(
            lambda now: operands_of(self._learner, self._chunks.step, [*now, *others]), parameters
        )
        data, fixed = ((sequences, flags), scales), Fixed(parameters, others, weights, initial)
        over_chunks = self._forward if self._chunks.linear is None else self._backward
        gradients, (losses, aux), written, after = over_chunks(fixed, traces, data, cut)

        def pulled_back(found: Weights) -> PyTree:
            return to_parameters(jax.tree.map(lambda w, g: g.astype(w.dtype), weights, found))[0]

        total = self._chunks.total(gradients, pulled_back)
        total = without_derivative((values, sequences), total, OptionError, NO_DERIVATIVE)
        if mask is not None:  # the loss of a masked step may be NaN
            losses = jnp.where(mask == 0, 0, losses)
        if self._options.unit_aware:
            total, losses = with_units(total, self._loss_unit), with_unit(losses, self._loss_unit)
        return ((total, losses, aux), None), written, after

    def _forward(self, fixed: Fixed, traces: Traces | None, data: PyTree, cut: Chunks) -> OfChunks:
        """Run all chunks; the traces after the last one are deferred."""
        zero, weights = self._chunks.start(fixed), fixed.weights
        start = self._chunks.step.written_of(fixed.others), zero, self._from(traces)

        def run_last(carry: PyTree, chunk: PyTree) -> PyTree:
            (written, gradients, residuals), results = self._chunks.run(fixed, carry, chunk)
            return (written, gradients, (residuals, carry[2])), results

        def run_chunk(carry: PyTree, chunk: PyTree) -> PyTree:
            (written, gradients, (residuals, before)), results = run_last(carry, chunk)
            after = self._updated((weights, residuals, ordering_token(gradients)), before)
            return (written, gradients, after), results

        (written, gradients, (residuals, before)), results = over_chunks(
            run_chunk, run_last, start, data, cut.steps, cut.length
        )
        after: Traces | DeferredTraces = residuals  # if `run` has computed them anyway
        if isinstance(residuals, SourceValues):
            read = self._read_by_update(weights, residuals, None if is_zero(before) else before)
            # XLA would compute single numbers of the gradient again inside the update.
            whole = jax.tree.map(jnp.sum, gradients)
            token = None if is_zero(before) else ordering_token(whole)
            after = DeferredTraces((read, residuals, token), None if cut.count == 1 else before)
        return gradients, results, written, after

    def _backward(self, fixed: Fixed, traces: Traces | None, data: PyTree, cut: Chunks) -> OfChunks:
        """Run all chunks twice; for the traces, they run once more at the next read."""
        chunks, graph = self._chunks, self._learner.graph
        silent = {s.name: jnp.zeros(s.shape, s.dtype) for s in graph.traced_states}
        (written, ((outside, of_operands), adjoints), results) = backward_over_chunks(
            lambda states, part: chunks.forward(fixed, states, part)[0],
            functools.partial(chunks.backward, fixed),
            chunks.step.written_of(fixed.others),
            (chunks.start(fixed), at_entry(graph, silent)),
            data,
            cut,
        )
        if traces is not None:
            past = chunks.of_past(
                fixed.weights, adjoints, traces, has_resets=data[0][1] is not None
            )
            of_operands = jax.tree.map(jnp.add, of_operands, past)
        return (outside, of_operands), results, written, DeferredTraces((fixed, data), None)

    def _replayed(self, sources: tuple[Fixed, PyTree], before: Traces | None) -> Traces:
        """Return the traces after a sequence that runs again."""
        fixed, data = sources
        steps = steps_of(data)

        def run(carry: PyTree, part: PyTree) -> tuple[PyTree, None]:
            states, traces = carry
            states, residuals = self._chunks.forward(fixed, states, part)
            after = self._chunks.traces_after(fixed.weights, residuals, traces)
            return (states, after), None

        start = self._chunks.step.written_of(fixed.others), self._from(before)
        length = self._chunks.cut(self._options, steps, from_zero=before is None).length
        (_, after), _ = over_chunks(run, run, start, data, steps, length)
        result: Traces = after
        return result

    def _from(self, traces: Traces | None) -> Traces:
        return self._zero_traces if traces is None else traces

    def _updated(
        self, sources: tuple[PyTree, PyTree, jax.Array | None], before: Traces | None
    ) -> Traces:
        """Return the traces after a chunk, from its operands, residuals, and the flag of `Records`.

        ``None`` for the traces before it means zero; ``None`` for an operand means that its value
        does not matter.
        """
        weights, residuals, flag = sources
        weights = jax.tree.map(
            lambda shape, operand: shape if operand is None else operand,
            self._operand_shapes,
            weights,
        )
        after: Traces = self._chunks.traces_after(
            as_arrays(weights), residuals, self._from(before), flag
        )
        return after

    def _read_by_update(self, weights: Weights, residuals: PyTree, before: Traces | None) -> PyTree:
        """Return the operands whose values the traces after a chunk depend on, or None.

        Returning the others as well would copy them.
        """
        update = program_of(jax.make_jaxpr(self._updated)((weights, residuals, None), before))
        read = update.depends_on(update.out_atoms)
        leaves, tree = jax.tree.flatten(weights)
        own = update.in_vars[: len(leaves)]
        result = [leaf if var in read else None for leaf, var in zip(leaves, own, strict=True)]
        return jax.tree.unflatten(tree, result)

    def _cut(self, steps: int, from_zero: bool) -> Chunks:
        """Return the chunks of a sequence, from zero traces or not."""
        if (steps, from_zero) not in self._cuts:
            self._cuts[steps, from_zero] = self._chunks.cut(self._options, steps, from_zero)
        return self._cuts[steps, from_zero]

    def _scales(self, mask: jax.Array) -> jax.Array:
        if self._options.reduction == "sum":
            return mask
        total = jnp.sum(mask)
        return mask / jnp.where(total == 0, 1, total)
