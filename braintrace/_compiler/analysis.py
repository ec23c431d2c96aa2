"""Hidden groups of a step, and the rewriting of the step that shows more of them."""

import dataclasses

from .._graph.hidden_group import HiddenGroup
from .._graph.traced_model import StateLeaf, TracedModel
from .backward import states_as_outputs
from .derivative import Derivatives
from .hidden_groups import find_hidden_groups
from .positions import Walk
from .relations import MarkedOperation, marked_operations
from .split_loops import num_traced, split_loops
from .split_shared_uses import split_shared_uses


@dataclasses.dataclass(frozen=True, eq=False)
class Analysis:
    """A step, and what is in it.

    Attributes
    ----------
    traced
        The step, rewritten so that what positions do on their own is seen.
    operations
        Its marked operations.
    outputs
        Hidden states that count as outputs.
    groups, walks
        Hidden groups, and for each of them the walk back from every state.
    """

    traced: TracedModel
    operations: list[MarkedOperation]
    outputs: tuple[StateLeaf, ...]
    groups: list[HiddenGroup]
    walks: list[list[Walk]]

    @property
    def num_traced(self) -> int:
        """See `num_traced`."""
        return num_traced(self.operations, self.groups, self.walks)


def analysed(
    traced: TracedModel, every_state: bool, unroll_limit: int, derivatives: Derivatives
) -> Analysis:
    """Return the step in a form that keeps what positions do on their own, and what is in it."""
    found = _with_shared_uses_split(traced, every_state, derivatives)
    while (apart := split_loops(found.traced, found.walks, unroll_limit)) is not None:
        again = _with_shared_uses_split(apart, every_state, derivatives)
        if again.num_traced <= found.num_traced:
            break  # everything in the loop mixes: it may as well stay a loop
        found = again
    return found


def _with_shared_uses_split(
    traced: TracedModel, every_state: bool, derivatives: Derivatives
) -> Analysis:
    while True:
        operations = marked_operations(traced)
        outputs = states_as_outputs(traced, derivatives)
        groups, walks = find_hidden_groups(traced, every_state, outputs, derivatives)
        apart = split_shared_uses(traced, operations, walks, derivatives)
        if apart is None:
            return Analysis(traced, operations, outputs, groups, walks)
        traced = apart
