"""The functions that are compared: BPTT and hand-written gradients; and learners of a task."""

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any, Protocol

import brainstate
import jax
import jax.numpy as jnp

import braintrace

from .case import Subject
from .networks import Network, sequence_loss, squared_error
from .operations import MarkedOps, PlainOps

ALPHA = 0.9
OPTIONS: dict[str, dict[str, Any]] = {
    "d_rtrl": {},
    "es_d_rtrl": {"decay_or_rank": ALPHA},
    "rtrl": {},
    "uoro": {},
    "kf_rtrl": {},
}


class Model(brainstate.nn.Module):
    """A network as a brainstate module that calls the library's operations."""

    def __init__(self, network: Network, dtype: Any = jnp.float32) -> None:
        super().__init__()
        self.network = network
        self.dtype = dtype
        for name, value in network.parameters(dtype).items():
            setattr(self, name, brainstate.ParamState(value))

    def init_state(self, batch_size: int | None = None, **_: Any) -> None:
        for name, value in self.network.start(batch_size or 1, self.dtype).items():
            setattr(self, name, brainstate.HiddenState(value))

    def update(self, x: Any) -> Any:
        parameters = {name: getattr(self, name).value for name in self.network.scales}
        states = {name: getattr(self, name).value for name in self.network.states}
        states, output = self.network.step(MarkedOps(), parameters, states, x)
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
    def learners(self) -> dict[str, Any]:
        """Learners of this task, which ways to take a sequence gradient share."""
        return {}

    def model(self) -> Model:
        """Return a new model; its parameters are the same at every call."""
        return Model(self.network, jnp.dtype(self.dtype))


def bptt(task: Task) -> Subject:
    """Compile backpropagation through time of the plain network."""
    gradient = jax.jit(bptt_of(task.network))
    parameters, data = task.parameters, task.data
    return Subject(lambda: gradient(parameters, *data))


def bptt_of(network: Network) -> Any:
    """Return ``(parameters, xs, targets) -> (loss, gradients)`` in plain JAX."""
    return jax.value_and_grad(functools.partial(sequence_loss, network, PlainOps()))


def by_hand(task: Task, make: Callable[[Network], Any], rule: str = "d_rtrl") -> Subject:
    """Compile a hand-written gradient."""
    gradient = jax.jit(make(task.network))
    parameters, data = task.parameters, task.data
    return Subject(lambda: gradient(parameters, *data), rule=rule, found=lambda result: result[1])


def compiled(model: brainstate.nn.Module, algorithm: str, x: Any, **options: Any) -> Any:
    """Compile a model with an algorithm."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that recurrent mixing is left out is the point
        return braintrace.compile(model, algorithm, x, **options)


class ModuleTask(Protocol):
    """A module with the sequences that it learns.

    Attributes
    ----------
    steps, batch
        Length of a sequence, and number of sequences at a time.
    """

    @property
    def steps(self) -> int: ...

    @property
    def batch(self) -> int: ...

    @property
    def data(self) -> tuple[Any, Any]:
        """Inputs and targets, time first."""

    @property
    def learners(self) -> dict[str, Any]:
        """Learners that several calls share, by algorithm."""

    def model(self) -> brainstate.nn.Module:
        """Return a new model; its parameters are the same at every call."""


def learner_of(task: ModuleTask, algorithm: str = "d_rtrl", **options: Any) -> Any:
    """Compile a new model with an algorithm."""
    given = {"batch_size": task.batch, **OPTIONS[algorithm], **options}
    return compiled(task.model(), algorithm, task.data[0][0], **given)


def step_function(learner: Any) -> Callable[[Any, Any], Any]:
    """Return the loss of one step."""
    return lambda x, target: squared_error(learner(x), target)


def named(gradients: Any) -> Any:
    """Return gradients by the names of the parameters."""
    return {path[-1] if isinstance(path, tuple) else path: g for path, g in gradients.items()}


def wait_for_states(learner: Any) -> None:
    """Wait until the hidden states are there; traces are left alone."""
    jax.block_until_ready([s.value for s in learner.states(brainstate.HiddenState).values()])


def without_states(
    function: Callable[..., Any], *arguments: Any
) -> tuple[Callable[..., Any], list[brainstate.State]]:
    """Return a function of the values of States, and these; it gives back ``(new, result)``.

    The new value of a State that is only read is ``None``.
    """
    stateful = brainstate.transform.StatefulFunction(function, return_only_write=True)
    stateful.make_jaxpr(*arguments)
    return stateful.jaxpr_call, list(stateful.get_states(*arguments))
