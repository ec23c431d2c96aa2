"""Traces between two programs: arrays, known zeros, or deferred; and the State that holds them.

Each form is a pytree, so JAX compiles a program for each, also inside a user's ``jit``: one that
starts from zeros has no product with old traces, and one that ends with deferred traces does not
compute them. Loops need a constant structure. In the body of a ``scan``, ``while_loop`` or
``cond``, all results are therefore arrays.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeAlias, TypeGuard

import brainstate
import jax

from .._brainstate import held, hold, is_in_loop, is_recorded, is_watched, seen_through
from .._core.traces import examples
from .._errors import LostTracesError
from .._graph import Traces
from .._jax import is_transforming


class Finish(Protocol):
    """Program that computes deferred traces; see `Program`."""

    def __call__(self, *arguments: Any, in_place: bool, done: list[Any]) -> None: ...


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Zero:
    """Traces that are zero: a pytree without leaves."""


@dataclasses.dataclass(frozen=True)
class Deferred:
    """Traces after a sequence, which a program of its own computes when they are read.

    Attributes
    ----------
    sources
        What this program reads: the operands, and the recorded values of the steps.
    before
        The traces before these steps.
    finish
        The program: ``(sources, before) -> traces``.
    is_double
        Whether 64-bit numbers were enabled in the call.
    """

    sources: Any
    before: "Traces | Zero"
    finish: Finish
    is_double: bool

    def compute(self, done: list[Traces], in_place: bool = False) -> Traces:
        """Return the traces; an interrupted computation continues with the same list."""
        if not done:
            with jax.enable_x64(self.is_double):
                self.finish(self.sources, self.before, in_place=in_place, done=done)
        return done[0]


jax.tree_util.register_dataclass(Deferred, ["sources", "before"], ["finish", "is_double"])

Form: TypeAlias = Traces | Zero | Deferred


def is_settled(form: Form) -> TypeGuard[Traces]:
    """Test whether traces are arrays."""
    return not isinstance(form, Zero | Deferred)


def settled(form: Form, zeros: Callable[[], Traces]) -> Traces:
    """Return traces as arrays.

    Parameters
    ----------
    form
        The traces.
    zeros
        Returns zero traces.
    """
    if isinstance(form, Zero):
        return zeros()
    return form.compute([]) if isinstance(form, Deferred) else form


_VALUE: Any = brainstate.ShortTermState.value


def present(traces: "CarriedTraces") -> Any:
    """Return the form of traces that a transformation of brainstate passes to its program.

    ``jit`` passes the form that the traces have, and compiles for each. Other transformations pass
    arrays. Between calls, the form is the one that the last trace has asked for.
    """
    form: Form = held(traces)
    if is_settled(form):
        return form
    if not is_watched():
        return traces.arrays() if traces.needs_arrays else form
    if not is_in_loop():
        if traces.placeholder is not None:  # a loop has been traced with it and now starts
            traces.placeholder = None
            hold(traces, settled(form, traces.zeros))
        elif not traces.is_inside:
            traces.needs_arrays = False
        return held(traces)
    if not traces.is_inside:
        traces.needs_arrays = True
        return traces.compute()
    # The traces belong to an outer `jit`: they become arrays there, after this trace.
    if traces.placeholder is None:
        traces.placeholder = form, examples(jax.eval_shape(lambda: settled(form, traces.zeros)))
    return traces.placeholder[1]


def store_external(traces: "CarriedTraces", form: Form) -> None:
    """Store traces that are reset or restored, or that other code writes with hidden states."""
    traces.left, traces.is_owned, traces.done = (), False, []
    traces.is_inside = is_recorded()
    if traces.placeholder is not None and form is traces.placeholder[1]:
        form = traces.placeholder[0]
    hold(traces, form)


@seen_through(present, store_external)
class CarriedTraces(brainstate.ShortTermState):
    """The State of the traces, in one of the forms of `forms`.

    Traces are large, and are often discarded: by a reset, or at the end of the program. A sequence
    therefore leaves deferred traces, which the next reader computes.

    Attributes
    ----------
    zeros
        Returns zero traces as arrays.
    left
        Values of the hidden States after the last calls, to which the traces belong.
    unfinished
        Writes the results of a program that has run; an interrupt may end a call before.
    is_owned
        Whether there is no other reference to the arrays, so their buffers can be donated.
    done
        Deferred traces that have been computed, and were not stored because of an interrupt.
    needs_arrays
        Whether the last trace that read them needed arrays.
    is_inside
        Whether the value belongs to a trace of brainstate.
    placeholder
        The form of an outer ``jit``, and the example that inner loops are traced with.
    """

    zeros: Callable[[], Traces]
    left: tuple[tuple[Any, ...], ...] = ()
    unfinished: Callable[[], None] | None = None
    is_owned = needs_arrays = is_inside = False
    placeholder: tuple[Form, Traces] | None = None

    def _check_value_tree(self, v: Any) -> None:
        """Accept every form, though brainstate compares structures."""

    def finish(self) -> None:
        """Write the results of an interrupted call; doing so twice is harmless."""
        if self.unfinished is not None:
            self.unfinished()
            self.unfinished = None

    def read(self) -> Form:
        """Return the traces in their form; transformations see the read."""
        form: Form = _VALUE.fget(self) if is_watched() else held(self)
        return form

    def write(self, form: Form) -> None:
        """Write traces; transformations see the write."""
        _VALUE.fset(self, form)

    def arrays(self) -> Traces:
        """Return the traces as arrays, in carried form."""
        return settled(self.read(), self.zeros) if is_watched() else self.compute()

    def compute(self) -> Traces:
        """Return the traces as arrays outside of transformations, and keep them."""
        form = held(self)
        if not is_settled(form):
            # Otherwise a program that is traced here would be lowered for one device; see `_jax`.
            at_once = jax.ensure_compile_time_eval if is_transforming() else contextlib.nullcontext
            with at_once():
                is_zero = isinstance(form, Zero)
                hold(self, self.zeros() if is_zero else form.compute(self.done, self.is_owned))
        traces: Traces = held(self)
        if self.is_owned and any(leaf.is_deleted() for leaf in jax.tree.leaves(traces)):
            raise LostTracesError(
                "A computation that updates the traces in place has failed, so they are lost. "
                "Call `reset_state` to start a new sequence."
            )
        return traces

    def shared_arrays(self) -> Traces:
        """Return the traces as arrays to other code, which keeps references to them."""
        traces = self.arrays()
        self.is_owned = self.is_owned and is_watched()
        return traces

    def store(self, form: Form) -> None:
        """Store the traces after a call, or after a reset."""
        if is_watched():
            self.write(settled(form, self.zeros) if is_in_loop() else form)
            return
        is_kept = isinstance(form, Deferred) and form.before is held(self)
        is_owned = self.is_owned or not is_kept
        store_external(self, form)
        self.is_owned = is_owned

    def convert(self, function: Callable[[Traces], Traces]) -> None:
        """Replace the traces by a function of them, unless they are known to be zero."""
        if not self.is_zero:
            hold(self, function(self.arrays()))

    @property
    def is_zero(self) -> bool:
        """Whether the traces are known to be zero when a program is compiled."""
        return not is_in_loop() and isinstance(self.read(), Zero)

    @contextlib.contextmanager
    def peeking(self) -> Iterator[bool]:
        """Allow reads inside that keep no references; yield whether the traces are zero."""
        left, zero, is_owned = held(self), self.is_zero, self.is_owned
        try:
            yield zero
        finally:
            if zero:
                hold(self, left)
            self.is_owned = is_owned

    def take(self) -> tuple[Traces, bool]:
        """Return the traces, and whether their buffers may be donated."""
        traces = self.arrays()
        return traces, self.is_owned and not is_watched()

    def lend(self) -> tuple[Traces, bool]:
        """Return the traces for a program that does not change them."""
        return self.arrays(), False
