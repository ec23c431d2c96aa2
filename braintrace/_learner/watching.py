"""Logged calls: a sequence in blocks, with progress and logs between them.

A compiled loop cannot report, and cannot be interrupted. A logged sequence is therefore split into
blocks, each a separate atomic call. While a block runs, the host has already issued the next one.
It waits for a block only if a log needs the learner's state after that block. Signals are handled
between two blocks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import saiunit

from .._brainstate import is_watched
from .._errors import Interrupted, NonFiniteError, OptionError
from .._optional import optional_import
from .._sharding import on_host
from .._typing import PyTree
from .calls.arguments import length_of, weights_of
from .calls.chunks import windows_of
from .calls.parts import LearnerParts
from .calls.request import Request
from .driver import run_request
from .state.skips import notice_all

PARTS, LONGEST = 10, 1000
"""Approximate number of blocks of a sequence, and maximum number of steps of a block."""

Metrics: TypeAlias = dict[str, Any]
"""Reported values of some steps, by name."""


def run_watched(learner: LearnerParts, request: Request) -> PyTree:
    """Run a call in blocks, and return the results of the whole call.

    Parameters
    ----------
    learner, request
        The learner, and the call.

    Raises
    ------
    OptionError
        Inside a transformation, or if logs are not at the end of blocks.
    Interrupted
        If Ctrl-C ended the call after a block.
    """
    if is_watched():
        raise OptionError(
            f"`progress` and `log_every` of `{request.method}` do not work inside a "
            "transformation, which runs as one program. Leave them out there."
        )
    steps = length_of(request.sequences)
    request, unit = _with_fixed_windows(learner, request, steps)
    parts = _Sum(request, steps) if request.method == "etrace_grad" else _OverTime(request)
    done, blocks = 0, list(blocks_of(steps, unit, request.options.log_every))
    with contextlib.closing(_Reporter(request, steps)) as reporter:
        try:
            for start, stop in blocks:
                with _counted_from(start):
                    result = run_request(learner, _part(parts.request, start, stop))
                    seen = parts.add(result, start, stop)
                    done = stop
                reporter.issued(stop, result, seen)
            reporter.report()
            notice_all(learner.held_optimizer)
        except KeyboardInterrupt as interrupt:
            results = parts.joined() if done else None
            jax.block_until_ready(results)
            raise Interrupted(request.method, done, steps, results) from interrupt
    return parts.joined()


def blocks_of(steps: int, unit: int, log_every: int | None) -> Iterator[tuple[int, int]]:
    """Yield the starts and stops of blocks: multiples of a unit, and every log.

    Most blocks have the same length, since every other length needs a compilation.

    Raises
    ------
    OptionError
        If a log is not at a multiple of the unit.
    """
    if log_every is not None and log_every % unit:
        raise OptionError(
            f"`log_every` is {log_every}, and parameters change or windows end every {unit} steps: "
            f"give a multiple of {unit}."
        )
    interval = log_every or steps
    most = min(LONGEST, max(1, steps // PARTS), interval)
    most = max(unit, most // unit * unit)
    fitting = [n for n in range(unit, most + 1, unit) if interval % n == 0]
    length = fitting[-1] if fitting and 4 * fitting[-1] >= most else most
    for begin in range(0, steps, interval):
        end = min(begin + interval, steps)
        for start in range(begin, end, length):
            yield start, min(start + length, end)


def _with_fixed_windows(learner: LearnerParts, request: Request, steps: int) -> tuple[Request, int]:
    """Return a call whose blocks compute the same as the whole, and the unit of their lengths."""
    options = request.options
    window = learner.algorithm.window_of(options.window)
    if window is None or request.method != "etrace_grad":
        return request, min(options.every, steps)
    if isinstance(window, int):
        return request, window
    length = windows_of(learner.graph, window, options, steps).length
    options = dataclasses.replace(options, chunk_size=length)
    return request._replace(options=options), length


@contextlib.contextmanager
def _counted_from(start: int) -> Iterator[None]:
    """Count the step of an error from the start of the call, not of the block."""
    try:
        yield
    except NonFiniteError as error:
        raise error.counted_from(start) from None


# --- results of blocks and of the call


def _part(request: Request, start: int, stop: int) -> Request:
    """Return the call of a block; one slicing program with all arrays serves every block."""
    options = request.options
    flags = (g if g is None else on_host(g) for g in (options.mask, options.reset))
    leaves, tree = jax.tree.flatten((request.sequences, *flags))
    arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
    cut = iter(_cut(arrays, start, stop - start))
    parts = [
        next(cut) if isinstance(leaf, jax.Array) else np.asarray(leaf)[start:stop]
        for leaf in leaves
    ]
    sequences, mask, reset = jax.tree.unflatten(tree, parts)
    options = dataclasses.replace(options, mask=mask, reset=reset)
    return request._replace(sequences=sequences, options=options, start=start)


@functools.partial(jax.jit, static_argnums=2)
def _cut(leaves: list[jax.Array], start: int, length: int) -> list[jax.Array]:
    return [jax.lax.dynamic_slice_in_dim(leaf, start, length) for leaf in leaves]


def _joined(parts: list[PyTree]) -> PyTree:
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)


class _OverTime:
    """Results that are stacked over time."""

    def __init__(self, request: Request) -> None:
        self.request, self._found = request, list[PyTree]()

    def add(self, found: PyTree, start: int, stop: int) -> tuple[PyTree, PyTree]:
        """Add the results of a block; return its losses and auxiliary results."""
        self._found.append(found)
        if self.request.method != "etrace_online":
            return None, None
        return found if self.request.options.has_aux else (found, None)

    def joined(self) -> PyTree:
        """Return the results of the call."""
        return _joined(self._found)


class _Sum:
    """Accumulated gradients, each with the weight of its block in the mean over all steps."""

    def __init__(self, request: Request, steps: int) -> None:
        self._given, self._gradients = request.options, None
        weights = jnp.ones(steps) if self._given.mask is None else self._given.mask
        self._weights = weights_of(weights, steps)
        options = dataclasses.replace(self._given, return_value=True)
        self.request = request._replace(options=options)
        self._rest: list[tuple[PyTree, ...]] = []

    def add(self, found: PyTree, start: int, stop: int) -> tuple[PyTree, PyTree]:
        """Add the results of a block; return its losses and auxiliary results."""
        gradients, *rest = found
        if self._given.reduction == "mean":
            share = _divisor(self._weights[start:stop]) / _divisor(self._weights)
            gradients = jax.tree.map(lambda g: (g * share).astype(g.dtype), gradients)
        before = self._gradients
        self._gradients = gradients if before is None else jax.tree.map(jnp.add, before, gradients)
        self._rest.append(tuple(rest))
        return rest[0], rest[1] if self._given.has_aux else None

    def joined(self) -> PyTree:
        """Return the results of the call."""
        losses, *aux = _joined(self._rest)
        result = (self._gradients, *((losses,) if self._given.return_value else ()), *aux)
        return result if len(result) > 1 else self._gradients


def _divisor(weights: jax.Array) -> jax.Array:
    """Return the divisor of a mean, as in a sequence gradient."""
    total = jnp.sum(weights)
    return jnp.where(total == 0, 1, total)


# --- reports


class _Reporter:
    """Reports blocks: immediately for a log, otherwise when the next block has been issued."""

    def __init__(self, request: Request, steps: int) -> None:
        self._options, self._reported, self._logged = request.options, 0, 0
        self._waiting: list[tuple[int, PyTree, tuple[PyTree, PyTree]]] = []
        self._since_log: list[tuple[PyTree, PyTree]] = []
        self._time = time.perf_counter()
        mask = request.options.mask
        self._counts = None if mask is None else on_host(mask) != 0
        self._bar = None
        if request.options.progress and jax.process_index() == 0:
            tqdm = optional_import("tqdm.auto", "examples").tqdm
            self._bar = tqdm(total=steps, unit="step", desc=request.method)

    def issued(self, stop: int, found: PyTree, seen: tuple[PyTree, PyTree]) -> None:
        """Note that a block is running, and report finished ones.

        Parameters
        ----------
        stop
            The last step of the block.
        found, seen
            Its results, and the losses and auxiliary results among them.
        """
        self.report()
        self._waiting.append((stop, found, seen))
        if self._options.log_every is not None and stop % self._options.log_every == 0:
            self.report()

    def report(self) -> None:
        """Wait for running blocks, and report them."""
        waiting, self._waiting = self._waiting, []
        for stop, result, seen in waiting:
            jax.block_until_ready(result)
            if self._bar is not None:
                if seen[0] is not None:
                    self._bar.set_postfix(loss=f"{_last(seen[0]):.4g}", refresh=False)
                self._bar.update(stop - self._reported)
            self._reported = stop
            if self._options.log_every is not None:
                self._since_log.append(seen)
                if stop % self._options.log_every == 0:
                    self._log(stop)

    def _log(self, stop: int) -> None:
        assert self._options.on_log is not None
        now, counts = time.perf_counter(), None
        if self._counts is not None:
            counts = self._counts[self._logged : stop]
        metrics: Metrics = {"steps_per_second": (stop - self._logged) / (now - self._time)}
        losses, aux = jax.tree.map(lambda *x: _mean(x, counts), *self._since_log)
        metrics |= {} if losses is None else {"loss": losses}
        metrics |= {} if aux is None else {"aux": aux}
        self._options.on_log(stop, metrics)
        self._since_log, self._logged, self._time = [], stop, time.perf_counter()

    def close(self) -> None:
        """Close the progress bar."""
        if self._bar is not None:
            self._bar.close()


def _last(losses: PyTree) -> float:
    return float(on_host(saiunit.get_mantissa(losses))[-1])


def _mean(parts: Sequence[jax.Array], counts: np.ndarray | None) -> np.ndarray:
    """Return the mean over unmasked steps of values in parts over time."""
    values = np.concatenate([on_host(part) for part in parts])
    if counts is not None and np.any(counts):
        values = values[counts]
    mean: np.ndarray = np.mean(values, axis=0)
    return mean
