"""Requests: a call of a learner's method, converted from the user's arguments."""

from __future__ import annotations

from collections.abc import Callable

from ..._typing import PyTree
from ..calls.arguments import chosen_among, of_numbers
from ..calls.body import Arguments, Body
from ..calls.options import EVERY, Options
from ..calls.parts import LearnerParts
from .evolve import evolving, predicting
from .gradient import differentiating
from .late_labels import forecasting, learning_late, settling
from .online import learning_online
from .request import Request
from .updates import check_updates

BODIES: dict[str, Callable[[LearnerParts, Request, Arguments], Body]] = {
    "etrace_grad": differentiating,
    "etrace_online": learning_online,
    "etrace_evolve": evolving,
    "predict": predicting,
    "forecast": forecasting,
    "learn": learning_late,
    "settle": settling,
}
"""Constructors of the body of each method, from checked example arguments."""


def request_of(
    learner: LearnerParts, method: str, sequences: tuple[PyTree, ...], options: Options
) -> Request:
    """Return a call of a method.

    Raises
    ------
    OptionError
        If its options select no parameters of the model, or not exactly one kind of update.
    """
    if "update_fn" in EVERY[method]:
        check_updates(options)
    sequences = of_numbers(sequences)
    if options.weights is None:
        return Request(method, sequences, options)
    chosen = chosen_among(learner.algorithm.param_states, options.weights)
    return Request(method, sequences, options, chosen)
