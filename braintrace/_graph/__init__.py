"""What the compiler finds, as frozen data that every later room reads."""

from .diagnostics import ApproximationWarning as ApproximationWarning
from .diagnostics import Diagnostic as Diagnostic
from .diagnostics import DiagnosticKind as DiagnosticKind
from .graph import ETraceGraph as ETraceGraph
from .hidden_group import Cut as Cut
from .hidden_group import HiddenGroup as HiddenGroup
from .influence import InfluenceMap as InfluenceMap
from .influence import InjectionPoint as InjectionPoint
from .method import Boundary as Boundary
from .method import Record as Record
from .method import Records as Records
from .method import Role as Role
from .method import Signal as Signal
from .method import TraceMethod as TraceMethod
from .method import Traces as Traces
from .method import TraceSpec as TraceSpec
from .method import TraceSpecs as TraceSpecs
from .method import Weights as Weights
from .method import specs_of as specs_of
from .relation import HiddenParamOpRelation as HiddenParamOpRelation
from .report import Report as Report
from .report import SequenceRow as SequenceRow
from .report import report_of as report_of
from .traced_model import StateKind as StateKind
from .traced_model import StateLeaf as StateLeaf
from .traced_model import TracedModel as TracedModel
