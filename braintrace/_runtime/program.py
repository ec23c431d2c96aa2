"""Compiled programs of a learner, and the one adapter between them and States.

A call of a learner is a pure function of values and traces. It reads them from a `Store` once, and
writes them once: to the learner's own States, or to a `LearnerState` that the user gives.
"""

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Sequence
from operator import is_
from typing import Any, Protocol, TypeAlias

import brainstate
import jax

from .._brainstate import is_in_loop, is_watched, peek_all, set_values, values_of
from .._errors import LostTracesError, OptionError
from .._typing import path_name
from .carried_traces import CarriedTraces, Form
from .model_states import States

Take: TypeAlias = Callable[[], tuple[Any, bool]]
"""Returns the traces, and whether their buffers may be given to a program."""

Changes: TypeAlias = tuple[Any, Sequence[Any], Form | None]
"""Results, new values of States, and the new traces; ``None``: they stay."""


class Program:
    """A compiled pure function.

    Parameters
    ----------
    function
        The function.
    donated
        Index of the argument with traces, whose buffers may be donated; ``None``: no donation.
    key
        Programs with the same key are equal. In the transformations of brainstate, the program of
        deferred traces is part of the type of a State, and a change of it means a new compilation.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        donated: int | None = None,
        key: Hashable | None = None,
    ) -> None:
        self._key = id(self) if key is None else key
        self._hash = hash(self._key)
        self._run = jax.jit(function)
        self._run_in_place = jax.jit(function, donate_argnums=() if donated is None else donated)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Program) and other._key == self._key

    def __hash__(self) -> int:
        return self._hash

    def __call__(self, *arguments: Any, in_place: bool = False, done: list[Any]) -> None:
        """Run the function and append its results; ``in_place`` donates the buffers of its traces.

        `map` and `extend` are C code: no signal handler runs between the program and its results.
        """
        run = self._run_in_place if in_place else self._run
        done.extend(map(run, *([each] for each in arguments)))


class Store(Protocol):
    """Where a call reads the values of States and the traces once, and writes them once."""

    @property
    def defers(self) -> bool:
        """Whether traces may be computed when they are read."""
        ...

    @property
    def is_zero(self) -> bool:
        """Whether the traces are known to be zero."""
        ...

    def values(self, states: Iterable[brainstate.State]) -> list[Any]:
        """Return the values of States."""
        ...

    def advance(
        self,
        written: Iterable[brainstate.State],
        run: Callable[[Take, list[Any]], None],
        settle: Callable[[Any], Changes],
        is_checked: bool = False,
    ) -> Any:
        """Run programs, write what they return, and return their results.

        Parameters
        ----------
        written
            The States that they write.
        run
            Takes the traces, runs the program, and appends its results to a list.
        settle
            Returns the changes of these results.
        is_checked
            Whether ``settle`` may refuse the results; the old values then remain.
        """
        ...


@dataclasses.dataclass(eq=False)
class LearnerStore:
    """The `Store` of a learner's own States, which it advances atomically.

    Attributes
    ----------
    traces
        The traces.
    followed
        The hidden States that the traces follow, by path.

    Raises
    ------
    LostTracesError
        If other code has written hidden states that the traces follow.
    """

    traces: CarriedTraces
    followed: States

    def __post_init__(self) -> None:
        self._is_watched = is_watched()
        if not self._is_watched:
            self.traces.finish()
        now, left = peek_all(self.followed.values()), self.traces.left
        if left and not self._is_watched and not any(all(map(is_, now, own)) for own in left):
            path = next(
                p
                for p, one, own in zip(self.followed, now, left[-1], strict=True)
                if one is not own
            )
            raise LostTracesError(
                f"State '{path_name(path)}' was written since the learner's last call, but the "
                "traces belong to its previous value. Call `learner.reset_state()` to start a new "
                "sequence, and write initial values after it; write a State during a sequence in "
                "`update` of the model."
            )

    @property
    def defers(self) -> bool:
        """See `Store`."""
        return not is_in_loop()

    @property
    def is_zero(self) -> bool:
        """See `Store`."""
        return self.traces.is_zero

    def values(self, states: Iterable[brainstate.State]) -> list[Any]:
        """See `Store`."""
        return values_of(states)

    def advance(
        self,
        written: Iterable[brainstate.State],
        run: Callable[[Take, list[Any]], None],
        settle: Callable[[Any], Changes],
        is_checked: bool = False,
    ) -> Any:
        """See `Store`.

        A checked program leaves the old values in place until its check has passed. Others reuse
        the buffers of the traces. If an interrupt ends the call between the program and the writes,
        the next call writes its results first; see `CarriedTraces.unfinished`.
        """
        done: list[Any] = []
        if is_checked and not self._is_watched:
            run(self.traces.lend, done)
            results, values, after = settle(done[0])
            self.write(written, values, after)
            return results
        changes: list[Changes] = []

        def finish() -> None:
            if done:
                if not changes:
                    changes.append(settle(done[0]))
                self._write(written, *changes[0][1:])

        if self._is_watched:
            run(self.traces.lend, done)
            finish()
        else:
            self.traces.unfinished = finish
            run(self.traces.take, done)
            self.traces.finish()
        return changes[0][0]

    def write(
        self,
        written: Iterable[brainstate.State],
        values: Iterable[Any],
        after: Form | None,
    ) -> None:
        """Write values of States, and traces; ``None``: they stay."""
        changes = list(written), list(values), after
        if self._is_watched:
            self._write(*changes)
        else:
            self.traces.unfinished = lambda: self._write(*changes)
            self.traces.finish()

    def _write(
        self,
        written: Iterable[brainstate.State],
        values: Iterable[Any],
        after: Form | None,
    ) -> None:
        write_values(written, values, is_outside=not self._is_watched)
        if after is not None:
            self.traces.store(after)
        self.remember(*(self.traces.left[:1] if after is None else ()))

    def remember(self, *before: tuple[Any, ...]) -> None:
        """Remember to which values of the hidden States the traces belong."""
        now = peek_all(self.followed.values())
        self.traces.left = () if self._is_watched else (*before, now)


RAW = (
    "A learner is called inside a transformation of JAX such as `jax.jit` or `jax.lax.scan`, which "
    "does not carry States from call to call. Use its pure functions, in two lines:\n"
    "    pure = learner.functional()  # outside; start with state = pure.state()\n"
    "    state, output = pure.step(state, x)  # inside\n"
    "or the transformation of brainstate, such as `brainstate.transform.jit`, `grad` or `for_loop`."
)


def write_values(
    states: Iterable[brainstate.State], values: Iterable[Any], is_outside: bool = False
) -> None:
    """Write a program's results to States; see `set_values`.

    Raises
    ------
    OptionError
        Inside a transformation of JAX (not of brainstate).
    """
    try:
        set_values(states, values, is_outside)
    except brainstate.TraceContextError as error:
        raise OptionError(RAW) from error
