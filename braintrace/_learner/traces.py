"""Traces between two programs: arrays, known zeros, or deferred; and the States that hold them.

Each form is a pytree, so JAX compiles a program for each, also inside a user's ``jit``: one that
starts from zeros has no product with old traces, and one that ends with deferred traces does not
compute them. Loops need a constant structure. In the body of a ``scan``, ``while_loop`` or
``cond``, all results are therefore arrays.
"""

import contextlib
import dataclasses
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias, TypeGuard

import brainstate
import jax
import numpy as np

from .._brainstate import (
    held,
    hold,
    is_in_loop,
    is_recorded,
    is_watched,
    peek,
    peek_all,
    seen_through,
    set_values,
)
from .._checks import differences, shown
from .._core.traces import Pairs, examples, pack, unpack
from .._errors import LostTracesError, OptionError, ShapeError
from .._graph import StateLeaf, Traces
from .._jax import is_tracer, is_transforming
from .._typing import Path, path_name


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
        The program: ``(sources, before) -> traces``; see `Jitted`.
    is_double
        Whether 64-bit numbers were enabled in the call.
    """

    sources: Any
    before: "Traces | Zero"
    finish: Callable[..., None]
    is_double: bool

    def compute(self, done: list[Traces], in_place: bool = False) -> Traces:
        """Return the traces; an interrupted computation continues with the same list."""
        if not done and self.is_double == jax.config.jax_enable_x64:
            self.finish(self.sources, self.before, in_place=in_place, done=done)
        elif not done:
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
_is_deleted = operator.methodcaller("is_deleted")


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
    """The State of the traces, in one of their forms.

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
            self.__dict__["unfinished"] = None

    def check(self, followed: Sequence[brainstate.State], paths: Sequence[Path]) -> None:
        """Refuse hidden States that other code has written since the last call.

        Raises
        ------
        LostTracesError
            If there is one.
        """
        now = peek_all(followed)
        for own in self.left:
            if all(map(operator.is_, now, own)):
                return
        if self.left:
            pairs = zip(paths, now, self.left[-1], strict=True)
            path = next(path for path, one, own in pairs if one is not own)
            raise LostTracesError(
                f"State '{path_name(path)}' was written since the learner's last call, but the "
                "traces belong to its previous value. Call `learner.reset_state()` to start a new "
                "sequence, and write initial values after it; write a State during a sequence in "
                "`update` of the model."
            )

    def advance(
        self,
        followed: Sequence[brainstate.State],
        states: Iterable[brainstate.State],
        values: Iterable[Any],
        after: Form | None,
        is_outside: bool,
    ) -> None:
        """Write values of States, and traces; ``None``: they stay.

        Raises
        ------
        OptionError
            Inside a transformation of JAX (not of brainstate).
        """
        before = self.left[:1] if after is None else ()
        try:
            set_values(states, values, is_outside)
        except brainstate.TraceContextError as error:
            raise OptionError(RAW) from error
        if after is not None:
            self.store(after, is_outside)
        if is_outside:
            self.__dict__["left"] = (*before, peek_all(followed))

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
        if isinstance(form, Zero | Deferred):
            if is_transforming():
                # Otherwise it would be lowered for one device; see `_jax`.
                with jax.ensure_compile_time_eval():
                    traces = self._computed(form)
            else:
                traces = self._computed(form)
            form = traces
            hold(self, traces)
        if self.is_owned and any(map(_is_deleted, jax.tree_util.tree_leaves(form))):
            raise LostTracesError(
                "A computation that updates the traces in place has failed, so they are lost. "
                "Call `reset_state` to start a new sequence."
            )
        result: Traces = form
        return result

    def _computed(self, form: Zero | Deferred) -> Traces:
        if isinstance(form, Zero):
            return self.zeros()
        return form.compute(self.done, self.is_owned)

    def shared_arrays(self) -> Traces:
        """Return the traces as arrays to other code, which keeps references to them."""
        traces = self.arrays()
        self.is_owned = self.is_owned and is_watched()
        return traces

    def store(self, form: Form, is_outside: bool) -> None:
        """Store the traces after a call, or after a reset."""
        if is_outside:
            # Traces before a sequence that others hold too are not donated to compute those after.
            is_shared = isinstance(form, Deferred) and form.before is held(self)
            is_owned = self.is_owned or not is_shared
            hold(self, form)
            self.__dict__.update(left=(), done=[], is_owned=is_owned, is_inside=False)
        else:
            _VALUE.fset(self, settled(form, self.zeros) if is_in_loop() else form)

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

    def given(self, reads: str, is_outside: bool) -> tuple[Traces | None, bool]:
        """Return the traces that a program reads, and whether their buffers may be donated.

        ``reads`` is the attribute of `Body`.
        """
        if reads == "nothing":
            return None, False
        form: Form = held(self) if is_outside else _VALUE.fget(self)
        if reads == "zero" and isinstance(form, Zero):
            return None, False
        return self.compute() if is_outside else settled(form, self.zeros), self.is_owned


def _read(state: "EligibilityTraces") -> Any:
    carried = state.carried
    return present(state) if carried is state else unpack(carried.shared_arrays())


def _store(state: "EligibilityTraces", traces: Any) -> None:
    store_external(state.carried, pack(traces, state.pairs))


@seen_through(_read, _store)
class EligibilityTraces(CarriedTraces):
    """State of an algorithm's traces: a dict with stable string keys.

    The traces of D_RTRL for one state have a key such as ``"cell/w@mm0>cell/V"``: the parameter,
    the operation, the state. `Learner.eligibility` returns the traces of one parameter. Keys and
    arrays are the same on every backend, and do not depend on the packed form in which programs
    update traces in place.

    To restore saved traces, write them to ``value`` (or use ``restore_value``, or restore them with
    the other States of a learner). Their keys, shapes and dtypes must equal the current ones: the
    same model, batch and ``trace_dtype``, both with a ``window`` or neither. A decay is part of a
    key, such as ``"steps, decay=0.9"`` of ES_D_RTRL. Other values raise a `ShapeError`, and the
    current traces do not change.
    """

    def __init__(self, traces: Form, pairs: Pairs = ()) -> None:
        super().__init__(traces)
        # If this State is created inside a map, the map adds an axis to every trace afterwards.
        # It finds the State in the module, so no other State can be carried instead.
        self.is_made_inside = self.needs_arrays = is_watched()
        self.pairs = () if self.is_made_inside else pairs
        if not self.is_made_inside:
            hold(self, CarriedTraces(traces))

    @property
    def carried(self) -> CarriedTraces:
        """The State that programs and transformations carry: another one than users see."""
        own = held(self)
        return own if isinstance(own, CarriedTraces) else self

    def _get(self) -> Any:
        return unpack(self.carried.shared_arrays())

    def _set(self, traces: Any) -> None:
        self._check(traces)
        self.carried.write(pack(traces, self.pairs))

    value = property(_get, _set, doc="The traces, by key.")

    def restore_value(self, v: Any) -> None:
        """Write traces; see `brainstate.State.restore_value`.

        Raises
        ------
        ShapeError
            If they do not belong to the algorithm.
        """
        self._check(v)
        brainstate.ShortTermState.restore_value(self.carried, pack(v, self.pairs))

    def copy(self) -> "EligibilityTraces":
        """Copy the State; buffers that two States share are not donated."""
        traces = peek(self)
        twin: EligibilityTraces = super().copy()
        if twin.carried is not twin:
            hold(twin, CarriedTraces(pack(traces, self.pairs)))
            twin.carried.zeros = self.carried.zeros
        return twin

    def _check(self, new: Any) -> None:
        """Refuse traces whose keys, shapes or dtypes differ from the current ones.

        Inside a transformation every trace has other axes than outside, but the same keys.
        """
        own = peek(self)
        if new is own or not isinstance(own, dict):  # brainstate marks invalidated values
            return
        if not _is_alike(own, new, lambda: self.is_made_inside or is_watched()):
            raise ShapeError(
                f"These traces do not belong to this algorithm, and are not restored:"
                f"{''.join(_differences(own, new))}\nRestore those of the same model, batch and "
                "options; for another batch call `reset_state` with its size first."
            )


def start_of_filter(leaf: StateLeaf) -> jax.Array:
    """Return the initial value of a filter of a linear readout."""
    return jax.device_put(np.zeros(leaf.shape, leaf.dtype))  # `jnp` compiles for every shape


def _is_alike(own: Any, new: Any, has_other_axes: Callable[[], bool]) -> bool:
    """Test whether traces have the keys, dtypes and shapes of others; called at each write."""
    leaves, tree = jax.tree.flatten(new)
    others, expected = jax.tree.flatten(own)
    if tree != expected:
        return False
    is_like = True
    for leaf, other in zip(leaves, others, strict=True):
        if getattr(leaf, "dtype", None) != other.dtype:
            return False
        is_like = is_like and leaf.shape == other.shape
    return is_like or has_other_axes() or any(map(is_tracer, (*leaves, *others)))


def _differences(own: Any, new: Any) -> list[str]:
    """Return a line for each difference between traces and the current ones."""
    if not isinstance(new, dict):
        return [f"\n- found {shown(new)}; expected a dict of traces"]
    lines = differences(_by_key(new), _by_key(own), lambda one, other: shown(one) == shown(other))
    return lines or [f"\n- found the structure {jax.tree.structure(new)}"]


def _by_key(traces: Any) -> dict[str, Any]:
    paths = jax.tree_util.tree_leaves_with_path(traces, is_leaf=lambda leaf: leaf is None)
    return {"/".join(str(getattr(k, "key", k)) for k in path): leaf for path, leaf in paths}


RAW = (
    "A learner is called inside a transformation of JAX such as `jax.jit` or `jax.lax.scan`, which "
    "does not carry States from call to call. Use its pure functions, in two lines:\n"
    "    pure = learner.functional()  # outside; start with state = pure.state()\n"
    "    state, output = pure.step(state, x)  # inside\n"
    "or the transformation of brainstate, such as `brainstate.transform.jit`, `grad` or `for_loop`."
)
