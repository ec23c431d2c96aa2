"""The traces as programs and loops carry them: packed, and not computed before somebody asks."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import brainstate
import jax

from .._brainstate import held, hold, is_watched, seen_through
from .._errors import LostTracesError
from .._graph import Traces
from .._interrupts import uninterrupted
from .._jax import is_transforming
from .companions import forget_companions
from .threads import lock_of

_VALUE: Any = brainstate.ShortTermState.value


@dataclasses.dataclass(frozen=True, eq=False)
class LazyTraces:
    """Traces that nobody has read since they were left.

    Attributes
    ----------
    compute
        Returns them.
    zero
        Whether they are all zero.
    """

    compute: Callable[[], Traces]
    zero: bool = False


def computed(state: brainstate.State) -> Traces:
    """Return what a State holds, which is computed now if nobody has read it."""
    if isinstance(held(state), LazyTraces):
        # Otherwise a program that is traced here would be for one device; see `_jax`.
        at_once = jax.ensure_compile_time_eval if is_transforming() else contextlib.nullcontext
        with uninterrupted, lock_of(state), at_once():
            left = held(state)
            if isinstance(left, LazyTraces):  # no other thread has read them since
                hold(state, left.compute())
    found: Traces = held(state)
    return found


def hold_from_outside(state: brainstate.State, traces: Any) -> None:
    """Let a State hold traces that hidden states come with, or that have been restored."""
    forget_companions(state)
    hold(state, traces)


@seen_through(computed, hold_from_outside)
class CarriedTraces(brainstate.ShortTermState):
    """The State that transformations carry from step to step, and that drivers take traces from.

    The traces after a sequence are often thrown away, by a reset or at the end of the program.
    They are large, so that a driver leaves them here to be computed when somebody reads
    ``value``. Traces that nobody has read also have no second owner: their buffers can be
    donated to the computation that replaces them.
    """

    def read(self) -> Traces:
        """Return the traces as they are carried."""
        traces: Traces = _VALUE.fget(self)
        return traces

    def write(self, traces: Traces) -> None:
        """Write traces as they are carried, which are not looked at."""
        _VALUE.fset(self, traces)

    def leave(self, compute: Callable[[], Traces], zero: bool = False) -> None:
        """Let whoever reads the traces next compute them.

        Parameters
        ----------
        compute
            Returns them; called at most once. Inside a transformation it is called at once:
            only brainstate can carry the traces out of there, and it reads them.
        zero
            Whether they are all zero.
        """
        if is_watched():
            self.write(compute())
        else:
            forget_companions(self)
            hold(self, LazyTraces(compute, zero))

    def convert(self, function: Callable[[Traces], Traces]) -> None:
        """Replace the traces by a function of them, unless they are known to be zero.

        They are computed now, and may be donated if they might have been before.
        """
        own = held(self)
        if not isinstance(own, LazyTraces):
            hold(self, function(own))
        elif not own.zero:
            found = function(own.compute())
            hold(self, LazyTraces(lambda: found))

    @property
    def is_zero(self) -> bool:
        """Whether the traces are known to be zero, for whatever is compiled now."""
        own = held(self)
        return isinstance(own, LazyTraces) and own.zero and not is_watched()

    @property
    def is_owned(self) -> bool:
        """Whether nobody else has the traces, so that their buffers may be given away."""
        return isinstance(held(self), LazyTraces) and not is_watched()

    @contextlib.contextmanager
    def read_by_the_way(self) -> Iterator[bool]:
        """Let the traces be read inside without a second owner; yield whether they are zero."""
        left, zero = held(self), self.is_zero
        try:
            yield zero
        finally:
            if zero:
                hold(self, left)
            elif isinstance(left, LazyTraces):
                self.take_over()

    def take_over(self) -> None:
        """Be the only owner of the traces that have been written."""
        found = held(self)
        if not isinstance(found, LazyTraces):
            hold(self, LazyTraces(lambda: found))

    @property
    def lock(self) -> Any:
        """What a thread holds while it takes the traces away and leaves others in their place."""
        return lock_of(self)

    def take(self) -> tuple[Traces, bool]:
        """Return the traces, and whether their buffers may be donated."""
        if not self.is_owned:
            return self.read(), False
        traces = held(self).compute()
        hold(self, LazyTraces(lambda: _unless_lost(traces)))
        return traces, True

    def lend(self) -> tuple[Traces, bool]:
        """Return the traces for a computation that leaves them as they are."""
        with uninterrupted, self.lock:
            return self.take()[0], False


def _unless_lost(traces: Traces) -> Traces:
    """Return traces that were taken, unless a computation has been given their buffers.

    Raises
    ------
    LostTracesError
        If it has, and has left no others in their place.
    """
    if any(leaf.is_deleted() for leaf in jax.tree.leaves(traces)):
        raise LostTracesError(
            "The traces were handed to a computation that updates them in place, and that has "
            "failed. Call `reset_state` to start a new sequence."
        )
    return traces
