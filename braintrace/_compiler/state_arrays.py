"""States as inputs and outputs of a traced step, leaf by leaf."""

import dataclasses
from collections.abc import Callable, Sequence

import brainstate
import jax
import jax.numpy as jnp

from .._graph import StateKind
from .._jax import ClosedJaxpr, is_tracer, strongly_typed
from .._jaxpr import Rule, evaluate_inlined
from .._typing import Path


def kind_of(state: brainstate.State) -> StateKind:
    """Return the kind of a State."""
    if isinstance(state, brainstate.HiddenState):
        return "hidden"
    if isinstance(state, brainstate.ParamState):
        return "parameter"
    return "random" if isinstance(state, brainstate.random.RandomState) else "other"


@dataclasses.dataclass(frozen=True)
class StateArray:
    """One leaf of a State, as an input and an output of the traced function."""

    path: Path
    leaf: int
    kind: StateKind
    is_grouped: bool
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
        kind, is_grouped = kind_of(state), isinstance(state, brainstate.HiddenGroupState)
        is_fresh = isinstance(state, brainstate.ShortTermState)
        for leaf in range(len(jax.tree.leaves(state.value))):
            arrays.append(StateArray(path, leaf, kind, is_grouped, bool(is_written), is_fresh))
    return arrays, touched, outside


def step_of(
    closed: ClosedJaxpr, arrays: list[StateArray], rule: Rule
) -> Callable[..., list[jax.Array]]:
    """Return the step as a function of arguments and of the leaves of States."""

    def step(*values: jax.Array) -> list[jax.Array]:
        results = evaluate_inlined(closed, values, rule)
        writes = [array for array in arrays if array.written]
        outputs = results[: len(results) - len(writes)]
        taken = {id(value) for value in values}
        for array, value in zip(writes, results[len(outputs) :], strict=True):
            value = value if array.kind == "random" else strongly_typed(value)
            # A hidden state that equals an input, a constant or another state is copied: with its
            # own variable, changes to one do not affect the other.
            is_state = array.kind in ("hidden", "other")
            if is_state and (id(value) in taken or not is_tracer(value)):
                value = jnp.copy(value)
            taken.add(id(value))
            outputs.append(value)
        return outputs

    return step
