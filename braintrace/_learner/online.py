"""Online learning: an update after every step of a stream, or after every block of steps.

With ``every=1`` each step runs separately: its gradient is computed from the traces after it, and
the parameters may change before the next step. With ``every=k`` the parameters are constant for
``k`` steps, which run in chunks like a separate sequence (see `gradient`). No computation is
deferred to the end of the stream, so a stream can be endless.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import brainstate
import jax
import jax.numpy as jnp
import saiunit

from .._checks import check_choice, shown
from .._core.gradient import as_chunk
from .._core.traces import as_arrays
from .._errors import OptionError
from .._from_function import gradients_by_path, gradients_for
from .._graph.method import Traces
from .._typing import PyTree, path_name
from . import user_step
from .arguments import Options
from .base import BaseLearner
from .chunks import over_blocks, steps_of
from .gradient import SequenceGradient
from .optimizer import notice
from .program import Arguments, LossesAndAux, Program, Result
from .resets import reset_states
from .state import by_path
from .update import StepResult, check_finite, run_update, update_of

Slices: TypeAlias = tuple[PyTree, jax.Array | None, jax.Array | None]
"""Slices of the sequences, the flags and the mask, for one step or the steps of a block."""

Differentiate: TypeAlias = Callable[[Traces, list[PyTree], Slices], tuple[StepResult, Traces]]
"""Returns the result of a step or block, and the traces after it; hidden States advance."""


class OnlineLearning(Program):
    """A stream for one learner, step function, update and shape of slices."""

    def __init__(self, learner: BaseLearner, options: Options, example: Arguments) -> None:
        self._learner, self._options = learner, options
        sequences, mask, flags, initial = example
        self._initial = jax.eval_shape(lambda: initial)
        self._length = min(options.every, steps_of(sequences))
        check_choice("nonfinite", options.nonfinite, "skip", "raise", "ignore")
        if (options.update_fn is None) == (options.optimizer is None):
            raise OptionError(
                f"`update_fn` is {shown(options.update_fn)} and `optimizer` is "
                f"{shown(options.optimizer)}; expected one of them, which changes the parameters "
                "after a step. In an `update_fn`, you can call an optimizer."
            )
        window = learner.window_of(options.window)
        if window is not None and options.every % window:
            raise OptionError(
                f"`window` is {window} and `every` is {options.every}: no window spans an update. "
                "Give a `window` that divides `every`."
            )
        is_step = options.every == 1 and window is None
        self._differentiate: Differentiate = self._step if is_step else self._of_blocks(example)
        self._update = update_of(learner, options)
        self._pure = self._traced((sequences, flags, mask), self._length)
        super().__init__(learner, self._pure.states, self._pure.is_written)
        if options.nonfinite == "raise":
            self.check = self._check_finite
        elif options.nonfinite == "skip":
            self.notice = functools.partial(notice, learner.held_optimizer)

    def _check_finite(self, found: tuple[jax.Array, jax.Array]) -> None:
        check_finite(*found, self._names, self._options.every)

    def _traced(self, over_time: Slices, length: int) -> user_step.PureStep:
        """Return a step, or a block of a given length, with its update as a pure function.

        Blocks of another length are not cached, since they may contain tracers.
        """
        traces = jax.eval_shape(as_arrays, self._learner.starting_traces())
        slices = user_step.example_slices(over_time)
        if self._options.every > 1:
            slices = jax.tree.map(lambda x: jnp.broadcast_to(x, (length, *x.shape)), slices)
        return user_step.PureStep(self._run, (), (traces, self._initial, slices))

    def _run(self, traces: Traces, initial: list[PyTree], inputs: Slices) -> PyTree:
        """Return the traces after a step or block with its update, and its results."""
        learner = self._learner
        result, after = self._differentiate(traces, initial, inputs)
        leaves = by_path(gradients_by_path(learner.module, result.gradients))
        self._names = list(map(path_name, leaves))
        verdict, after = run_update(learner, self._update, self._options.nonfinite, result, after)
        shape = result.losses.shape
        verdict = jax.tree.map(lambda v: jnp.broadcast_to(v, (*shape, *v.shape)), verdict)
        return after, (result.losses, result.aux, verdict)

    def _step(
        self, traces: Traces, initial: list[PyTree], inputs: Slices
    ) -> tuple[StepResult, Traces]:
        learner, options = self._learner, self._options
        slices, reset, weight = inputs
        if reset is not None:
            reset_states(learner, initial, reset)

        def loss_of_step() -> PyTree:
            run = functools.partial(learner.compiled.one_step, traces=traces, reset=reset)
            recorder = user_step.Recorder(learner, run)
            (loss, *rest), self._loss_unit = user_step.recorded_loss(recorder, options, slices)
            return loss, rest

        differentiate = brainstate.transform.grad(
            loss_of_step, learner.param_states, has_aux=True, return_value=True
        )
        gradients, loss, (aux, after) = differentiate()
        if options.unit_aware:
            gradients = user_step.with_units(gradients, self._loss_unit)
        if weight is not None:
            loss = jnp.where(weight != 0, loss, 0)
        return StepResult(gradients_for(learner.module, gradients), loss, aux, weight), after

    def _of_blocks(self, example: Arguments) -> Differentiate:
        """Return the derivative of a block: of its mean loss, as a separate sequence."""
        learner, own, is_one = self._learner, self._options, self._options.every == 1
        kept = {name: getattr(own, name) for name in ("window", "has_aux", "unit_aware")}
        options = Options(step_fn=own.step_fn, **kept)
        sequences, mask, flags = jax.tree.map(lambda leaf: leaf[: self._length], example[:3])
        block = Arguments(sequences, mask, flags, example.initial)
        program = SequenceGradient(learner, options, block)

        def of_block(traces: Traces, initial: list[PyTree], inputs: Slices) -> Any:
            slices, reset, weights = as_chunk(inputs) if is_one else inputs
            values = [state.value for state in program.states]
            arguments = Arguments(slices, weights, reset, [] if reset is None else initial)
            (results, _), written, after = program.run(values, traces, arguments)
            after = program.finished(after, traces)
            for state, value in zip(program.written, written, strict=True):
                state.value = value
            of_parameters, losses, aux = results
            losses, self._loss_unit = saiunit.split_mantissa_unit(losses)
            if is_one:
                losses, aux = jax.tree.map(lambda leaf: leaf[0], (losses, aux))
            by_path = dict(zip(program.parameters, of_parameters, strict=True))
            return StepResult(gradients_for(learner.module, by_path), losses, aux, weights), after

        return of_block

    def run(self, values: list[PyTree], traces: Any, arguments: Arguments) -> Result:
        """Return losses and auxiliary results, and verdicts."""
        sequences, mask, flags, initial = arguments
        over_time, every = (sequences, flags, mask), self._options.every

        def of_length(length: int) -> Any:
            pure = self._pure if length == self._length else self._traced(over_time, length)

            def run(carry: PyTree, now: Slices) -> PyTree:
                current = pure.merge(values, carry[0])
                written, (after, results) = pure(current, carry[1], initial, now)
                return (written, after), results

            return run

        start = (self._pure.written_of(values), traces)
        if every == 1:
            carry, results = jax.lax.scan(of_length(1), start, over_time)
        else:
            carry, results = over_blocks(of_length, start, over_time, steps_of(sequences), every)
        losses, aux, verdict = results
        verdict = (losses, verdict) if self._options.nonfinite == "raise" else verdict
        if self._options.unit_aware:
            losses = user_step.with_unit(losses, self._loss_unit)
        results = LossesAndAux(losses, aux) if self._options.has_aux else losses
        return (results, verdict), *carry
