"""Arguments of a model's ``update``, for one step or for a sequence."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from .._checks import named
from .._errors import DtypeError, ShapeError
from .._graph import ETraceGraph, TracedModel
from .._jax import Var, to_array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SingleStepData:
    """One time step of one input.

    Parameters
    ----------
    data
        A pytree of arrays as ``update`` takes them.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> SingleStepData(jnp.zeros((2, 3))).data.shape
    (2, 3)
    """

    data: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MultiStepData:
    """A sequence of time steps of one input, time first.

    Parameters
    ----------
    data
        A pytree of arrays with a leading time axis.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> MultiStepData(jnp.zeros((7, 2, 3))).data.shape
    (7, 2, 3)
    """

    data: Any


def is_sequence(arguments: tuple[Any, ...]) -> bool:
    """Test whether any argument is a `MultiStepData`."""
    return any(isinstance(argument, MultiStepData) for argument in arguments)


def unwrap(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the data of the wrappers."""
    return tuple(
        argument.data if isinstance(argument, (SingleStepData, MultiStepData)) else argument
        for argument in arguments
    )


def first_step(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of one step: wrappers removed, sequences cut to their first step."""
    return tuple(
        jax.tree.map(lambda leaf: leaf[0], argument.data)
        if isinstance(argument, MultiStepData)
        else argument.data
        if isinstance(argument, SingleStepData)
        else argument
        for argument in arguments
    )


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
    is_integer = jnp.issubdtype(expected, jnp.integer)
    if not jnp.can_cast(found, expected, "safe" if is_integer else "same_kind"):
        raise DtypeError(
            f"Argument `{name}` of `update` has dtype {found}; the model was compiled for "
            f"{expected}, which cannot hold it. Compile with an example of dtype {found}."
        )


def _hidden(graph: ETraceGraph) -> str:
    states = [state for group in graph.hidden_groups for state in group.leaves]
    return ", ".join(f"'{state.name}' of shape {state.shape}" for state in states)


def example_arguments(traced: TracedModel) -> Any:
    """Return zeros like the arguments of ``update``."""
    leaves = (jnp.zeros(var.aval.shape, var.aval.dtype) for var in traced.argument_vars)
    return jax.tree.unflatten(traced.argument_tree, leaves)


def arguments_for_batch(graph: ETraceGraph, batch_size: int | None) -> Any:
    """Return zeros like the arguments of ``update`` for another batch size.

    Raises
    ------
    ShapeError
        If the model has no batch axis, or no size is given.
    """
    traced, samples = graph.traced, graph.batch.samples
    old = samples if traced.batch_size is None else traced.batch_size
    if batch_size is None or old is None:
        raise ShapeError(
            "The states have other shapes than the model was compiled for. Call `compile_graph` "
            "with an example of these shapes; reset a learner that was compiled inside a map "
            "inside the same map."
        )
    leaves = []
    for var in traced.argument_vars:
        shape = list(var.aval.shape)
        if old in shape:
            shape[shape.index(old)] = batch_size
        leaves.append(jnp.zeros(shape, var.aval.dtype))
    return jax.tree.unflatten(traced.argument_tree, leaves)
