"""The ways to learn: each returns a gradient of the same loss, of one batch of sequences.

Truncated backpropagation goes back within windows; the states go on from one to the next, and the
gradients of all windows of a sequence are added. The rules of the library are used as its users
do, by the functions of a learner's state; a network that they cannot take is refused by them.

`SnAp` of two and more steps is not among them: the connections of a dense network reach all units
in two steps, so that it is `RTRL` there, entry by entry and many times slower.
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
class Way:
    """How a gradient is found, and who goes down it.

    Attributes
    ----------
    name
        Of the way.
    algorithm, options
        The rule and its options; ``None``: backpropagation through time.
    truncation
        Which of the task's windows backpropagation is cut to: 0, 1, or ``None``.
    feedback
        Whether errors go back from the readout by a random matrix.
    optimizer
        ``"adam"`` or ``"rmsprop"``.
    """

    name: str
    algorithm: str | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    truncation: int | None = None
    feedback: bool = False
    optimizer: str = "adam"

    def window(self, task: Task) -> int | None:
        """Return how many steps truncated backpropagation goes back."""
        return None if self.truncation is None else task.truncations[self.truncation]


DECAY = 0.8
"""Of the filters of `ES_D_RTRL` and `OTTT`, for all tasks and cells: a memory of five steps."""

BPTT = Way("bptt")
ALL = (
    BPTT,
    Way("tbptt-long", truncation=1),
    Way("tbptt-short", truncation=0),
    Way("rtrl", "rtrl"),
    Way("ostl-recurrent", "ostl_recurrent"),
    Way("snap-1", "snap"),
    Way("d_rtrl", "d_rtrl"),
    Way("eprop", "eprop"),
    Way("ostl-feedforward", "ostl_feedforward"),
    Way("d_rtrl-feedback", "d_rtrl", feedback=True),
    Way("rflo", "rflo", feedback=True),
    Way("bptt-feedback", feedback=True),
    Way("es_d_rtrl", "es_d_rtrl", {"decay_or_rank": DECAY}),
    Way("ottt", "ottt", {"decay": DECAY}),
    Way("uoro", "uoro"),
    Way("kf_rtrl", "kf_rtrl"),
    Way("immediate", "immediate"),
)
RMSPROP = tuple(
    dataclasses.replace(way, name=f"{way.name}-rmsprop", optimizer="rmsprop")
    for way in ALL
    if way.name in ("rtrl", "d_rtrl", "immediate")
)
BY_NAME = {way.name: way for way in ALL + RMSPROP}

Gradient = Callable[[Values, Any, Batch], tuple[Values, Any]]


@dataclasses.dataclass(frozen=True, eq=False)
class Method:
    """A way on a network, as pure functions.

    Attributes
    ----------
    gradient
        ``(weights, memory, batch) -> (gradient of the weights, memory)``; the memory is what a way
        keeps from one batch to the next (the keys of its random numbers, matrices of feedback).
    memory
        Returns that of a seed, at the start.
    trace_bytes
        Size of the traces.
    """

    gradient: Gradient
    memory: Callable[[int], Any]
    trace_bytes: int = 0


def prepare(
    way: Way, task: Task, cell: str, units: int, batch: int, chunk: int | str = "auto"
) -> Method:
    """Return a way on a network.

    Raises
    ------
    braintrace.BraintraceError
        If the rule refuses the network.
    """

    def model(seed: int) -> brainstate.nn.Module:
        readout = braintrace.nn.FeedbackLinear if way.feedback else braintrace.nn.Linear
        return build(task, cell, units, seed, readout)

    if way.algorithm is None:
        return _backpropagation(way, task, model, batch)
    return _rule(way.algorithm, way.options, task, model, batch, chunk)


def _loss(task: Task, outputs: Any, targets: Any, weights: Any, batch: int) -> Any:
    return jnp.sum(task.losses(outputs, targets) * weights) / (task.counted * batch)


def _long_term(model: brainstate.nn.Module) -> dict[Any, Any]:
    """Return what a network holds besides weights and hidden states."""
    weights = model.states(brainstate.ParamState)
    found = values_of(model, brainstate.LongTermState)
    return {path: value for path, value in found.items() if path not in weights}


def _backpropagation(way: Way, task: Task, model: Callable[[int], Any], batch: int) -> Method:
    """Return backpropagation through time, within windows."""
    network = pure(model(0), batch, task.features)
    window = way.window(task) or task.length
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

    return Method(gradient, lambda seed: _long_term(model(seed)))


def _rule(
    algorithm: str,
    options: Mapping[str, Any],
    task: Task,
    model: Callable[[int], Any],
    batch: int,
    chunk: int | str,
) -> Method:
    """Return a rule of the library."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", braintrace.ApproximationWarning)  # which is the point
        learner = braintrace.compile(
            model(0),
            algorithm,
            jnp.zeros((batch, task.features)),
            batch_size=batch,
            **options,
        )
    functional = learner.functional()
    first = functional.state()

    def step(x: Any, targets: Any, weights: Any) -> Any:
        return _loss(task, learner(x), targets, weights, batch)

    def gradient(weights: Values, memory: Any, sequences: Batch) -> tuple[Values, Any]:
        state = functional.reset(dataclasses.replace(memory, parameters=dict(weights)))
        state, found = functional.grad(
            state, *sequences, step_fn=step, reduction="sum", chunk_size=chunk
        )
        return found, functional.reset(state)

    def memory(seed: int) -> Any:
        found = _long_term(model(seed))
        others = {path: found.get(path, value) for path, value in first.others.items()}
        return dataclasses.replace(first, others=others)

    trace_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(first.traces))
    return Method(gradient, memory, trace_bytes)
