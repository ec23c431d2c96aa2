"""Recompilation of a model that has changed since its compilation.

A model changes if a plain attribute of a module has a new value, or if a State is added. Both
change the contents of its modules, which are compared by identity before every call.
"""

from typing import Any

from .._errors import NotCompiledError, OptionError
from .compiled_model import CompiledModel
from .compiled_step import CompiledStep, carries_alike
from .environment.mesh import on_automatic_axes
from .states.model_states import States


def up_to_date(algorithm: Any) -> States:
    """Recompile the model of an algorithm if its contents changed, and return all its States.

    Raises
    ------
    NotCompiledError
        If the model has a new State, or attributes that change its traces.
    """
    states, version = algorithm.found_states(algorithm.model), algorithm.found_states.version
    if version is not algorithm.seen_version:
        _catch_up(algorithm, algorithm.compiled_model, states)
        algorithm.seen_version = version
    of_model: States = algorithm.states_of_model if algorithm.filters else states
    return of_model


def current_step(algorithm: Any) -> tuple[CompiledStep, States]:
    """Recompile the model of an algorithm if it changed; return the step, and its States in order.

    Another step may read its States in another order.

    Raises
    ------
    NotCompiledError
        See `up_to_date`; or if the model reads a value of the environment that has changed.
    """
    states = up_to_date(algorithm)
    step: CompiledStep = algorithm.compiled
    step.environment.check(algorithm.model)
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


@on_automatic_axes
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


@on_automatic_axes
def _catch_up(algorithm: Any, compiled: CompiledModel, states: States) -> None:
    after = compiled.up_to_date(algorithm.model, algorithm.analysed, states)
    is_same = after.step.graph is compiled.step.graph
    if not (is_same or carries_alike(compiled.step, after.step)):
        raise NotCompiledError(
            f"`{type(algorithm.model).__name__}` needs other traces, because attributes of its "
            f"modules have changed: {_told(compiled, after)}. Call `reset_state` or "
            "`compile_graph`, which start a new sequence."
        )
    algorithm._compiled = after
    if not is_same:
        algorithm.place()


def check_model_of_call(algorithm: Any) -> None:
    """Refuse to run a step of a model that a user's function has changed since the call began.

    Raises
    ------
    NotCompiledError
        If the change would change the step.
    """
    states, version = algorithm.found_states(algorithm.model), algorithm.found_states.version
    if version is algorithm.seen_version:
        return
    compiled = algorithm.compiled_model
    after = compiled.up_to_date(algorithm.model, algorithm.analysed, states)
    if after.step.graph is not compiled.step.graph:
        raise NotCompiledError(
            f"`step_fn` changes attributes of `{type(algorithm.model).__name__}` before it calls "
            f"the learner: {_told(compiled, after)}. One call has one model: change it between two "
            "calls, or pass the value as an argument of `update`."
        )
    algorithm._compiled, algorithm.seen_version = after, version


def _told(before: CompiledModel, after: CompiledModel) -> str:
    changed = before.attributes.changed(after.attributes)
    return ", ".join(before.attributes.change(after.attributes, name) for name in changed)
