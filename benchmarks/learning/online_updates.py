"""Gradients while the parameters change during a sequence.

Every term of a trace is at the parameters of its own step. After an update within a sequence, no
rule has the gradient of the loss as a function of the current parameters.

A partly trained network continues in a long stream, by RTRL and Adam with an update every few
steps. All rules observe this one network and carry their own traces. At some steps, the gradients
of the loss of that step are compared over the parameters of the cell

- with RTRL, whose trace is equally stale: the error of the approximation;
- with backpropagation through the whole stream, recomputed with the current parameters: the error
  of the approximation and of the stale traces together.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax

from . import methods, tasks, training
from .networks import Values, build, pure, values_of
from .rows import FOLDER, StreamRow, finite
from .tasks import Batch, Task

TASKS = ("copy with lag", "Lorenz", "characters")
CELLS = ("leaky", "gru")
EXACT = "rtrl"
RULES = (EXACT, "snap-1", "d_rtrl", "es_d_rtrl", "uoro", "kf_rtrl", "immediate")
FILE = FOLDER / "online_updates.csv"
AT_A_TIME = 6
"""Streams, whose gradients are kept for all steps."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """A network on a task, and its streams: ``steps``, of which ``points`` are compared.

    ``begun`` updates by backpropagation come before a stream, at ``begun_rate``; ``rates`` are
    those of the stream, and ``every`` has the steps per update.
    """

    task: str
    cell: str
    units: int = 16
    batch: int = 4
    steps: int = 256
    points: int = 8
    begun: int = 100
    begun_rate: float = 3e-3
    rates: tuple[float, ...] = (0.0, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
    every: tuple[int, ...] = (1, 8)
    seeds: tuple[int, ...] = (0, 1, 2)
    rules: tuple[str, ...] = RULES


def all_studies() -> list[Settings]:
    return [Settings(task, cell) for task in TASKS for cell in CELLS]


def run(settings: Settings, machine: Any = None) -> list[StreamRow]:
    """Return the rows of one network on one task."""
    weights = _begun(settings)
    task = tasks.load(settings.task, length=settings.steps)
    keys = jnp.stack([jax.random.key(seed) for seed in settings.seeds])
    streams = jax.vmap(lambda key: task.sample(key, settings.batch, "train"))(keys)
    shape = len(settings.every), len(settings.rates), len(settings.seeds)
    every, rate, seed = (place.ravel() for place in np.indices(shape))
    lanes = (
        jnp.asarray(settings.rates)[rate],
        jnp.asarray(settings.every)[every],
        *jax.tree.map(lambda leaf: leaf[seed], (weights, streams)),
    )
    lane = _stream(settings, task)
    cosines, losses = jax.jit(
        lambda lanes: jax.lax.map(lambda own: lane(*own), lanes, batch_size=AT_A_TIME)
    )(lanes)
    loss = losses[:, losses.shape[-1] // 2 :].mean(axis=-1)
    return [
        StreamRow(
            settings.task,
            settings.cell,
            rule,
            settings.every[every[lane]],
            settings.rates[rate[lane]],
            settings.seeds[seed[lane]],
            to_rtrl=finite(cosines[rule][lane, :, 0].mean()),
            to_bptt=finite(cosines[rule][lane, :, 1].mean()),
            loss=finite(loss[lane]),
        )
        for rule in settings.rules
        for lane in range(len(rate))
    ]


def _begun(settings: Settings) -> Values:
    """Return the weights of all seeds with which the streams begin."""
    task = tasks.load(settings.task)
    method = methods.prepare(methods.BPTT, task, settings.cell, settings.units, task.batch)
    models = [build(task, settings.cell, settings.units, seed) for seed in settings.seeds]
    first = [values_of(model, brainstate.ParamState) for model in models]
    weights = jax.tree.map(lambda *leaves: jnp.stack(leaves), *first)
    keys = jnp.stack([jax.random.key(seed) for seed in settings.seeds])
    train = training.lane(task, method.gradient, task.batch, settings.begun, "adam")
    learn = jax.jit(jax.vmap(lambda *lane: train(settings.begun_rate, *lane), (0, 0, None)))
    return jax.tree.map(lambda leaf: leaf[:, -1], learn(keys, weights, method.memory(0)))


Lane = Callable[[Any, Any, Values, Batch], tuple[dict[str, Any], Any]]


def _stream(settings: Settings, task: Task) -> Lane:
    """Return ``(rate, every, weights, stream) -> (cosines by rule, losses)``."""
    start, observe = _observers(settings, task)
    recomputed = jax.grad(_recomputed(settings, task))
    compared = jnp.arange(1, settings.points + 1) * (settings.steps // settings.points) - 1

    def lane(rate: Any, every: Any, weights: Values, stream: Batch) -> tuple[dict[str, Any], Any]:
        descent = optax.chain(optax.clip_by_global_norm(training.LARGEST), optax.adam(rate))
        optimizer = optax.MultiSteps(descent, lambda _: every)  # of the mean gradient

        def one_step(carry: Any, now: Batch) -> tuple[Any, Any]:
            weights, moments, states = carry
            gradients, states, loss = observe(weights, states, now)
            steps, moments = optimizer.update(gradients[EXACT], moments, weights)
            after = optax.apply_updates(weights, steps), moments, states
            return after, (weights, gradients, loss)

        def at_point(t: Any) -> dict[str, Any]:
            then, found = jax.tree.map(lambda leaf: leaf[t], (path, gradients))
            exact = jnp.stack([_of_cell(found[EXACT]), _of_cell(recomputed(then, stream, t))])
            return {name: _cosines(_of_cell(own), exact) for name, own in found.items()}

        begin = weights, optimizer.init(weights), start
        path, gradients, losses = jax.lax.scan(one_step, begin, stream)[1]
        return jax.lax.map(at_point, compared), losses

    return lane


def _loss(task: Task, outputs: Any, now: Batch) -> Any:
    return jnp.mean(task.losses(outputs, now.targets) * now.weights)


def _observers(
    settings: Settings, task: Task
) -> tuple[dict[str, Any], Callable[[Values, dict[str, Any], Batch], Any]]:
    """Return the states of all rules at the start, and what they find at a step.

    That is ``(weights, states, step) -> (gradients by rule, states, loss)``.
    """
    inputs = jnp.zeros((settings.batch, task.features))
    network = functools.partial(build, task, settings.cell, settings.units, 0)
    learners = {
        name: methods.learner_of(methods.BY_NAME[name], network(), inputs)
        for name in settings.rules
    }
    rules = {name: learner.functional() for name, learner in learners.items()}

    def loss(weights: Values, name: str, state: Any, now: Batch) -> tuple[Any, Any]:
        state = dataclasses.replace(state, parameters=dict(weights))
        state, outputs = rules[name].step(state, now.inputs)
        value = _loss(task, outputs, now)
        return value, (dataclasses.replace(state, parameters={}), value)

    def observe(weights: Values, states: dict[str, Any], now: Batch) -> Any:
        gradients, after, losses = {}, {}, {}
        for name, state in states.items():
            found = jax.grad(loss, has_aux=True)(weights, name, state, now)
            gradients[name], (after[name], losses[name]) = found
        return gradients, after, losses[EXACT]

    start = {name: dataclasses.replace(own.state(), parameters={}) for name, own in rules.items()}
    return start, observe


def _recomputed(settings: Settings, task: Task) -> Callable[[Values, Batch, Any], Any]:
    """Return the loss of step ``t`` as a function ``(weights, stream, t)`` of all its past."""
    model = build(task, settings.cell, settings.units, 0)
    network = pure(model, settings.batch, task.features)

    def loss(weights: Values, stream: Batch, t: Any) -> Any:
        _, outputs = network.run(weights, network.start, stream.inputs)
        return _loss(task, outputs[t], jax.tree.map(lambda leaf: leaf[t], stream))

    return loss


def _cosines(own: Any, others: Any) -> Any:
    return others @ own / (jnp.linalg.norm(own) * jnp.linalg.norm(others, axis=1))


def _of_cell(gradient: Values) -> Any:
    """Return the gradient of the parameters of the cell."""
    leaves = [value for path, value in gradient.items() if path[0] == "cell"]
    return jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(leaves)])
