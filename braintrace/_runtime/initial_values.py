"""Initial values of a model's states, and arguments of ``update`` for another batch size."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import brainstate
import jax
import jax.numpy as jnp

from .._brainstate import is_watched, peek, trace_stateful
from .._errors import ShapeError
from .._graph import TracedModel
from .._jax import strongly_typed
from .._typing import Path

Shapes = tuple[tuple[int, ...], ...]
Values: TypeAlias = dict[Path, Any]

InitialFunction: TypeAlias = Callable[[Sequence[Any]], tuple[Sequence[Any], Values]]
"""``values of States -> (new values or None, initial values by path)``."""

Size = int | None
"""A batch size; ``None``: the default of ``init_state``."""


def fresh_values(
    model: brainstate.nn.Module, mapped: bool, size: Size, options: dict[str, Any]
) -> Values:
    """Return the initial values of all short-term States, without changing the model."""
    twin = brainstate.graph.clone(model)
    states = model.states()
    for path, state in twin.states().items():
        if not isinstance(state, brainstate.ShortTermState):
            state.value = states[path].value  # transformations observe the read
    arguments = {} if mapped or size is None else {"batch_size": size}
    brainstate.nn.init_all_states(twin, **arguments, **options)
    values = {
        tuple(path): strongly_typed(state.value)
        for path, state in twin.states(brainstate.ShortTermState).items()
    }
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


class InitialValues:
    """Initial values of the short-term States of a model, traced once for each batch size."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, bool, Size], Initialiser] = {}

    def __call__(
        self, model: brainstate.nn.Module, mapped: bool, size: Size, options: dict[str, Any]
    ) -> Values:
        """Return the initial values for a batch size."""
        if options or is_watched():
            return fresh_values(model, mapped, size, options)
        return self.initialiser(model, mapped, size)()

    def size_of(
        self, model: brainstate.nn.Module, mapped: bool, samples: Size, shapes: Shapes
    ) -> Size:
        """Return the batch size for which ``init_state`` makes states of given shapes."""
        for size in [samples] if mapped else dict.fromkeys([samples, None]):
            try:
                made = self.initialiser(model, mapped, size)
            except TypeError:  # `init_state` wants a batch size
                continue
            if made.shapes == shapes:
                return size
        raise ShapeError(
            f"`{type(model).__name__}.init_state` does not create states of the current shapes, "
            f"{', '.join(map(str, shapes))}. Call `reset_state` with the batch size of your "
            "initialisation, inside the same maps."
        )

    def initialiser(self, model: brainstate.nn.Module, mapped: bool, size: Size) -> "Initialiser":
        """Return the function of initial values for a batch size."""
        key = (id(model), mapped, size)
        if key not in self._made:
            self._made[key] = Initialiser(model, mapped, size)
        return self._made[key]


class Initialiser:
    """Initial values of one model for one batch size, as a compiled function of States."""

    def __init__(self, model: brainstate.nn.Module, mapped: bool, size: Size) -> None:
        found = trace_stateful(lambda: fresh_values(model, mapped, size, {}))
        self.states, (values, _) = found.states, found.result_shapes
        self._paths, self.shapes = list(values), shapes_of(values)
        self._run = jax.jit(lambda states: _as_list(found.call(states)))

        program = found.jaxpr.jaxpr
        used = {id(v) for eqn in program.eqns for v in eqn.invars} | set(map(id, program.outvars))
        rest = iter(program.invars)
        leaves = [[next(rest) for _ in jax.tree.leaves(peek(s))] for s in self.states]
        pairs = zip(self.states, leaves, strict=True)
        self.read = tuple(s for s, own in pairs if any(id(v) in used for v in own))

    def __call__(self) -> Values:
        """Return the initial values; random States advance."""
        written, values = self.values([state.value for state in self.states])
        for state, value in zip(self.states, written, strict=True):
            if value is not None:
                state.value = value
        return values

    def values(self, of_states: Sequence[Any]) -> tuple[Sequence[Any], Values]:
        """Return new values of States, and the initial values; see `InitialFunction`."""
        written, values = self._run(of_states)
        return written, dict(zip(self._paths, values, strict=True))


def _as_list(result: tuple[Any, Values]) -> tuple[Any, list[Any]]:
    """Return values in a list, since paths with both names and numbers cannot be sorted."""
    return result[0], list(result[1].values())


def example_arguments(traced: TracedModel) -> Any:
    """Return zeros like the arguments of ``update``."""
    leaves = (jnp.zeros(var.aval.shape, var.aval.dtype) for var in traced.argument_vars)
    return jax.tree.unflatten(traced.argument_tree, leaves)


def arguments_for_batch(
    traced: TracedModel, shapes: tuple[Shapes, Shapes], batch_size: int | None
) -> Any:
    """Return zeros like the arguments of ``update`` for another batch size.

    Parameters
    ----------
    traced
        The traced model.
    shapes
        Shapes of the short-term States of the traced step, and with the new batch size.
    batch_size
        The new batch size.

    Raises
    ------
    ShapeError
        If anything except the batch size differs.
    """
    before, after = shapes
    if batch_size is None or list(map(len, before)) != list(map(len, after)):
        raise ShapeError(
            f"The states have shapes {', '.join(map(str, after))}; the model was compiled for "
            f"{', '.join(map(str, before))}. Call `compile_graph` with an example of these "
            "shapes; reset an algorithm that was compiled inside a map inside the same map."
        )
    pairs = zip(itertools.chain(*before), itertools.chain(*after), strict=True)
    old = min((old for old, new in pairs if old != new == batch_size), default=None)
    old = old if traced.batch_size is None else traced.batch_size
    leaves = []
    for var in traced.argument_vars:
        shape = list(var.aval.shape)
        if old in shape:
            shape[shape.index(old)] = batch_size
        leaves.append(jnp.zeros(shape, var.aval.dtype))
    return jax.tree.unflatten(traced.argument_tree, leaves)
