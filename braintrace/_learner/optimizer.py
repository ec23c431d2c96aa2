"""State of the optimizer of a learner's parameters.

There are two kinds of optimizers. A gradient transformation of optax is a pair of pure functions
``init`` and ``update``; its state is a pytree, which is stored in a State of the learner. An object
with a method ``update(gradients)``, such as brainstate's optimizers, has its own States.

Both are represented by leaves with paths.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import brainstate
import jax
import jax.numpy as jnp

from .._brainstate import Hidden, is_watched, peek
from .._checks import shown
from .._errors import OptionError, ShapeError, in_words
from .._jax import strongly_typed
from .._typing import Path, PyTree
from .leaves import same_type


def is_transformation(optimizer: Any) -> bool:
    """Test whether an optimizer is a pair of pure functions, as in optax."""
    return isinstance(optimizer, tuple) and callable(getattr(optimizer, "init", None))


class Running(NamedTuple):
    """Results of a call that may still be computed; see `notice_of_call`.

    Attributes
    ----------
    count
        Number of skipped updates after it.
    is_bad, samples, start
        Its verdicts, and the index of its first step.
    """

    count: jax.Array
    is_bad: jax.Array
    samples: jax.Array
    start: int


@dataclasses.dataclass(eq=False)
class Noticed:
    """Number of skipped updates when a call last read it, hidden from brainstate.

    Attributes
    ----------
    value
        The array that the last call has read or written.
    count
        The number that was read last.
    warned
        The number at the last warning.
    running, time
        Later calls, whose results may still be computed, and the time of the last check.
    """

    value: jax.Array | None = None
    count: int = 0
    warned: int = 0
    running: list[Running] = dataclasses.field(default_factory=list)
    time: float = 0.0


class LearnerOptimizer(brainstate.graph.Node):
    """The optimizer of a learner.

    Attributes
    ----------
    transformed
        State of a gradient transformation; ``None`` if there is none.
    own
        An optimizer with its own States; ``None`` if there is none.
    skipped
        Number of updates that were omitted because of non-finite numbers.
    noticed
        The number of them that a call has read.
    version
        The optimizer that the state belongs to, in an object that is replaced with it.
    """

    def __init__(self) -> None:
        self.transformed = brainstate.LongTermState(None)
        self.own: Any = None
        self.skipped = brainstate.LongTermState(jnp.zeros((), jnp.int32))
        self.noticed = Noticed()
        self.version: Hidden[Any] = Hidden(None)

    @property
    def states(self) -> dict[Path, brainstate.State]:
        """The States of an optimizer, by path; empty before it is initialised."""
        if peek(self.transformed) is not None:
            return {(): self.transformed}
        return {} if self.own is None else _states_of(self.own)

    @property
    def value(self) -> PyTree:
        """The state of the optimizer: a pytree, or values by path; ``None`` if there is none."""
        if self.own is None:
            return self.transformed.value
        return {path: state.value for path, state in _states_of(self.own).items()}

    def write(self, value: PyTree) -> None:
        """Write a state with the structure of the current one; ``None`` removes the optimizer.

        Raises
        ------
        OptionError
            If there is no state, or the optimizer has its own States.
        ShapeError
            If the structure differs from the current state.
        """
        if value is None:
            self.forget()
            return
        if self.own is not None or peek(self.transformed) is None:
            raise OptionError(
                "`optimizer_state` can be written if the learner holds the state of a gradient "
                "transformation, and set to `None` at any time. If an optimizer has its own "
                "States, write those; before the first update, call "
                "`learner.init_optimizer(optimizer)`."
            )
        held, new = peek(self.transformed), strongly_typed(value)
        if not same_type(held, new):
            raise ShapeError(
                f"`optimizer_state` is {shown(value)}; expected a pytree like the current one "
                f"({shown(held)}), with the same shapes and dtypes, or None to reset it."
            )
        self.transformed.value = new

    def forget(self) -> None:
        """Remove the optimizer."""
        self.transformed.value = None
        self.own, self.version = None, Hidden(None)

    def begin(self, optimizer: Any, parameters: Callable[[], PyTree]) -> None:
        """Initialise an optimizer with its current state or a new one.

        Parameters
        ----------
        optimizer
            The optimizer.
        parameters
            Returns the parameters, in the structure of their gradients.

        Raises
        ------
        OptionError
            If it is not an optimizer, if there is another one, or if the state would be created
            inside a transformation.
        """
        has_begun = self.own is not None or peek(self.transformed) is not None
        if has_begun and self.version.value is optimizer:
            return
        if is_transformation(optimizer):
            self._begin_transformation(optimizer, parameters())
        else:
            self._begin_object(optimizer)
        self.version = Hidden(optimizer)

    def check_begun(self, optimizer: Any, parameters: Callable[[], PyTree]) -> None:
        """Refuse a transformation that has no state yet; see `begin`.

        Raises
        ------
        OptionError
            If it has none, or there is another optimizer.
        """
        if is_transformation(optimizer):
            if peek(self.transformed) is None:
                raise OptionError(
                    "The learner has no state of this `optimizer`: call "
                    "`learner.init_optimizer(optimizer)` before `functional.state()`."
                )
            self.begin(optimizer, parameters)

    def _begin_transformation(self, optimizer: Any, parameters: PyTree) -> None:
        def fresh() -> PyTree:
            with in_words(lambda: "`optimizer.init` fails for the parameters"):
                return strongly_typed(optimizer.init(parameters))

        held = peek(self.transformed)
        if self.own is not None:
            raise _other(f"the state of a {type(self.own).__name__}")
        if held is None:
            if is_watched():
                raise OptionError(
                    "The state of `optimizer` would be created inside a transformation, which "
                    "cannot store it. Call `learner.init_optimizer(optimizer)` before."
                )
            self.transformed.value = fresh()
        elif not same_type(held, jax.eval_shape(fresh)):
            raise _other("the state of an optimizer of other parts or shapes")

    def _begin_object(self, optimizer: Any) -> None:
        if peek(self.transformed) is not None:
            raise _other("the state of a gradient transformation")
        if self.own not in (None, optimizer):
            raise _other(f"the state of another {type(self.own).__name__}")
        self.own = optimizer


def _states_of(optimizer: Any) -> dict[Path, brainstate.State]:
    """Return the States of an optimizer by path, except for parameters."""
    if isinstance(optimizer, brainstate.graph.Node):
        result = dict(brainstate.graph.states(optimizer))
    else:
        held = getattr(optimizer, "__dict__", {})
        result = {(name,): s for name, s in held.items() if isinstance(s, brainstate.State)}
    return {
        tuple(map(str, path if isinstance(path, tuple) else (path,))): state
        for path, state in result.items()
        if not isinstance(state, brainstate.ParamState)
    }


def _other(what: str) -> OptionError:
    return OptionError(
        f"The learner holds {what}, which does not fit this `optimizer`. To use another "
        "optimizer, write `learner.optimizer_state = None` first."
    )
