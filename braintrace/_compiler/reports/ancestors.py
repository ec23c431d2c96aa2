"""Ancestors of a hidden group, by gradient: old states, new states and weights."""

import dataclasses
from collections.abc import Iterable, Iterator

from ..._graph import FOLLOWS_ALL, HiddenGroup, Jacobian
from ..._jax import Atom, Var
from ..._jaxpr import carries_derivative
from ..groups.grouped_step import GroupedStep
from ..groups.marked_operations import MarkedOperation


@dataclasses.dataclass(frozen=True)
class Ancestors:
    """The ancestors of some operands, by printed name."""

    old_states: list[str]
    new_states: list[str]
    weights: list[str]

    @property
    def names(self) -> list[str]:
        """All of them."""
        return [*self.old_states, *self.new_states, *self.weights]


class AncestorSearch:
    """Search for ancestors of operands, up to ETP operations and new hidden states.

    Parameters
    ----------
    step
        The step.
    jacobian
        The learning rule's treatment of products (see `TraceMethod`). For a full-Jacobian rule, the
        search continues through ETP operations and the states of other groups.
    """

    def __init__(self, step: GroupedStep, jacobian: Jacobian) -> None:
        self.step, self.jacobian = step, jacobian
        self._follows_all = jacobian in FOLLOWS_ALL
        self._weights = {operation.y_var: operation.printed_paths for operation in step.operations}
        self._old = {state.in_var: state.name for state, _ in step.new_states}
        self._new = {var: state.name for state, var in step.new_states}

    def is_remembered(self, group: HiddenGroup) -> bool:
        """Test whether a later step reads a group, other than by ETP operations alone."""
        return self.step.is_remembered(group) and not group.delay_line

    def of_others(self, ancestors: Iterable[Var], group: HiddenGroup) -> list[str]:
        """Return the states of other groups whose new values are among ``ancestors``."""
        if not self.is_remembered(group):
            return []
        reached = set(ancestors).difference(group.new_vars)
        return [name for var, name in self._new.items() if var in reached]

    def ends(self, group: HiddenGroup) -> frozenset[Var]:
        """Return the variables at which a search from a group's states ends."""
        if self._follows_all:
            return frozenset()
        return frozenset(self._weights) | (frozenset(self._new) - frozenset(group.new_vars))

    def ancestors(self, operands: Iterable[Atom], group: HiddenGroup) -> Ancestors:
        """Return the ancestors of some operands, operand by operand."""
        old: dict[str, None] = {}
        new: dict[str, None] = {}
        weights: dict[str, None] = {}
        ends = self.ends(group)
        for atom in filter(carries_derivative, operands):
            ancestors = self.step.graph.gradients.ancestors([atom], ends)
            old.update((name, None) for var, name in self._old.items() if var in ancestors)
            new.update((name, None) for name in self.of_others(ancestors, group))
            marked = (paths for var, paths in self._weights.items() if var in ancestors)
            weights.update((path, None) for paths in marked for path in paths)
        return Ancestors(list(old), list(new), list(weights))

    def before(
        self, operands: Iterable[Atom], group: HiddenGroup
    ) -> Iterator[tuple[MarkedOperation, list[str]]]:
        """Yield the nearest ETP ancestors of operands, with the old states they read.

        An operation may read old states through other operations.
        """
        gradients, ends = self.step.graph.gradients, self.ends(group)
        ancestors = gradients.ancestors(operands, ends)
        others = ends - frozenset(self._weights)
        for operation in self.step.operations:
            if operation.y_var in ancestors:
                of_operation = gradients.ancestors([operation.y_var], others)
                states = [name for var, name in self._old.items() if var in of_operation]
                if states:
                    yield operation, states
