"""States of a model as inputs and outputs of its compiled step, found once."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import brainstate
import jax
import jax.numpy as jnp
import saiunit

from .._brainstate import set_values, values_of
from .._checks import is_quantity, named, shown
from .._errors import DtypeError, NotCompiledError, ShapeError
from .._graph import ETraceGraph, StateLeaf
from .._jax import Var, to_array
from .._typing import Path, path_name

States: TypeAlias = Mapping[Path, brainstate.State]


def find_states(
    graph: ETraceGraph, inside: States, outside: States
) -> dict[Path, brainstate.State]:
    """Return the States that the compiled step uses, by path, in its order.

    Parameters
    ----------
    graph
        The compiled model.
    inside, outside
        All States of the model, and States outside it that a step uses.

    Raises
    ------
    NotCompiledError
        If the model no longer has one of them.
    """
    result: dict[Path, brainstate.State] = {}
    for leaf in graph.traced.leaves:
        state = inside.get(leaf.path, outside.get(leaf.path))
        if state is None:
            raise NotCompiledError(
                f"The model no longer has the State '{path_name(leaf.path)}', which it had at "
                "compilation. Call `compile_graph` again after a change of the model."
            )
        result[leaf.path] = state
    return result


def all_states(model: brainstate.nn.Module) -> dict[Path, brainstate.State]:
    """Return all States of a model by path."""
    return {tuple(path): state for path, state in model.states().items()}


def short_term(states: States) -> dict[Path, brainstate.State]:
    """Return the States that are reset with a sequence."""
    return of_kind(states, brainstate.ShortTermState)


def of_kind(states: States, kind: type[brainstate.State]) -> dict[Path, brainstate.State]:
    """Return the States of a class."""
    return {path: state for path, state in states.items() if isinstance(state, kind)}


def values_by_path(states: States) -> dict[Path, Any]:
    """Return the values of States."""
    return dict(zip(states, values_of(states.values()), strict=True))


def write_by_path(states: States, values: Mapping[Path, Any]) -> None:
    """Write values to some of the States."""
    set_values([states[path] for path in values], values.values())


def read_states(
    graph: ETraceGraph,
    states: States,
    values: Mapping[Path, Any] | None = None,
) -> dict[Var, Any]:
    """Return the value of every State leaf, by input variable.

    Parameters
    ----------
    graph, states
        The compiled model, and its States.
    values
        Values to use for the States; ``None``: their current values.

    Raises
    ------
    ShapeError
        If the shape of a State has changed since compilation.
    """
    given = values_of(states.values()) if values is None else [values[path] for path in states]
    return leaves_by_var(graph, states, given)


def leaves_by_var(graph: ETraceGraph, states: States, values: Sequence[Any]) -> dict[Var, Any]:
    """Return the leaves of the values of all States; see `read_states`."""
    traced = graph.traced
    result, tree = jax.tree.flatten(tuple(values))
    if tree != traced.tree_of_states:
        for path, value in zip(states, values, strict=True):
            if jax.tree.structure(value) != traced.state_trees[path]:
                raise _other_structure(path, value, traced.state_trees[path])
    inputs: dict[Var, Any] = {}
    for leaf, value in zip(traced.leaves, result, strict=True):
        inputs[leaf.in_var] = array = to_array(value)
        if array.shape != leaf.shape or array.dtype != leaf.dtype:
            raise _other_shape(leaf, array)
    return inputs


def _other_structure(path: Path, value: Any, expected: Any) -> ShapeError:
    was = jax.tree.unflatten(expected, [None] * expected.num_leaves)
    unit = f" in {saiunit.get_unit(was)}" if is_quantity(was) else f" of structure {expected}"
    return ShapeError(
        f"State '{path_name(path)}' is {shown(value)}; the model was compiled for a value{unit}. "
        "Convert the value (`.to`, `.in_unit`), or compile again."
    )


def _other_shape(leaf: StateLeaf, value: Any) -> ShapeError:
    return ShapeError(
        f"State '{path_name(leaf.path)}' has shape {tuple(value.shape)} and dtype {value.dtype}; "
        f"the model was compiled with {leaf.shape} and {leaf.dtype}. Call `reset_state` "
        "with the batch size that you want, or compile again."
    )


def whole_values(graph: ETraceGraph, new: Mapping[Var, Any]) -> dict[Path, Any]:
    """Return the new values of the States that the step writes, by path, from their leaves.

    Parameters
    ----------
    graph
        The compiled model.
    new
        New values of the leaves, by input variable.
    """
    traced = graph.traced
    leaves = [new[var] for var in traced.written_vars]
    values = jax.tree.unflatten(traced.tree_of_written, leaves)
    return dict(zip(traced.written_paths, values, strict=True))


def write_states(graph: ETraceGraph, states: States, new: Mapping[Var, Any]) -> None:
    """Write new leaf values to the States that the step writes."""
    write_by_path(states, whole_values(graph, new))


def read_arguments(graph: ETraceGraph, arguments: tuple[Any, ...]) -> dict[Var, Any]:
    """Return the leaves of the arguments of one step, by input variable.

    Raises
    ------
    ShapeError
        If their structure or shapes differ from the compiled ones.
    DtypeError
        If they cannot be converted to the compiled dtype, as floats to integers.
    """
    traced = graph.traced
    leaves, tree = jax.tree.flatten(arguments)
    if tree != traced.argument_tree:
        raise _other_arguments(graph, arguments)
    values = {}
    expected = zip(traced.argument_names, traced.argument_vars, leaves, strict=True)
    for name, var, leaf in expected:
        value = to_array(leaf)
        if value.shape != var.aval.shape:
            raise ShapeError(
                f"Argument `{name}` of `update` has shape {value.shape}; the model was "
                f"compiled for {tuple(var.aval.shape)}, with hidden states {_hidden(graph)}. "
                f"{_advice(value.shape, var.aval.shape)}"
            )
        if value.dtype != var.aval.dtype:
            _check_kind(name, value.dtype, var.aval.dtype)
            value = value.astype(var.aval.dtype)
        values[var] = value
    return values


def _advice(found: tuple[int, ...], expected: tuple[int, ...]) -> str:
    """Return what to do about an argument of a different shape."""
    if found == expected[1:]:
        first = "" if expected[0] == 1 else "call `reset_state(1)` and "
        return (
            f"If this is one sample, {first}give it a batch axis: `x[None]`, and a sequence "
            "`xs[:, None]`."
        )
    return (
        "If the batch size has changed, call `reset_state` with the new one. In a sequence, time "
        "is the first axis and the batch the second: `(time, batch, …)`."
    )


def _other_arguments(graph: ETraceGraph, arguments: tuple[Any, ...]) -> ShapeError:
    traced = graph.traced
    avals = [var.aval for var in traced.argument_vars]
    expected = jax.tree.unflatten(traced.argument_tree, avals)
    return ShapeError(
        f"`update` was compiled for {named(traced.argument_roots, expected)}, and is called with "
        f"{named(traced.argument_roots, arguments)}. Call it with arguments of the same structure "
        "and in the same units, or compile again."
    )


def _check_kind(name: str, found: Any, expected: Any) -> None:
    """Refuse numbers that the dtype of the example argument cannot represent."""
    if not _holds(expected, found):
        raise DtypeError(
            f"Argument `{name}` of `update` has dtype {found}; the model was compiled for "
            f"{expected}, which cannot hold it. Compile with an example of dtype {found}."
        )


def _holds(wide: Any, dtype: Any) -> bool:
    """Test whether a dtype has the range of another one; digits may be lost."""
    kinds = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)
    rank, other = (
        next((i for i, kind in enumerate(kinds) if jnp.issubdtype(d, kind)), 0)
        for d in (wide, dtype)
    )
    if rank != other:
        return rank > other
    if kinds[rank] is jnp.integer:
        inside, outside = jnp.iinfo(dtype), jnp.iinfo(wide)
        return bool(outside.min <= inside.min and inside.max <= outside.max)
    if kinds[rank] is jnp.floating:
        enough = min(float(jnp.finfo(d).max) for d in (dtype, jnp.float32))
        return float(jnp.finfo(wide).max) >= 0.99 * enough  # bfloat16 has the range of float32
    return True


def _hidden(graph: ETraceGraph) -> str:
    states = [state for group in graph.hidden_groups for state in group.leaves]
    return ", ".join(f"'{state.name}' of shape {state.shape}" for state in states)


def add_to_states(
    graph: ETraceGraph,
    paths: Sequence[Path | None],
    values: Sequence[Any],
    terms: Mapping[str, Any],
) -> list[Any]:
    """Add arrays, by state name, to the values of States.

    Parameters
    ----------
    graph
        The compiled model.
    paths
        Path of each value's State, ``None`` for States that the compiled step does not use.
    values
        Values of States.
    terms
        Terms to add, for some of the hidden states.
    """
    leaves: dict[Path, list[StateLeaf]] = {}
    for leaf in graph.traced.leaves:
        leaves.setdefault(leaf.path, []).append(leaf)

    def added(path: Path | None, value: Any) -> Any:
        own = leaves.get(path, []) if path is not None else []
        if not any(leaf.name in terms for leaf in own):
            return value
        arrays, tree = jax.tree.flatten(value)
        pairs = zip(own, arrays, strict=True)
        parts = [v + terms[leaf.name] if leaf.name in terms else v for leaf, v in pairs]
        return jax.tree.unflatten(tree, parts)

    return [added(path, value) for path, value in zip(paths, values, strict=True)]


class FoundStates:
    """All States of a model by path; copies of an object that has this cache may share it."""

    def __init__(self) -> None:
        self._model: Any = None
        self._states: dict[Any, brainstate.State] = {}
        self._held: list[tuple[Any, Any, brainstate.State]] = []

    def __call__(self, model: brainstate.nn.Module) -> States:
        """Return the current States."""
        if model is not self._model or any(c.get(k) is not s for c, k, s in self._held):
            self._model, self._states = model, all_states(model)
            self._held = [(*_place(model, path), s) for path, s in self._states.items()]
        return self._states


def _place(model: Any, path: tuple[Any, ...]) -> tuple[dict[Any, Any], Any]:
    """Return the dict that holds a State, and its key there; a State in a list is not followed."""
    holder = vars(model)
    for part in path[:-1]:
        held = holder.get(part) if isinstance(holder, dict) else holder[part]
        holder = held if isinstance(held, (dict, list, tuple)) else vars(held)
    if isinstance(holder, dict):
        return holder, path[-1]
    return {0: holder[path[-1]]}, 0
