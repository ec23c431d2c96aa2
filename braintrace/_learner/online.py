"""Online learning: an update after every step of a stream, or after every block of steps.

With ``every=1`` each step runs separately: its gradient is computed from the traces after it, and
the parameters may change before the next step. With ``every=k`` the parameters are constant for
``k`` steps, which run in chunks like a separate sequence (see `gradient`). No computation is
deferred to the end of the stream, so a stream can be endless.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import compress
from typing import Any, TypeAlias

import brainstate
import jax
import jax.numpy as jnp
import saiunit

from .._core.gradient import as_chunk
from .._core.traces import as_arrays
from .._errors import OptionError
from .._from_function import gradients_by_path, gradients_for
from .._graph import Traces
from .._typing import PyTree, path_name
from .base import BaseLearner
from .chunks import over_blocks, steps_of
from .gradient import SequenceGradient
from .optimizer import notice_call
from .options import Options
from .program import Arguments, Body, BodyResult, Initial
from .resets import reset_states
from .state import by_path
from .update import StepResult, Update, check_finite, run_update, update_of
from .user_step import (
    PureStep,
    Recorder,
    Reset,
    Values,
    example_slices,
    first_written,
    loss_of,
    values_of,
    with_unit,
    with_units,
)

Slices: TypeAlias = tuple[PyTree, Reset, jax.Array | None]
"""Slices of the sequences, the flags and the mask, for one step or the steps of a block."""

Differentiate: TypeAlias = Callable[[Traces, Initial, Slices], tuple[StepResult, Traces]]
"""Returns the result of a step or block, and the traces after it; hidden States advance."""


class OnlineLearning:
    """A stream for one learner, step function, update and shape of slices.

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

    Raises
    ------
    OptionError
        If ``every`` is not a multiple of the window.
    """

    def __init__(self, learner: BaseLearner, options: Options, example: Arguments) -> None:
        self._learner, self._options = learner, options
        self._parameters = self._learner.param_states
        sequences, mask, flags, _ = example
        self._length = min(self._options.every, steps_of(sequences))
        differentiate = self._differentiating(learner, example)
        self._has_initial = flags is not None
        self._run = self._with_update(update_of(learner, self._options), differentiate)
        self._step = self._traced((sequences, flags, mask), self._length)
        self._step.check_unused(self._learner.carried)
        nonfinite = self._options.nonfinite
        self.body: Body = Body(
            run=self._sequence,
            states=self._step.states,
            is_written=self._step.is_written,
            check=self._check_finite if nonfinite == "raise" else None,
            notice=functools.partial(notice_call, learner.held_optimizer)
            if nonfinite == "skip"
            else None,
        )

    def _check_finite(self, found: tuple[jax.Array, jax.Array]) -> None:
        check_finite(*found, self._names, self._options.every)

    def _traced(self, over_time: Slices, length: int) -> PureStep:
        """Return a step, or a block of a given length, as a pure function."""
        traces = jax.eval_shape(as_arrays, self._learner.starting_traces())
        initial: Initial = []
        if self._has_initial:
            initial = list(self._learner.initial_values(self._learner.states_of_model).values())
        slices = example_slices(over_time)
        if self._options.every > 1:
            slices = jax.tree.map(
                lambda leaf: jnp.broadcast_to(leaf, (length, *leaf.shape)), slices
            )
        return PureStep(self._run, (), (traces, initial, slices))

    def _differentiating(self, learner: BaseLearner, example: Arguments) -> Differentiate:
        step_fn, every = self._options.step_fn, self._options.every
        window = self._learner.window_of(self._options.window)
        if window is not None and every % window:
            raise OptionError(
                f"`window` is {window} and `every` is {every}: parameters change after every "
                f"`every` steps, and no window spans an update. Give a `window` that divides "
                "`every`."
            )
        if every > 1:
            return self._of_blocks(learner, example)
        if window is not None:
            return _of_single_steps(self._of_blocks(learner, example))
        return functools.partial(self._of_step, step_fn)

    def _of_step(
        self,
        step_fn: Callable[..., PyTree],
        traces: Traces,
        initial: Initial,
        inputs: Slices,
    ) -> tuple[StepResult, Traces]:
        learner, options = self._learner, self._options
        slices, reset, weight = inputs
        if reset is not None:
            reset_states(learner, initial, reset)

        def loss_of_step() -> PyTree:
            before = values_of(self._parameters)
            recorder = Recorder(learner, lambda now: learner.compiled.one_step(now, traces, reset))
            has_aux, unit_aware = options.has_aux, options.unit_aware
            loss, self._loss_unit, aux = loss_of(step_fn, recorder, slices, has_aux, unit_aware)
            self._check_not_written(before)
            return loss, (aux, recorder.records)

        differentiate = brainstate.transform.grad(
            loss_of_step, self._parameters, has_aux=True, return_value=True
        )
        gradients, loss, (aux, after) = differentiate()
        if options.unit_aware:
            gradients = with_units(gradients, self._loss_unit)
        if weight is not None:
            loss = jnp.where(weight != 0, loss, 0)
        return StepResult(gradients_for(learner.module, gradients), loss, aux, weight), after

    def _of_blocks(self, learner: BaseLearner, example: Arguments) -> Differentiate:
        """Return the derivative of a block: of its mean loss, as a separate sequence."""
        own = self._options
        kept = {name: getattr(own, name) for name in ("window", "has_aux", "unit_aware")}
        options = Options(step_fn=own.step_fn, **kept)
        parts = {name: getattr(example, name) for name in ("sequences", "mask", "flags")}
        block = jax.tree.map(lambda leaf: leaf[: self._length], parts)
        body = SequenceGradient(learner, options, example._replace(**block)).body
        module = learner.module

        def of_block(traces: Traces, initial: Initial, inputs: Slices) -> tuple[StepResult, Traces]:
            slices, reset, weights = inputs
            values = [state.value for state in body.states]
            arguments = Arguments(slices, weights, reset, [] if reset is None else initial)
            (results, _), written, after = body.run(values, traces, arguments)
            after = body.finished(after, traces)
            for state, value in zip(compress(body.states, body.is_written), written, strict=True):
                state.value = value
            of_parameters, losses, aux = results
            by_path = dict(zip(body.parameters, of_parameters, strict=True))
            mantissas, self._loss_unit = saiunit.split_mantissa_unit(losses)
            return StepResult(gradients_for(module, by_path), mantissas, aux, weights), after

        return of_block

    def _with_update(self, update: Update, differentiate: Differentiate) -> Callable[..., PyTree]:
        """Return a step or block with its update: (traces, initial values, slices) -> results."""
        learner = self._learner

        def run(traces: Traces, initial: Initial, inputs: Slices) -> PyTree:
            result, after = differentiate(traces, initial, inputs)
            leaves = by_path(gradients_by_path(learner.module, result.gradients))
            self._names = list(map(path_name, leaves))
            verdict, after = run_update(learner, update, self._options.nonfinite, result, after)
            if verdict is not None:
                verdict = jax.tree.map(
                    lambda v: jnp.broadcast_to(v, (*result.losses.shape, *v.shape)), verdict
                )
            return after, result.losses, result.aux, verdict

        return run

    def _check_not_written(self, before: Values) -> None:
        path = first_written(before, values_of(self._parameters))
        if path is not None:
            raise OptionError(
                f"`step_fn` writes the parameter '{path_name(path)}'. Change parameters in "
                "`update_fn`, which gets the gradient of the step."
            )

    def _carried(self, step: PureStep, others: list[PyTree], initial: Initial) -> Any:
        """Return a step or block as a function of a loop's carry, and of slices."""

        def run(carry: PyTree, now: Slices) -> PyTree:
            values = step.merge(others, carry[0])
            written, (after, losses, aux, verdict) = step((), values, carry[1], initial, now)
            return (written, after), (losses, aux, verdict)

        return run

    def _sequence(self, others: list[PyTree], traces: Traces, given: Arguments) -> BodyResult:
        sequences, mask, flags, initial = given
        over_time, every = (sequences, flags, mask), self._options.every

        def of_length(length: int) -> Any:
            step = self._step if length == self._length else self._other_block(over_time, length)
            return self._carried(step, others, initial)

        start = (self._step.written_of(others), traces)
        if every == 1:
            carry, results = jax.lax.scan(of_length(1), start, over_time)
        else:
            carry, results = over_blocks(of_length, start, over_time, steps_of(sequences), every)
        losses, aux, verdict = results
        verdict = (losses, verdict) if self._options.nonfinite == "raise" else verdict
        if self._options.unit_aware:
            losses = with_unit(losses, self._loss_unit)
        return ((losses, aux) if self._options.has_aux else losses, verdict), *carry

    def _other_block(self, over_time: Slices, length: int) -> PureStep:
        """Return a block of another length; it is not cached, since it may contain tracers."""
        step = self._traced(over_time, length)
        if list(map(id, step.others)) != list(map(id, self._step.others)):
            raise OptionError(
                f"A block of {length} steps reads or writes other States than a block of "
                f"{self._length}. `step_fn` and `update_fn` must use the same States in all "
                "blocks."
            )
        return step


def _of_single_steps(of_block: Differentiate) -> Differentiate:
    """Return the derivative of a step, as a block of one step."""

    def of_step(traces: Traces, initial: Initial, inputs: Slices) -> tuple[StepResult, Traces]:
        result, after = of_block(traces, initial, as_chunk(inputs))
        loss, aux = jax.tree.map(lambda leaf: leaf[0], (result.losses, result.aux))
        return result._replace(losses=loss, aux=aux), after

    return of_step
