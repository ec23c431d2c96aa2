"""Recompilation of a model that has changed since it was compiled.

A model changes when a plain attribute of a module has another value, or when a State is added. Both
show in what its modules hold, which is compared by identity before every call.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from .._errors import OptionError
from .attributes import attributes_of
from .compiled_model import CompiledModel
from .mesh import on_automatic_axes
from .model_states import States


def caught_up(algorithm: Any) -> States:
    """Compile the model of an algorithm for what it holds now, and return all its States.

    Raises
    ------
    NotCompiledError
        If the model has a State that it did not have, or attributes that change its traces.
    """
    states, version = algorithm.found_states(algorithm.model), algorithm.found_states.version
    if version is not algorithm.seen_version:
        _catch_up(algorithm, algorithm.compiled_model, states)
        algorithm.seen_version = version
    of_model: States = algorithm.states_of_model if algorithm.filters else states
    return of_model


@on_automatic_axes
def follow_every_state(algorithm: Any, window: int, is_start: bool) -> None:
    """Let traces follow every hidden state, as windows need it; else compile the model again.

    Parameters
    ----------
    algorithm
        The algorithm.
    window
        The window of the call that needs it.
    is_start
        Whether its traces are those at the start of a sequence, so that they may begin again.

    Raises
    ------
    OptionError
        If a sequence has begun, and its traces leave out a state.
    """
    compiled = algorithm.compiled_model
    is_alike = compiled.step.follows_every_state
    if not (is_alike or is_start):
        raise OptionError(
            f"`window` is {window}, and the traces so far leave out hidden states from which a "
            "window continues. Give `window` to `compile`, or reset the learner before its first "
            "call with a `window`."
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
    after = compiled.caught_up(algorithm.model, algorithm.analysed, states)
    if after is not compiled:
        algorithm._compiled = after
        algorithm.place()


@contextlib.contextmanager
def own_changes(algorithm: Any) -> Iterator[None]:
    """Let attributes not count that functions change inside, while they are traced."""
    try:
        yield
    finally:
        compiled, states = algorithm.compiled_model, algorithm.found_states(algorithm.model)
        version = algorithm.found_states.version
        if version is not algorithm.seen_version and compiled.paths.issuperset(states):
            compiled.written.update(compiled.changed(attributes_of(algorithm.model)))
            algorithm.seen_version = version
