"""Online learning of recurrent and spiking networks by eligibility traces."""

from ._algorithms import D_RTRL as D_RTRL
from ._algorithms import ES_D_RTRL as ES_D_RTRL
from ._algorithms import EligibilityTraces as EligibilityTraces
from ._algorithms import ETraceAlgorithm as ETraceAlgorithm
from ._algorithms import IODimVjpAlgorithm as IODimVjpAlgorithm
from ._algorithms import MultiStepData as MultiStepData
from ._algorithms import ParamDimVjpAlgorithm as ParamDimVjpAlgorithm
from ._algorithms import SingleStepData as SingleStepData
from ._algorithms import pp_prop as pp_prop
from ._compiler import ApproximationWarning as ApproximationWarning
from ._compiler import Diagnostic as Diagnostic
from ._compiler import ETraceGraph as ETraceGraph
from ._compiler import HiddenGroup as HiddenGroup
from ._compiler import HiddenParamOpRelation as HiddenParamOpRelation
from ._compiler import compile_etrace_graph as compile_etrace_graph
from ._errors import BraintraceError as BraintraceError
from ._errors import CompilationError as CompilationError
from ._errors import DtypeError as DtypeError
from ._errors import NotCompiledError as NotCompiledError
from ._errors import OptionError as OptionError
from ._errors import PrimitiveError as PrimitiveError
from ._errors import ShapeError as ShapeError
from ._errors import UnitError as UnitError
from ._etrace_op import ETPPrimitive as ETPPrimitive
from ._etrace_op import ETPPrimitiveSpec as ETPPrimitiveSpec
from ._etrace_op import element_wise as element_wise
from ._etrace_op import get_primitive_spec as get_primitive_spec
from ._etrace_op import matmul as matmul
from ._etrace_op import register_primitive as register_primitive
from ._etrace_op import register_primitive_spec as register_primitive_spec
from ._learner import Learner as Learner
from ._learner import compile as compile

__version__ = "0.1.0"
