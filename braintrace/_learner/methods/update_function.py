"""Runs the update of a stream: the user's function or an optimizer.

Writes to hidden states or traces are refused: the next step must continue from the state after this
one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NoReturn

import jax

from ..._algorithms import ETraceAlgorithm
from ..._brainstate import held
from ..._errors import OptionError
from ..._graph import Traces
from ..._runtime.traces import EligibilityTraces
from ..._typing import PyTree, path_name
from ..calls.interceptor import intercepting
from .recorder import first_written, traced_values
from .updates import StepResult, Update, Verdict


def run_update(
    algorithm: ETraceAlgorithm, update: Update, found: StepResult, traces: Traces
) -> Verdict:
    """Run an update, and return its verdict.

    Parameters
    ----------
    algorithm
        The algorithm of the learner.
    update, found
        The update, and its argument.
    traces
        Traces after the step, which the update can read.

    Raises
    ------
    OptionError
        If it runs a step, or writes hidden states or traces.
    """
    left = traced_values(algorithm)
    with intercepting(algorithm, _refuse_step), _showing(algorithm, traces):
        verdict = update(found)
    path = first_written(left, traced_values(algorithm))
    if path is not None:
        raise _refusal(f"writes the hidden State '{path_name(path)}'")
    return verdict


@contextlib.contextmanager
def _showing(algorithm: ETraceAlgorithm, traces: Traces) -> Iterator[None]:
    """Replace the algorithm's traces by the traces after the step, read-only."""
    own = algorithm.traces
    algorithm.traces = shown = EligibilityTraces(traces)
    shown.carried.zeros = own.carried.zeros
    try:
        yield
    finally:
        algorithm.traces = own
    leaves, now = jax.tree.leaves(traces), jax.tree.leaves(held(shown.carried))
    is_kept = len(leaves) == len(now) and all(a is b for a, b in zip(leaves, now, strict=True))
    if not is_kept:
        raise _refusal("writes the traces")


def _refuse_step(*arguments: PyTree) -> NoReturn:
    raise _refusal("calls the learner, which runs a step")


def _refusal(what: str) -> OptionError:
    return OptionError(
        f"`update_fn` {what}. It may change parameters and its own States; hidden states and "
        "traces keep their values from after the step. Change hidden states in `update` of the "
        "model; to start a new sequence, use `reset`."
    )
