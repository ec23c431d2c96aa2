"""Recompilation of a model for other flags of the environment, or for a window."""

from typing import Any

from .._errors import NotCompiledError, OptionError
from .compiled_model import settings
from .compiled_step import CompiledStep, carries_alike
from .states.model_states import States


def up_to_date(algorithm: Any) -> States:
    """Return all States of the model, compiled for the current settings of the environment."""
    states, compiled = algorithm.found_states(algorithm.model), algorithm.compiled_model
    if settings() != compiled.settings:
        after = compiled.up_to_date(algorithm.analysed)
        if not carries_alike(compiled.step, after.step):
            raise NotCompiledError(
                f"`{type(algorithm.model).__name__}` has other traces for the current values of "
                "`brainstate.environ`. Call `compile_graph`, which starts a new sequence."
            )
        algorithm._compiled = after
        algorithm.place()
    of_model: States = algorithm.states_of_model if algorithm.filters else states
    return of_model


def current_step(algorithm: Any) -> tuple[CompiledStep, States]:
    """Return the step for the current settings, and its States in order."""
    states = up_to_date(algorithm)
    step: CompiledStep = algorithm.compiled
    return step, step.find_states(states)


def follow_every_state(algorithm: Any, requested: int | None, is_given: bool = False) -> None:
    """Make traces follow every hidden state, if a call has a window, and recompile if necessary.

    Parameters
    ----------
    algorithm
        The algorithm.
    requested
        The window of the call; ``None``: the learner's window, for which its traces follow every
        state.
    is_given
        Whether the user passes the traces. The learner's traces are replaced if no sequence has
        started.

    Raises
    ------
    OptionError
        If a sequence has started, and its traces omit a state.
    """
    if requested is not None and not algorithm.every_state:
        is_start = not is_given and algorithm.traces.carried.is_zero
        _follow_every_state(algorithm, int(requested), is_start)


def _follow_every_state(algorithm: Any, window: int, is_start: bool) -> None:
    compiled = algorithm.compiled_model
    is_alike = compiled.step.follows_every_state
    if not (is_alike or is_start):
        raise OptionError(
            f"`window` is {window}, but the current traces omit hidden states that a window "
            "needs. Give `window` to `compile`, or reset the learner before its first call with "
            "a `window`."
        )
    algorithm.every_state = True
    if is_alike:
        return
    try:
        algorithm._compiled = compiled.analysed_again(algorithm.analysed)
    except BaseException:
        algorithm.every_state = False
        raise
    algorithm.begin_traces()
