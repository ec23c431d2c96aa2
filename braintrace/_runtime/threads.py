"""Several threads with one model: one of them runs or traces it, the others wait or read."""

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import brainstate

from .._interrupts import uninterrupted

Method = TypeVar("Method", bound=Callable[..., Any])

_locks: dict[int, Any] = {}
_making = threading.Lock()


def lock_of(owner: Any) -> Any:
    """Return the reentrant lock of an object.

    It is not kept as an attribute, which a copy of the object would share.
    """
    lock = _locks.get(id(owner))
    if lock is None:
        with _making:
            lock = _locks.get(id(owner))
            if lock is None:
                lock = _locks[id(owner)] = threading.RLock()
                weakref.finalize(owner, _locks.pop, id(owner), None).atexit = False
    return lock


def one_thread_at_a_time(method: Method) -> Method:
    """Let other threads wait that call a method of an object with the same ``lock``."""

    @functools.wraps(method)
    def locked(self: Any, *arguments: Any, **options: Any) -> Any:
        with self.lock:
            return method(self, *arguments, **options)

    return locked  # type: ignore[return-value]


@contextlib.contextmanager
def kept_for_other_threads(states: Iterable[brainstate.State]) -> Iterator[None]:
    """Let other threads read what States hold, while this one traces a function of them.

    A trace puts tracers into the States, of which other threads can make nothing. Here the States
    are of a class, meanwhile, that gives other threads the values from before.

    Parameters
    ----------
    states
        The States. Those that keep their value in a way of their own are left as they are.
    """
    plain = [state for state in states if not hasattr(type(state), "_value")]
    before = [(state, type(state), vars(state)["_value"]) for state in plain]
    reader = threading.get_ident()
    with uninterrupted:
        try:
            for state, kind, value in before:
                _kept[id(state)] = (reader, value)
                state.__class__ = _keeping(kind)  # type: ignore[arg-type]
            with uninterrupted.lifted():
                yield
        finally:
            for state, kind, _ in before:
                state.__class__ = kind
                _kept.pop(id(state), None)


_kept: dict[int, tuple[int, Any]] = {}
"""For States that are being traced: by which thread, and what they held before."""


@functools.cache
def _keeping(kind: type) -> type:
    """Return a class of States that gives threads other than the one that traces what was kept."""

    def read(state: Any) -> Any:
        if id(state) not in _kept:  # a copy of a State, or the trace has just ended
            state.__class__ = kind
        reader, value = _kept.get(id(state), (threading.get_ident(), None))
        return vars(state)["_value"] if reader == threading.get_ident() else value

    def write(state: Any, value: Any) -> None:
        vars(state)["_value"] = value

    named = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, (kind,), {**named, "_value": property(read, write)})
