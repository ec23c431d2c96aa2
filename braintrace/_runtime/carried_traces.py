"""Traces as programs and loops carry them: packed, and computed only when they are read."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import brainstate
import jax

from .._brainstate import held, hold, is_watched, seen_through
from .._errors import LostTracesError
from .._graph import Traces
from .._jax import is_transforming

_VALUE: Any = brainstate.ShortTermState.value


@dataclasses.dataclass(eq=False, slots=True)  # frozen, it would take twice as long in every call
class LazyTraces:
    """Deferred traces, which have not been read yet.

    Attributes
    ----------
    compute
        Returns the traces.
    zero
        Whether all of them are zero.
    """

    compute: Callable[[], Traces]
    zero: bool = False


def computed(state: brainstate.State) -> Traces:
    """Return the traces of a State, and compute them if they are deferred."""
    if isinstance(held(state), LazyTraces):
        # Otherwise a program that is traced here would be lowered for one device; see `_jax`.
        at_once = jax.ensure_compile_time_eval if is_transforming() else contextlib.nullcontext
        with at_once():
            hold(state, held(state).compute())
    result: Traces = held(state)
    return result


def store_external(state: brainstate.State, traces: Any) -> None:
    """Store traces that are reset or restored, or that other code writes with hidden states."""
    state.left = ()
    hold(state, traces)


@seen_through(computed, store_external)
class CarriedTraces(brainstate.ShortTermState):
    """The State of the traces, which transformations carry and drivers read.

    The traces after a sequence are often discarded, by a reset or at the end of the program. Since
    they are large, a driver stores deferred traces, which are computed when ``value`` is read.
    Deferred traces also have only one owner: their buffers can be donated to the program that
    replaces them.
    """

    left: tuple[tuple[Any, ...], ...] = ()
    """Values of the hidden States after the last calls, to which the traces belong."""

    unfinished: Callable[[], None] | None = None
    """Writes the results of a program that has run; an interrupt may end a call before."""

    def finish(self) -> None:
        """Write the results of an interrupted call; doing so twice is harmless."""
        if self.unfinished is not None:
            self.unfinished()
            self.unfinished = None

    def read(self) -> Traces:
        """Return the traces in carried form."""
        traces: Traces = _VALUE.fget(self)
        return traces

    def write(self, traces: Traces) -> None:
        """Write traces in carried form, without checks."""
        _VALUE.fset(self, traces)

    def store_deferred(
        self, compute: Callable[[], Traces], zero: bool = False, watched: bool | None = None
    ) -> None:
        """Store deferred traces, computed at the next read.

        Parameters
        ----------
        compute
            Returns them; called at most once. Inside a transformation it is called immediately:
            only brainstate can return the traces from there, and it reads them.
        zero
            Whether all of them are zero.
        watched
            The result of `is_watched`, which a call that advances the traces has asked already;
            ``None``: not known.
        """
        if is_watched() if watched is None else watched:
            self.write(compute())
        else:
            store_external(self, LazyTraces(compute, zero))

    def convert(self, function: Callable[[Traces], Traces]) -> None:
        """Replace the traces by a function of them, unless they are known to be zero.

        They are computed now. If they could be donated before, so can the new ones.
        """
        own = held(self)
        if not isinstance(own, LazyTraces):
            hold(self, function(own))
        elif not own.zero:
            result = function(own.compute())
            hold(self, LazyTraces(lambda: result))

    @property
    def is_zero(self) -> bool:
        """Whether the traces are known to be zero when a program is compiled."""
        own = held(self)
        return isinstance(own, LazyTraces) and own.zero and not is_watched()

    @property
    def is_owned(self) -> bool:
        """Whether there is no other reference to the traces, so their buffers can be donated."""
        return isinstance(held(self), LazyTraces) and not is_watched()

    @contextlib.contextmanager
    def peeking(self) -> Iterator[bool]:
        """Allow reads inside without a second owner; yield whether the traces are zero."""
        left, zero = held(self), self.is_zero
        try:
            yield zero
        finally:
            if zero:
                hold(self, left)
            elif isinstance(left, LazyTraces):
                self.claim()

    def claim(self) -> None:
        """Become the only owner of the traces that have been written."""
        result = held(self)
        if not isinstance(result, LazyTraces):
            hold(self, LazyTraces(lambda: result))

    def take(self) -> tuple[Traces, bool]:
        """Return the traces outside of transformations, and whether they may be donated."""
        own = held(self)
        if not isinstance(own, LazyTraces):
            return self.read(), False
        traces = own.compute()
        hold(self, LazyTraces(lambda: _unless_lost(traces)))
        return traces, True

    def lend(self) -> tuple[Traces, bool]:
        """Return the traces for a program that does not change them."""
        if is_watched():
            traces = self.read()
            return traces, False
        return self.take()[0], False


def _unless_lost(traces: Traces) -> Traces:
    """Return traces that were taken, unless their buffers have been donated.

    Raises
    ------
    LostTracesError
        If a program has taken their buffers, and failed before it stored new ones.
    """
    if any(leaf.is_deleted() for leaf in jax.tree.leaves(traces)):
        raise LostTracesError(
            "A computation that updates the traces in place has failed, so they are lost. Call "
            "`reset_state` to start a new sequence."
        )
    return traces
