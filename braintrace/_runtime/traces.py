"""The State that holds an algorithm's traces, and what may be written to it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import brainstate
import jax

from .._arguments import shown
from .._brainstate import held, hold, is_watched, peek, seen_through
from .._errors import LostTracesError, ShapeError
from .._interrupts import uninterrupted
from .._jax import is_tracer
from .threads import lock_of

_STATE_VALUE: Any = brainstate.ShortTermState.value


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

    compute: Callable[[], Any]
    zero: bool = False


def _computed(state: "EligibilityTraces") -> Any:
    """Return traces, which are computed now if nobody has read them."""
    if isinstance(held(state), LazyTraces):
        with uninterrupted, state.lock, jax.ensure_compile_time_eval():
            left = held(state)
            if isinstance(left, LazyTraces):  # no other thread has read them since
                hold(state, left.compute())
    return held(state)


@seen_through(_computed)
class EligibilityTraces(brainstate.ShortTermState):
    """The State that holds an algorithm's traces: a dict with stable string keys.

    D_RTRL keeps the traces of two coupled states, one of which reads the other, as one complex
    array under a key such as ``"w@mm0>V+a"``: ``V`` is the real part, ``a`` the imaginary one. It
    is updated in place that way. The traces of states in half precision (``trace_dtype`` as well),
    of operations that are not declared ``holomorphic``, and on backends other than CPU and GPU are
    separate, so that saved traces can be restored on the same kind of backend.

    The traces after a sequence are often thrown away, by a reset or at the end of the program.
    They are large, so that a driver leaves them here to be computed when somebody reads
    ``value``. Traces that nobody has read also have no second owner: their buffers can be
    donated to the computation that replaces them.

    Saved traces are restored by writing to ``value`` (or by ``restore_value``, or with the other
    States of a learner). They have the keys, shapes and dtypes of those that are held: those of
    the same model, batch, ``vjp_method`` and ``trace_dtype``. A key of ES_D_RTRL names its decay,
    ``"steps, decay=0.9"``. Anything else is a `ShapeError`, and what is held stays.
    """

    def __init__(self, value: Any, **options: Any) -> None:
        super().__init__(value, **options)
        # A map around the place where it is made gives every trace an axis afterwards.
        self.is_made_inside = is_watched()

    def leave(self, compute: Callable[[], Any], zero: bool = False) -> None:
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
            hold(self, LazyTraces(compute, zero))

    def write(self, traces: Any) -> None:
        """Write traces that the algorithm itself has computed, which are not looked at."""
        _STATE_VALUE.fset(self, traces)

    def _get(self) -> Any:
        return _STATE_VALUE.fget(self)

    def _set(self, traces: Any) -> None:
        self._check(traces)
        self.write(traces)

    value = property(_get, _set, doc="The traces, by key.")

    def restore_value(self, v: Any) -> None:
        """Write traces; see `brainstate.State.restore_value`.

        Raises
        ------
        ShapeError
            If they do not belong to the algorithm.
        """
        self._check(v)
        super().restore_value(v)

    def _check(self, new: Any) -> None:
        """Refuse traces that are not like those that are held.

        Inside a transformation every trace has other axes than outside, and keys stay.
        """
        own = peek(self)
        if new is own or not isinstance(own, dict):  # brainstate marks a value that has died
            return
        if not _is_alike(own, new, lambda: self.is_made_inside or is_watched()):
            raise ShapeError(
                f"These traces do not belong to this algorithm, and are not restored:"
                f"{''.join(_differences(own, new))}\nRestore those of the same model, batch and "
                "options; for another batch call `reset_state` with its size first."
            )

    def convert(self, function: Callable[[Any], Any]) -> None:
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
    def lock(self) -> Any:
        """What a thread holds while it takes the traces away and leaves others in their place."""
        return lock_of(self)

    def take(self) -> tuple[Any, bool]:
        """Return the traces, and whether their buffers may be donated."""
        own = held(self)
        if not isinstance(own, LazyTraces) or is_watched():
            return self.value, False
        traces = own.compute()
        hold(self, LazyTraces(lambda: _unless_lost(traces)))
        return traces, True

    def lend(self) -> tuple[Any, bool]:
        """Return the traces for a computation that leaves them as they are."""
        with uninterrupted, self.lock:
            return self.take()[0], False

    def copy(self) -> "EligibilityTraces":
        """Copy the State; buffers that two of them share are not donated."""
        peek(self)
        return super().copy()


def _unless_lost(traces: Any) -> Any:
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


def _is_alike(held: Any, new: Any, has_other_axes: Callable[[], bool]) -> bool:
    """Tell whether traces have the keys, dtypes and shapes of others; each write asks that."""
    leaves, tree = jax.tree.flatten(new)
    others, expected = jax.tree.flatten(held)
    if tree != expected:
        return False
    is_like = True
    for leaf, other in zip(leaves, others, strict=True):
        if getattr(leaf, "dtype", None) != other.dtype:
            return False
        is_like = is_like and leaf.shape == other.shape
    return is_like or has_other_axes() or any(map(is_tracer, (*leaves, *others)))


def _differences(held: Any, new: Any) -> list[str]:
    """Return a line for everything in which traces differ from those that are held."""
    if not isinstance(new, dict):
        return [f"\n- found {shown(new)}; expected a dict of traces"]
    expected, found = _by_key(held), _by_key(new)
    lines = [
        f"\n- made with {_option(key)}; this algorithm has {_option(other)}"
        for key in sorted(found.keys() - expected.keys())
        for other in sorted(expected.keys() - found.keys())
        if _option(key) and key.split(", ")[0] == other.split(", ")[0]
    ]
    paired = bool(lines)
    for key in sorted(expected.keys() | found.keys()):
        if paired and _option(key) and key in expected.keys() ^ found.keys():
            continue
        if key not in found:
            lines.append(f"\n- '{key}' is missing; expected {shown(expected[key])}")
        elif key not in expected:
            lines.append(f"\n- '{key}' is unexpected: {shown(found[key])}")
        elif shown(found[key]) != shown(expected[key]):
            lines.append(f"\n- '{key}' is {shown(found[key])}; expected {shown(expected[key])}")
    return lines or [f"\n- found the structure {jax.tree.structure(new)}"]


def _by_key(traces: Any) -> dict[str, Any]:
    paths = jax.tree_util.tree_leaves_with_path(traces, is_leaf=lambda leaf: leaf is None)
    return {"/".join(str(getattr(k, "key", k)) for k in path): leaf for path, leaf in paths}


def _option(key: str) -> str:
    """Return the option that a key names, as in ``'decay=0.9'``, or nothing."""
    return key.partition(", ")[2]
