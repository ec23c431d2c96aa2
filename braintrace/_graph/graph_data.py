"""Fields of a compiled model."""

import dataclasses

from .batch import Batch
from .diagnostics import Diagnostic
from .hidden_group import HiddenGroup
from .relation import HiddenParamOpRelation
from .trace_spec import Record, TraceSpecs
from .traced_model import TracedModel
from .whole_state import WholeState


@dataclasses.dataclass(frozen=True, eq=False)
class GraphData:
    """What the compiler found in one step of a model, without views and printing.

    Attributes
    ----------
    traced
        The step as a flat program with named inputs and outputs.
    hidden_groups
        Hidden states that are coupled position by position.
    hidden_param_op_relations
        ETP operations that reach hidden groups, and their parameters.
    diagnostics
        What a user should know about the approximations made.
    needs, trace_specs
        What the learning rule that the model was compiled for reads of every step, and what it
        carries from step to step; see `TraceMethod`.
    batch
        The number of samples, and the batch axis of each state.
    whole
        The hidden states as one vector, for rules that follow every way from state to state.
    """

    traced: TracedModel
    hidden_groups: tuple[HiddenGroup, ...]
    hidden_param_op_relations: tuple[HiddenParamOpRelation, ...]
    diagnostics: tuple[Diagnostic, ...]
    needs: frozenset[Record]
    trace_specs: TraceSpecs
    batch: Batch
    whole: WholeState | None = None
