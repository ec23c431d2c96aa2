"""The gradient of a loss over a sequence, compiled once per step function and shape.

One step is the user's ``step_fn``, run on a learner that records. Steps are run chunk by chunk
(see `chunk_gradient`). The gradient of the operands goes back to the parameters once, at the
end: what lies between (a mask, a transpose, a product of parameters) is fixed over a sequence.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .._arguments import BOOLEAN, check_option, one_of
from .._executor import as_arrays, is_zero, operands
from .._graph import ETraceGraph
from .._jaxpr import program_of
from .._runtime import Program, Take, advance, read_states
from .._typing import Path
from .chunk_gradient import RecordedChunk, WindowChunk
from .chunks import check_sequences, chunk_length, over_chunks
from .recorder import Recorder, run_in_chunk, run_in_window
from .restart import Initial, Restarts, check_held, restart_states
from .step_function import (
    call_step_function,
    example_slices,
    no_loops_in_step_function,
    parameters_of,
)
from .units import split_loss, with_unit, with_units

_REDUCTION = one_of("mean", "sum")


@dataclasses.dataclass(frozen=True)
class GradientOptions:
    """What a sequence gradient returns.

    Attributes
    ----------
    reduction
        ``'mean'`` or ``'sum'`` of the steps' losses.
    has_aux
        Whether the step function returns auxiliary results.
    unit_aware
        Whether gradients have the unit of the loss over that of the parameter.
    """

    reduction: str
    has_aux: bool
    unit_aware: bool

    def __post_init__(self) -> None:
        check_option("reduction", self.reduction, _REDUCTION)
        check_option("has_aux", self.has_aux, BOOLEAN)
        check_option("unit_aware", self.unit_aware, BOOLEAN)


class SequenceGradient:
    """A compiled sequence gradient of one learner, step function and shape of slices.

    Parameters
    ----------
    learner
        The learner.
    step_fn
        The user's function of one step.
    options, chunk_size
        What is returned, and the length of a chunk as the user gives it.
    sequences
        Example sequences.
    has_mask
        Whether the steps' losses have weights.
    restarts
        Flags of every step, and the values that States start anew from; see `check_reset`.
    """

    def __init__(
        self,
        learner: Any,
        step_fn: Callable[..., Any],
        options: GradientOptions,
        chunk_size: int | str,
        sequences: Any,
        has_mask: bool,
        restarts: Restarts,
    ) -> None:
        self._algorithm = learner.algorithm
        self._options = options
        self._chunk_size = chunk_size
        self._parameters = parameters_of(self._algorithm)
        flags, initial = restarts
        slices = example_slices((sequences, flags))
        graph = self._algorithm.graph
        weights = _zero_operands(graph)
        arguments = (
            self._algorithm,
            self._recording(learner, step_fn),
            list(self._parameters.values()),
            (weights, initial),
            slices,
            has_mask,
        )
        is_window = self._algorithm.vjp_method == "multi-step"
        self._chunks: RecordedChunk | WindowChunk = (
            WindowChunk(*arguments) if is_window else RecordedChunk(*arguments)
        )
        paths = {id(state): path for path, state in self._algorithm.states_of_step.items()}
        pure = self._chunks.step
        self._paths = [paths.get(id(state), ()) for state in pure.others]
        check_held(self._algorithm, pure.written_of(self._paths), flags is not None)
        pure.check_unused(self._algorithm.traces)
        self._operand_shapes = jax.eval_shape(lambda: weights)
        self._zero_traces = self._algorithm.starting_traces()
        self._program = Program(self._sequence, donated=2)
        self._update = Program(self._updated, donated=2)

    def __call__(
        self,
        sequences: Any,
        mask: jax.Array | None,
        restarts: Restarts,
    ) -> tuple[dict[Path, Any], Any, Any]:
        """Return gradients, value and auxiliary results; advance states and traces."""
        parameters = [state.value for state in self._parameters.values()]
        others = [state.value for state in self._chunks.step.others]
        held = self._algorithm.traces
        steps, length = self._lengths(sequences)
        is_one_chunk = steps <= length

        def before(take: Take) -> tuple[Any, bool]:
            return (None, True) if held.is_zero else take()

        def arguments(traces: Any) -> tuple[Any, ...]:
            return parameters, others, traces, sequences, mask, restarts

        def run(take: Take) -> Any:
            traces, owned = before(take)
            in_place = owned and not is_one_chunk
            *results, last = self._program(*arguments(traces), in_place=in_place)
            weights, kept, replaced = last
            if not is_one_chunk:
                traces, owned = replaced, True
            after = self._chunks.known_traces(kept)
            if can_fail and after is None:
                after = jax.block_until_ready(self._update(weights, kept, traces))
            update = functools.partial(self._update, weights, kept, traces, in_place=owned)
            return *results, (lambda: after) if after is not None else update

        def store(results: Any) -> None:
            *_, written, after = results
            self._chunks.step.write(written)
            held.leave(after)

        with no_loops_in_step_function():
            can_fail = self._program.can_fail(lambda: arguments(before(held.lend)[0]))
            gradients, value, aux, *_ = advance(held, can_fail, run, store)
        if self._options.unit_aware:
            gradients = with_units(gradients, self._loss_unit)
            value = with_unit(value, self._loss_unit)
        return dict(zip(self._parameters, gradients, strict=True)), value, aux

    def _recording(self, learner: Any, step_fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return the step as a function of probes, of what is held fixed, and of slices."""

        def step(probes: Any, held: tuple[Any, Initial], inputs: tuple[Any, Any]) -> Any:
            (weights, initial), (slices, restart) = held, inputs
            if restart is not None:
                restart_states(self._algorithm, initial, restart)
            graph = self._algorithm.graph
            run = (
                run_in_window(graph, restart)
                if probes is None
                else run_in_chunk(graph, weights, probes, restart)
            )
            recorder = Recorder(self._algorithm, run)
            loss, aux = call_step_function(
                learner, step_fn, recorder, slices, self._options.has_aux
            )
            mantissa, self._loss_unit = split_loss(loss, self._options.unit_aware)
            return mantissa, aux, recorder.records

        return step

    def _operands(self, parameters: list[Any], others: list[Any]) -> Any:
        """Return the operands: parameters, and States that no step writes, as they are now."""
        graph, states = self._algorithm.graph, self._algorithm.states_of_step
        values = dict(zip(self._parameters, parameters, strict=True))
        values.update(zip(self._paths, others, strict=True))
        return operands(graph, read_states(graph, states, values))

    def _sequence(
        self,
        parameters: list[Any],
        others: list[Any],
        traces: Any,
        sequences: Any,
        mask: Any,
        restarts: Restarts,
    ) -> Any:
        steps, length = self._lengths(sequences)
        scales = self._scales(jnp.ones(steps) if mask is None else mask)
        flags, initial = restarts
        weights, to_parameters = jax.vjp(lambda now: self._operands(now, others), parameters)
        zero = self._chunks.start(parameters, weights)
        is_one_chunk = steps <= length
        if traces is None:
            traces = self._zero_traces if is_one_chunk else as_arrays(self._zero_traces)

        def run_last(carry: Any, chunk: Any) -> Any:
            (written, gradients, kept), results = self._chunks.run(
                parameters, others, (weights, initial), carry, chunk
            )
            return (written, gradients, (kept, carry[2])), results

        def run_chunk(carry: Any, chunk: Any) -> Any:
            (written, gradients, (kept, before)), results = run_last(carry, chunk)
            after = self._updated(weights, kept, _once_computed(gradients, before))
            return (written, gradients, after), results

        start = (self._chunks.step.written_of(others), zero, traces)
        (written, gradients, (kept, before)), (losses, aux) = over_chunks(
            run_chunk, run_last, start, ((sequences, flags), scales), steps, length
        )

        def pulled_back(found: Any) -> Any:
            return to_parameters(jax.tree.map(lambda w, g: g.astype(w.dtype), weights, found))[0]

        total = self._chunks.total(gradients, pulled_back)
        read = self._read_by_update(weights, kept, None if is_zero(before) else before)
        is_read = not is_one_chunk and self._chunks.known_traces(kept) is None
        last = (read, kept, before if is_read else None)
        # The loss of a padded step may be infinite.
        value = jnp.sum(jnp.where(scales == 0, 0, losses * scales))
        return total, value, aux, written, last

    def _updated(self, weights: Any, kept: Any, before: Any) -> Any:
        """Return the traces after a chunk.

        ``None`` before it means zero; among the operands, that the value does not matter.
        """
        before = self._zero_traces if before is None else before
        weights = jax.tree.map(
            lambda shape, operand: shape if operand is None else operand,
            self._operand_shapes,
            weights,
        )
        return self._chunks.traces_after(as_arrays(weights), kept, before)

    def _read_by_update(self, weights: Any, kept: Any, before: Any) -> Any:
        """Return the operands whose values the traces after a chunk depend on, or None.

        To return the others as well would copy them.
        """
        update = program_of(jax.make_jaxpr(self._updated)(weights, kept, before))
        read = update.depends_on(update.out_atoms)
        leaves, tree = jax.tree.flatten(weights)
        own = update.in_vars[: len(leaves)]
        found = [leaf if var in read else None for leaf, var in zip(leaves, own, strict=True)]
        return jax.tree.unflatten(tree, found)

    def _lengths(self, sequences: Any) -> tuple[int, int]:
        """Return the number of steps of the sequences and of a chunk."""
        steps = check_sequences(sequences)
        graph, recorded = self._algorithm.graph, self._chunks.bytes_per_step
        return steps, chunk_length(graph, self._chunk_size, steps, recorded)

    def _scales(self, mask: Any) -> Any:
        if self._options.reduction == "sum":
            return mask
        total = jnp.sum(mask)
        return mask / jnp.where(total == 0, 1, total)


def _once_computed(first: Any, arrays: Any) -> Any:
    """Return arrays as they are, in a way that XLA cannot use before it has computed others.

    It overwrites traces in place only where every other use of them is known to come before;
    otherwise it copies them. By the time that it decides, optimization barriers are gone: here
    the arrays would be zero if some number were equal to itself and different from itself.
    """
    numbers = [_one_number(leaf) for leaf in jax.tree.leaves(first) if leaf.size]
    if not numbers:
        return arrays
    never = jnp.any(jnp.stack([(number != number) & (number == number) for number in numbers]))
    return jax.tree.map(lambda leaf: jnp.where(never, jnp.zeros_like(leaf), leaf), arrays)


def _one_number(array: jax.Array) -> jax.Array:
    """Return the first element of an array, of which no axis is folded: it may be divided."""
    corner = jax.lax.slice(array, (0,) * array.ndim, (1,) * array.ndim)
    return corner.reshape(())


def _zero_operands(graph: ETraceGraph) -> Any:
    return {
        relation.key: {
            name: jnp.zeros(var.aval.shape, var.aval.dtype)
            for name, var in relation.trainable_vars.items()
        }
        for relation in graph.hidden_param_op_relations
    }
