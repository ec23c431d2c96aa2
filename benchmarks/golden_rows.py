"""Calls whose speed is compared between two checkouts; see `golden_speed`.

They use the public interface alone, since both checkouts run the same text.
"""

import dataclasses
import importlib
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import saiunit

import braintrace

from .case import Subject
from .modules import Layers, Net
from .networks import NETWORKS, dense
from .questions.streaming import loop
from .subjects import Task, compiled, gradient_of_step, learner_of, step_function


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of the table; of a first call, compilation is timed: it starts without programs."""

    build: Callable[[], Subject]
    quick: bool = False
    is_first: bool = False


def sequence(
    task: Task,
    algorithm: str = "d_rtrl",
    chunk: int | str = "auto",
    resets: bool = True,
    masked: bool = False,
    **options: Any,
) -> Subject:
    """Return the gradient of a sequence, after a reset or carrying on.

    With ``masked``, every second step does not count.
    """
    learner = learner_of(task, algorithm, **options)
    call: dict[str, Any] = {"step_fn": step_function(learner), "chunk_size": chunk}
    if masked:
        call["mask"] = jnp.arange(task.steps) % 2

    def begin() -> None:
        if resets:
            learner.reset_state(task.batch)

    def run() -> Any:
        begin()
        return learner.etrace_grad(*task.data, **call)

    def lower() -> Any:
        begin()
        return learner.lower("etrace_grad", *task.data, **call)

    if not resets:
        jax.block_until_ready(run())  # so that no trace is zero
    return Subject(run, lower=lower)


def windows(task: Task, length: int) -> Subject:
    """Return a sequence in windows after a reset, in the spelling that the checkout has."""
    if "window" in inspect.signature(braintrace.D_RTRL).parameters:
        return sequence(task, window=length)
    return sequence(task, chunk=length, vjp_method="multi-step")


def _learning(learner: Any) -> dict[str, Any]:
    """Return options of `etrace_online`, without the check for NaN that the base lacks."""
    weights = learner.algorithm.model.states(brainstate.ParamState)

    def descend(gradients: Any) -> None:
        for path, weight in weights.items():
            move = partial(jax.tree.map, lambda w, g: w - 1e-4 * g)
            weight.value = move(weight.value, gradients[path])

    return {"step_fn": step_function(learner), "update_fn": descend, "nonfinite": "ignore"}


def stream(task: Task, algorithm: str = "d_rtrl") -> Subject:
    """Return a stream that learns at every step, in one call."""
    learner = learner_of(task, algorithm)
    call = _learning(learner)
    lower = partial(learner.lower, "etrace_online", *task.data, **call)
    return Subject(lambda: learner.etrace_online(*task.data, **call), lower=lower)


def _jitted_own_grad(learner: Any) -> Callable[[Any, Any], Any]:
    take = gradient_of_step(learner)
    return brainstate.transform.jit(lambda x, target: take(x[0], target[0]))


def _pure_step(learner: Any, is_jitted: bool) -> Callable[[Any, Any], Any]:
    """Return gradients of one step by the pure functions, from state to state."""
    pure = learner.functional()
    take = partial(pure.grad, step_fn=step_function(learner))
    step = jax.jit(take) if is_jitted else take
    state = [jax.tree.map(jnp.copy, pure.state())]

    def move(x: Any, target: Any) -> Any:
        state[0], gradients = step(state[0], x, target)
        return gradients

    return move


STEPS: dict[str, Callable[[Any], Callable[[Any, Any], Any]]] = {
    "learner(x)": lambda learner: lambda x, _: learner(x[0]),
    "own grad": _jitted_own_grad,
    "etrace_grad": lambda own: partial(own.etrace_grad, step_fn=step_function(own)),
    "etrace_online": lambda learner: partial(learner.etrace_online, **_learning(learner)),
    "functional": partial(_pure_step, is_jitted=False),
    "functional jitted": partial(_pure_step, is_jitted=True),
}
"""By name: what makes of a learner a function of a sequence of one step."""


def one_by_one(task: Task, kind: str) -> Subject:
    """Return the steps of a sequence in a call each."""
    learner = learner_of(task, "d_rtrl")
    step = STEPS[kind](learner)
    pairs = [tuple(part[t : t + 1] for part in task.data) for t in range(task.steps)]

    def run() -> Any:
        found = None
        for now in pairs:
            found = step(*now)
        return found

    def lower() -> Any:
        return learner.lower(kind, *pairs[0], **_learning(learner))

    return Subject(run, lower=lower if kind == "etrace_online" else None, work=task.steps)


def analysis(batch: int, units: int) -> Subject:
    x = jnp.ones((batch, 16))

    def run() -> Any:
        model = braintrace.nn.LSTMCell(16, units)
        learner = compiled(model, "d_rtrl", x, batch_size=batch)
        return [state.value for state in learner.states(brainstate.HiddenState).values()]

    return Subject(run)


def compiled_entries(entries: Sequence[Any]) -> Subject:
    """Return the compilation of models of the catalogue of the tests."""
    brainstate.environ.set(dt=1.0 * saiunit.ms)
    models = [(entry.started(), jnp.ones(entry.shape)) for entry in entries]

    def run() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for model, x in models:
                braintrace.compile_etrace_graph(model, x)

    return Subject(run)


def first_gradient(task: Task) -> Subject:
    """Return everything from the model to its first gradient."""

    def run() -> Any:
        learner = learner_of(task, "d_rtrl")
        return learner.etrace_grad(*task.data, step_fn=step_function(learner))

    return Subject(run)


def row(build: Callable[..., Subject], *given: Any, quick: bool = False, **options: Any) -> Row:
    return Row(partial(build, *given, **options), quick, build in (analysis, first_gradient))


def _of_task(title: str, task: Task, quick: bool = False) -> dict[str, Row]:
    return {
        f"{title}, D_RTRL": row(sequence, task, quick=quick),
        f"{title}, D_RTRL carrying on": row(sequence, task, resets=False, quick=quick),
        f"{title}, ES_D_RTRL": row(sequence, task, "es_d_rtrl"),
    }


LEAKY, LONG, SMALL = (Task(dense(), *sizes) for sizes in ((64, 32), (512, 32), (500, 4)))
LSTM, ALIF = (Task(NETWORKS[name](), 64, 32) for name in ("lstm", "alif"))
LAYER = Task(Layers("LSTMCell", 1, 256), 256, 32)
SPIKES = Task(NETWORKS["alif"](), 32, 32)
TINY = Task(NETWORKS["lstm"](inputs=4, hidden=8, outputs=2), 64, 1)
CHUNKS: dict[str, Any] = {"vjp_method": "multi-step"}

ROWS: dict[str, Row] = {
    **_of_task("leaky 64 steps", LEAKY, quick=True),
    "leaky 64 steps, one chunk": row(sequence, LEAKY, chunk=64),
    "leaky 512 steps, D_RTRL": row(sequence, LONG),
    "leaky 512 steps, ES_D_RTRL": row(sequence, LONG, "es_d_rtrl"),
    "leaky 1024 units, D_RTRL": row(sequence, Task(dense(hidden=1024), 64, 32)),
    "LSTM, D_RTRL": row(sequence, LAYER),
    "LSTM, D_RTRL carrying on": row(sequence, LAYER, resets=False),
    "IndRNN x3, D_RTRL": row(sequence, Task(Layers("IndRNN", 3, 256), 256, 32)),
    "LRU x4, D_RTRL": row(sequence, Task(Layers("LRUCell", 4, 128), 256, 32)),
    "MGU, D_RTRL": row(sequence, Task(Layers("MGUCell", 1, 128), 512, 16)),
    "ALIF, D_RTRL": row(sequence, ALIF),
    "ALIF, ES_D_RTRL": row(sequence, ALIF, "es_d_rtrl"),
    "LSTM with a mask, D_RTRL": row(sequence, LSTM, masked=True),
    "leaky with a mask, ES_D_RTRL": row(sequence, LEAKY, "es_d_rtrl", masked=True),
    "leaky, 4000 outputs, D_RTRL": row(sequence, Task(dense(8, 64, 4000), 64, 16)),
    "RTRL, 32 units": row(sequence, Task(dense(8, 32), 64, 8), "rtrl", quick=True),
    "UORO, 128 units": row(sequence, Task(dense(16, 128), 64, 8), "uoro"),
    "windows of 64": row(sequence, LONG, chunk=64, **CHUNKS),
    "windows of 8, carrying on": row(sequence, LEAKY, chunk=8, resets=False, quick=True, **CHUNKS),
    "windows of 64, ES_D_RTRL": row(sequence, LONG, "es_d_rtrl", chunk=64, **CHUNKS),
    "windows of 16 of 64 steps, leaky": row(windows, LEAKY, 16),
    "windows of 16 of 64 steps, LSTM": row(windows, LSTM, 16),
    "stream, leaky batch 4": row(stream, SMALL, quick=True),
    "stream, LSTM batch 1": row(stream, Task(NETWORKS["lstm"](hidden=128), 500, 1)),
    "stream, ALIF batch 32": row(stream, SPIKES),
    "stream, ES_D_RTRL": row(stream, SMALL, "es_d_rtrl"),
    "own grad in a loop, leaky batch 1": row(loop, Task(dense(), 500, 1)),
    "own grad in a loop, ALIF": row(loop, SPIKES),
    "one step a call, etrace_online, leaky": row(one_by_one, LEAKY, "etrace_online"),
    "one step a call, own grad, leaky": row(one_by_one, LEAKY, "own grad"),
    **{
        f"one step, {kind}": row(one_by_one, TINY, kind, quick=i < 4)
        for i, kind in enumerate(STEPS)
    },
    "first call, analysis of LSTM 256 x 1024": row(analysis, 256, 1024),
    "first call, GRU x3": row(first_gradient, Task(Layers("GRUCell", 3, 64), 64, 8)),
    "first call, leaky": row(first_gradient, Task(dense(8, 128), 8, 64), quick=True),
    **_of_task("GRU x3", Task(Layers("GRUCell", 3, 256), 512, 32)),
    **_of_task("leaky x4", Task(Layers("LeakyRNN", 4, 256), 256, 64)),
    **_of_task("sparse LIF batch 1", Task(Net("LIF", 10_000, 100), 64, 1)),
    **_of_task("sparse LIF batch 16", Task(Net("LIF", 10_000, 100), 64, 16)),
    "smallest": row(sequence, Task(dense(2, 4, 2), 4, 2)),
}
"""Long calls are at the end: they get the time that the short ones leave."""

MODELS = "BRAINTRACE_MODELS"
"""The environment variable that names the folder with the catalogue of models."""


def catalogue() -> dict[str, Row]:
    """Return rows for the compilation of all models of the catalogue, and of each."""
    if MODELS not in os.environ:
        return {}
    sys.path.append(os.environ[MODELS])
    found = importlib.import_module("catalogue")
    entries = [*found.MODELS, *found.LAYERS]
    rows = {f"compile {entry.name}": row(compiled_entries, [entry]) for entry in entries}
    return {"compile all models": row(compiled_entries, entries), **rows}


ROWS |= catalogue()
