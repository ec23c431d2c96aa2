"""Public State of an algorithm's traces, with checks of the values written to it."""

from collections.abc import Callable
from typing import Any

import brainstate
import jax
import numpy as np

from .._brainstate import held, hold, is_watched, peek, seen_through
from .._checks import differences, shown
from .._core.traces import Pairs, pack, unpack
from .._errors import ShapeError
from .._graph import StateLeaf
from .._jax import is_tracer
from .carried_traces import CarriedTraces, Form, present, store_external


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
