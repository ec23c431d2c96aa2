"""Single calls of an algorithm: one step, or the steps of a sequence, on the current States."""

import dataclasses
from typing import Any

import jax
import numpy as np

from .._checks import common_length
from .._errors import ShapeError
from .._jax import own_copy, to_array
from .compiled_step import CompiledStep
from .model_states import States, whole_values
from .program import Changes, Program, Store, Take


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


def check_steps(arguments: tuple[Any, ...]) -> None:
    """Refuse sequences without steps, or of different lengths.

    Raises
    ------
    ShapeError
        If there are any.
    """
    sequences = [argument.data for argument in arguments if isinstance(argument, MultiStepData)]
    if shapes := [tuple(np.shape(leaf)) for leaf in jax.tree.leaves(sequences)]:
        common_length(shapes, "`MultiStepData`")


def first_step(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of one step: wrappers removed, sequences cut to their first step."""
    check_steps(arguments)
    return tuple(
        jax.tree.map(lambda leaf: leaf[0], argument.data)
        if isinstance(argument, MultiStepData)
        else argument.data
        if isinstance(argument, SingleStepData)
        else argument
        for argument in arguments
    )


def run_call(
    step: CompiledStep, states: States, store: Store, arguments: tuple[Any, ...], is_window: bool
) -> Any:
    """Run one step, or the steps of a sequence, and return the output of ``update``.

    Parameters
    ----------
    step
        The compiled model.
    states, store
        States of the step, and the store of their values and of the traces; all of them advance.
    arguments
        Arguments of ``update``, possibly wrapped.
    is_window
        Whether the call is one window: its derivative passes through all its steps.

    Raises
    ------
    ShapeError
        For arguments or States of a different shape.
    """
    if is_sequence(arguments):
        if not all(isinstance(argument, MultiStepData) for argument in arguments):
            raise ShapeError(
                "Some arguments are `MultiStepData` and some are not. Wrap all of them: every "
                "argument needs a leading time axis."
            )
        check_steps(arguments)
        sequences = jax.tree.map(own_copy, unwrap(arguments))
        return _run_steps(step, states, store, sequences, is_window)
    if is_window:
        one_step = jax.tree.map(lambda leaf: to_array(leaf)[None], unwrap(arguments))
        outputs = _run_steps(step, states, store, one_step, is_window)
        return jax.tree.map(lambda leaf: leaf[0], outputs)
    inputs = step.inputs(states, store.values(states.values()), unwrap(arguments))
    return _run(step, step.single_step, states, store, inputs)


def _run_steps(
    step: CompiledStep, states: States, store: Store, sequences: tuple[Any, ...], is_window: bool
) -> Any:
    first = jax.tree.map(lambda leaf: leaf[0], sequences)
    inputs = step.inputs(states, store.values(states.values()), first)
    if step.placement is not None:
        sequences = step.placement.by_sample(sequences, axis=1)
    return _run(step, step.window if is_window else step.steps, states, store, inputs, sequences)


def _run(
    step: CompiledStep,
    program: Program,
    states: States,
    store: Store,
    inputs: list[Any],
    *sequences: tuple[Any, ...],
) -> Any:
    def run(take: Take, done: list[Any]) -> None:
        program(inputs, take()[0], *sequences, done=done)

    def settle(raw: Any) -> Changes:
        outputs, written, traces = raw
        new = dict(zip(traced.written_vars, written, strict=True))
        return outputs, list(whole_values(step.graph, new).values()), traces

    traced = step.graph.traced
    written = [states[path] for path in traced.written_paths]
    return jax.tree.unflatten(traced.output_tree, store.advance(written, run, settle))
