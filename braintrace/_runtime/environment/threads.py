"""Locks for several threads that use one model."""

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

Method = TypeVar("Method", bound=Callable[..., Any])

_locks: dict[int, Any] = {}
_making = threading.Lock()


def lock_of(owner: Any) -> Any:
    """Return the reentrant lock of an object.

    The lock is not an attribute, which a copy of the object would share.
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
    """Run a method with the object's ``lock``, so other threads wait."""

    @functools.wraps(method)
    def locked(self: Any, *arguments: Any, **options: Any) -> Any:
        with self.lock:
            return method(self, *arguments, **options)

    return locked  # type: ignore[return-value]
