"""State of the optimizer of a learner's parameters, and the count of skipped updates.

A gradient transformation of optax is a pair of pure functions; its state is a pytree, which is
stored in a State of the learner. An object with a method ``update(gradients)``, such as
brainstate's optimizers, has its own States.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import brainstate
import jax
import jax.numpy as jnp
import numpy as np

from .._brainstate import Hidden, is_watched, peek
from .._checks import differences, level_of_user
from .._errors import NonFiniteWarning, OptionError, in_words
from .._jax import is_tracer, strongly_typed
from .._typing import Path, PyTree
from ..sharding import on_host
from .arguments import key_of


def is_transformation(optimizer: Any) -> bool:
    """Test whether an optimizer is a pair of pure functions, as in optax."""
    return isinstance(optimizer, tuple) and callable(getattr(optimizer, "init", None))


class Skips(NamedTuple):
    """Number of skipped updates after a call, which may still be computed.

    Attributes
    ----------
    count
        The number.
    is_bad, samples
        ``(T,)``: whether the update of each step was skipped, and the samples that were reset after
        it. ``None``: they were skipped inside a transformation.
    start
        Index of its first step in the user's call.
    """

    count: jax.Array
    is_bad: jax.Array | None = None
    samples: jax.Array | None = None
    start: int = 0


@dataclasses.dataclass(eq=False)
class Noticed:
    """What calls know about skipped updates, hidden from brainstate.

    Attributes
    ----------
    value, count
        The array that the last call has read or written, and the number that was read last.
    running
        Calls since then.
    """

    value: jax.Array
    count: int = 0
    running: list[Skips] = dataclasses.field(default_factory=list)


class LearnerOptimizer(brainstate.graph.Node):
    """The optimizer of a learner.

    Attributes
    ----------
    transformed
        State of a gradient transformation; ``None`` if there is none.
    own
        An optimizer with its own States; ``None`` if there is none.
    begun
        The optimizer that the state belongs to, and its cache key.
    skipped
        Number of updates that were omitted because of non-finite numbers.
    """

    def __init__(self) -> None:
        self.transformed = brainstate.LongTermState(None)
        self.own: Any = None
        self.begun: Hidden[tuple[Any, Hashable]] = Hidden((None, ()))
        # From NumPy: `jnp.zeros` compiles a program.
        self.skipped = brainstate.LongTermState(jnp.asarray(np.zeros((), np.int32)))
        self.noticed = Noticed(peek(self.skipped))

    @property
    def states(self) -> dict[Path, brainstate.State]:
        """The States of an optimizer, by path; empty before it is initialised."""
        if self.own is None:
            return {} if peek(self.transformed) is None else {(): self.transformed}
        is_node = isinstance(self.own, brainstate.graph.Node)
        items = (brainstate.graph.states(self.own) if is_node else vars(self.own)).items()
        return {
            tuple(map(str, path if isinstance(path, tuple) else (path,))): state
            for path, state in items
            if isinstance(state, brainstate.State) and not isinstance(state, brainstate.ParamState)
        }

    @property
    def value(self) -> PyTree:
        """The state of the optimizer: a pytree, or values by path; ``None`` if there is none."""
        if self.own is None:
            return self.transformed.value
        return {path: state.value for path, state in self.states.items()}

    def write(self, value: PyTree) -> None:
        """Write a state like the current one; ``None`` removes the optimizer."""
        if value is None:
            self.transformed.value, self.own, self.begun = None, None, Hidden((None, ()))
        elif self.own is None:
            self.transformed.value = strongly_typed(value)
        else:
            for path, state in self.states.items():
                state.value = value[path]

    def begin(self, optimizer: Any, parameters: Callable[[], PyTree], creates: bool = True) -> None:
        """Initialise an optimizer, with its current state or a new one.

        Parameters
        ----------
        optimizer, parameters
            The optimizer, and a function that returns the parameters, in the structure of their
            gradients.
        creates
            Whether its state may be created here, and not only be continued.

        Raises
        ------
        OptionError
            If there is another one, or if its state would be created inside a transformation.
        """
        held, (begun, _) = peek(self.transformed), self.begun.value
        if begun is optimizer and not (held is self.own is None):
            return

        def fresh() -> PyTree:
            with in_words(lambda: "`optimizer.init` fails for the parameters"):
                return strongly_typed(optimizer.init(parameters()))

        is_pure = is_transformation(optimizer)
        if is_pure and held is not None:
            is_other = bool(differences(held, jax.eval_shape(fresh)))
        else:
            is_other = held is not None or self.own not in (None, optimizer)
        if is_other:
            raise OptionError(
                f"The learner holds the state of another optimizer ({type(begun).__name__}). To "
                "use this one, write `learner.optimizer_state = None` first."
            )
        if is_pure and held is None:
            if is_watched() or not creates:
                raise OptionError(
                    "The state of `optimizer` would be created inside a transformation or a pure "
                    "function, which cannot store it: call `learner.init_optimizer(optimizer)` "
                    "before."
                )
            self.transformed.value = fresh()
        elif not is_pure and creates:
            self.own = optimizer
        self.begun = Hidden((optimizer, key_of(optimizer.update)[0]))


# --- warnings about skipped updates


MOST_RUNNING = 8
"""Maximum number of calls of one step whose results are not read yet."""


def notice(
    held: LearnerOptimizer, verdict: tuple[jax.Array, jax.Array] | None = None, start: int = 0
) -> None:
    """Warn of the updates that a call has skipped; after single steps, at the latest the eighth.

    Without a verdict, before a call: of those that a transformation has skipped.
    """
    value, noticed = peek(held.skipped), held.noticed
    is_known = verdict is None and value is noticed.value
    if not (is_known or is_tracer(value) or is_watched()):
        is_bad, samples = verdict or (None, None)
        noticed.value = value
        noticed.running.append(Skips(value, is_bad, samples, start))
        if is_bad is None or len(is_bad) > 1 or len(noticed.running) > MOST_RUNNING:
            notice_all(held)


def notice_all(held: LearnerOptimizer) -> None:
    """Wait for all calls, and warn at the first skipped update, and then at powers of ten."""
    noticed = held.noticed
    calls, noticed.running = noticed.running, []
    if calls and int(on_host(calls[-1].count)) != noticed.count:
        for call in calls:
            before, noticed.count = noticed.count, int(on_host(call.count))
            if _digits(noticed.count) > _digits(before):
                warnings.warn(
                    f"{_described(call, noticed.count - before)} A skipped update changes neither "
                    "parameters nor optimizer, and `learner.skipped_updates` counts it; the next "
                    "warning follows at the next power of ten. `nonfinite='raise'` stops at the "
                    "first, and `nonfinite='ignore'` updates nevertheless.",
                    NonFiniteWarning,
                    stacklevel=level_of_user(),
                )


def _digits(number: int) -> int:
    return len(str(number)) if number else 0


def _described(call: Skips, new: int) -> str:
    if call.is_bad is None or call.samples is None:
        return (
            "Updates that were skipped inside a transformation, or before the learner's state was "
            f"restored: {new}. A loss or gradient was NaN or infinite."
        )
    steps = on_host(call.is_bad)
    first = int(np.argmax(steps))
    is_reset = np.atleast_1d(on_host(call.samples)[first])
    which = "All" if is_reset.all() else ", ".join(map(str, np.nonzero(is_reset)[0][:10]))
    return (
        f"A loss or gradient is NaN or infinite, first at step {call.start + first} of "
        f"{'this' if len(steps) > 1 else 'a'} call. Updates skipped: {new}. Samples that were "
        f"reset, with non-finite states or traces: {which or 'none'}. If an input has gaps that "
        "are NaN, fill them (`jnp.nan_to_num`)."
    )
