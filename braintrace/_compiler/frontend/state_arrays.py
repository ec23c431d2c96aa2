"""States as inputs and outputs of a traced step, leaf by leaf.

A State with ``n`` states along its last axis (`HiddenGroupState`) is one input of the function that
brainstate traces, and ``n`` inputs of the step.
"""

import dataclasses
from collections.abc import Callable, Sequence

import brainstate
import jax
import jax.numpy as jnp

from ..._graph import StateKind
from ..._jax import Aval, ClosedJaxpr, is_tracer, open_jaxpr, strongly_typed
from ..._jaxpr import Rule, evaluate_inlined
from ..._typing import Path


def kind_of(state: brainstate.State) -> StateKind:
    """Return the kind of a State."""
    if isinstance(state, brainstate.HiddenState):
        return "hidden"
    if isinstance(state, brainstate.ParamState):
        return "parameter"
    return "random" if isinstance(state, brainstate.random.RandomState) else "other"


def component_count(state: brainstate.State) -> int | None:
    """Return the number of states along a value's last axis; ``None``: no such axis."""
    return state.num_state if isinstance(state, brainstate.HiddenGroupState) else None


def split_components(value: jax.Array, count: int | None) -> list[jax.Array]:
    """Split the last axis of a `HiddenGroupState` value into its states."""
    return [value] if count is None else [value[..., index] for index in range(count)]


def join_components(values: Sequence[jax.Array], count: int | None) -> jax.Array:
    """Undo `split_components`."""
    return values[0] if count is None else jnp.stack(values, axis=-1)


@dataclasses.dataclass(frozen=True)
class StateArray:
    """One leaf of a State, as an input and an output of the traced function."""

    path: Path
    leaf: int
    kind: StateKind
    count: int | None
    written: bool
    per_sample: bool


def state_arrays_of(
    states: Sequence[brainstate.State], written: Sequence[bool], paths: dict[int, Path]
) -> tuple[list[StateArray], dict[Path, brainstate.State], dict[Path, brainstate.State]]:
    """Return the States' leaves, the States by path, and those outside the model."""
    arrays = []
    touched: dict[Path, brainstate.State] = {}
    outside: dict[Path, brainstate.State] = {}
    for state, is_written in zip(states, written, strict=True):
        path = paths.get(id(state))
        if path is None:
            path = ("<outside>", type(state).__name__, len(outside))
            outside[path] = state
        touched[path] = state
        kind, count = kind_of(state), component_count(state)
        is_fresh = isinstance(state, brainstate.ShortTermState)
        for leaf in range(len(jax.tree.leaves(state.value))):
            arrays.append(StateArray(path, leaf, kind, count, bool(is_written), is_fresh))
    return arrays, touched, outside


def split_states(
    closed: ClosedJaxpr, arrays: list[StateArray], arguments: int, rule: Rule
) -> Callable[..., list[jax.Array]]:
    """Return the step as a function of leaves, with every component as its own leaf."""

    def step(*values: jax.Array) -> list[jax.Array]:
        rest = iter(values[arguments:])
        joined = [
            join_components([next(rest) for _ in range(array.count or 1)], array.count)
            for array in arrays
        ]
        results = evaluate_inlined(closed, [*values[:arguments], *joined], rule)
        writes = [array for array in arrays if array.written]
        outputs = results[: len(results) - len(writes)]
        taken = {id(value) for value in values}
        for array, value in zip(writes, results[len(outputs) :], strict=True):
            value = value if array.kind == "random" else strongly_typed(value)
            # A hidden state that equals an input, a constant or another state is copied: with its
            # own variable, changes to one do not affect the other.
            if array.kind == "hidden" and (id(value) in taken or not is_tracer(value)):
                value = jnp.copy(value)
            taken.add(id(value))
            outputs += split_components(value, array.count)
            if array.count is not None:
                outputs.append(value)
        return outputs

    return step


def split_avals(closed: ClosedJaxpr, arrays: list[StateArray], arguments: int) -> list[Aval]:
    """Return the argument types of the function that `split_states` returns."""
    avals = [var.aval for var in open_jaxpr(closed)[0].invars]
    split = list(avals[:arguments])
    for array, aval in zip(arrays, avals[arguments:], strict=True):
        if array.count is None:
            split.append(aval)
        else:
            split += [jax.ShapeDtypeStruct(aval.shape[:-1], aval.dtype)] * array.count
    return split
