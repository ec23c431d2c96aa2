"""Step graph: the paths between named values of a step, by value and by gradient.

The nodes are the inputs of the step (mostly parameters and States), States after the step, and the
outputs of ETP operations. A *use* is a node and an equation that reads it. One pass over the
program finds, for every variable, the uses that it depends on without another node in between.
Paths from node to node follow from these uses, so every question about a step is a search among a
few dozen nodes.
"""

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from .._graph.traced_model import TracedModel
from .._jax import Atom, Var, is_var
from .._jaxpr import CONSTANT, Program, carries_derivative, reached
from .analysis import Analysis


class Use(NamedTuple):
    """A node, and the index of an equation that reads it."""

    node: Var
    equation: int


class Paths:
    """The paths between the nodes of a step, all by value or all by gradient.

    Parameters
    ----------
    uses
        The uses of nodes.
    direct
        For every variable, a bit mask over ``uses``: those that it depends on directly.
    nodes
        The nodes.
    after
        The old and the new value of each State that the step writes.
    """

    def __init__(
        self,
        uses: Sequence[Use],
        direct: Mapping[Var, int],
        nodes: Collection[Var],
        after: Collection[tuple[Var, Var]],
    ) -> None:
        self._uses, self._direct, self._nodes = uses, direct, nodes
        self._sinks: dict[Use, set[Var]] = {}
        for node in nodes:
            for use in self.direct_uses(node):
                self._sinks.setdefault(use, set()).add(node)
        self._uses_of: dict[Var, list[Use]] = {}
        for use in uses:
            self._uses_of.setdefault(use.node, []).append(use)
        self._before: dict[Var, set[Var]] = {}
        for old, new in after:
            self._before.setdefault(new, set()).add(old)

    def uses_of(self, node: Var) -> Sequence[Use]:
        """Return the uses of a node, in the order of the equations."""
        return self._uses_of.get(node, ())

    def sinks(self, use: Use) -> set[Var]:
        """Return the nodes that depend directly on a use of a node."""
        return self._sinks.get(use, set())

    def direct_uses(self, var: Var) -> Iterator[Use]:
        """Yield the uses of nodes that a variable depends on directly."""
        mask = self._direct.get(var, 0)
        while mask:
            lowest = mask & -mask
            yield self._uses[lowest.bit_length() - 1]
            mask ^= lowest

    def ancestors(self, targets: Iterable[Atom], ends: Collection[Var] = ()) -> set[Var]:
        """Return the nodes that some variables depend on within the step.

        Nodes among the variables are included. Nodes in ``ends`` are included, their ancestors are
        not.
        """

        def before(var: Var) -> Iterable[Var]:
            return () if var in ends else (use.node for use in self.direct_uses(var))

        return {var for var in reached(filter(is_var, targets), before) if var in self._nodes}

    def descendants(self, starts: Iterable[Var], ends: Collection[Var] = ()) -> set[Var]:
        """Return some nodes and their descendants within the step.

        Nodes in ``ends`` are included, their descendants are not.
        """
        return self._forward(starts, ends, {})

    def descendants_over_time(self, starts: Iterable[Var], ends: Collection[Var] = ()) -> set[Var]:
        """Return some nodes and their descendants, in this step or in a later one."""
        return self._forward(starts, ends, self._before)

    def _forward(
        self, starts: Iterable[Var], ends: Collection[Var], before: Mapping[Var, set[Var]]
    ) -> set[Var]:
        def after(node: Var) -> Iterable[Var]:
            if node in ends:
                return ()
            sinks = (sink for use in self.uses_of(node) for sink in self.sinks(use))
            return itertools.chain(sinks, before.get(node, ()))

        return reached(starts, after)


@dataclasses.dataclass(frozen=True, eq=False)
class StepGraph:
    """The paths between the nodes of a step.

    Attributes
    ----------
    values
        Paths by which values depend on values, except through ``stop_gradient``.
    gradients
        Paths by which a gradient passes.
    operations, opaque
        The outputs of ETP operations, and the outputs of those that end a walk.
    """

    values: Paths
    gradients: Paths
    operations: frozenset[Var]
    opaque: frozenset[Var]


def step_graph(
    traced: TracedModel, analysis: Analysis, states: Collection[tuple[Var, Var]]
) -> StepGraph:
    """Build the step graph of a model.

    Parameters
    ----------
    traced, analysis
        The step.
    states
        The old and the new value of its hidden states, as the model itself reads them.
    """
    program = analysis.program
    written = [leaf for leaf in traced.leaves if is_var(leaf.out_var)]
    after = set(states)
    known = {old for old, _ in after}
    after |= {(leaf.in_var, leaf.out_var) for leaf in written if leaf.in_var not in known}
    operations = program.made_by(analysis.roles)
    new = (var for _, var in states)
    ends = [*(leaf.in_var for leaf in traced.leaves), *(leaf.out_var for leaf in written)]
    nodes = operations.union(program.in_vars, ends, new)
    return StepGraph(
        values=_paths(program, nodes, after, is_var),
        gradients=_paths(program, nodes, after, carries_derivative),
        operations=operations,
        opaque=program.made_by(analysis.opaque),
    )


def _paths(
    program: Program,
    nodes: Collection[Var],
    after: Collection[tuple[Var, Var]],
    passes: Callable[[Atom], bool],
) -> Paths:
    """Return the paths through variables for which ``passes`` holds."""
    uses: dict[Use, int] = {}
    direct: dict[Var, int] = {}
    for index, equation in enumerate(program.equations):
        if equation.primitive.name in CONSTANT:
            continue
        mask = 0
        for atom in filter(passes, equation.invars):
            if atom in nodes:
                mask |= 1 << uses.setdefault(Use(atom, index), len(uses))
            else:
                mask |= direct.get(atom, 0)
        direct.update((var, mask) for var in equation.outvars if passes(var))
    return Paths([*uses], direct, nodes, after)
