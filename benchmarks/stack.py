"""Stacks of ``braintrace.nn`` layers as people build them, and the ways to learn a sequence."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import brainstate
import jax
import jax.numpy as jnp

import braintrace

from . import oracles, stack_oracles
from .case import Subject
from .networks import squared_error
from .stack_oracles import Layers
from .subjects import ALPHA, OPTIONS, compiled, matmul_rounding, step_function

INPUTS, OUTPUTS = 64, 10
TOLERANCE = 1e-3
"""Largest deviation: a unit of relu that round-off moves across zero counts or does not."""


class Model(brainstate.nn.Module):
    """Layers of one kind, and a readout that no marker operation uses."""

    def __init__(self, stack: Layers) -> None:
        super().__init__()
        brainstate.random.seed(0)
        make, hidden = getattr(braintrace.nn, stack.cell), stack.hidden
        inputs = [INPUTS, *[hidden] * (stack.layers - 1)]
        self.layers = [make(size, hidden) for size in inputs]
        self.out = brainstate.nn.Linear(hidden, OUTPUTS)

    def update(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


@dataclasses.dataclass(frozen=True)
class StackTask:
    """A stack with the sequences that it learns.

    Attributes
    ----------
    stack
        Cells and sizes.
    steps, batch
        Length of a sequence, and number of sequences at a time.
    """

    stack: Layers
    steps: int
    batch: int

    @functools.cached_property
    def data(self) -> tuple[Any, Any]:
        """Inputs and targets, time first."""
        keys = jax.random.split(jax.random.key(1))
        shape = (self.steps, self.batch)
        return (
            jax.random.normal(keys[0], (*shape, INPUTS)),
            jax.random.normal(keys[1], (*shape, OUTPUTS)),
        )

    @functools.cached_property
    def learners(self) -> dict[str, Any]:
        """Learners that begin every sequence anew, which the chunk sizes share."""
        return {}

    @functools.cached_property
    def _expected(self) -> dict[tuple[str, bool], Any]:
        return {}

    def expected(self, algorithm: str, carrying: bool = False) -> Any:
        """Return the gradient of the sequence; carrying on, of the same sequence once more."""
        key = (algorithm, carrying)
        if key not in self._expected:
            gradient = {
                "bptt": stack_oracles.bptt(self.stack),
                "d_rtrl": stack_oracles.d_rtrl(self.stack),
                "es_d_rtrl": stack_oracles.es_d_rtrl(self.stack, ALPHA),
            }[algorithm]
            data, mask = self.data, jnp.ones(self.steps)
            if carrying:
                data = jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf]), data)
                mask = jnp.concatenate([jnp.zeros(self.steps), mask])
            model = Model(self.stack)
            parameters = {path: state.value for path, state in _parameters(model).items()}
            self._expected[key] = jax.jit(gradient)(parameters, *data, mask)
        return self._expected[key]

    def deviation(self, algorithm: str, carrying: bool = False) -> Callable[[Any], float]:
        """Return what tells how far gradients are from the oracle."""
        return lambda found: oracles.deviation(
            _flat(found), _flat(self.expected(algorithm, carrying))
        )

    @property
    def tolerance(self) -> float:
        """Largest deviation from the oracle."""
        return max(TOLERANCE, 30 * matmul_rounding())


def _parameters(model: Model) -> Any:
    return model.states(brainstate.ParamState)


def _flat(gradients: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_flatten_with_path(dict(gradients))[0]
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def learner_of(task: StackTask, algorithm: str, model: Model | None = None) -> Any:
    """Compile a model of the stack, a new one if none is given, with an algorithm."""
    model = Model(task.stack) if model is None else model
    options = {"batch_size": task.batch, **OPTIONS[algorithm]}
    return compiled(model, algorithm, task.data[0][0], **options)


def sequence_gradient(task: StackTask, learner: Any, chunk: int | None = None) -> Any:
    """Return what takes the gradient of the sequence, from the states and traces that are there.

    Parameters
    ----------
    task, learner
        What is learnt, and by whom.
    chunk
        ``chunk_size``; ``None``: as the library chooses.
    """
    step, sizes = step_function(learner), {} if chunk is None else {"chunk_size": chunk}
    return lambda: learner.etrace_grad(*task.data, step_fn=step, **sizes)


def bptt_gradient(task: StackTask, model: Model) -> Any:
    """Return backpropagation through time of a model, as brainstate's users write it."""
    brainstate.nn.init_all_states(model, batch_size=task.batch)
    parameters = _parameters(model)

    @brainstate.transform.jit
    def gradient(xs: Any, targets: Any) -> Any:
        brainstate.nn.init_all_states(model, batch_size=task.batch)

        def loss() -> Any:
            def step(x: Any, target: Any) -> Any:
                return squared_error(model(x), target)

            return brainstate.transform.for_loop(step, xs, targets).mean()

        return brainstate.transform.grad(loss, parameters)()

    return lambda: gradient(*task.data)


def bptt(task: StackTask) -> Subject:
    """Compile backpropagation through time of the same model."""
    run = bptt_gradient(task, Model(task.stack))
    return Subject(run, deviation=task.deviation("bptt"), tolerance=task.tolerance)


def online(task: StackTask, algorithm: str = "d_rtrl", chunk: int | None = None) -> Subject:
    """Compile a sequence gradient that begins with a reset, which is part of the time."""
    if algorithm not in task.learners:
        task.learners[algorithm] = learner_of(task, algorithm)
    learner = task.learners[algorithm]
    gradient = sequence_gradient(task, learner, chunk)

    def run() -> Any:
        learner.reset_state(task.batch)
        return gradient()

    return Subject(run, deviation=task.deviation(algorithm), tolerance=task.tolerance)


def carrying_on(task: StackTask, algorithm: str = "d_rtrl") -> Subject:
    """Compile a sequence gradient whose states and traces are those that the last call left.

    A first sequence has gone through the learner, so that no trace is zero.
    """
    run = sequence_gradient(task, learner_of(task, algorithm))
    jax.block_until_ready(run())
    return Subject(run, deviation=task.deviation(algorithm, True), tolerance=task.tolerance)


def agreement(task: StackTask) -> tuple[float, float]:
    """Return the deviation of D_RTRL's gradient from the oracle, and what is tolerated."""
    return task.deviation("d_rtrl")(online(task).run()), task.tolerance
