"""Sequence gradient: the gradient of a loss over a sequence, compiled once per step function.

One step is the user's ``step_fn``, run on a learner that records. Steps run chunk by chunk (see
`sequence_chunk`). The gradient of the operands is pulled back to the parameters once, at the end:
the operations between them (a mask, a transpose, a product of parameters) are loop-invariant.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp

from .._core.chunk import SourceValues
from .._core.sites import at_entry
from .._core.steps import operand_shapes, operands
from .._core.traces import as_arrays, examples, is_zero, ordering_token
from .._core.windows import passed_step, window_step
from .._errors import OptionError
from .._from_function import gradients_for
from .._graph import Traces, Weights
from .._jax import without_derivative
from .._jaxpr import program_of
from .._runtime.model_states import read_states
from .._typing import PyTree
from .base import BaseLearner
from .body import Arguments, Body, BodyResult, DeferredTraces, Initial, Resets, taken_unless_zero
from .chunks import Chunks, ChunksByLength, backward_over_chunks, over_chunks, steps_of
from .leaves import split_loss, with_unit, with_units
from .options import Options, Request
from .resets import check_fixed_weights, reset_states
from .sequence_chunk import SequenceChunk
from .user_step import Recorder, call_step_function, example_slices, perturbed_step, run_recorded

NO_DERIVATIVE = (
    "The gradients of `etrace_grad` or `etrace_online` are differentiated, but they are computed "
    "from traces and residuals that are held constant. Pass them through `jax.lax.stop_gradient`, "
    "or differentiate backpropagation through time (`predict`) twice."
)


Fixed: TypeAlias = tuple[list[PyTree], list[PyTree], tuple[Weights, Initial]]
"""Values of the parameters and of other States, and operands and initial values."""

OfChunks: TypeAlias = tuple[PyTree, PyTree, list[PyTree], Traces | DeferredTraces]
"""Gradients, results over time, written States, traces."""


class SequenceGradient:
    """The gradient of sequences for one learner, step function and shape of slices.

    Parameters
    ----------
    learner, request
        The learner, and the call of its method.
    example
        Example arguments.

    Attributes
    ----------
    body
        The body for a driver.
    """

    def __init__(self, learner: BaseLearner, request: Request, example: Arguments) -> None:
        self._learner = learner
        self._options = request.options
        self._parameters = self._learner.param_states
        self._window = self._learner.window_of(self._options.window)
        self._chosen = request.chosen
        self._wanted = (
            {path: path for path in self._parameters}
            if self._chosen is None
            else dict(self._chosen)
        )
        sequences, mask, (flags, initial) = example
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
        pure, paths = self._chunks.step, self._chunks.paths
        check_fixed_weights(self._learner, pure.written_of(paths), flags is not None)
        pure.check_unused(self._learner.traces.carried)
        self._zero_traces = self._learner.starting_traces()
        states, count = [*self._parameters.values(), *pure.others], len(self._parameters)
        self.body: Body = Body(
            run=self._sequence,
            states=lambda of_model: states,
            written=lambda items: pure.written_of(items[count:]),
            results=self._results,
            take=taken_unless_zero,
            replaces=self._has_chunks,
            finish=self._updated if self._chunks.linear is None else self._replayed,
            chunks_by_length=self._cuts,
        )

    def _results(self, found: tuple[PyTree, PyTree, PyTree], options: Options) -> PyTree:
        gradients, losses, aux = found
        if options.unit_aware:
            gradients = with_units(gradients, self._loss_unit)
            losses = with_unit(losses, self._loss_unit)
        given: PyTree = dict(zip(self._wanted, gradients, strict=True))
        if self._chosen is None:
            given = gradients_for(self._learner.module, given)
        extra = ((losses,) if options.return_value else ()) + ((aux,) if options.has_aux else ())
        return (given, *extra) if extra else given

    def _recorded_step(
        self, has_mask: bool, step_fn: Callable[..., PyTree]
    ) -> Callable[..., PyTree]:
        """Return the recorded step as a function of perturbations, fixed values, and slices."""
        in_full = passed_step if self._window is None else window_step

        def step(
            probes: PyTree, constants: tuple[PyTree, Initial], inputs: tuple[PyTree, PyTree]
        ) -> PyTree:
            (weights, initial), (slices, reset) = constants, inputs
            if reset is not None:
                reset_states(self._learner, initial, reset)
            recorded = in_full if probes is None else perturbed_step(weights, probes, reset)
            run = run_recorded(recorded, self._learner.graph, reset, has_mask)
            recorder = Recorder(self._learner, run)
            loss, aux = call_step_function(step_fn, recorder, slices, self._options.has_aux)
            mantissa, self._loss_unit = split_loss(loss, self._options.unit_aware)
            return mantissa, aux, recorder.records

        return step

    def _operands(self, parameters: list[PyTree], others: list[PyTree]) -> Weights:
        """Return the operands: parameters, and the current values of read-only States."""
        graph, states = self._learner.graph, self._learner.states_of_step
        values = dict(zip(self._parameters, parameters, strict=True))
        read_only = zip(self._chunks.paths, others, strict=True)
        values.update({path: value for path, value in read_only if path is not None})
        return operands(graph, read_states(graph, states, values))

    def _sequence(
        self,
        values: list[PyTree],
        traces: Traces | None,
        sequences: PyTree,
        mask: jax.Array | None,
        resets: Resets,
    ) -> BodyResult:
        parameters, others = values[: len(self._parameters)], values[len(self._parameters) :]
        cut = self._cut(sequences, traces)
        scales = self._scales(jnp.ones(cut.steps) if mask is None else mask)
        flags, initial = resets
        weights, to_parameters = jax.vjp(lambda now: self._operands(now, others), parameters)
        data, fixed = ((sequences, flags), scales), (parameters, others, (weights, initial))
        over_chunks = self._forward if self._chunks.linear is None else self._backward
        gradients, (losses, aux), written, after = over_chunks(fixed, traces, data, cut)

        def pulled_back(found: Weights) -> PyTree:
            return to_parameters(jax.tree.map(lambda w, g: g.astype(w.dtype), weights, found))[0]

        total = dict(zip(self._parameters, self._chunks.total(gradients, pulled_back), strict=True))
        wanted = [total[path] for path in self._wanted.values()]
        wanted = without_derivative((values, sequences), wanted, OptionError, NO_DERIVATIVE)
        if mask is not None:  # the loss of a masked step may be NaN
            losses = jnp.where(mask == 0, 0, losses)
        return (wanted, losses, aux), written, after

    def _forward(self, fixed: Fixed, traces: Traces | None, data: PyTree, cut: Chunks) -> OfChunks:
        """Run all chunks; the traces after the last one are deferred."""
        parameters, others, (weights, _) = fixed
        zero = self._chunks.start(parameters, weights)
        start = self._chunks.step.written_of(others), zero, self._from(traces)

        def run_last(carry: PyTree, chunk: PyTree) -> PyTree:
            (written, gradients, residuals), results = self._chunks.run(*fixed, carry, chunk)
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
        parameters, others, (weights, _) = fixed
        chunks, graph = self._chunks, self._learner.graph
        silent = {s.name: jnp.zeros(s.shape, s.dtype) for s in graph.traced_states}
        (written, ((outside, of_operands), adjoints), results) = backward_over_chunks(
            lambda states, part: chunks.forward(*fixed, states, part)[0],
            functools.partial(chunks.backward, *fixed),
            chunks.step.written_of(others),
            (chunks.start(parameters, weights), at_entry(graph, silent)),
            data,
            cut,
        )
        if traces is not None:
            past = chunks.of_past(weights, adjoints, traces, has_resets=data[0][1] is not None)
            of_operands = jax.tree.map(jnp.add, of_operands, past)
        return (outside, of_operands), results, written, DeferredTraces((fixed, data), None)

    def _replayed(self, sources: tuple[Fixed, PyTree], before: Traces | None) -> Traces:
        """Return the traces after a sequence that runs again."""
        fixed, data = sources
        steps = steps_of(data)

        def run(carry: PyTree, part: PyTree) -> tuple[PyTree, None]:
            states, traces = carry
            states, residuals = self._chunks.forward(*fixed, states, part)
            after = self._chunks.traces_after(fixed[2][0], residuals, traces)
            return (states, after), None

        start = self._chunks.step.written_of(fixed[1]), self._from(before)
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

    def _cut(self, sequences: PyTree, traces: Traces | None) -> Chunks:
        """Return the chunks of sequences, given the traces before them; ``None``: zero."""
        key = steps, from_zero = steps_of(sequences), traces is None
        if key not in self._cuts:
            self._cuts[key] = self._chunks.cut(self._options, steps, from_zero)
        return self._cuts[key]

    def _has_chunks(self, sequences: PyTree, traces: Traces | None) -> bool:
        """Test whether a sequence has several chunks: only their loop overwrites the traces."""
        return self._cut(sequences, traces).count > 1 and self._chunks.linear is None

    def _scales(self, mask: jax.Array) -> jax.Array:
        if self._options.reduction == "sum":
            return mask
        total = jnp.sum(mask)
        return mask / jnp.where(total == 0, 1, total)
