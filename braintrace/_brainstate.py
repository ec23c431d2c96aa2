"""Interface to brainstate: the only file that uses its internals.

The public interface of a State is its ``value``; ``brainstate.transform`` turns functions into
stateful ones. This file contains everything else that the library needs: the States that a trace
reads and writes, and access to a value without notifying transformations. A new release of
brainstate needs changes here only.

Tried with brainstate 0.5.0, 0.5.4 and 0.6.0.
"""

import contextlib
import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeAlias, TypeVar

import brainstate
import jax
from brainstate._state import TRACE_CONTEXT, _InvalidatedTraceValue

from ._errors import ShapeError
from ._jax import is_in_body, is_transforming

Kind = TypeVar("Kind", bound=type[brainstate.State])
Value = TypeVar("Value")

# --- classes of modules


class Hidden(Generic[Value]):
    """A value in an attribute of a module, in which brainstate does not search for States."""

    def __init__(self, value: Value) -> None:
        self.value = value


def initialise(model: brainstate.nn.Module, **arguments: Any) -> None:
    """Run `init_state` of all modules of a model, as `brainstate.nn.init_all_states` does.

    If one refuses, since it may be initialised only once (a cell of braincell), the modules that
    have States and a `reset_state` of their own are reset instead.
    """
    try:
        brainstate.nn.init_all_states(model, **arguments)
    except RuntimeError:
        once = [node for node in model.nodes(brainstate.nn.Module).values() if _has_reset(node)]
        if not once:
            raise
        excluded = {"node_to_exclude": lambda _, node: _has_reset(node)}
        brainstate.nn.init_all_states(model, **excluded, **arguments)
        for node in once:
            node.reset_state(**arguments)


def _has_reset(node: brainstate.nn.Module) -> bool:
    is_own = type(node).reset_state is not brainstate.nn.Module.reset_state
    return is_own and bool(node.states(brainstate.ShortTermState))


# --- functions of States


@dataclasses.dataclass(frozen=True, eq=False)
class StatefulTrace:
    """A function that reads and writes States, traced for arguments of given shapes.

    Attributes
    ----------
    jaxpr
        The closed jaxpr: its inputs are the arguments, then the value of each State.
    states
        The States that it reads or writes.
    is_written
        Whether it writes each State.
    result_shapes
        Shapes of its result, and of the States' new values; ``None`` for read-only States.
    call
        The function in pure form: ``call(values, *arguments)`` returns ``(new values, result)``.
    """

    jaxpr: Any
    states: tuple[brainstate.State, ...]
    is_written: tuple[bool, ...]
    result_shapes: tuple[Any, tuple[Any, ...]]
    call: Callable[..., tuple[tuple[Any, ...], Any]]


Refuse: TypeAlias = Callable[[brainstate.State, Any, Any], Exception]
"""``(state, old value, new value) -> error`` for a State whose pytree structure changes."""


def trace_stateful(
    function: Callable[..., Any], *arguments: Any, refuse: Refuse | None = None
) -> StatefulTrace:
    """Trace a function that reads and writes States, without changing their values.

    Parameters
    ----------
    function, arguments
        The function, and example arguments.
    refuse
        Returns the error for a State whose pytree structure changes; ``None``: a `ShapeError`.
    """
    traced = brainstate.transform.StatefulFunction(
        keeping_structure(function, refuse or _changed_structure),
        static_argnums=(),
        return_only_write=True,
    )
    traced.make_jaxpr(*arguments)
    key = traced.get_arg_cache_key(*arguments)
    stack = traced.get_state_trace_by_cache(key)
    return StatefulTrace(
        jaxpr=traced.get_jaxpr_by_cache(key),
        states=tuple(stack.states),
        is_written=tuple(map(bool, stack.been_writen)),
        result_shapes=traced.get_out_shapes_by_cache(key),
        call=traced.jaxpr_call,
    )


def keeping_structure(function: Callable[..., Any], refuse: Refuse) -> Callable[..., Any]:
    """Return a function that refuses States whose pytree structure changes.

    After a trace, brainstate restores the old values, one State after the other. It refuses a value
    whose structure differs from the new value, and leaves tracers in all remaining States.
    """

    def run(*arguments: Any) -> Any:
        stack, changed = TRACE_CONTEXT.state_stack[-1], []
        try:
            result = function(*arguments)
        finally:
            for state, old in zip(stack.states, stack.original_state_values, strict=True):
                new = peek(state)
                if jax.tree.structure(new) != jax.tree.structure(old):
                    hold(state, old)
                    changed.append((state, old, new))
        if changed:
            raise refuse(*changed[0])
        return result

    return run


def _changed_structure(state: brainstate.State, old: Any, new: Any) -> ShapeError:
    was, found = jax.tree.structure(old), jax.tree.structure(new)
    return ShapeError(
        f"A {type(state).__name__} changes: its pytree structure was {was}, and is {found}. Write "
        "a value of the same structure."
    )


# --- which transformations see reads and writes


@contextlib.contextmanager
def unnoticed_states() -> Iterator[None]:
    """Hide States created inside from `brainstate.catch_new_states`.

    At its end, a map adds an axis to the States that it caught. States made for a trace no longer
    exist then.
    """
    catchers, TRACE_CONTEXT.new_state_catcher = TRACE_CONTEXT.new_state_catcher, []
    try:
        yield
    finally:
        TRACE_CONTEXT.new_state_catcher = catchers


def is_watched() -> bool:
    """Test whether a transformation of JAX or brainstate must see reads and writes of States."""
    return is_transforming() or is_recorded()


def is_recorded() -> bool:
    """Test whether a transformation of brainstate records reads and writes of States."""
    return bool(TRACE_CONTEXT.state_stack)


def is_in_loop() -> bool:
    """Test whether a transformation other than ``jit`` needs values of a constant structure."""
    return is_in_body() or any(stack.name != "jit" for stack in TRACE_CONTEXT.state_stack)


@contextlib.contextmanager
def undone() -> Iterator[None]:
    """Restore all States that code inside has written, at the end of the context."""
    stack: brainstate.StateTraceStack = brainstate.StateTraceStack()
    try:
        with stack:
            yield
    finally:
        for state, value in zip(stack.states, stack.original_state_values, strict=True):
            state._value = value


# --- stored values of States


def peek(state: brainstate.State) -> Any:
    """Return the value of a State without notifying transformations of the read."""
    return state._value


def values_of(states: Iterable[brainstate.State]) -> list[Any]:
    """Return the value of each State.

    ``state.value`` checks several managers at each read. Here they are checked once, and for each
    State only its hooks are checked.
    """
    if _is_observed():
        return [state.value for state in states]
    found = []
    for state in states:
        value = state._value
        is_there = _is_plain(state.__class__) and not isinstance(value, _InvalidatedTraceValue)
        is_hooked = state._hooks_manager._has_hooks
        found.append(state.value if not is_there or is_hooked else value)
    return found


def peek_all(states: Iterable[brainstate.State]) -> tuple[Any, ...]:
    """Return the value of each State without notifying transformations of the read."""
    return tuple(map(operator.attrgetter("_value"), states))


def set_values(
    states: Iterable[brainstate.State], values: Iterable[Any], is_outside: bool = False
) -> None:
    """Write a value to each State, with the checks of `values_of`.

    ``is_outside`` tells that the caller runs outside of transformations.
    """
    is_observed = _is_observed() or (not is_outside and is_transforming())
    for state, value in zip(states, values, strict=True):
        if is_observed or not _is_plain(state.__class__) or state._hooks_manager._has_hooks:
            state.value = value
        else:
            attributes = vars(state)
            attributes["_value"], attributes["_been_writen"] = value, True


_has_global_hooks = brainstate.GlobalHookRegistry.instance().has_hooks  # the only instance


def _is_observed() -> bool:
    """Test whether anything except hooks of single States observes reads and writes."""
    checks = TRACE_CONTEXT.tree_check[-1] or TRACE_CONTEXT.jax_tracer_check[-1]
    return bool(TRACE_CONTEXT.state_stack or checks or _has_global_hooks())


@functools.cache
def _is_plain(kind: Any) -> bool:
    """Test whether a class of States reads and writes as `brainstate.State` does."""
    methods = ["value", "_value", "_read_value", "_write_value", "_check_value_tree"]
    methods.append("check_if_deleted")
    own = {name for c in kind.__mro__[: kind.__mro__.index(brainstate.State)] for name in vars(c)}
    return own.isdisjoint(methods)


def held(state: brainstate.State) -> Any:
    """Return the stored value of a State, without the function of `seen_through`."""
    return vars(state)["_value"]


def hold(state: brainstate.State, value: Any) -> None:
    """Replace the stored value of a State without notifying transformations of the write."""
    vars(state)["_value"] = value


def seen_through(
    read: Callable[[Any], Any], write: Callable[[Any, Any], None] = hold
) -> Callable[[Kind], Kind]:
    """Return a class decorator that makes the value of States a function of the stored value.

    ``write`` stores the values that brainstate assigns. All operations of brainstate (copies,
    snapshots before a trace) see the function's value, not only ``value``.
    """

    def decorate(kind: Kind) -> Kind:
        kind._value = property(read, write)
        return kind

    return decorate
