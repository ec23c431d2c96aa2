"""Base classes and helpers of modules with hidden states."""

from collections.abc import Callable
from typing import Any, TypeAlias

import brainstate
import jax
import jax.numpy as jnp
import saiunit

from .._errors import OptionError, UnitError
from .._etrace_op.elemwise import element_wise
from .._jax import strongly_typed

Activation: TypeAlias = str | Callable[[Any], Any]
"""A function, or its name in `brainstate.nn`."""

Initializers: TypeAlias = dict[str, tuple[Any, tuple[int, ...]]]
"""For every hidden state, by name: its initialiser, and its shape for one sample."""


class Stateful(brainstate.nn.Module):
    """A module whose hidden states each have an initialiser.

    A subclass declares them in `_initializers`, and their class in `_kind`.
    """

    _kind: type = brainstate.HiddenState

    def _initializers(self) -> Initializers:
        """Return the initialiser and the shape of one sample of each state, by name."""
        raise NotImplementedError

    def init_state(self, batch_size: int | None = None, **_: Any) -> None:
        """Create the hidden states, with a leading batch axis if there is a batch size."""
        for name, (initializer, shape) in self._initializers().items():
            value = initial(initializer, shape, batch_size)
            setattr(self, name, self._kind(value))

    def reset_state(self, batch_size: int | None = None, **_: Any) -> None:
        """Reset the hidden states to their initial values."""
        for name, (initializer, shape) in self._initializers().items():
            getattr(self, name).value = initial(initializer, shape, batch_size)


class Population(Stateful):
    """A module with one output for each input."""

    def __init__(self, in_size: Any, name: str | None) -> None:
        super().__init__(name=name)
        self.in_size, self.out_size = in_size, in_size


class Cell(Stateful):
    """A cell with the hidden state h."""

    def __init__(
        self, num_in: int, num_out: int, state_init: Any, activation: Activation, name: str | None
    ) -> None:
        super().__init__(name=name)
        self.num_in, self.num_out = num_in, num_out
        self.in_size, self.out_size = (num_in,), (num_out,)
        self.state_init = state_init
        named: Any = activation if callable(activation) else getattr(brainstate.nn, activation)
        self.activation = named

    def _initializers(self) -> Initializers:
        return {"h": (self.state_init, self.out_size)}


def initial(initializer: Any, shape: tuple[int, ...], batch_size: int | None) -> Any:
    """Return the initial value of a state; a single number is used for every unit.

    Integers become floating-point numbers, the dtype after a step.
    """
    value = brainstate.nn.init.param(initializer, shape, batch_size)
    batch = () if batch_size is None else (batch_size,)
    value = strongly_typed(saiunit.math.broadcast_to(value, (*batch, *shape)))
    return jax.tree.map(lambda leaf: leaf.astype(jnp.result_type(leaf, float)), value)


def identity(value: Any) -> Any:
    """Return the value: a cell without a nonlinearity."""
    return value


def constant(value: Any) -> Any:
    """Return a constant of a neuron; one in a `ParamState` is marked, so that it learns online."""
    return element_wise(value.value) if isinstance(value, brainstate.ParamState) else value


def decay(tau: Any) -> Any:
    """Return ``exp(-dt / tau)``, the factor of an exponential decay over one step."""
    return saiunit.math.exp(-step_over(tau))


def step_over(tau: Any) -> Any:
    """Return ``dt / tau``, a time step as a part of a time constant."""
    tau = constant(tau)
    ratio = time_step() / tau
    if not saiunit.get_unit(ratio).is_unitless:
        raise UnitError(
            f"The time step `dt` in {saiunit.get_unit(time_step())} over a time constant or a "
            f"refractory period in {saiunit.get_unit(tau)} has a unit: give both a unit of time, "
            "or none."
        )
    return ratio


def time_step() -> Any:
    """Return the length ``dt`` of a time step from brainstate's environment."""
    dt = brainstate.environ.get("dt", None)
    if dt is None:
        raise OptionError(
            "No time step is set. Call `brainstate.environ.set(dt=1.0 * saiunit.ms)` first, or "
            "use `with brainstate.environ.context(dt=1.0 * saiunit.ms):`."
        )
    return dt
