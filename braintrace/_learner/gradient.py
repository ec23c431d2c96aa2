"""The gradient of a loss over a sequence, compiled once per step function and shape.

One step is the user's ``step_fn``, run on a learner that records. Steps are run chunk by chunk
(see `chunk_gradient`). The gradient of the operands goes back to the parameters once, at the
end: what lies between (a mask, a transpose, a product of parameters) is fixed over a sequence.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import brainstate
import jax
import jax.numpy as jnp

from .._errors import OptionError
from .._executor import operands
from .._typing import Path
from .chunk_gradient import RecordedChunk, WindowChunk
from .chunks import check_sequences, over_chunks
from .recorder import Recorder
from .units import split_loss, with_unit, with_units


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
        if self.reduction not in ("mean", "sum"):
            raise OptionError(f"`reduction` is {self.reduction!r}; expected 'mean' or 'sum'.")


class SequenceGradient:
    """A compiled sequence gradient of one learner, step function and shape of slices.

    Parameters
    ----------
    learner
        The learner.
    step_fn
        The user's function of one step.
    options, chunk
        What is returned, and the length of a chunk.
    sequences
        Example sequences.
    """

    def __init__(
        self,
        learner: Any,
        step_fn: Callable[..., Any],
        options: GradientOptions,
        chunk: int,
        sequences: Any,
    ) -> None:
        self._algorithm = learner.algorithm
        self._options = options
        self._length = chunk
        self._parameters: dict[Path, brainstate.State] = {
            tuple(path): state
            for path, state in self._algorithm.model.states(brainstate.ParamState).items()
        }
        slices = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape[1:], leaf.dtype), sequences)
        graph = self._algorithm.graph
        weights = {
            relation.key: {
                name: jnp.zeros(var.aval.shape, var.aval.dtype)
                for name, var in relation.trainable_vars.items()
            }
            for relation in graph.hidden_param_op_relations
        }
        kind = WindowChunk if self._algorithm.vjp_method == "multi-step" else RecordedChunk
        self._chunks = kind(
            self._algorithm,
            self._recording(learner, step_fn),
            list(self._parameters.values()),
            weights,
            slices,
        )
        self._run = jax.jit(self._sequence)

    def __call__(self, sequences: Any, mask: jax.Array) -> tuple[dict[Path, Any], Any, Any]:
        """Return gradients, value and auxiliary results; advance states and traces."""
        parameters = [state.value for state in self._parameters.values()]
        others = [state.value for state in self._chunks.step.others]
        traces = self._algorithm.traces
        try:
            gradients, value, aux, written, traces.value = self._run(
                parameters, others, traces.value, sequences, mask
            )
        except jax.errors.UnexpectedTracerError as error:
            raise OptionError(
                "`step_fn` calls the learner inside a compiled function or loop of its own. Call "
                "it directly: the whole sequence gradient is compiled."
            ) from error
        self._chunks.step.write(written)
        if self._options.unit_aware:
            gradients = with_units(gradients, self._loss_unit)
            value = with_unit(value, self._loss_unit)
        return dict(zip(self._parameters, gradients, strict=True)), value, aux

    def _recording(self, learner: Any, step_fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return the step as a function of probes, operands and slices."""

        def step(probes: Any, weights: Any, slices: Any) -> Any:
            recorder = Recorder(self._algorithm, weights, probes)
            learner.record_with(recorder)
            try:
                result = step_fn(*slices)
            finally:
                learner.record_with(None)
            if recorder.calls != 1:
                raise OptionError(
                    f"`step_fn` called the learner {recorder.calls} times; it has to call it "
                    "exactly once per step, and not inside a compiled function of its own."
                )
            loss, aux = _loss_and_aux(result, self._options.has_aux)
            mantissa, self._loss_unit = split_loss(loss, self._options.unit_aware)
            return mantissa, aux, recorder.records

        return step

    def _operands(self, parameters: list[Any]) -> Any:
        graph = self._algorithm.graph
        values = dict(zip(self._parameters, map(jax.tree.leaves, parameters), strict=True))
        inputs = {
            leaf.in_var: values[leaf.path][leaf.leaf]
            for leaf in graph.traced.leaves
            if leaf.kind == "parameter" and leaf.path in values
        }
        return operands(graph, inputs)

    def _sequence(
        self, parameters: list[Any], others: list[Any], traces: Any, sequences: Any, mask: Any
    ) -> Any:
        steps = check_sequences(sequences)
        scales = self._scales(mask)
        weights, to_parameters = jax.vjp(self._operands, parameters)
        zero = self._chunks.start(parameters, weights)
        start = (self._chunks.step.written_of(others), zero, traces)

        def run_chunk(carry: Any, chunk: Any) -> Any:
            return self._chunks.run(parameters, others, weights, carry, chunk)

        (written, gradients, traces), (losses, aux) = over_chunks(
            run_chunk, start, (sequences, scales), steps, self._length
        )
        total = self._chunks.total(gradients, lambda found: to_parameters(found)[0])
        return total, jnp.sum(losses * scales), aux, written, traces

    def _scales(self, mask: Any) -> Any:
        if self._options.reduction == "sum":
            return mask
        total = jnp.sum(mask)
        return mask / jnp.where(total == 0, 1, total)


def _loss_and_aux(result: Any, has_aux: bool) -> tuple[Any, Any]:
    if has_aux and not (isinstance(result, tuple) and len(result) == 2):
        raise OptionError("With `has_aux=True`, `step_fn` must return a pair `(loss, aux)`.")
    loss, aux = result if has_aux else (result, None)
    shapes = [tuple(jnp.shape(leaf)) for leaf in jax.tree.leaves(loss)]
    if shapes != [()]:
        raise OptionError(
            f"`step_fn` must return a scalar loss; it returned arrays of shapes {shapes}."
        )
    return loss, aux
