"""Notes about the user's call on errors that JAX or brainstate raise inside of it."""

import contextlib
from collections.abc import Callable, Iterator

from ._errors import BraintraceError


@contextlib.contextmanager
def in_words(call: Callable[[], str]) -> Iterator[None]:
    """Add the call to an error that is raised inside."""
    try:
        yield
    except BraintraceError:
        raise
    except Exception as error:
        error.add_note(f"braintrace: {call()}")
        raise
