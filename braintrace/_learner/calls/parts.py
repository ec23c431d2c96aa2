"""Parts of a learner that its methods use."""

from typing import Any, NamedTuple, Protocol

import brainstate

from ..._algorithms import ETraceAlgorithm
from ..._function_model import gradients_for
from ..._graph import ETraceGraph
from ..._runtime.program import write_values
from ..._typing import PyTree
from ..state.optimizer import LearnerOptimizer
from .compilations import Compilations
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
