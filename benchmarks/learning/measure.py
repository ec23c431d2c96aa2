"""One run: train all lanes, choose the rate, and ask for prices and cosines."""

import dataclasses
import functools
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np

from braintrace import BraintraceError

from . import tasks, training, ways
from .networks import Values, build, values_of
from .record import Cosine, Curves, Price, Record, Settings, tuples
from .scores import scorer
from .ways import Method, Way

COSINES = 8
CALLS, SECONDS = 9, 0.5
"""Calls of a gradient that are timed, and the seconds after which no further one begins."""

FIXED = 10**6
"""Seed of the batch on which gradients are compared: one that no training draws."""


def run(settings: Settings, machine: dict[str, Any]) -> Record:
    """Return what a run finds; or, where the library refuses it, why."""
    begin = time.perf_counter()
    way = ways.BY_NAME[settings.way]
    try:
        method = _method(settings, way)
        weights, seconds = _train(settings, method)
    except BraintraceError as error:
        return Record(settings, machine, refused=reason(error))
    scores = _scores(settings, weights, "validation")
    best = best_rate(scores)
    test = _scores(
        settings, jax.tree.map(lambda leaf: leaf[best : best + 1, :, -1:], weights), "test"
    )
    path = jax.tree.map(lambda leaf: leaf[best, 0], weights)
    gradient, price = _priced(settings, method)
    return Record(
        settings,
        machine,
        curves=Curves(training.points_of(settings.updates), _nested(scores)),
        best_rate=settings.rates[best],
        test=_nested(test[0, :, 0]),
        updates_to_threshold=_to_threshold(settings, scores[best]),
        cosine=_cosine(settings, gradient, path),
        price=price,
        failed=_failed(settings, scores),
        seconds={**seconds, "all": time.perf_counter() - begin},
    )


def reason(error: BraintraceError) -> str:
    """Return the first line of an error, without where the files of this machine lie."""
    return re.sub(r" \[[^\]]*:\d+:\d+[^\]]*\]", "", str(error).splitlines()[0])


def priced(found: Record) -> Record:
    """Return a record with all prices that the page shows, taken now."""
    settings, way = found.settings, ways.BY_NAME[found.settings.way]
    price = _priced(settings, _method(settings, way))[1]
    if way.algorithm is not None and settings.table == "core":
        lone = _priced(settings, _method(settings, way, chunk=1))[1]
        price = dataclasses.replace(
            price, seconds_per_lone_step=lone.seconds_per_step, lone_peak_bytes=lone.peak_bytes
        )
    return dataclasses.replace(found, price=price)


def _method(settings: Settings, way: Way, chunk: int | str = "auto") -> Method:
    task = tasks.load(settings.task)
    return ways.prepare(way, task, settings.cell, settings.units, settings.batch, chunk)


def _weights(settings: Settings, seed: int) -> Values:
    model = build(tasks.load(settings.task), settings.cell, settings.units, seed)
    return values_of(model, brainstate.ParamState)


def _stacked(trees: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def _train(settings: Settings, method: Method) -> tuple[Values, dict[str, float]]:
    """Return the weights by rate, seed and point; and how long compiling and training take."""
    task, seeds = tasks.load(settings.task), settings.seeds
    lane = training.lane(
        task, method.gradient, settings.batch, settings.updates, settings.optimizer
    )
    lanes = jax.vmap(jax.vmap(lane, (None, 0, 0, 0)), (0, None, None, None))
    arguments = (
        jnp.asarray(settings.rates),
        jnp.stack([jax.random.key(seed) for seed in seeds]),
        _stacked([_weights(settings, seed) for seed in seeds]),
        _stacked([method.memory(seed) for seed in seeds]),
    )
    begin = time.perf_counter()
    compiled = jax.jit(lanes).lower(*arguments).compile()
    between = time.perf_counter()
    found = jax.block_until_ready(compiled(*arguments))
    return found, {"compile": between - begin, "train": time.perf_counter() - between}


def _scores(settings: Settings, weights: Values, split: tasks.Split) -> Any:
    """Return scores of weights, ``(rate, seed, point)``."""
    lanes = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), weights)
    found = scorer(settings.task, settings.cell, settings.units, split)(lanes)
    return np.asarray(found).reshape(jax.tree.leaves(weights)[0].shape[:3])


def best_rate(scores: Any) -> int:
    """Return which rate has the best mean over seeds at the last point; NaN is worse than all."""
    last = np.asarray(scores)[:, :, -1].mean(axis=1)
    return int(np.argmax(np.where(np.isfinite(last), last, -np.inf)))


def _nested(array: Any) -> Any:
    return tuples(np.asarray(array).tolist())


def _to_threshold(settings: Settings, scores: Any) -> tuple[int | None, ...]:
    """Return after how many updates each seed's score first reaches the threshold."""
    updates = training.points_of(settings.updates)
    reached = scores >= settings.threshold
    return tuple(updates[int(np.argmax(row))] if row.any() else None for row in reached)


def _failed(settings: Settings, scores: Any) -> tuple[tuple[float, int], ...]:
    return tuple(
        (rate, seed)
        for rate, row in zip(settings.rates, scores[:, :, -1], strict=True)
        for seed, score in zip(settings.seeds, row, strict=True)
        if not np.isfinite(score)
    )


Compiled = Callable[[Values], Any]
"""The gradient of a fixed batch."""


def _compiled(settings: Settings, method: Method) -> tuple[Compiled, int | None]:
    """Return a way's gradient for the first seed alone, and its working memory."""
    batch = tasks.load(settings.task).sample(jax.random.key(FIXED), settings.batch, "train")
    memory = method.memory(settings.seeds[0])
    weights = _weights(settings, settings.seeds[0])
    compiled = jax.jit(method.gradient).lower(weights, memory, batch).compile()
    analysis = compiled.memory_analysis()
    peak = None if analysis is None else int(analysis.temp_size_in_bytes)
    return lambda weights: compiled(weights, memory, batch)[0], peak


def _priced(settings: Settings, method: Method) -> tuple[Compiled, Price]:
    """Return a way's gradient and what it takes."""
    gradient, peak = _compiled(settings, method)
    weights = _weights(settings, settings.seeds[0])
    seconds = timed(lambda: gradient(weights))
    return gradient, Price(seconds / settings.length, method.trace_bytes, peak)


def timed(call: Callable[[], Any]) -> float:
    """Return the shortest time of some calls, since what else is running only adds to it."""
    jax.block_until_ready(call())
    times: list[float] = []
    while len(times) < CALLS and sum(times) < SECONDS:
        begin = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - begin)
    return min(times)


def _cosine(settings: Settings, gradient: Compiled, path: Values) -> Cosine:
    """Return the cosines along the weights of one lane."""
    updates = training.points_of(settings.updates)
    chosen = np.unique(np.linspace(0, len(updates) - 1, COSINES).round().astype(int))
    exact = _exact(dataclasses.replace(settings, way=ways.BPTT.name, window=None, optimizer="adam"))
    found: list[tuple[float, float]] = []
    for point in chosen:
        weights = jax.tree.map(lambda leaf, point=point: leaf[point], path)
        own, theirs = gradient(weights), exact(weights)
        of_cell = [name for name in weights if name[0] == "cell"]
        found.append((angle(own, theirs, list(weights)), angle(own, theirs, of_cell)))
    values, recurrent = zip(*found, strict=True)
    return Cosine(tuple(updates[point] for point in chosen), values, recurrent)


@functools.lru_cache(maxsize=4)
def _exact(settings: Settings) -> Compiled:
    """Return the gradient of backpropagation; the runs of a task and a cell share it."""
    return _compiled(settings, _method(settings, ways.BPTT))[0]


def angle(first: Values, second: Values, names: Sequence[Any]) -> float:
    """Return the cosine of the angle between two gradients; NaN where one is zero."""
    a, b = (
        np.concatenate([np.ravel(leaf) for name in names for leaf in jax.tree.leaves(x[name])])
        for x in (first, second)
    )
    with np.errstate(all="ignore"):
        return float(a @ b / np.sqrt((a @ a) * (b @ b)))
