"""A run: train all rates and seeds, choose the rate, compare gradients and measure memory."""

import dataclasses
import datetime
import functools
import importlib.metadata
import os
import platform
import re
from collections.abc import Callable, Sequence
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np

from braintrace import BraintraceError

from ..timing import Call, time_once
from . import methods, tasks, training
from .methods import Prepared
from .networks import Values, build, values_of
from .rows import COSINES, Row, finite, spread_out
from .runs import Job
from .scores import scorer

CALLS = 9
"""Calls of a gradient that are timed; the shortest counts, as other processes only add to it."""

PACKAGES = ("braintrace", "brainstate", "jax", "jaxlib")

FIXED = 10**6
"""Seed of the batch on which gradients are compared, which no training draws."""


def run(job: Job) -> list[Row]:
    """Return the row of every seed; or one row with the reason if the library refuses."""
    task, method = tasks.load(job.task), methods.BY_NAME[job.method]
    updates = job.updates or task.updates
    row = Row(
        *job.key,
        seed=job.seeds[0],
        units=job.units,
        batch=task.batch,
        updates=updates,
        steps=task.length,
        window=method.window(task),
        chance=task.chance,
        threshold=task.threshold,
        measured=datetime.date.today().isoformat(),
        machine=f"{jax.devices()[0].device_kind}, {platform.machine()}, {os.cpu_count()} cores",
        versions=" ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES),
    )
    try:
        prepared = _prepared(row)
        weights = _train(job, row, prepared)
    except BraintraceError as error:
        return [dataclasses.replace(row, refused=reason(error))]
    return _rows(job, row, prepared, weights)


def _rows(job: Job, row: Row, prepared: Prepared, weights: Values) -> list[Row]:
    scores = _scores(row, weights, "validation")
    best = best_rate(scores)
    last = jax.tree.map(lambda leaf: leaf[best : best + 1, :, -1:], weights)
    test = _scores(row, last, "test")
    is_grid = len(job.rates) > 1
    rows = [
        dataclasses.replace(
            row,
            seed=seed,
            rate=job.rates[best],
            score=finite(test[0, i, 0]),
            validation=_numbers(scores[:, i, -1]) if is_grid else (),
            curve=_numbers(scores[best, i]),
        )
        for i, seed in enumerate(job.seeds)
    ]
    if not is_grid:
        return rows
    gradient, peak = _compiled(row, prepared)
    call = Call(functools.partial(gradient, _weights(row, row.seed)))
    rows[0] = dataclasses.replace(
        rows[0],
        cosine=_cosine(row, gradient, jax.tree.map(lambda leaf: leaf[best, 0], weights)),
        trace_bytes=prepared.trace_bytes,
        peak_bytes=peak,
        step_seconds=min(time_once(call) for _ in range(CALLS)) / row.steps,
    )
    return rows


def reason(error: BraintraceError) -> str:
    """Return the first line of an error, without the places of files on this machine."""
    return re.sub(r" \[[^\]]*:\d+:\d+[^\]]*\]", "", str(error).splitlines()[0])


def _prepared(row: Row) -> Prepared:
    method, task = methods.BY_NAME[row.method], tasks.load(row.task)
    return methods.prepare(method, task, row.cell, row.units, row.batch)


def _weights(row: Row, seed: int) -> Values:
    model = build(tasks.load(row.task), row.cell, row.units, seed)
    return values_of(model, brainstate.ParamState)


def _stacked(trees: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def _train(job: Job, row: Row, prepared: Prepared) -> Values:
    """Return the weights by rate, seed and point."""
    optimizer = methods.BY_NAME[job.method].optimizer
    task = tasks.load(row.task)
    lane = training.lane(task, prepared.gradient, row.batch, row.updates, optimizer)
    lanes = jax.vmap(jax.vmap(lane, (None, 0, 0, 0)), (0, None, None, None))
    found: Values = jax.jit(lanes)(
        jnp.asarray(job.rates),
        jnp.stack([jax.random.key(seed) for seed in job.seeds]),
        _stacked([_weights(row, seed) for seed in job.seeds]),
        _stacked([prepared.memory(seed) for seed in job.seeds]),
    )
    return found


def _scores(row: Row, weights: Values, split: tasks.Split) -> Any:
    """Return scores of weights, ``(rate, seed, point)``."""
    lanes = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), weights)
    found = scorer(row.task, row.cell, row.units, split)(lanes)
    return np.asarray(found).reshape(jax.tree.leaves(weights)[0].shape[:3])


def best_rate(scores: Any) -> int:
    """Return the rate with the best mean over seeds at the last point; NaN is the worst."""
    last = np.asarray(scores)[:, :, -1].mean(axis=1)
    return int(np.argmax(np.where(np.isfinite(last), last, -np.inf)))


def _numbers(values: Any) -> tuple[float | None, ...]:
    return tuple(map(finite, values))


Compiled = Callable[[Values], Any]
"""The gradient of a fixed batch."""


def _compiled(row: Row, prepared: Prepared) -> tuple[Compiled, int | None]:
    """Return the gradient of the first seed alone, and its temporary memory."""
    batch = tasks.load(row.task).sample(jax.random.key(FIXED), row.batch, "train")
    memory = prepared.memory(row.seed)
    compiled = jax.jit(prepared.gradient).lower(_weights(row, row.seed), memory, batch).compile()
    analysis = compiled.memory_analysis()
    peak = None if analysis is None else int(analysis.temp_size_in_bytes)
    return lambda weights: compiled(weights, memory, batch)[0], peak


def _cosine(row: Row, gradient: Compiled, path: Values) -> tuple[float | None, ...]:
    """Return the cosines to BPTT along the weights of the first seed."""
    exact = _exact(dataclasses.replace(row, method=methods.BPTT.name, window=None))
    found = []
    for point in spread_out(len(row.points), COSINES):
        weights = jax.tree.map(lambda leaf, point=point: leaf[point], path)
        of_cell = [name for name in weights if name[0] == "cell"]
        found.append(angle(gradient(weights), exact(weights), of_cell))
    return _numbers(found)


@functools.lru_cache(maxsize=4)
def _exact(row: Row) -> Compiled:
    """Return the gradient of BPTT, which the runs of a task and a cell share."""
    return _compiled(row, _prepared(row))[0]


def angle(first: Values, second: Values, names: Sequence[Any]) -> float:
    """Return the cosine of the angle between two gradients; NaN if one is zero."""
    a, b = (
        np.concatenate([np.ravel(leaf) for name in names for leaf in jax.tree.leaves(x[name])])
        for x in (first, second)
    )
    with np.errstate(all="ignore"):
        return float(a @ b / np.sqrt((a @ a) * (b @ b)))
