"""A brainstate module as values by path: its States, their leaves, and their initial values."""

import enum
import functools
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import saiunit

from ._brainstate import initialise, peek, set_values, trace_stateful, values_of
from ._checks import in_words, is_quantity, path_name, shown
from ._errors import ShapeError
from ._graph.graph import ETraceGraph
from ._graph.traced_model import StateLeaf
from ._jax import Var, strongly_typed, to_array
from ._typing import Path

States: TypeAlias = Mapping[Path, brainstate.State]
Shapes: TypeAlias = tuple[tuple[int, ...], ...]

Size: TypeAlias = int | None
"""A batch size; ``None``: the default of ``init_state``."""


class Values(dict[Path, Any]):
    """Values of States by path: a pytree, also of paths with names and numbers."""


@functools.lru_cache(maxsize=1000)
def _in_order(paths: tuple[Path, ...]) -> tuple[Path, ...]:
    """Return paths in the order of their printed names, since some paths cannot be sorted."""
    return tuple(sorted(paths, key=path_name))


def _flatten(values: Values) -> tuple[list[tuple[Any, Any]], tuple[Path, ...]]:
    paths = _in_order(tuple(values))
    return [(jax.tree_util.DictKey(path_name(path)), values[path]) for path in paths], paths


jax.tree_util.register_pytree_with_keys(
    Values, _flatten, lambda paths, values: Values(zip(paths, values, strict=True))
)

# --- States


def settings() -> frozenset[tuple[str, Any]]:
    """Return the flags and names of ``brainstate.environ``, such as ``fit=True``.

    A step is compiled for each combination. Numbers are read when it is traced, as under
    ``jax.jit``: the time may change at every step.
    """
    every = brainstate.environ.all().items()
    return frozenset([pair for pair in every if isinstance(pair[1], COMPARED)])


COMPARED = (bool, np.bool_, str, type, enum.Enum, type(None))


def all_states(model: brainstate.nn.Module) -> dict[Path, brainstate.State]:
    """Return all States of a model by path."""
    return {tuple(path): state for path, state in model.states().items()}


def of_kind(states: States, kind: type[brainstate.State]) -> dict[Path, brainstate.State]:
    """Return the States of a class."""
    return {path: state for path, state in states.items() if isinstance(state, kind)}


def values_by_path(states: States) -> dict[Path, Any]:
    """Return the values of States."""
    return dict(zip(states, values_of(states.values()), strict=True))


def write_by_path(states: States, values: Mapping[Path, Any]) -> None:
    """Write values to some of the States."""
    set_values([states[path] for path in values], values.values())


class FoundStates:
    """All States of a model by path; copies of an object that has this cache may share it."""

    def __init__(self) -> None:
        self._model: Any = None
        self._more: States = {}
        self._states: dict[Any, brainstate.State] = {}
        self._held: list[tuple[Any, Any, brainstate.State]] = []

    def __call__(self, model: brainstate.nn.Module, more: States) -> States:
        """Return the current States, and more."""
        is_current = model is self._model and more is self._more
        for holder, key, state in self._held:
            is_current = is_current and holder.get(key) is state
        if not is_current:
            found = all_states(model)
            self._held = [(*_place(model, path), state) for path, state in found.items()]
            found.update(more)
            self._model, self._more, self._states = model, more, found
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
    """
    states = {**outside, **inside}
    with in_words(lambda: "the model has other States than compiled; call `compile_graph` again"):
        return {leaf.path: states[leaf.path] for leaf in graph.traced.leaves}


# --- their leaves


def leaves_by_var(graph: ETraceGraph, states: States, values: Sequence[Any]) -> dict[Var, Any]:
    """Return the leaves of the values of all States, by input variable.

    Raises
    ------
    ShapeError
        If the shape of a State has changed since compilation.
    """
    traced = graph.traced
    for path, value in zip(states, values, strict=True):
        if jax.tree.structure(value) != traced.state_trees[path]:
            raise _other_structure(path, value, traced.state_trees[path])
    inputs: dict[Var, Any] = {}
    for leaf, value in zip(traced.leaves, jax.tree.leaves(list(values)), strict=True):
        inputs[leaf.in_var] = array = to_array(value)
        if array.shape != leaf.shape or array.dtype != leaf.dtype:
            raise _other_shape(leaf, array)
    return traced.mirror_rings(inputs)


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
    new = traced.mirror_rings(new)
    leaves = [new[var] for var in traced.written_vars]
    tree = jax.tree_util.treedef_tuple([traced.state_trees[p] for p in traced.written_paths])
    values = jax.tree.unflatten(tree, leaves)
    return dict(zip(traced.written_paths, values, strict=True))


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
    known = {path: value for path, value in zip(paths, values, strict=True) if path is not None}
    states = {leaf.path: known[leaf.path] for leaf in graph.traced.leaves}
    inputs = leaves_by_var(graph, states, [*states.values()])
    moved = [leaf for leaf in graph.traced.written if leaf.name in terms]
    added = {leaf.in_var: inputs[leaf.in_var] + terms[leaf.name] for leaf in moved}
    new, changed = whole_values(graph, inputs | added), {leaf.path for leaf in moved}
    pairs = zip(paths, values, strict=True)
    return [new[path] if path in changed else value for path, value in pairs]


# --- initial values


def fresh_values(model: brainstate.nn.Module, mapped: bool, size: Size) -> Values:
    """Return the initial values of all short-term States, without changing the model."""
    twin = brainstate.graph.clone(model)
    now = model.states()
    for path, state in twin.states().items():
        if not isinstance(state, brainstate.ShortTermState):
            state.value = now[path].value  # transformations observe the read
    arguments = {} if mapped or size is None else {"batch_size": size}
    initialise(twin, **arguments)
    states = twin.states(brainstate.ShortTermState).items()
    values = Values({tuple(path): strongly_typed(state.value) for path, state in states})
    return jax.tree.map(lambda leaf: _of_samples(leaf, size), values) if mapped else values


def _of_samples(value: Any, size: Size) -> Any:
    """Return the values of all samples from the value of one; random keys are split."""
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        split = jax.vmap(lambda key: jax.random.split(key, size), out_axes=1)
        return split(value.ravel()).reshape(size, *value.shape)
    return jnp.broadcast_to(value, (size, *value.shape))


def shapes_of(values: Mapping[Path, Any]) -> Shapes:
    """Return the shapes of all values of States, in the order of their paths."""
    leaves = (leaf for path in sorted(values, key=str) for leaf in jax.tree.leaves(values[path]))
    return tuple(tuple(jnp.shape(leaf)) for leaf in leaves)


class Initialiser:
    """Initial values of one model for one batch size, as a compiled function of States."""

    def __init__(self, model: brainstate.nn.Module, mapped: bool, size: Size) -> None:
        found = trace_stateful(lambda: fresh_values(model, mapped, size))
        self.states, (values, _) = found.states, found.result_shapes
        self.shapes = shapes_of(values)
        # ``values of States -> (new values or None, initial values by path)``
        self.values = jax.jit(found.call)

        program = found.jaxpr.jaxpr
        used = {id(v) for eqn in program.eqns for v in eqn.invars} | set(map(id, program.outvars))
        rest = iter(program.invars)
        leaves = [[next(rest) for _ in jax.tree.leaves(peek(s))] for s in self.states]
        pairs = zip(self.states, leaves, strict=True)
        self.read = tuple(s for s, own in pairs if any(id(v) in used for v in own))

    def __call__(self) -> Values:
        """Return the initial values; random States advance."""
        written, values = self.values(values_of(self.states))
        for state, value in zip(self.states, written, strict=True):
            if value is not None:
                state.value = value
        return values
