"""Step graph: what depends on what within a step and over time, by value and by gradient."""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import chain

from .._graph.traced_model import TracedModel
from .._jax import Atom, Var, is_var
from .._jaxpr.primitives import CONSTANT
from .._jaxpr.program import Program, carries_derivative, reached
from .analysis import Analysis


@dataclasses.dataclass(frozen=True, eq=False)
class Paths:
    """The paths between the variables of a step, by value or by gradient.

    Attributes
    ----------
    program
        The program of the step.
    passes
        Tests whether paths pass a variable.
    before
        The old values of the States with a new value.
    """

    program: Program
    passes: Callable[[Atom], bool]
    before: Mapping[Var, set[Var]]

    def uses_of(self, var: Var) -> Iterable[int]:
        """Return the equations that read a variable, in order."""
        readers = (index for index, _ in self.program.readers.get(var, ()))
        return dict.fromkeys(index for index in readers if not self._ends_at(index))

    def ancestors(self, targets: Iterable[Atom], ends: Collection[Var] = ()) -> set[Var]:
        """Return some variables and what they depend on within the step.

        Variables in ``ends`` are included, what they depend on is not.
        """
        return self.program.depends_on(targets, frozenset(ends), CONSTANT, self.passes)

    def descendants(self, starts: Iterable[Var], ends: Collection[Var] = ()) -> set[Var]:
        """Return some variables and what depends on them within the step.

        Variables in ``ends`` are included, what depends on them is not.
        """
        return self._forward(starts, ends, {})

    def descendants_over_time(self, starts: Iterable[Var], ends: Collection[Var] = ()) -> set[Var]:
        """Return the same, in this step or in a later one."""
        return self._forward(starts, ends, self.before)

    def _forward(
        self, starts: Iterable[Var], ends: Collection[Var], before: Mapping[Var, set[Var]]
    ) -> set[Var]:
        def after(var: Var) -> Iterable[Var]:
            if var in ends or not self.passes(var):
                return ()
            results = (self.program.equations[index].outvars for index in self.uses_of(var))
            return chain(filter(self.passes, chain(*results)), before.get(var, ()))

        return reached(starts, after)

    def _ends_at(self, index: int) -> bool:
        return self.program.equations[index].primitive.name in CONSTANT


@dataclasses.dataclass(frozen=True, eq=False)
class StepGraph:
    """The paths between the variables of a step.

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
    program, known = analysis.program, {old for old, _ in states}
    written = ((leaf.in_var, leaf.out_var) for leaf in traced.leaves if is_var(leaf.out_var))
    before: dict[Var, set[Var]] = {}
    for old, new in (*states, *(pair for pair in written if pair[0] not in known)):
        before.setdefault(new, set()).add(old)
    return StepGraph(
        values=Paths(program, is_var, before),
        gradients=Paths(program, carries_derivative, before),
        operations=program.made_by(analysis.roles),
        opaque=program.made_by(analysis.opaque),
    )
