"""Compiled programs of a learner, with atomic storage of their results.

A step of a learner is atomic. A program that can fail at run time leaves the old values in place
until it has succeeded. Other programs reuse the buffers of the traces; meanwhile, signals and other
threads wait.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias, TypeVar

import brainstate
import jax

from .._brainstate import is_watched, set_values
from .._errors import OptionError
from .._interrupts import interruptible, uninterrupted
from .._jax import calls_back
from .carried_traces import CarriedTraces

Result = TypeVar("Result")

Take: TypeAlias = Callable[[], tuple[Any, bool]]
"""Returns the traces, and whether their buffers may be given to a program."""


class Program:
    """A compiled pure function.

    Parameters
    ----------
    function
        The function.
    donated
        Index of the argument with traces, whose buffers may be donated; ``None``: no donation.
    """

    def __init__(self, function: Callable[..., Any], donated: int | None = None) -> None:
        function = interruptible(function)
        self._run = jax.jit(function)
        self._run_in_place = jax.jit(function, donate_argnums=() if donated is None else donated)
        self._calls_back: bool | None = None

    def __call__(self, *arguments: Any, in_place: bool = False) -> Any:
        """Run the function; ``in_place`` donates the buffers of its traces."""
        return (self._run_in_place if in_place else self._run)(*arguments)

    def trace(self, *arguments: Any, in_place: bool = False) -> jax.stages.Traced:
        """Return the program for arguments, which may be shapes."""
        return (self._run_in_place if in_place else self._run).trace(*arguments)

    def can_fail(self, example: Callable[[], tuple[Any, ...]]) -> bool:
        """Test whether a call can fail at run time, because of callbacks or checks.

        Parameters
        ----------
        example
            Returns arguments; called at most once.
        """
        if is_watched():  # the outer transformation runs the program
            return False
        if self._calls_back is None:
            self._calls_back = calls_back(self._run.trace(*example()).jaxpr)
        config = jax.config
        return bool(self._calls_back or config.jax_debug_nans or config.jax_debug_infs)


def advance(
    traces: CarriedTraces,
    can_fail: bool,
    run: Callable[[Take], Result],
    store: Callable[[Result], None],
) -> Result:
    """Run programs and store their results atomically.

    Parameters
    ----------
    traces
        The traces, which the programs advance.
    can_fail
        Whether a program can fail at run time; see `Program.can_fail`.
    run
        Takes the traces, runs the programs, and returns their results.
    store
        Writes the results to States and traces.
    """
    if can_fail:
        results = run(traces.lend)
        jax.block_until_ready(results)
        with uninterrupted:
            store(results)
    else:
        with uninterrupted, traces.lock:
            results = run(traces.take)
            store(results)
    return results


RAW = (
    "A learner is called inside a transformation of JAX such as `jax.jit` or `jax.lax.scan`, which "
    "does not carry States from call to call. Use its pure functions, in two lines:\n"
    "    pure = learner.functional()  # outside; start with state = pure.state()\n"
    "    state, output = pure.step(state, x)  # inside\n"
    "or the transformation of brainstate, such as `brainstate.transform.jit`, `grad` or `for_loop`."
)


@contextlib.contextmanager
def states_are_carried() -> Iterator[None]:
    """Refuse to write a State inside a transformation of JAX (not of brainstate).

    Raises
    ------
    OptionError
        There.
    """
    try:
        yield
    except brainstate.TraceContextError as error:
        raise OptionError(RAW) from error


def write_values(states: Iterable[brainstate.State], values: Iterable[Any]) -> None:
    """Write a program's results to States.

    Raises
    ------
    OptionError
        Inside a transformation of JAX (not of brainstate).
    """
    with states_are_carried():
        set_values(states, values)
