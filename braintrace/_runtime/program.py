"""Compiled programs that move a learner on, and how their results are stored.

A step of a learner is done as a whole or not at all. What can fail while it runs keeps the old
values until it has succeeded. All else runs on the traces' own buffers, and while it does so
neither a signal nor another thread gets in between.
"""

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias, TypeVar

import brainstate
import jax

from .._brainstate import is_watched, set_values
from .._errors import OptionError
from .._foreign import in_words
from .._interrupts import interruptible, uninterrupted
from .._jax import calls_back
from .carried_traces import CarriedTraces

Result = TypeVar("Result")

Take: TypeAlias = Callable[[], tuple[Any, bool]]
"""Returns the traces, and whether their buffers may be given to a program."""


class Program:
    """A pure function, compiled.

    Parameters
    ----------
    function
        The function.
    donated
        Which of its arguments holds traces, whose buffers it may be given; ``None``: none does.
    """

    def __init__(self, function: Callable[..., Any], donated: int | None = None) -> None:
        function = interruptible(function)
        self._run = jax.jit(function)
        self._run_in_place = jax.jit(function, donate_argnums=() if donated is None else donated)
        self._calls_back: bool | None = None

    def __call__(self, *arguments: Any, in_place: bool = False) -> Any:
        """Run it, on the buffers of its traces if they are its own."""
        return (self._run_in_place if in_place else self._run)(*arguments)

    def trace(self, *arguments: Any, in_place: bool = False) -> jax.stages.Traced:
        """Return the program for such arguments, which need not have numbers."""
        return (self._run_in_place if in_place else self._run).trace(*arguments)

    def can_fail(self, example: Callable[[], tuple[Any, ...]]) -> bool:
        """Tell whether a call can fail once it runs, by what it calls back or checks.

        Parameters
        ----------
        example
            Returns arguments; it is asked for them once.
        """
        if is_watched():  # whoever transforms the program runs it
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
    """Run programs and store their results, all or none.

    Parameters
    ----------
    traces
        The traces, which the programs move on.
    can_fail
        Whether a program can fail once it runs; see `Program.can_fail`.
    run
        Takes the traces, runs the programs, and returns their results.
    store
        Writes them to States and traces.
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
    "A step is called inside a transformation of JAX, which does not carry States from call to "
    "call. Use that of brainstate, such as `brainstate.transform.jit`, `grad`, `vmap` or `for_loop`"
)


def write_values(states: Iterable[brainstate.State], values: Iterable[Any]) -> None:
    """Write what a program returned for States.

    Raises
    ------
    OptionError
        Inside a transformation of JAX's own.
    """
    with in_words(OptionError, lambda: RAW):
        set_values(states, values)
