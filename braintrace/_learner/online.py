"""Online learning: an update after every step of a stream, or after every block of steps.

The parameters are constant for a block of ``every`` steps, which runs like a separate sequence (see
`gradient`). No computation is deferred to the end of the stream, so a stream can be endless.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import time
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from .._checks import check_choice, shown
from .._core.traces import as_arrays
from .._errors import OptionError, optional_import
from .._graph.method import Traces
from .._typing import PyTree
from ..sharding import on_host
from . import user_step
from .arguments import Options, of_numbers
from .base import BaseLearner
from .chunks import over_blocks, steps_of
from .gradient import SequenceGradient
from .program import Arguments, Program, Result
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
        cut = jax.tree.map(lambda leaf: leaf[: self._length], (sequences, mask, flags))
        own = Options(step_fn=options.step_fn, window=window, has_aux=options.has_aux)
        example = Arguments(cut[0], cut[1], cut[2], initial)
        is_one_step = options.every == 1
        self._block = SequenceGradient(learner, own, example, is_one_step=is_one_step)
        self._slices = user_step.example_slices((sequences, flags, mask))
        self._initial = jax.eval_shape(lambda: initial)
        self._pure = self._traced(self._length)
        super().__init__(learner, self._pure.states, self._pure.is_written)
        if options.nonfinite == "raise":
            self.check = functools.partial(check_finite, every=options.every)
        elif options.nonfinite == "skip":
            self.notice = learner.held_optimizer.notice

    def _traced(self, length: int) -> user_step.PureStep:
        """Return a block of a given length, with its update, as a pure function."""
        traces = jax.eval_shape(as_arrays, self._learner.starting_traces())
        slices = jax.tree.map(lambda x: jnp.broadcast_to(x, (length, *x.shape)), self._slices)
        return user_step.PureStep(self._run, (), (traces, self._initial, slices))

    def _run(self, traces: Traces, initial: list[PyTree], inputs: Slices) -> PyTree:
        """Return the traces after a block with its update, and its results.

        The gradient is that of the mean loss of the block, as of a separate sequence.
        """
        learner, block, (slices, reset, weights) = self._learner, self._block, inputs
        if reset is not None and self._options.every == 1:  # weights may be computed from States
            learner.reset_samples(initial, reset[0])
        values = [state.value for state in block.states]
        arguments = Arguments(slices, weights, reset, [] if reset is None else initial)
        (results, _), written, after = block.run(values, traces, arguments)
        for state, value in zip(block.written, written, strict=True):
            state.value = value
        gradients, (_, losses, aux) = block.named(results, Options()), results
        if self._options.every == 1:
            aux = jax.tree.map(lambda leaf: leaf[0], aux)
        result = StepResult(gradients, losses, aux, weights)
        is_bad, after = run_update(learner, self._options, result, block.finished(after, traces))
        verdict = is_bad & (jnp.arange(len(losses)) == 0)
        return after, (losses, results[2], verdict)

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
        steps = steps_of(sequences)
        carry, results = over_blocks(of_length, start, over_time, steps, options.every)
        losses, aux, verdict = results
        verdict = (losses, verdict) if options.nonfinite == "raise" else verdict
        results = LossesAndAux(losses, aux) if options.has_aux else losses
        return (results, verdict), *carry


# --- progress and logs


PARTS = 10
"""Number of slices of a call that shows progress without logs."""


def learn_in_slices(
    run: Callable[..., PyTree], sequences: tuple[PyTree, ...], options: Options
) -> PyTree:
    """Learn online slice by slice, and return the results of the whole call.

    ``run`` learns a slice, from the index of its first step, with options.

    Raises
    ------
    OptionError
        If a slice would end within a block of steps with one update.
    """
    (sequences, steps, _), results = of_numbers(sequences), []
    length = options.log_every or options.every * max(1, steps // PARTS // options.every)
    if length % options.every:
        raise OptionError(f"`log_every` is {length}; expected a multiple of {options.every}.")
    with contextlib.ExitStack() as stack:
        bar = None
        if options.progress and jax.process_index() == 0:
            tqdm = optional_import("tqdm.auto", "examples").tqdm
            bar = stack.enter_context(tqdm(total=steps, unit="step", desc="etrace_online"))
        for start in range(0, steps, length):
            now, begun = slice(start, min(start + length, steps)), time.perf_counter()
            part = jax.tree.map(lambda x, now=now: x[now], sequences)
            flags = options.mask, options.reset
            mask, reset = (None if flag is None else on_host(flag)[now] for flag in flags)
            own = options._replace(mask=mask, reset=reset, progress=False, log_every=None)
            result = run(part, start, **own._asdict())
            results.append(jax.block_until_ready(result))
            metrics = _means(own, result)
            metrics["steps_per_second"] = (now.stop - start) / (time.perf_counter() - begun)
            if bar is not None:
                bar.set_postfix(loss=metrics["loss"])
                bar.update(now.stop - start)
            if options.on_log is not None and now.stop - start == length:
                options.on_log(now.stop, metrics)
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *results)


def _means(options: Options, result: PyTree) -> dict[str, Any]:
    """Return the means of losses and auxiliary results over the unmasked steps of a slice."""
    mask, results = options.mask, result if options.has_aux else (result,)
    counts = slice(None) if mask is None or not np.any(mask) else mask != 0
    means = jax.tree.map(lambda leaf: np.mean(on_host(leaf)[counts], axis=0), results)
    return dict(zip(("loss", "aux"), means, strict=False))
