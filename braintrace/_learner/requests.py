"""What a call of one of a learner's methods asks for, from what the user gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import brainstate
from jax.typing import ArrayLike

from .._typing import PyTree
from .arguments import Options, chosen_among
from .evolve import evolving, predicting
from .gradient import differentiating
from .online import stream_request
from .parts import LearnerParts
from .request import Request


def of_gradient(
    learner: LearnerParts,
    *sequences: PyTree,
    step_fn: Callable[..., PyTree],
    mask: ArrayLike | None = None,
    reset: ArrayLike | None = None,
    weights: Mapping[PyTree, brainstate.State] | None = None,
    **options: Any,
) -> Request:
    """Return a call of `Learner.etrace_grad`."""
    chosen = chosen_among(learner.algorithm.param_states, weights)
    made = Options(weights=chosen, **options)
    functions = {"step_fn": step_fn}
    return Request("etrace_grad", differentiating, sequences, made, functions, mask, reset)


def of_stream(
    learner: LearnerParts,
    *sequences: PyTree,
    step_fn: Callable[..., PyTree],
    optimizer: Any = None,
    update_fn: Callable[..., PyTree] | None = None,
    mask: ArrayLike | None = None,
    reset: ArrayLike | None = None,
    **options: Any,
) -> Request:
    """Return a call of `Learner.etrace_online`."""
    given = (update_fn, optimizer)
    return stream_request(learner, sequences, Options(**options), step_fn, given, mask, reset)


def of_evolution(
    learner: LearnerParts, *sequences: PyTree, reset: ArrayLike | None = None, **options: Any
) -> Request:
    """Return a call of `Learner.etrace_evolve`."""
    return Request("etrace_evolve", evolving, sequences, Options(**options), reset=reset)


def of_prediction(
    learner: LearnerParts, *sequences: PyTree, reset: ArrayLike | None = None
) -> Request:
    """Return a call of `Learner.predict`."""
    return Request("predict", predicting, sequences, reset=reset)


REQUESTS: dict[str, Callable[..., Request]] = {
    "etrace_grad": of_gradient,
    "etrace_online": of_stream,
    "etrace_evolve": of_evolution,
    "predict": of_prediction,
}
