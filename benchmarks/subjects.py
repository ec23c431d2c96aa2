"""The functions that are compared: BPTT, hand-written gradients, the library as users call it."""

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any

import brainstate
import jax
import jax.numpy as jnp

import braintrace

from . import handwritten, oracles
from .case import Subject
from .networks import Network, squared_error
from .operations import MarkedOps, PlainOps

ALPHA = 0.9
ES_OPTIONS = {"decay_or_rank": ALPHA}
OPTIONS: dict[str, dict[str, Any]] = {
    "d_rtrl": {},
    "es_d_rtrl": ES_OPTIONS,
    "rtrl": {},
    "snap": {},
    "immediate": {},
    "ottt": {"decay": ALPHA},
    "uoro": {},
    "kf_rtrl": {},
}
RANDOM = frozenset({"uoro", "kf_rtrl"})
"""Rules whose mean over draws alone can be held against an oracle; the tests do that."""
TOLERANCES = {"float32": 1.0, "bfloat16": 500.0}
"""Factors on a network's tolerance by dtype."""


class Model(brainstate.nn.Module):
    """A network as a brainstate module that calls the library's operations, or other ones."""

    def __init__(self, network: Network, dtype: Any = jnp.float32, ops: Any = MarkedOps) -> None:
        super().__init__()
        self.network = network
        self.ops = ops
        self.dtype = dtype
        for name, value in network.parameters(dtype).items():
            setattr(self, name, brainstate.ParamState(value))

    def init_state(self, batch_size: int | None = None, **_: Any) -> None:
        for name, value in self.network.start(batch_size or 1, self.dtype).items():
            setattr(self, name, brainstate.HiddenState(value))

    def update(self, x: Any) -> Any:
        parameters = {name: getattr(self, name).value for name in self.network.scales}
        states = {name: getattr(self, name).value for name in self.network.states}
        states, output = self.network.step(self.ops(), parameters, states, x)
        for name, value in states.items():
            getattr(self, name).value = value
        return output


@dataclasses.dataclass(frozen=True)
class Task:
    """A network with the sequences that it learns.

    Attributes
    ----------
    network
        The network.
    steps, batch
        Length of a sequence, and number of sequences at a time.
    dtype
        Of parameters, states and sequences.
    """

    network: Network
    steps: int
    batch: int
    dtype: str = "float32"

    @functools.cached_property
    def data(self) -> tuple[Any, Any]:
        """Inputs and targets, time first."""
        return self.network.data(self.steps, self.batch, jnp.dtype(self.dtype))

    @functools.cached_property
    def parameters(self) -> Any:
        """The initial parameters."""
        return self.network.parameters(jnp.dtype(self.dtype))

    @functools.cached_property
    def learners(self) -> dict[Any, Any]:
        """Learners of this task, which ways to take a sequence gradient share."""
        return {}

    @functools.cached_property
    def d_rtrl(self) -> Any:
        """What D_RTRL has to give."""
        gradient = jax.jit(oracles.bptt(self.network, cut_mixing=True))
        return gradient(self.parameters, *self.data)[1]

    @functools.cached_property
    def es_d_rtrl(self) -> Any:
        """What ES_D_RTRL has to give."""
        return jax.jit(oracles.es_d_rtrl(self.network, ALPHA))(self.parameters, *self.data)

    @functools.cached_property
    def snap(self) -> Any:
        """What SnAp-1 has to give."""
        return jax.jit(oracles.snap(self.network))(self.parameters, *self.data)

    @functools.cached_property
    def immediate(self) -> Any:
        """What Immediate has to give."""
        return jax.jit(oracles.immediate(self.network))(self.parameters, *self.data)

    @functools.cached_property
    def ottt(self) -> Any:
        """What OTTT has to give."""
        return jax.jit(oracles.ottt(self.network, ALPHA))(self.parameters, *self.data)

    @property
    def tolerance(self) -> float:
        """Largest deviation from the oracle: the network's, or what the matrix unit rounds."""
        return max(self.network.tolerance * TOLERANCES[self.dtype], 30 * matmul_rounding())

    def expected(self, algorithm: str) -> Any:
        """Return what an algorithm has to give."""
        return getattr(self, algorithm)


@functools.cache
def matmul_rounding() -> float:
    """Return the relative error of a float32 product (some devices round its factors)."""
    key = jax.random.key(0)
    matrix = jax.random.normal(key, (256, 256))
    with jax.default_matmul_precision("highest"):
        exact = matrix @ matrix
    return oracles.deviation({"product": matrix @ matrix}, {"product": exact})


def bptt(task: Task) -> Subject:
    """Compile backpropagation through time of the plain network."""
    gradient = jax.jit(oracles.bptt(task.network))
    parameters, data = task.parameters, task.data
    return Subject(lambda: gradient(parameters, *data))


def by_hand(task: Task, make: Callable[[Network], Any], algorithm: str = "d_rtrl") -> Subject:
    """Compile a hand-written gradient."""
    gradient = jax.jit(make(task.network))
    parameters, data = task.parameters, task.data
    return Subject(
        lambda: gradient(parameters, *data),
        deviation=lambda result: oracles.deviation(result[1], task.expected(algorithm)),
        tolerance=task.tolerance,
    )


def hand_one_chunk(task: Task) -> Subject:
    """Compile hand-written D_RTRL in one chunk."""
    return by_hand(task, handwritten.one_chunk)


def hand_chunked(task: Task, chunk: int) -> Subject:
    """Compile hand-written D_RTRL in chunks."""
    return by_hand(task, lambda network: handwritten.chunked(network, chunk))


def hand_smoothed(task: Task) -> Subject:
    """Compile hand-written ES_D_RTRL."""
    return by_hand(task, lambda network: handwritten.smoothed(network, ALPHA), "es_d_rtrl")


def compiled(model: brainstate.nn.Module, algorithm: str, x: Any, **options: Any) -> Any:
    """Compile a model with an algorithm."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that recurrent mixing is left out is the point
        return braintrace.compile(model, algorithm, x, **options)


def learner_of(task: Task, algorithm: str = "d_rtrl", **options: Any) -> Any:
    """Compile a network with an algorithm; its operations are plain where the compiler marks."""
    ops = PlainOps if options.get("mark") == "auto" else MarkedOps
    model = Model(task.network, jnp.dtype(task.dtype), ops)
    given = OPTIONS[algorithm] | options
    return compiled(model, algorithm, task.data[0][0], batch_size=task.batch, **given)


def step_function(learner: Any) -> Callable[[Any, Any], Any]:
    """Return the loss of one step."""
    return lambda x, target: squared_error(learner(x), target)


def named(gradients: Any) -> Any:
    """Return gradients by the names of the parameters."""
    return {path[-1] if isinstance(path, tuple) else path: g for path, g in gradients.items()}


def wait_for_states(learner: Any) -> None:
    """Wait until the hidden states are there; traces are left alone."""
    jax.block_until_ready([s.value for s in learner.states(brainstate.HiddenState).values()])


def online(
    task: Task,
    algorithm: str = "d_rtrl",
    chunk: int | None = None,
    count_reset: bool = True,
    **options: Any,
) -> Subject:
    """Compile a sequence gradient that starts from fresh states and traces.

    Parameters
    ----------
    task, algorithm
        What learns, and how.
    chunk
        ``chunk_size``; ``None``: as the library chooses.
    count_reset
        Whether ``reset_state`` is part of the time.
    **options
        Given to ``braintrace.compile``.
    """
    key = (algorithm, *sorted(options.items()))
    if key not in task.learners:
        task.learners[key] = learner_of(task, algorithm, **options)
    learner = task.learners[key]
    step, data = step_function(learner), task.data
    sizes = {} if chunk is None else {"chunk_size": chunk}

    def reset() -> None:
        learner.reset_state(task.batch)
        wait_for_states(learner)

    def gradient() -> Any:
        return learner.etrace_grad(*data, step_fn=step, **sizes)

    def reset_and_gradient() -> Any:
        learner.reset_state(task.batch)
        return gradient()

    return Subject(
        reset_and_gradient if count_reset else gradient,
        before=None if count_reset else reset,
        deviation=lambda found: oracles.deviation(named(found), task.expected(algorithm)),
        tolerance=task.tolerance,
    )


def agreement(
    task: Task, algorithm: str = "d_rtrl", chunk: int | None = None
) -> tuple[float, float]:
    """Return the deviation of a sequence gradient from its oracle, and what is tolerated."""
    subject = online(task, algorithm, chunk)
    assert subject.deviation is not None
    return subject.deviation(subject.run()), subject.tolerance


def without_states(
    function: Callable[..., Any], *arguments: Any
) -> tuple[Callable[..., Any], list[brainstate.State]]:
    """Return a function of the values of States, and these; it gives back ``(new, result)``.

    The new value of a State that is only read is ``None``.
    """
    stateful = brainstate.transform.StatefulFunction(function, return_only_write=True)
    stateful.make_jaxpr(*arguments)
    return stateful.jaxpr_call, list(stateful.get_states(*arguments))
