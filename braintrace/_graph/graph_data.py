"""Fields of a compiled model."""

import dataclasses

from .batch import Batch
from .diagnostics import Diagnostic
from .flat_state import FlatState
from .hidden_group import HiddenGroup
from .relation import HiddenParamOpRelation
from .trace_spec import Record, TraceSpecs
from .traced_model import TracedModel


@dataclasses.dataclass(frozen=True, eq=False)
class GraphData:
    """The fields of `ETraceGraph`, without views and printing.

    Attributes
    ----------
    traced
        The step as a flat program with named inputs and outputs.
    hidden_groups
        Hidden states with elementwise coupling.
    hidden_param_op_relations
        ETP operations that reach hidden groups, and their parameters.
    diagnostics
        Approximations that a user should know.
    needs, trace_specs
        The residuals that the learning rule needs of every step, and the arrays that it carries
        from step to step; see `TraceMethod`.
    batch
        The number of samples, and the batch axis of each state.
    flat_state
        The hidden states as one vector, for full-Jacobian rules.
    """

    traced: TracedModel
    hidden_groups: tuple[HiddenGroup, ...]
    hidden_param_op_relations: tuple[HiddenParamOpRelation, ...]
    diagnostics: tuple[Diagnostic, ...]
    needs: frozenset[Record]
    trace_specs: TraceSpecs
    batch: Batch
    flat_state: FlatState | None = None
