"""Parts of a learner that its methods use, and a call of one of them."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import brainstate

from .._algorithms import ETraceAlgorithm
from .._checks import shown
from .._errors import OptionError
from .._from_function import gradients_for
from .._graph import ETraceGraph
from .._runtime.program import write_values
from .._typing import PyTree
from .compilations import Compilations
from .optimizer import LearnerOptimizer
from .options import Chosen, Options, chosen_among, of_numbers
from .placed import Placing


class LearnerParts(NamedTuple):
    """The parts of a learner.

    Attributes
    ----------
    algorithm
        The algorithm, with the model and the traces.
    held_optimizer
        The optimizer of `Learner.etrace_online`.
    drivers
        The sequence programs that the learner has compiled.
    """

    algorithm: ETraceAlgorithm
    held_optimizer: LearnerOptimizer
    drivers: Compilations

    @property
    def graph(self) -> ETraceGraph:
        """The compiled model."""
        return self.algorithm.graph

    def states(self) -> list[brainstate.State]:
        """Return all States of the learner."""
        holders = (self.algorithm, self.held_optimizer)
        return [state for holder in holders for state in brainstate.graph.states(holder).values()]

    def parameters_for_optimizer(self) -> PyTree:
        """Return the parameters in the structure of their gradients."""
        states = self.algorithm.param_states
        return gradients_for(self.algorithm.model, {p: s.value for p, s in states.items()})

    def init_optimizer(self, optimizer: Any) -> None:
        """See `Learner.init_optimizer`."""
        self.held_optimizer.begin(optimizer, self.parameters_for_optimizer)
        self.place()

    def placing(self) -> Placing | None:
        """Return the placement of the values of the States; ``None``: no mesh."""
        placement = self.algorithm.placement
        if placement is None:
            return None
        return Placing(self.algorithm, placement)

    def place(self) -> None:
        """Place the learner's arrays on its mesh, if it has one."""
        placing = self.placing()
        if placing is not None:
            self.algorithm.place()
            states = list(self.held_optimizer.states.values())
            write_values(states, placing.values(states, [state.value for state in states]))


class HasParts(Protocol):
    """A learner, for functions that become its methods."""

    @property
    def parts(self) -> LearnerParts: ...


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
