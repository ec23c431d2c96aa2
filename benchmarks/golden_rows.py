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
from .networks import NETWORKS, dense, squared_error
from .subjects import Task, compiled, learner_of, step_function


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of the table; of a first call, compilation is timed: it starts without programs."""

    build: Callable[[], Subject]
    quick: bool = False
    is_first: bool = False


def sequence(
    task: Task,
    algorithm: str = "d_rtrl",
    chunk: int | None = None,
    resets: bool = True,
    masked: bool = False,
    **options: Any,
) -> Subject:
    """Return the gradient of a sequence, after a reset or carrying on.

    With ``masked``, every second step does not count.
    """
    learner = learner_of(task, algorithm, **options)
    call: dict[str, Any] = {"step_fn": step_function(learner)}
    if chunk is not None:
        call["chunk_size"] = chunk
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
    has_window = "window" in inspect.signature(braintrace.D_RTRL).parameters
    if has_window:
        return sequence(task, window=length)
    return sequence(task, chunk=length, vjp_method="multi-step")


def _descent(learner: Any) -> Callable[[Any], None]:
    weights = learner.algorithm.model.states(brainstate.ParamState)

    def descend(gradients: Any) -> None:
        for path, weight in weights.items():
            move = partial(jax.tree.map, lambda w, g: w - 1e-4 * g)
            weight.value = move(weight.value, gradients[path])

    return descend


def _learning(learner: Any) -> dict[str, Any]:
    """Return options of `etrace_online`, without the check for NaN that the base lacks."""
    step, descent = step_function(learner), _descent(learner)
    return {"step_fn": step, "update_fn": descent, "nonfinite": "ignore"}


def stream(task: Task, algorithm: str = "d_rtrl") -> Subject:
    """Return a stream that learns at every step, in one call."""
    learner = learner_of(task, algorithm)
    call = _learning(learner)
    lower = partial(learner.lower, "etrace_online", *task.data, **call)
    return Subject(lambda: learner.etrace_online(*task.data, **call), lower=lower)


def _one_by_one(task: Task, step: Callable[[Any, Any], Any]) -> Callable[[], Any]:
    pairs = [tuple(part[t : t + 1] for part in task.data) for t in range(task.steps)]

    def run() -> Any:
        found = None
        for now in pairs:
            found = step(*now)
        return found

    return run


def online_steps(task: Task) -> Subject:
    """Return streams of one step."""
    learner = learner_of(task, "d_rtrl")
    call = _learning(learner)
    run = _one_by_one(task, lambda *now: learner.etrace_online(*now, **call))
    example = [part[:1] for part in task.data]
    lower = partial(learner.lower, "etrace_online", *example, **call)
    return Subject(run, lower=lower, work=task.steps)


def gradient_steps(task: Task) -> Subject:
    """Return gradients of sequences of one step."""
    learner = learner_of(task, "d_rtrl")
    call = {"step_fn": step_function(learner)}
    run = _one_by_one(task, lambda *now: learner.etrace_grad(*now, **call))
    return Subject(run, work=task.steps)


def own_gradients(task: Task) -> Subject:
    """Return jitted gradients that the user takes around a call of the learner."""
    learner = learner_of(task, "d_rtrl")
    loss = step_function(learner)
    weights = learner.algorithm.model.states(brainstate.ParamState)
    take = brainstate.transform.grad(lambda x, y: loss(x[0], y[0]), weights)
    return Subject(_one_by_one(task, brainstate.transform.jit(take)), work=task.steps)


def own_loop(task: Task) -> Subject:
    """Return such gradients in a compiled loop, which adds them up."""
    learner = learner_of(task, "d_rtrl")
    weights = learner.algorithm.model.states(brainstate.ParamState)
    take = brainstate.transform.grad(step_function(learner), weights)

    @brainstate.transform.jit
    def run(xs: Any, targets: Any) -> Any:
        def step(total: Any, now: Any) -> Any:
            return jax.tree.map(jnp.add, total, take(*now)), None

        zero = {path: jax.tree.map(jnp.zeros_like, w.value) for path, w in weights.items()}
        return brainstate.transform.scan(step, zero, (xs, targets))[0]

    return Subject(lambda: run(*task.data), work=task.steps)


def plain_calls(task: Task) -> Subject:
    """Return calls of the learner, without gradients or `jit`."""
    learner = learner_of(task, "d_rtrl")
    return Subject(_one_by_one(task, lambda x, _: learner(x[0])), work=task.steps)


def pure_steps(task: Task, is_jitted: bool) -> Subject:
    """Return gradients of one step by the pure functions, from state to state."""
    learner = learner_of(task, "d_rtrl")
    pure, loss = learner.functional(), step_function(learner)
    take = partial(pure.grad, step_fn=loss)
    step = jax.jit(take) if is_jitted else take
    state = [jax.tree.map(jnp.copy, pure.state())]

    def move(x: Any, target: Any) -> Any:
        state[0], gradients = step(state[0], x, target)
        return gradients

    return Subject(_one_by_one(task, move), work=task.steps)


def analysis(batch: int, units: int) -> Subject:
    """Return the analysis of one LSTM."""
    x = jnp.ones((batch, 16))

    def run() -> Any:
        model = braintrace.nn.LSTMCell(16, units)
        learner = compiled(model, "d_rtrl", x, batch_size=batch)
        return [state.value for state in learner.states(brainstate.HiddenState).values()]

    return Subject(run)


def compiled_entry(entry: Any) -> Subject:
    """Return the compilation of a model of the catalogue of the tests."""
    brainstate.environ.set(dt=1.0 * saiunit.ms)
    model, x = entry.build(), jnp.ones(entry.shape)
    return Subject(partial(_ignoring_warnings, partial(braintrace.compile_etrace_graph, model, x)))


def compiled_entries(entries: Sequence[Any]) -> Subject:
    """Return the compilation of several models of the catalogue."""
    calls = [compiled_entry(entry) for entry in entries]
    return Subject(lambda: [call.run() for call in calls])


def _ignoring_warnings(run: Callable[[], Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run()


def first_gradient(task: Task) -> Subject:
    """Return everything from the model to its first gradient."""

    def run() -> Any:
        learner = learner_of(task, "d_rtrl")
        return learner.etrace_grad(*task.data, step_fn=step_function(learner))

    return Subject(run)


class Reader(brainstate.nn.Module):
    """A network as in the example that reads digits, row by row."""

    def __init__(self, inputs: int = 8, hidden: int = 128, classes: int = 10) -> None:
        super().__init__()
        keys = jax.random.split(jax.random.key(0), 3)
        self.w_in = brainstate.ParamState(jax.random.normal(keys[0], (inputs, hidden)))
        self.w_rec = brainstate.ParamState(0.1 * jax.random.normal(keys[1], (hidden, hidden)))
        self.bias = brainstate.ParamState(jnp.zeros(hidden))
        self.w_out = brainstate.ParamState(0.1 * jax.random.normal(keys[2], (hidden, classes)))
        self.b_out = brainstate.ParamState(jnp.zeros(classes))
        self.leak = jnp.geomspace(1 / 8, 0.5, hidden)

    def init_state(self, batch_size: int) -> None:
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, self.leak.size)))

    def update(self, x: Any) -> Any:
        drive = braintrace.matmul(x, self.w_in.value, self.bias.value)
        drive += braintrace.matmul(self.h.value, self.w_rec.value)
        self.h.value = self.h.value + self.leak * (jnp.tanh(drive) - self.h.value)
        return self.h.value @ self.w_out.value + self.b_out.value


def first_digits(batch: int = 64) -> Subject:
    """Return the same of the network that reads digits."""
    xs, ys = jnp.ones((8, batch, 8)), jnp.ones((8, batch, 10))

    def run() -> Any:
        learner = compiled(Reader(), "d_rtrl", xs[0], batch_size=batch)
        loss = lambda x, y: squared_error(learner(x), y)  # noqa: E731 (a user's one)
        return learner.etrace_grad(xs, ys, step_fn=loss)

    return Subject(run)


def _of_task(title: str, task: Task, quick: bool = False) -> dict[str, Row]:
    return {
        f"{title}, D_RTRL": Row(partial(sequence, task), quick),
        f"{title}, D_RTRL carrying on": Row(partial(sequence, task, resets=False), quick),
        f"{title}, ES_D_RTRL": Row(partial(sequence, task, "es_d_rtrl")),
    }


LEAKY = Task(dense(), 64, 32)
LONG = Task(dense(), 512, 32)
TINY = Task(NETWORKS["lstm"](inputs=4, hidden=8, outputs=2), 64, 1)

ROWS: dict[str, Row] = {
    **_of_task("leaky 64 steps", LEAKY, quick=True),
    "leaky 64 steps, one chunk": Row(partial(sequence, LEAKY, chunk=64)),
    "leaky 512 steps, D_RTRL": Row(partial(sequence, LONG)),
    "leaky 512 steps, ES_D_RTRL": Row(partial(sequence, LONG, "es_d_rtrl")),
    "leaky 1024 units, D_RTRL": Row(partial(sequence, Task(dense(hidden=1024), 64, 32))),
    "LSTM, D_RTRL": Row(partial(sequence, Task(Layers("LSTMCell", 1, 256), 256, 32))),
    "LSTM, D_RTRL carrying on": Row(
        partial(sequence, Task(Layers("LSTMCell", 1, 256), 256, 32), resets=False)
    ),
    "IndRNN x3, D_RTRL": Row(partial(sequence, Task(Layers("IndRNN", 3, 256), 256, 32))),
    "LRU x4, D_RTRL": Row(partial(sequence, Task(Layers("LRUCell", 4, 128), 256, 32))),
    "MGU, D_RTRL": Row(partial(sequence, Task(Layers("MGUCell", 1, 128), 512, 16))),
    "ALIF, D_RTRL": Row(partial(sequence, Task(NETWORKS["alif"](), 64, 32))),
    "ALIF, ES_D_RTRL": Row(partial(sequence, Task(NETWORKS["alif"](), 64, 32), "es_d_rtrl")),
    "LSTM with a mask, D_RTRL": Row(
        partial(sequence, Task(NETWORKS["lstm"](), 64, 32), masked=True)
    ),
    "leaky with a mask, ES_D_RTRL": Row(partial(sequence, LEAKY, "es_d_rtrl", masked=True)),
    "leaky, 4000 outputs, D_RTRL": Row(partial(sequence, Task(dense(8, 64, 4000), 64, 16))),
    "RTRL, 32 units": Row(partial(sequence, Task(dense(8, 32), 64, 8), "rtrl"), quick=True),
    "UORO, 128 units": Row(partial(sequence, Task(dense(16, 128), 64, 8), "uoro")),
    "windows of 64": Row(partial(sequence, LONG, chunk=64, vjp_method="multi-step")),
    "windows of 8, carrying on": Row(
        partial(sequence, LEAKY, chunk=8, resets=False, vjp_method="multi-step"), quick=True
    ),
    "windows of 64, ES_D_RTRL": Row(
        partial(sequence, LONG, "es_d_rtrl", chunk=64, vjp_method="multi-step")
    ),
    "windows of 16 of 64 steps, leaky": Row(partial(windows, LEAKY, 16)),
    "windows of 16 of 64 steps, LSTM": Row(partial(windows, Task(NETWORKS["lstm"](), 64, 32), 16)),
    "stream, leaky batch 4": Row(partial(stream, Task(dense(), 500, 4)), quick=True),
    "stream, LSTM batch 1": Row(partial(stream, Task(NETWORKS["lstm"](hidden=128), 500, 1))),
    "stream, ALIF batch 32": Row(partial(stream, Task(NETWORKS["alif"](), 32, 32))),
    "stream, ES_D_RTRL": Row(partial(stream, Task(dense(), 500, 4), "es_d_rtrl")),
    "own grad in a loop, leaky batch 1": Row(partial(own_loop, Task(dense(), 500, 1))),
    "own grad in a loop, ALIF": Row(partial(own_loop, Task(NETWORKS["alif"](), 32, 32))),
    "one step a call, etrace_online, leaky": Row(partial(online_steps, LEAKY)),
    "one step a call, own grad, leaky": Row(partial(own_gradients, LEAKY)),
    "one step, learner(x)": Row(partial(plain_calls, TINY), quick=True),
    "one step, own grad": Row(partial(own_gradients, TINY), quick=True),
    "one step, etrace_grad": Row(partial(gradient_steps, TINY), quick=True),
    "one step, etrace_online": Row(partial(online_steps, TINY), quick=True),
    "one step, functional": Row(partial(pure_steps, TINY, is_jitted=False)),
    "one step, functional jitted": Row(partial(pure_steps, TINY, is_jitted=True)),
    "first call, analysis of LSTM 256 x 1024": Row(partial(analysis, 256, 1024), is_first=True),
    "first call, GRU x3": Row(
        partial(first_gradient, Task(Layers("GRUCell", 3, 64), 64, 8)), is_first=True
    ),
    "first call, digits": Row(first_digits, quick=True, is_first=True),
    **_of_task("GRU x3", Task(Layers("GRUCell", 3, 256), 512, 32)),
    **_of_task("leaky x4", Task(Layers("LeakyRNN", 4, 256), 256, 64)),
    **_of_task("sparse LIF batch 1", Task(Net("LIF", 10_000, 100), 64, 1)),
    **_of_task("sparse LIF batch 16", Task(Net("LIF", 10_000, 100), 64, 16)),
    "smallest": Row(partial(sequence, Task(dense(2, 4, 2), 4, 2))),
}

# Long calls stand at the end: they get the time that the short ones leave.

MODELS = "BRAINTRACE_MODELS"
"""The environment variable that names the folder with the catalogue of models."""


def catalogue() -> dict[str, Row]:
    """Return rows for the compilation of all models of the catalogue, and of each."""
    if MODELS not in os.environ:
        return {}
    sys.path.append(os.environ[MODELS])
    every = (importlib.import_module(name).MODELS for name in ("zoo", "nn_models"))
    entries = [entry for entries in every for entry in entries]
    rows = {f"compile {entry.name}": Row(partial(compiled_entry, entry)) for entry in entries}
    return {"compile all models": Row(partial(compiled_entries, entries)), **rows}


ROWS |= catalogue()

FOR_TESTS = ("smallest",)
"""Rows that are run only where they are asked for by name."""
