"""The hidden states that traces belong to, and whether something else has written them since.

Traces are derivatives of the values that the learner wrote. A call compares the arrays in the
hidden States with those that the last one left there, by identity; in a transformation, the arrays
from before it are compared when it is traced. An outside write to the traces (a transformation, a
restored checkpoint) ends the comparison: hidden states come from the same place then. After a reset
there is nothing to compare.
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

from .._arguments import is_quantity
from .._brainstate import is_watched, peek, value_outside
from .._errors import LostTracesError
from .._jax import is_tracer
from .._typing import Path, path_name
from .model_states import States


@dataclasses.dataclass(eq=False)
class Companions:
    """What the learner left in the hidden States next to its traces.

    Attributes
    ----------
    states
        The States.
    values
        What they held when the traces were written, and after the last call that wrote States
        alone (`Learner.predict`); empty: not known.
    is_known
        Whether every call of the learner is seen. A call that writes States alone, inside a
        function that a user compiled, is not: from then on only State objects are compared.
    """

    states: Sequence[brainstate.State] = ()
    values: tuple[tuple[Any, ...], ...] = ()
    is_known: bool = True


_companions: dict[int, Companions] = {}


def _new_companions(traces: brainstate.State) -> Companions:
    """Return companions of traces; like a lock, they are no attribute that a copy shares."""
    weakref.finalize(traces, _companions.pop, id(traces), None).atexit = False
    return _companions.setdefault(id(traces), Companions())


def forget_companions(traces: brainstate.State) -> None:
    """Compare nothing before the learner has written these traces again."""
    found = _companions.get(id(traces))
    if found is not None:
        found.values = ()


def note_companions(
    traces: brainstate.State, states: States, paths: Sequence[Path], with_traces: bool = True
) -> None:
    """Remember what the learner has just written.

    Parameters
    ----------
    traces, states
        The traces, and States by path.
    paths
        Of the hidden States that the traces follow.
    with_traces
        Whether it has written the traces as well.
    """
    if not paths:
        return
    own = _companions.get(id(traces)) or _new_companions(traces)
    own.states = [states[path] for path in paths]
    now = tuple(map(peek, own.states))
    if is_tracer(saiunit.get_mantissa(now[0]) if is_quantity(now[0]) else now[0]):
        own.is_known = own.is_known and with_traces
        own.values = ()
    elif with_traces:
        own.values = (now,)
    elif own.values:
        own.values = (own.values[0], now)


def check_companions(traces: brainstate.State, states: States, paths: Sequence[Path]) -> None:
    """Refuse to continue with hidden states that are not those which the traces belong to.

    Parameters
    ----------
    traces, states, paths
        See `note_companions`.

    Raises
    ------
    LostTracesError
        Naming the first State that has been written, or made, by something else.
    """
    own = _companions.get(id(traces))
    if own is None or not own.values:
        return
    if not own.is_known and all(map(is_, (states[path] for path in paths), own.states)):
        return
    read = value_outside if is_watched() else peek
    now = tuple([read(states[path]) for path in paths])
    for values in own.values:
        if all(map(is_, now, values)):
            return
    if any(all(map(_is_alike, now, values)) for values in own.values):
        own.values = (now,)  # moved to another device, or written back
        return
    latest = zip(paths, own.states, now, own.values[-1], strict=True)
    path, before = next((p, s) for p, s, value, left in latest if not _is_alike(value, left))
    name = path_name(path)
    if states[path] is not before:
        raise LostTracesError(
            f"State '{name}' is another object than in the learner's last call: the model has been "
            "initialised again, or another learner has been compiled for it. The traces belong to "
            "the values before. Call `learner.reset_state()` to start a new sequence, or compile "
            "again."
        )
    raise LostTracesError(
        f"State '{name}' has been written since the learner's last call, and the traces belong to "
        "the value before. Call `learner.reset_state()` to start a new sequence, and write initial "
        "values after it; write a State during a sequence in the model's `update`."
    )


def _is_alike(value: Any, other: Any) -> bool:
    """Tell whether values are equal; those of another shape are refused where they are read."""
    if value is other:
        return True
    leaves, tree = jax.tree.flatten(value)
    others, other_tree = jax.tree.flatten(other)
    return tree != other_tree or all(map(_is_alike_array, leaves, others))


def _is_alike_array(array: Any, other: Any) -> bool:
    if np.shape(array) != np.shape(other) or jnp.result_type(array) != jnp.result_type(other):
        return True
    if any(not _is_here(each) for each in (array, other)):
        return True  # it cannot be read
    return np.array_equal(np.asarray(array), np.asarray(other), equal_nan=True)


def _is_here(array: Any) -> bool:
    if not isinstance(array, jax.Array):
        return True
    if is_tracer(array):
        return False
    return not array.is_deleted() and array.is_fully_addressable
