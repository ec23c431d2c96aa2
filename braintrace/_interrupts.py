"""Deferral of signals during atomic operations.

Python runs signal handlers between any two bytecodes of the main thread, and most handlers raise an
exception there: Ctrl-C, the alarm of a timeout, the warning of a cluster before it ends a job. If
it comes between a computation with donated arrays and the assignment of its result, both are lost.
If it comes between writes of two States, only one of them is updated. Inside ``with
uninterrupted:``, handlers are called at the end of the block. Other threads run no handlers, so
they need no protection.
"""

import contextlib
import functools
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

try:  # `signal` without the conversion to enums, which takes 5 µs per signal
    import _signal as signals
except ImportError:  # pragma: no cover
    signals = signal

Function = TypeVar("Function", bound=Callable[..., Any])

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGUSR2")
WAITING = tuple(int(getattr(signal, name)) for name in _NAMES if hasattr(signal, name))
"""Signals that programs turn into exceptions. Only Python handlers can raise exceptions."""

_MAIN = threading.main_thread().ident


class _Uninterrupted:
    """Context that defers signals; contexts may be nested."""

    def __init__(self) -> None:
        self._depth = 0
        self._handlers: dict[int, Callable[..., Any]] = {}
        self._arrived: list[tuple[int, Any]] = []

    def __enter__(self) -> None:
        if threading.get_ident() == _MAIN:
            if self._depth:
                self._depth += 1
            else:
                self._begin(1)

    def __exit__(self, *_: Any) -> None:
        if threading.get_ident() == _MAIN:
            if self._depth > 1:
                self._depth -= 1
            else:
                self._end()

    @contextlib.contextmanager
    def lifted(self) -> Iterator[None]:
        """Allow signals inside a context that defers them."""
        depth = self._depth if threading.get_ident() == _MAIN else 0
        if not depth:
            yield
            return
        try:
            self._end()
            yield
        finally:
            self._begin(depth)

    def _begin(self, depth: int) -> None:
        try:
            self._install(depth)
        except BaseException:  # a signal came before its handler was replaced
            if depth == 1:
                self._end()
            else:
                self._install(depth)
            raise

    def _install(self, depth: int) -> None:
        for number in WAITING:
            handler = signals.getsignal(number)
            if callable(handler) and handler is not _remember:
                self._handlers[number] = handler
                signals.signal(number, _remember)
        self._depth = depth

    def _end(self) -> None:
        self._depth = 0
        arrived, self._arrived = self._arrived, []
        try:
            for number in list(self._handlers):
                if signals.getsignal(number) is _remember:
                    signals.signal(number, self._handlers[number])
        finally:
            if arrived:
                self._deliver(arrived)

    def _deliver(self, arrived: list[tuple[int, Any]]) -> None:
        if arrived:
            try:
                self.handle(*arrived[0])
            finally:
                self._deliver(arrived[1:])

    def handle(self, number: int, frame: Any) -> None:
        """Call the program's handler of a signal, now or at the end of the context."""
        if self._depth:
            self._arrived.append((number, frame))
        else:
            self._handlers[number](number, frame)


uninterrupted = _Uninterrupted()
"""``with uninterrupted:`` defers signals to its end."""


def _remember(number: int, frame: Any) -> None:
    uninterrupted.handle(number, frame)


def interruptible(function: Function) -> Function:
    """Allow signals in a function that is called where they are deferred.

    JAX and brainstate call the functions that they trace; tracing takes long and changes nothing.
    """

    @functools.wraps(function)
    def called(*arguments: Any, **options: Any) -> Any:
        with uninterrupted.lifted():
            return function(*arguments, **options)

    return called  # type: ignore[return-value]
