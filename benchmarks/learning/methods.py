"""Methods: each returns a gradient of the same loss, of one batch of sequences.

Truncated backpropagation goes back within windows. The states continue from one window to the next,
and the gradients of all windows of a sequence are added. The rules of the library are called by the
functional interface, with or without windows of the same lengths.

`SnAp` with more steps is not among them: the connections of a dense network reach all units in two
steps, so it is `RTRL` there, entry by entry and many times slower.
"""

import dataclasses
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import brainstate
import jax
import jax.numpy as jnp

import braintrace

from .networks import Values, build, pure, values_of
from .tasks import Batch, Task


@dataclasses.dataclass(frozen=True)
class Method:
    """How a gradient is computed: by a rule, or without one by backpropagation through time.

    ``truncation`` is 0 for the short window of the task, 1 for the long one. With ``feedback``,
    errors pass the readout through a random matrix. Optimizers are ``"adam"`` and ``"rmsprop"``.
    """

    name: str
    algorithm: str | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    truncation: int | None = None
    feedback: bool = False
    optimizer: str = "adam"

    def window(self, task: Task) -> int | None:
        return None if self.truncation is None else task.truncations[self.truncation]


DECAY = 0.8
"""Decay of the filters of `ES_D_RTRL` and `OTTT`, for all tasks and cells."""

_FILTERS = {"decay_or_rank": DECAY}
BPTT = Method("bptt")
ALL = (
    BPTT,
    Method("tbptt-long", truncation=1),
    Method("tbptt-short", truncation=0),
    Method("rtrl", "rtrl"),
    Method("ostl-recurrent", "ostl_recurrent"),
    Method("snap-1", "snap"),
    Method("d_rtrl", "d_rtrl"),
    Method("d_rtrl-long", "d_rtrl", truncation=1),
    Method("d_rtrl-short", "d_rtrl", truncation=0),
    Method("eprop", "eprop"),
    Method("ostl-feedforward", "ostl_feedforward"),
    Method("bptt-feedback", feedback=True),
    Method("d_rtrl-feedback", "d_rtrl", feedback=True),
    Method("rflo", "rflo", feedback=True),
    Method("es_d_rtrl", "es_d_rtrl", _FILTERS),
    Method("es_d_rtrl-long", "es_d_rtrl", _FILTERS, truncation=1),
    Method("es_d_rtrl-short", "es_d_rtrl", _FILTERS, truncation=0),
    Method("ottt", "ottt", {"decay": DECAY}),
    Method("kf_rtrl", "kf_rtrl"),
    Method("uoro", "uoro"),
    Method("immediate", "immediate"),
)
RMSPROP = tuple(
    dataclasses.replace(method, name=f"{method.name}-rmsprop", optimizer="rmsprop")
    for method in ALL
    if method.name in ("rtrl", "d_rtrl", "immediate")
)
BY_NAME = {method.name: method for method in ALL + RMSPROP}

Gradient = Callable[[Values, Any, Batch], tuple[Values, Any]]


@dataclasses.dataclass(frozen=True, eq=False)
class Prepared:
    """A method on a network: ``(weights, memory, batch) -> (gradient of the weights, memory)``.

    The memory passes from batch to batch (keys of random numbers, feedback matrices); `memory`
    returns that of a seed at the start.
    """

    gradient: Gradient
    memory: Callable[[int], Any]
    trace_bytes: int = 0


def prepare(method: Method, task: Task, cell: str, units: int, batch: int) -> Prepared:
    """Return a method on a network; a `BraintraceError` if the rule refuses the network."""

    def model(seed: int) -> brainstate.nn.Module:
        readout = braintrace.nn.FeedbackLinear if method.feedback else braintrace.nn.Linear
        return build(task, cell, units, seed, readout)

    if method.algorithm is None:
        return _backpropagation(method.window(task) or task.length, task, model, batch)
    return _rule(method, task, model, batch)


def _loss(task: Task, outputs: Any, targets: Any, weights: Any, batch: int) -> Any:
    return jnp.sum(task.losses(outputs, targets) * weights) / (task.counted * batch)


def _long_term(model: brainstate.nn.Module) -> dict[Any, Any]:
    """Return the States of a network besides weights and hidden states."""
    weights = model.states(brainstate.ParamState)
    found = values_of(model, brainstate.LongTermState)
    return {path: value for path, value in found.items() if path not in weights}


def _backpropagation(window: int, task: Task, model: Callable[[int], Any], batch: int) -> Prepared:
    """Return backpropagation through time, within windows."""
    network = pure(model(0), batch, task.features)
    count = math.ceil(task.length / window)
    missing = count * window - task.length

    def parts(leaf: Any) -> Any:
        padded = jnp.pad(leaf, [(0, missing)] + [(0, 0)] * (leaf.ndim - 1))
        return padded.reshape(count, window, *leaf.shape[1:])

    def gradient(weights: Values, memory: Values, sequences: Batch) -> tuple[Values, Values]:
        def loss(weights: Values, hidden: Values, part: Batch) -> tuple[Any, Values]:
            hidden, outputs = network.run({**weights, **memory}, hidden, part.inputs)
            return _loss(task, outputs, part.targets, part.weights, batch), hidden

        def one_window(carry: Any, part: Batch) -> tuple[Any, None]:
            hidden, total = carry
            found, hidden = jax.grad(loss, has_aux=True)(weights, hidden, part)
            return (hidden, jax.tree.map(jnp.add, total, found)), None

        if count == 1:
            return jax.grad(loss, has_aux=True)(weights, network.start, sequences)[0], memory
        zero = jax.tree.map(jnp.zeros_like, weights)
        windows = jax.tree.map(parts, sequences)
        return jax.lax.scan(one_window, (network.start, zero), windows)[0][1], memory

    return Prepared(gradient, lambda seed: _long_term(model(seed)))


def _rule(method: Method, task: Task, model: Callable[[int], Any], batch: int) -> Prepared:
    """Return a rule of the library."""
    assert method.algorithm is not None
    inputs = jnp.zeros((batch, task.features))
    options = {**method.options, "batch_size": batch, "window": method.window(task)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", braintrace.ApproximationWarning)  # which is the point
        learner = braintrace.compile(model(0), method.algorithm, inputs, **options)
    functional = learner.functional()
    first = functional.state()

    def step(x: Any, targets: Any, weights: Any) -> Any:
        return _loss(task, learner(x), targets, weights, batch)

    def gradient(weights: Values, memory: Any, sequences: Batch) -> tuple[Values, Any]:
        state = functional.reset(dataclasses.replace(memory, parameters=dict(weights)))
        state, found = functional.grad(state, *sequences, step_fn=step, reduction="sum")
        return found, functional.reset(state)

    def memory(seed: int) -> Any:
        found = _long_term(model(seed))
        others = {path: found.get(path, value) for path, value in first.others.items()}
        return dataclasses.replace(first, others=others)

    trace_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(first.traces))
    return Prepared(gradient, memory, trace_bytes)
