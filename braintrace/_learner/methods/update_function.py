"""Runs the update of a stream: the user's function or an optimizer.

An update may request a new sequence by ``reset_state``. All other writes to hidden states or traces
are refused: the next step must continue from the state after this one.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import NoReturn

import jax

from ..._algorithms import ETraceAlgorithm
from ..._brainstate import held
from ..._errors import OptionError
from ..._graph import Traces
from ..._runtime.carried_traces import CarriedTraces
from ..._runtime.traces import EligibilityTraces
from ..._typing import PyTree, path_name
from ..calls.interceptor import intercepting
from .recorder import first_written, traced_values
from .updates import StepResult, Update, Verdict


def run_update(
    algorithm: ETraceAlgorithm, update: Update, found: StepResult, traces: Traces
) -> tuple[jax.Array | None, Verdict]:
    """Run an update, and return the samples that it requests to reset; ``None``: no requests.

    Parameters
    ----------
    algorithm
        The algorithm of the learner.
    update, found
        The update, and its argument.
    traces
        Traces after the step, which the update can read.

    Returns
    -------
    flags, verdict
        Samples to reset, and the result of the update.

    Raises
    ------
    OptionError
        If it runs a step, or writes hidden states or traces.
    """
    left = traced_values(algorithm)
    with (
        intercepting(algorithm, _refuse_step),
        _showing(algorithm, traces),
        algorithm.requested_resets.collected() as requests,
    ):
        verdict = update(found)
    path = first_written(left, traced_values(algorithm))
    if path is not None:
        raise _refusal(f"writes the hidden State '{path_name(path)}' itself")
    if not requests:
        return None, verdict
    flags, *more = requests
    for some in more:
        flags = flags | some
    return flags, verdict


class _Shown(EligibilityTraces):
    """Traces after the step, for the tracing thread; other threads read the algorithm's traces."""

    def __init__(self, traces: Traces, own: EligibilityTraces) -> None:
        super().__init__(traces)
        self.own, self.reader = own, threading.get_ident()

    @property
    def carried(self) -> CarriedTraces:
        """The State that the current thread may read."""
        return self if threading.get_ident() == self.reader else self.own.carried


@contextlib.contextmanager
def _showing(algorithm: ETraceAlgorithm, traces: Traces) -> Iterator[None]:
    """Replace the algorithm's traces by the traces after the step, read-only."""
    own = algorithm.traces
    algorithm.traces = shown = _Shown(traces, own)
    try:
        yield
    finally:
        algorithm.traces = own
    leaves, now = jax.tree.leaves(traces), jax.tree.leaves(held(shown))
    is_kept = len(leaves) == len(now) and all(a is b for a, b in zip(leaves, now, strict=True))
    if not is_kept:
        raise _refusal("writes the traces")


def _refuse_step(*arguments: PyTree) -> NoReturn:
    raise _refusal("calls the learner, which runs a step")


def _refusal(what: str) -> OptionError:
    return OptionError(
        f"`update_fn` {what}. It may change parameters and its own States; hidden states and "
        "traces keep their values from after the step. Change hidden states in `update` of the "
        "model; to start a new sequence, call `reset_state` in `update_fn`, or use `reset`."
    )
