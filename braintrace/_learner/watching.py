"""Logged calls: a sequence in slices, with a progress bar and logs between them."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._errors import NonFiniteError, OptionError, optional_import
from .._typing import PyTree
from ..sharding import on_host
from .base import BaseLearner
from .driver import run_request
from .nonfinite import notice_all
from .options import Request, length_of

PARTS = 10
"""Number of slices of a call that shows progress without logs."""


def run_watched(learner: BaseLearner, request: Request) -> PyTree:
    """Run a call slice by slice, and return the results of the whole call.

    Raises
    ------
    OptionError
        If a slice would end within a block of steps with one update.
    """
    options, steps, results = request.options, length_of(request.sequences), []
    length = options.log_every or options.every * max(1, steps // PARTS // options.every)
    if length % options.every:
        raise OptionError(f"`log_every` is {length}; expected a multiple of {options.every}.")
    with contextlib.ExitStack() as stack:
        bar = None
        if options.progress and jax.process_index() == 0:
            tqdm = optional_import("tqdm.auto", "examples").tqdm
            bar = stack.enter_context(tqdm(total=steps, unit="step", desc=request.method))
        for start in range(0, steps, length):
            stop, begun = min(start + length, steps), time.perf_counter()
            call = _slice(request, start, stop)
            try:
                result = run_request(learner, call)
            except NonFiniteError as error:
                raise error.counted_from(start) from None
            results.append(jax.block_until_ready(result))
            metrics = _means(call, result)
            metrics["steps_per_second"] = (stop - start) / (time.perf_counter() - begun)
            if bar is not None:
                bar.set_postfix({name: metrics[name] for name in metrics if name == "loss"})
                bar.update(stop - start)
            if options.on_log is not None and stop - start == length:
                options.on_log(stop, metrics)
    notice_all(learner.held_optimizer)
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *results)


def _slice(request: Request, start: int, stop: int) -> Request:
    flags = request.options.mask, request.options.reset
    mask, reset = (None if flag is None else on_host(flag)[start:stop] for flag in flags)
    options = dataclasses.replace(request.options, mask=mask, reset=reset)
    sequences = jax.tree.map(lambda leaf: leaf[start:stop], request.sequences)
    return request._replace(sequences=sequences, options=options, start=start)


def _means(call: Request, result: PyTree) -> dict[str, Any]:
    """Return the means of losses and auxiliary results over the unmasked steps of a slice."""
    if call.method != "etrace_online":
        return {}
    mask, results = call.options.mask, result if call.options.has_aux else (result,)
    counts = slice(None) if mask is None or not np.any(mask) else mask != 0
    means = jax.tree.map(lambda leaf: np.mean(on_host(leaf)[counts], axis=0), results)
    return dict(zip(("loss", "aux"), means, strict=False))
