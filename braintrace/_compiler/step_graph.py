"""Step graph: what depends on what within a step and over time, by value and by gradient."""

import dataclasses
from collections.abc import Collection

from .._graph.traced_model import TracedModel
from .._jax import Var, is_var
from .._jaxpr.program import carries_derivative
from .analysis import Analysis, Paths


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
