"""Binding times of a step: constant, parameter-derived, or data."""

from .._graph.traced_model import StateKind, StateLeaf, TracedModel
from .._jax import Var
from .._jaxpr import BindingTime, flows_of_variables, question_of_taint
from .analysis import Analysis


def data_of(traced: TracedModel, analysis: Analysis) -> set[Var]:
    """Return the variables that depend on data."""
    leaves = {leaf.in_var: leaf for leaf in traced.leaves}
    inputs = [time_of_leaf(leaves.get(var)) for var in analysis.program.in_vars]
    times = flows_of_variables(question_of_taint(), analysis.constants, inputs)
    return {var for var, time in times.items() if time is BindingTime.DATA}


def time_of_leaf(leaf: StateLeaf | None) -> BindingTime:
    """Return the binding time of an input of the step.

    ``None`` means an argument of the step.
    """
    return BindingTime.DATA if leaf is None else time_of(leaf.kind, leaf.out_var is not None)


def time_of(kind: StateKind, changes: bool) -> BindingTime:
    """Return the binding time of a State's leaf before the step.

    Parameters
    ----------
    kind
        The kind of the State.
    changes
        Whether the step writes it, or it differs from sample to sample.
    """
    if kind == "parameter":
        return BindingTime.PARAMETER
    return BindingTime.DATA if changes or kind == "random" else BindingTime.CONSTANT
