"""The State that holds an algorithm's traces."""

import dataclasses
from collections.abc import Callable
from typing import Any

import brainstate
import jax

from .._errors import LostTracesError
from .._jax import is_watched


@dataclasses.dataclass(frozen=True, eq=False)
class _Unread:
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
    """

    # brainstate reads and writes a State's value through this attribute, also where it does not
    # go through `value` (copies, snapshots of a trace). Tried with brainstate 0.5.0 to 0.6.0.
    @property
    def _value(self) -> Any:
        held = self.__dict__["_value"]
        if isinstance(held, _Unread):
            with jax.ensure_compile_time_eval():
                held = self.__dict__["_value"] = held.compute()
        return held

    @_value.setter
    def _value(self, value: Any) -> None:
        self.__dict__["_value"] = value

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
            self.value = compute()
        else:
            self.__dict__["_value"] = _Unread(compute, zero)

    @property
    def is_zero(self) -> bool:
        """Whether the traces are known to be zero, for whatever is compiled now."""
        held = self.__dict__["_value"]
        return isinstance(held, _Unread) and held.zero and not is_watched()

    def take(self) -> tuple[Any, bool]:
        """Return the traces, and whether their buffers may be donated."""
        held = self.__dict__["_value"]
        if not isinstance(held, _Unread) or is_watched():
            return self.value, False
        traces = held.compute()
        self.__dict__["_value"] = _Unread(lambda: _unless_lost(traces))
        return traces, True


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
