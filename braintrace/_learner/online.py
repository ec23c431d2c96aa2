"""Online learning: an update after every step of a stream, or after every block of steps.

The parameters are constant for a block of ``every`` steps, which runs like a separate sequence (see
`gradient`). No computation is deferred to the end of the stream, so a stream can be endless. After
the gradient of a block comes its update, unless a mask or a number that is not finite forbids it.
An update is a gradient transformation of optax (a pair of pure functions with a pytree as its
state), or the user's ``update_fn``, which writes parameters and States of its own.
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

from .._brainstate import values_of
from .._checks import check_choice, in_words, path_name, shown
from .._core.traces import as_arrays, reset_traces, samples_with, unpack
from .._errors import NonFiniteError, OptionError, optional_import
from .._from_function import gradients_by_path
from .._graph.method import Traces
from .._jax import on_host
from .._model import Values, write_by_path
from .._typing import PyTree
from . import user_step
from .arguments import Options, of_numbers
from .base import BaseLearner
from .chunks import over_chunks, steps_of
from .gradient import SequenceGradient
from .program import Arguments, Program, Result

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
                f"{shown(options.optimizer)}; expected one of them."
            )
        self._length = min(options.every, steps_of(sequences))
        self._block = SequenceGradient(learner, options, example)
        over_time = jax.tree.map(lambda leaf: leaf[: self._length], (sequences, flags, mask))
        self._pure = self._traced(initial, over_time)
        super().__init__(learner, self._pure.states, self._pure.is_written)
        if options.nonfinite == "raise":
            self.check = functools.partial(check_finite, every=options.every)
        elif options.nonfinite == "skip":
            self.notice = learner.held_optimizer.notice

    def _traced(self, initial: Values | None, block: Slices) -> user_step.PureStep:
        """Return a block, with its update, as a pure function."""
        traces = jax.eval_shape(as_arrays, self._learner.starting_traces())
        example = jax.eval_shape(lambda: (initial, block))
        return user_step.PureStep(self._run, (), (traces, *example))

    def _run(self, traces: Traces, initial: Values, inputs: Slices) -> PyTree:
        """Return the traces after a block with its update, and its results.

        The block's mean loss is differentiated, as in a separate sequence.
        """
        block, (slices, reset, weights) = self._block, inputs
        if reset is not None and self._options.every == 1:  # weights may be computed from States
            self._learner.reset_samples(initial, reset[0])
        values = [state.value for state in block.states]
        arguments = Arguments(slices, weights, reset, initial)
        (results, _), written, after = block.run(values, traces, arguments)
        for state, value in zip(block.written, written, strict=True):
            state.value = value
        gradients, (_, losses, aux) = block.named(results, Options()), results
        traces = block.finished(after, traces)
        is_bad, traces = self._update((gradients, losses, aux), weights, traces)
        return traces, (losses, aux, is_bad & (jnp.arange(len(losses)) == 0))

    def run(self, values: list[PyTree], traces: Any, arguments: Arguments) -> Result:
        """Return losses and auxiliary results, and verdicts."""
        sequences, mask, flags, initial = arguments
        over_time, options = (sequences, flags, mask), self._options

        def run_block(carry: PyTree, now: Slices) -> PyTree:
            # Blocks of another length are not kept, since they may contain tracers.
            is_full = steps_of(now) == self._length
            pure = self._pure if is_full else self._traced(initial, now)
            written, (after, results) = pure(pure.merge(values, carry[0]), carry[1], initial, now)
            return (written, after), results

        start = self._pure.written_of(values), traces
        carry, results = over_chunks(run_block, start, over_time, options.every)
        losses, aux, verdict = results
        verdict = (losses, verdict) if options.nonfinite == "raise" else verdict
        results = LossesAndAux(losses, aux) if options.has_aux else losses
        return (results, verdict), *carry

    # --- the update

    def _update(
        self, results: PyTree, weights: jax.Array | None, traces: Traces
    ) -> tuple[jax.Array, Traces]:
        """Update the parameters, unless a mask or a non-finite number forbids it.

        Parameters
        ----------
        results, weights, traces
            Gradients in the form for the user, losses and auxiliary results of a block, the weights
            of its steps in the mask (``None``: there is none), and the traces after it.

        Returns
        -------
        is_bad
            Whether a loss or a gradient is not finite, and not ignored.
        traces
            The traces, in which samples may be reset.
        """
        (gradients, losses, aux), nonfinite = results, self._options.nonfinite
        runs: Any = weights is None or jnp.any(weights != 0)
        is_bad = jnp.zeros((), bool)
        if nonfinite != "ignore":  # before `update_fn` writes to the dict
            leaves = jax.tree.leaves((gradients, losses))
            is_bad = jnp.any(jnp.stack([~jnp.isfinite(_zero(leaf)) for leaf in leaves])) & runs
        if nonfinite == "skip":
            runs = ~is_bad & runs
        written = user_step.first_written(user_step.traced_states(self._learner))
        if runs is True:
            self._write_update(None, gradients, aux)
        else:
            user_step.run_if(runs, self._write_update, None, gradients, aux)
        path = written()
        if path is not None:
            raise OptionError(
                f"`update_fn` writes the hidden State '{path_name(path)}', which no trace follows. "
                "Write it in `update` of the model; to start a new sequence, use `reset`."
            )
        if nonfinite == "skip":
            self._learner.held_optimizer.skipped.value += is_bad
            is_masked = None if weights is None else jnp.any(weights == 0)
            traces = _reset_spoiled(self._learner, is_bad, is_masked, traces)
        return is_bad, traces

    def _write_update(self, _: None, gradients: PyTree, aux: PyTree) -> None:
        learner, options = self._learner, self._options
        if options.optimizer is None:
            if options.every == 1:
                aux = jax.tree.map(lambda leaf: leaf[0], aux)
            results = (gradients, aux) if options.has_aux else (gradients,)
            user_step.call_user("update_fn", options.update_fn, *results)
            return
        now, state = learner.parameters_for_optimizer(), learner.held_optimizer.transformed
        # JAX's derivative by a complex number is the conjugate of the direction of ascent.
        ascent = list(map(jnp.conj, jax.tree.leaves(gradients)))
        with in_words(lambda: "`optimizer.update` fails for the gradients"):
            found = jax.tree.unflatten(jax.tree.structure(now), ascent)
            changes, state.value = options.optimizer.update(found, state.value, now)
        new = jax.tree.map(lambda old, change: (old + change).astype(old.dtype), now, changes)
        write_by_path(learner.param_states, gradients_by_path(learner.module, new))


# --- non-finite numbers


def _zero(leaf: jax.Array) -> jax.Array:
    """Return 0, or NaN for a leaf with non-finite numbers: times zero, all other numbers are zero.

    A product with a vector of zeros takes a CPU a third of the time of a sum.
    """
    if leaf.ndim > 1:
        leaf = jnp.tensordot(jnp.zeros(leaf.shape[:-1], leaf.dtype), leaf, leaf.ndim - 1)
    return jnp.sum(leaf * jnp.zeros((), leaf.dtype))


def check_finite(found: tuple[jax.Array, jax.Array], first: int, every: int) -> None:
    """Refuse a stream in which a loss or a gradient is not finite.

    Parameters
    ----------
    found
        Losses of every step, and whether a block that starts there has one that is not finite.
    first, every
        Index of the first step in the user's call, and length of a block.

    Raises
    ------
    NonFiniteError
        If there is one, or more.
    """
    losses, is_bad = map(on_host, found)
    if is_bad.any():
        start = int(np.argmax(is_bad))
        block = losses[start : start + every]
        step = start + int(np.argmax(~np.isfinite(block)))  # the first one if all losses are finite
        raise NonFiniteError(first + step, float(losses[step]), len(block), first)


def _reset_spoiled(
    learner: BaseLearner, is_bad: jax.Array, is_masked: jax.Array | None, traces: Traces
) -> Traces:
    """Reset the samples that are not finite after a skipped update, or NaN in a masked step.

    Traces are read only if an update is skipped, or a state is NaN in a masked step. Initial values
    are computed only then, since they may draw random numbers. In other steps a NaN is the model's
    own: it may store an input with gaps that it fills.
    """

    def reset(traces: Traces) -> Traces:
        initial = learner.initial_values()
        samples = _spoiled_samples(learner, is_bad, initial, traces)
        learner.reset_samples(initial, samples)
        return reset_traces(learner.compiled.trace_specs, traces, samples)

    is_suspect = is_bad
    if is_masked is not None:
        states = jax.tree.leaves(values_of(learner.short_term_states.values()))
        has_nan = [jnp.any(x != x) for x in states]  # also for random keys
        is_suspect |= is_masked & functools.reduce(jnp.logical_or, has_nan)
    return user_step.run_if(is_suspect, reset, traces)


def _spoiled_samples(
    learner: BaseLearner, is_bad: jax.Array, initial: Values, traces: Traces
) -> jax.Array:
    """Return the samples that have a state or a trace with a bad number; see `_reset_spoiled`.

    It is one flag for each, or one for all if samples cannot be reset separately. Where a state
    starts without a number (a running maximum at minus infinity), none is bad.
    """

    def is_spoiled(leaf: jax.Array) -> jax.Array:
        return jnp.isnan(leaf) | (is_bad & jnp.isinf(leaf))

    def flags_of(leaf: jax.Array, start: Any = 0.0, axis: int | None = None) -> jax.Array:
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            return jnp.zeros((), bool)
        others = tuple(a for a in range(leaf.ndim) if a != axis)
        return jnp.any(is_spoiled(leaf) & jnp.isfinite(start), others)

    graph, specs, traces = learner.graph, learner.compiled.trace_specs, unpack(traces)
    batch, flat, found = graph.batch, graph.flat_state, list[jax.Array]()
    samples, states = batch.samples, learner.short_term_states
    if samples is not None and not batch.unclear and (flat is None or flat.samples == samples):
        with contextlib.suppress(OptionError):  # they share a trace
            found.append(samples_with(is_spoiled, specs, traces, samples))
    is_apart = bool(found)
    if not is_apart:
        found += map(flags_of, jax.tree.leaves(traces))
    for path, starts in initial.items():
        pairs = zip(jax.tree.leaves(states[path].value), jax.tree.leaves(starts), strict=True)
        for index, (leaf, start) in enumerate(pairs):
            axis = batch.axis_at(path, index) if is_apart else None
            found.append(flags_of(leaf, start, axis))
    return functools.reduce(jnp.logical_or, found)


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
    flags = (None if flag is None else on_host(flag) for flag in (options.mask, options.reset))
    over_time = sequences, *flags
    with contextlib.ExitStack() as stack:
        bar = None
        if options.progress and jax.process_index() == 0:
            tqdm = optional_import("tqdm.auto", "examples").tqdm
            bar = stack.enter_context(tqdm(total=steps, unit="step", desc="etrace_online"))
        for start in range(0, steps, length):
            now, begun = slice(start, min(start + length, steps)), time.perf_counter()
            part, mask, reset = jax.tree.map(lambda x, now=now: x[now], over_time)
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
