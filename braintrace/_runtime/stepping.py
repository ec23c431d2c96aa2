"""Single calls of an algorithm: one step, or the steps of a sequence, on the current States."""

from typing import Any

import brainstate
import jax
import jax.numpy as jnp

from .._arguments import check_arrays
from .._brainstate import is_watched
from .._errors import ShapeError
from .._typing import Path
from .carried_traces import CarriedTraces
from .companions import check_companions, note_companions
from .compiled_step import CompiledStep
from .program import Program, advance, write_values
from .step_data import MultiStepData, check_steps, is_sequence, unwrap

StatesOfStep = dict[Path, brainstate.State]


def run_call(
    step: CompiledStep,
    states: StatesOfStep,
    traces: CarriedTraces,
    mark: brainstate.State,
    arguments: tuple[Any, ...],
    is_window: bool,
) -> Any:
    """Run one step, or the steps of a sequence, and return the output of ``update``.

    Parameters
    ----------
    step
        The compiled model.
    states, traces, mark
        States of the step, traces and the mark of a gradient; all of them advance.
    arguments
        Arguments of ``update``, possibly wrapped.
    is_window
        Whether the call is one window: its derivative passes through all its steps.

    Raises
    ------
    ShapeError
        For arguments or States of a different shape.
    LostTracesError
        If other code has written hidden states that the traces follow.
    """
    # Inside a transformation, reading the traces ends this comparison, so it comes first.
    check_companions(traces, states, step.followed)
    if is_sequence(arguments):
        if not all(isinstance(argument, MultiStepData) for argument in arguments):
            raise ShapeError(
                "Some arguments are `MultiStepData` and some are not. Wrap all of them: every "
                "argument needs a leading time axis."
            )
        check_steps(arguments)
        return _run_steps(step, states, traces, mark, unwrap(arguments), is_window)
    if is_window:
        check_arrays("arguments", unwrap(arguments), "`update`: ")
        one_step = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], unwrap(arguments))
        outputs = _run_steps(step, states, traces, mark, one_step, is_window)
        return jax.tree.map(lambda leaf: leaf[0], outputs)
    step.environment.check()
    inputs = _entered(step, mark, step.inputs(states, unwrap(arguments)), ())
    return _moved_on(step, step.single_step, states, traces, (inputs, traces.read()))


def _run_steps(
    step: CompiledStep,
    states: StatesOfStep,
    traces: CarriedTraces,
    mark: brainstate.State,
    sequences: tuple[Any, ...],
    is_window: bool,
) -> Any:
    step.environment.check()
    inputs = step.inputs(states, jax.tree.map(lambda leaf: leaf[0], sequences))
    if step.placement is not None:
        sequences = step.placement.by_sample(sequences, axis=1)
    inputs = _entered(step, mark, inputs, sequences)
    program = step.window if is_window else step.steps
    return _moved_on(step, program, states, traces, (inputs, traces.read(), sequences))


def _entered(
    step: CompiledStep, mark: brainstate.State, inputs: list[Any], sequences: Any
) -> list[Any]:
    """Return the inputs as a user's gradient may differentiate them, inside a transformation."""
    if is_watched():
        inputs, after = step.entered(inputs, sequences, mark.value)
        write_values([mark], [after])
    return inputs


def _moved_on(
    step: CompiledStep,
    program: Program,
    states: StatesOfStep,
    traces: CarriedTraces,
    arguments: tuple[Any, ...],
) -> Any:
    def store(results: Any) -> None:
        _, new_states, after = results
        step.write(states, new_states)
        traces.write(after)
        note_companions(traces, states, step.followed)

    can_fail = program.can_fail(lambda: arguments)
    outputs, *_ = advance(traces, can_fail, lambda _: program(*arguments), store)
    return jax.tree.unflatten(step.graph.traced.output_tree, outputs)
