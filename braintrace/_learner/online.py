"""Online learning: an update after every step of a stream, or after every block of steps.

With ``every=1`` each step runs separately: its gradient is computed from the traces after it, and
the parameters may change before the next step. With ``every=k`` the parameters are constant for
``k`` steps, which run in chunks like a separate sequence (see `gradient`). No computation is
deferred to the end of the stream, so a stream can be endless.
"""

from __future__ import annotations

import collections
import functools
from typing import Any, TypeAlias

import brainstate
import jax
import jax.numpy as jnp

from .._checks import check_choice, shown
from .._core.steps import operands
from .._core.traces import as_arrays
from .._core.windows import probes_of_entry
from .._errors import OptionError
from .._from_function import gradients_by_path, gradients_for
from .._graph.method import Traces
from .._model import leaves_by_var
from .._typing import PyTree, path_name
from . import user_step
from .arguments import Options
from .base import BaseLearner
from .chunks import over_blocks, steps_of
from .gradient import SequenceGradient
from .program import Arguments, Program, Result
from .state import by_path
from .update import StepResult, check_finite, run_update

Slices: TypeAlias = tuple[PyTree, jax.Array | None, jax.Array | None]
"""Slices of the sequences, the flags and the mask, for one step or the steps of a block."""


# Results of `etrace_online` with ``has_aux``.
LossesAndAux = collections.namedtuple("LossesAndAux", "losses aux")


class OnlineLearning(Program):
    """A stream for one learner, step function, update and shape of slices."""

    def __init__(self, learner: BaseLearner, options: Options, example: Arguments) -> None:
        self._learner, self._options = learner, options
        sequences, mask, flags, initial = example
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
        self._length = min(options.every, steps_of(sequences))
        self._differentiate = self._of_step
        if options.every > 1 or window is not None:
            cut = jax.tree.map(lambda leaf: leaf[: self._length], (sequences, mask, flags))
            self._block = SequenceGradient(
                learner,
                Options(step_fn=options.step_fn, window=options.window, has_aux=options.has_aux),
                Arguments(cut[0], cut[1], cut[2], initial),
            )
            self._differentiate = self._of_block
        slices = user_step.example_slices((sequences, flags, mask))
        self._example = jax.eval_shape(lambda: initial), slices
        self._pure = self._traced(self._length)
        super().__init__(learner, self._pure.states, self._pure.is_written)
        if options.nonfinite == "raise":
            self.check = lambda found: check_finite(found, self._names, options.every)
        elif options.nonfinite == "skip":
            self.notice = learner.held_optimizer.notice

    def _traced(self, length: int) -> user_step.PureStep:
        """Return a step, or a block of a given length, with its update as a pure function."""
        traces = jax.eval_shape(as_arrays, self._learner.starting_traces())
        initial, slices = self._example
        if self._differentiate == self._of_block:
            slices = jax.tree.map(lambda x: jnp.broadcast_to(x, (length, *x.shape)), slices)
        return user_step.PureStep(self._run, (), (traces, initial, slices))

    def _run(self, traces: Traces, initial: list[PyTree], inputs: Slices) -> PyTree:
        """Return the traces after a step or block with its update, and its results."""
        learner = self._learner
        by_parameter, losses, aux, after = self._differentiate(traces, initial, inputs)
        gradients = gradients_for(learner.module, by_parameter)
        self._names = list(map(path_name, by_path(gradients_by_path(learner.module, gradients))))
        result = StepResult(gradients, losses, aux, inputs[2])
        verdict, after = run_update(learner, self._options, result, after)
        verdict = jax.tree.map(lambda v: jnp.broadcast_to(v, (*losses.shape, *v.shape)), verdict)
        return after, (losses, aux, verdict)

    def _of_step(self, traces: Traces, initial: list[PyTree], inputs: Slices) -> Any:
        learner, options = self._learner, self._options
        slices, reset, weight = inputs
        if reset is not None:
            learner.reset_samples(initial, reset)

        def loss_of_step() -> PyTree:
            run = functools.partial(learner.compiled.one_step, traces=traces, reset=reset)
            states = learner.states_of_step
            values = [state.value for state in states.values()]
            weights = operands(learner.graph, leaves_by_var(learner.graph, states, values))
            heard = functools.partial(user_step.report_early_reads, learner)
            known = learner.graph, learner.method, weights, traces, reset, heard
            recorder = user_step.Recorder(learner, run, probes_of_entry(*known))
            loss, *rest = user_step.recorded_loss(recorder, options, slices)
            return loss, rest

        differentiate = brainstate.transform.grad(
            loss_of_step, learner.param_states, has_aux=True, return_value=True
        )
        gradients, loss, (aux, after) = differentiate()
        return gradients, loss if weight is None else jnp.where(weight != 0, loss, 0), aux, after

    def _of_block(self, traces: Traces, initial: list[PyTree], inputs: Slices) -> Any:
        """Differentiate the mean loss of a block, as of a separate sequence."""
        (slices, reset, weights), block = inputs, self._block
        values = [state.value for state in block.states]
        arguments = Arguments(slices, weights, reset, [] if reset is None else initial)
        (results, _), written, after = block.run(values, traces, arguments)
        for state, value in zip(block.written, written, strict=True):
            state.value = value
        gradients, losses, aux = results
        return block.by_parameter(gradients), losses, aux, block.finished(after, traces)

    def run(self, values: list[PyTree], traces: Any, arguments: Arguments) -> Result:
        """Return losses and auxiliary results, and verdicts."""
        sequences, mask, flags, initial = arguments
        over_time, options = (sequences, flags, mask), self._options

        def of_length(length: int) -> Any:
            # Blocks of another length are not kept, since they may contain tracers.
            pure = self._pure if length == self._length else self._traced(length)

            def run(carry: PyTree, now: Slices) -> PyTree:
                current = pure.merge(values, carry[0])
                written, (after, results) = pure(current, carry[1], initial, now)
                return (written, after), results

            return run

        start = (self._pure.written_of(values), traces)
        if self._differentiate == self._of_step:
            carry, results = jax.lax.scan(of_length(1), start, over_time)
        else:
            steps = steps_of(sequences)
            carry, results = over_blocks(of_length, start, over_time, steps, options.every)
        losses, aux, verdict = results
        verdict = (losses, verdict) if options.nonfinite == "raise" else verdict
        results = LossesAndAux(losses, aux) if options.has_aux else losses
        return (results, verdict), *carry
