"""Parts of a learner that its methods use."""

from typing import Any, NamedTuple, Protocol

import brainstate
import jax

from ..._algorithms import ETraceAlgorithm
from ..._brainstate import Hidden, peek
from ..._function_model import gradients_for
from ..._graph import ETraceGraph
from ..._runtime.program import write_values
from ..._typing import PyTree
from ..state.optimizer import LearnerOptimizer
from .compilations import Compilations
from .placed import Placing


class ForecastState(brainstate.LongTermState):
    """State with the forecasts that wait for a label; see `late_labels`."""


class PendingForecasts(brainstate.graph.Node):
    """The forecasts of a learner that wait for a label.

    Attributes
    ----------
    waiting
        State of the forecasts; its value is ``None`` before the first one.
    last_prediction
        Inputs of the last call, if this was a concrete `Learner.predict`.
    """

    def __init__(self) -> None:
        self.waiting = ForecastState(None)
        self.last_prediction: Hidden[tuple[PyTree, ...]] = Hidden(())

    @property
    def structure(self) -> Any:
        """Structure, shapes and dtypes of the forecasts."""
        leaves, tree = jax.tree.flatten(peek(self.waiting))
        return tree, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


class LearnerParts(NamedTuple):
    """The parts of a learner.

    Attributes
    ----------
    algorithm
        The algorithm, with the model and the traces.
    held_optimizer
        The optimizer of `Learner.etrace_online`.
    held_forecasts
        The forecasts that wait for a label.
    drivers
        The sequence programs that the learner has compiled.
    """

    algorithm: ETraceAlgorithm
    held_optimizer: LearnerOptimizer
    held_forecasts: PendingForecasts
    drivers: Compilations[Any]

    @property
    def graph(self) -> ETraceGraph:
        """The compiled model."""
        return self.algorithm.graph

    def states(self) -> list[brainstate.State]:
        """Return all States of the learner."""
        holders = (self.algorithm, self.held_optimizer, self.held_forecasts)
        return [state for holder in holders for state in brainstate.graph.states(holder).values()]

    def parameters_for_optimizer(self) -> PyTree:
        """Return the parameters in the structure of their gradients."""
        states = self.algorithm.param_states
        return gradients_for(self.algorithm.model, {p: s.value for p, s in states.items()})

    @property
    def holds_more(self) -> bool:
        """Whether the learner has forecasts, or an optimizer with its own States."""
        return peek(self.held_forecasts.waiting) is not None or self.held_optimizer.own is not None

    def init_optimizer(self, optimizer: Any) -> None:
        """See `Learner.init_optimizer`."""
        self.held_optimizer.begin(optimizer, self.parameters_for_optimizer)
        self.place()

    def placing(self) -> Placing | None:
        """Return the placement of the values of the States; ``None``: no mesh."""
        placement = self.algorithm.placement
        if placement is None:
            return None
        return Placing(self.algorithm, self.held_optimizer.states, placement)

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
