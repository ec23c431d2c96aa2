"""Interception of learner calls while a user's function is traced.

A step function calls the learner, and the call must run the step that is being traced instead of a
step on the States. The replacement is bound to a context: another thread may trace pure functions
of the same learner meanwhile.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TypeAlias

from ..._algorithms import ETraceAlgorithm
from ..._typing import PyTree

Interceptor: TypeAlias = Callable[..., PyTree]
"""Receives the arguments of a learner call, and returns its result."""

_interceptors: ContextVar[tuple[tuple[ETraceAlgorithm, Interceptor], ...]] = ContextVar(
    "braintrace_interceptors", default=()
)


@contextlib.contextmanager
def intercepting(algorithm: ETraceAlgorithm, interceptor: Interceptor) -> Iterator[None]:
    """Let an interceptor handle the calls of an algorithm's learner inside the context."""
    token = _interceptors.set((*_interceptors.get(), (algorithm, interceptor)))
    try:
        yield
    finally:
        _interceptors.reset(token)


def interceptor_of(algorithm: ETraceAlgorithm) -> Interceptor | None:
    """Return the innermost interceptor of an algorithm's learner, or ``None``."""
    for owner, interceptor in reversed(_interceptors.get()):
        if owner is algorithm:
            return interceptor
    return None
