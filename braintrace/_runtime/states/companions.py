"""Detection of hidden states that other code has written.

Traces are derivatives of the values that the learner wrote. A call compares the arrays in the
hidden States with the arrays after the last call, by identity; in a transformation, the arrays from
before it are compared when it is traced. An outside write to the traces (a transformation, a
restored checkpoint) ends the comparison: the hidden states then have the same source. After a
reset, nothing is compared.
"""

import dataclasses
import weakref
from collections.abc import Sequence
from operator import is_
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import saiunit

from ..._arguments import is_quantity
from ..._brainstate import peek_all, value_outside
from ..._errors import LostTracesError
from ..._jax import is_tracer
from ..._typing import path_name
from .model_states import States


@dataclasses.dataclass(eq=False)
class Companions:
    """Values of the hidden States that belong to the traces.

    Attributes
    ----------
    states
        The States.
    values
        Their values when the traces were written, and after the last call that wrote only States
        (`Learner.predict`); empty: unknown.
    is_known
        Whether all calls of the learner are observed. A call that writes only States, inside a
        function that a user compiled, is not. From then on, only State objects are compared.
    """

    states: Sequence[brainstate.State] = ()
    values: tuple[tuple[Any, ...], ...] = ()
    is_known: bool = True


_companions: dict[int, Companions] = {}


def _new_companions(traces: brainstate.State) -> Companions:
    """Return new companions of traces; a copy of the traces does not share them."""
    weakref.finalize(traces, _companions.pop, id(traces), None).atexit = False
    return _companions.setdefault(id(traces), Companions())


def forget_companions(traces: brainstate.State) -> None:
    """Compare nothing until the learner writes these traces again."""
    result = _companions.get(id(traces))
    if result is not None:
        result.values = ()


def note_companions(traces: brainstate.State, followed: States, with_traces: bool = True) -> None:
    """Store the values that the learner has just written.

    Parameters
    ----------
    traces
        The traces.
    followed
        The hidden States that the traces follow, by path.
    with_traces
        Whether the learner has also written the traces.
    """
    if not followed:
        return
    own = _companions.get(id(traces)) or _new_companions(traces)
    own.states = tuple(followed.values())
    now = peek_all(own.states)
    if is_tracer(saiunit.get_mantissa(now[0]) if is_quantity(now[0]) else now[0]):
        own.is_known = own.is_known and with_traces
        own.values = ()
    elif with_traces:
        own.values = (now,)
    elif own.values:
        own.values = (own.values[0], now)


def check_companions(traces: brainstate.State, followed: States, is_watched: bool) -> None:
    """Refuse hidden states that do not belong to the traces.

    Parameters
    ----------
    traces, followed
        See `note_companions`.
    is_watched
        Whether the caller runs inside a transformation.

    Raises
    ------
    LostTracesError
        Naming the first State that other code has written or created.
    """
    own = _companions.get(id(traces))
    if own is None or not own.values:
        return
    current = followed.values()
    if not own.is_known and all(map(is_, current, own.states)):
        return
    now = tuple(map(value_outside, current)) if is_watched else peek_all(current)
    for values in own.values:
        if all(map(is_, now, values)):
            return
    if any(all(map(_is_alike, now, values)) for values in own.values):
        own.values = (now,)  # moved to another device, or written back
        return
    latest = zip(followed, own.states, now, own.values[-1], strict=True)
    path, before = next((p, s) for p, s, value, left in latest if not _is_alike(value, left))
    name = path_name(path)
    if followed[path] is not before:
        raise LostTracesError(
            f"State '{name}' is a new object since the learner's last call: the model was "
            "initialised again, or another learner was compiled for it. The traces belong to the "
            "previous values. Call `learner.reset_state()` to start a new sequence, or compile "
            "again."
        )
    raise LostTracesError(
        f"State '{name}' was written since the learner's last call, but the traces belong to its "
        "previous value. Call `learner.reset_state()` to start a new sequence, and write initial "
        "values after it; write a State during a sequence in `update` of the model."
    )


def _is_alike(value: Any, other: Any) -> bool:
    """Test whether values are equal; values of a different shape are refused by the reader."""
    if value is other:
        return True
    leaves, tree = jax.tree.flatten(value)
    others, other_tree = jax.tree.flatten(other)
    return tree != other_tree or all(map(_is_alike_array, leaves, others))


def _is_alike_array(array: Any, other: Any) -> bool:
    if np.shape(array) != np.shape(other) or jnp.result_type(array) != jnp.result_type(other):
        return True
    if any(not is_here(each) for each in (array, other)):
        return True  # it cannot be read
    return np.array_equal(np.asarray(array), np.asarray(other), equal_nan=True)


def is_here(array: Any) -> bool:
    """Test whether this process can read an array."""
    if not isinstance(array, jax.Array):
        return True
    if is_tracer(array):
        return False
    return not array.is_deleted() and array.is_fully_addressable
