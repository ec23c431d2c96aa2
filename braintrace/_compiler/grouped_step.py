"""A step with its hidden states grouped, the starting point of all later passes."""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from .._graph import HiddenGroup
from .._graph.traced_model import StateLeaf, TracedModel
from .._jax import Atom, Var
from .analysis import Analysis
from .back_through import BROADCAST
from .marked_operations import MarkedOperation
from .step_graph import StepGraph
from .walk import Walk


@dataclasses.dataclass(frozen=True, eq=False)
class GroupedStep:
    """A step, its hidden groups, and the facts that later passes need.

    Attributes
    ----------
    traced, analysis
        The step, and the analysis of its program.
    graph
        Paths between its States, parameters and ETP operations.
    operations
        Its ETP operations.
    outputs
        Hidden states that count as outputs.
    groups, walks
        Hidden groups, and for each of them the walk back from every state.
    """

    traced: TracedModel
    analysis: Analysis
    graph: StepGraph
    operations: list[MarkedOperation]
    outputs: tuple[StateLeaf, ...]
    groups: list[HiddenGroup]
    walks: list[list[Walk]]

    @property
    def new_states(self) -> Iterator[tuple[StateLeaf, Var]]:
        """The grouped states, with the variables of their new values."""
        return (pair for group in self.groups for pair in new_states(group))

    @property
    def remembered_states(self) -> Iterator[tuple[StateLeaf, Var]]:
        """The states of groups that a later step reads, with their new variables."""
        remembered = filter(self.is_remembered, self.groups)
        return (pair for group in remembered for pair in new_states(group))

    def is_remembered(self, group: HiddenGroup) -> bool:
        """Test whether a later step reads the states of a group."""
        return any(state.in_var in self.analysis.program.readers for state in group.states)

    @property
    def num_traced(self) -> int:
        """Number of old elements and ETP output elements that reach states elementwise."""
        ends = [operation.y_var for operation in self.operations]
        ends += [state.in_var for group in self.groups for state in group.states]
        walks = [walk for group_walks in self.walks for walk in group_walks]
        every_ids = [walk.ids[var] for walk in walks for var in ends if var in walk.ids]
        return sum(int(np.count_nonzero((ids >= 0) | (ids == BROADCAST))) for ids in every_ids)


def new_states(group: HiddenGroup) -> Iterator[tuple[StateLeaf, Var]]:
    """Yield the states of a group with the variables of their new values."""
    yield from dict.fromkeys(zip(group.states, group.new_vars, strict=True))


def seen_by_losses(traced: TracedModel, outputs: Sequence[StateLeaf]) -> list[Atom]:
    """Return the values that a loss can read: outputs, and other States written."""
    written = [leaf.out_var for leaf in traced.leaves if leaf.kind == "other" or leaf in outputs]
    return [*traced.output_atoms, *(atom for atom in written if atom is not None)]
