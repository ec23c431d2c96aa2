"""Request: a call of a learner's method, with checked options."""

from __future__ import annotations

from typing import NamedTuple

from ..._checks import shown
from ..._errors import OptionError
from ..._typing import PyTree
from .arguments import Chosen, chosen_among, of_numbers
from .options import Options
from .parts import LearnerParts


class Request(NamedTuple):
    """A call of one of a learner's methods.

    Attributes
    ----------
    method
        Its name.
    sequences, options
        The user's arguments; see `Learner.etrace_grad`.
    chosen
        The parameters whose gradients are requested; ``None``: all.
    start
        Index of its first step in the user's call.
    """

    method: str
    sequences: tuple[PyTree, ...]
    options: Options
    chosen: Chosen | None = None
    start: int = 0


def request_of(
    learner: LearnerParts, method: str, sequences: tuple[PyTree, ...], options: Options
) -> Request:
    """Return a call of a method.

    Raises
    ------
    OptionError
        If its options select no parameters of the model, or not exactly one kind of update.
    """
    if method == "etrace_online":
        _check_updates(options)
    sequences = of_numbers(sequences)
    if options.weights is None:
        return Request(method, sequences, options)
    chosen = chosen_among(learner.algorithm.param_states, options.weights)
    return Request(method, sequences, options, chosen)


def _check_updates(options: Options) -> None:
    """Refuse options with no update, or with two.

    Raises
    ------
    OptionError
        If both ``update_fn`` and ``optimizer`` are given, or none.
    """
    if options.update_fn is None and options.optimizer is None:
        raise OptionError(
            "`update_fn` and `optimizer` are both None; expected one of them, which changes the "
            "parameters after a step."
        )
    if options.update_fn is not None and options.optimizer is not None:
        raise OptionError(
            f"Both `update_fn` and `optimizer` are given ({shown(options.optimizer)}); expected "
            "one of them. In an `update_fn`, call the optimizer there."
        )
