"""Online learning of recurrent and spiking networks by eligibility traces."""

import typing as _types

from . import nn as nn
from . import streams as streams
from ._compare import ComparedRule as ComparedRule
from ._compare import GradientCheck as GradientCheck
from ._compare import RuleComparison as RuleComparison
from ._compare import compare_rules as compare_rules
from ._compare import gradient_check as gradient_check
from ._ended import missing as _missing
from ._errors import BraintraceError as BraintraceError
from ._errors import CheckpointError as CheckpointError
from ._errors import CompilationError as CompilationError
from ._errors import DtypeError as DtypeError
from ._errors import LostTracesError as LostTracesError
from ._errors import MissingPackageError as MissingPackageError
from ._errors import NoCheckpointError as NoCheckpointError
from ._errors import NonFiniteError as NonFiniteError
from ._errors import NonFiniteWarning as NonFiniteWarning
from ._errors import NotCompiledError as NotCompiledError
from ._errors import NotInitializedError as NotInitializedError
from ._errors import NotPicklableError as NotPicklableError
from ._errors import OptionError as OptionError
from ._errors import PrimitiveError as PrimitiveError
from ._errors import ShapeError as ShapeError
from ._errors import UnitError as UnitError
from ._etrace_op.check import PrimitiveReport as PrimitiveReport
from ._etrace_op.check import check_primitive as check_primitive
from ._etrace_op.conv import conv as conv
from ._etrace_op.conv import etp_conv_p as etp_conv_p
from ._etrace_op.dense import etp_mm_p as etp_mm_p
from ._etrace_op.dense import etp_mv_p as etp_mv_p
from ._etrace_op.dense import feedback_matmul as feedback_matmul
from ._etrace_op.dense import matmul as matmul
from ._etrace_op.einsum import einsum as einsum
from ._etrace_op.einsum import embedding as embedding
from ._etrace_op.einsum import grouped_matmul as grouped_matmul
from ._etrace_op.elemwise import element_wise as element_wise
from ._etrace_op.elemwise import etp_elemwise_p as etp_elemwise_p
from ._etrace_op.inline import inline as inline
from ._etrace_op.lora import etp_lora_mm_p as etp_lora_mm_p
from ._etrace_op.lora import etp_lora_mv_p as etp_lora_mv_p
from ._etrace_op.lora import lora_matmul as lora_matmul
from ._etrace_op.mark import mark as mark
from ._etrace_op.primitive import ETPPrimitive as ETPPrimitive
from ._etrace_op.primitive import register_primitive as register_primitive
from ._etrace_op.primitive import register_primitive_spec as register_primitive_spec
from ._etrace_op.registry import ETPPrimitiveSpec as ETPPrimitiveSpec
from ._etrace_op.registry import get_primitive_spec as get_primitive_spec
from ._etrace_op.sparse import etp_sp_mm_p as etp_sp_mm_p
from ._etrace_op.sparse import etp_sp_mv_p as etp_sp_mv_p
from ._etrace_op.sparse import sparse_matmul as sparse_matmul
from ._from_function import FunctionModel as FunctionModel
from ._from_function import from_function as from_function
from ._graph.graph import ETraceGraph as ETraceGraph
from ._graph.graph import TraceSpec as TraceSpec
from ._graph.hidden_group import HiddenGroup as HiddenGroup
from ._graph.hidden_group import HiddenParamOpRelation as HiddenParamOpRelation
from ._graph.report import ApproximationWarning as ApproximationWarning
from ._graph.report import Diagnostic as Diagnostic
from ._graph.report import Report as Report
from ._learner.arguments import MultiStepData as MultiStepData
from ._learner.arguments import SingleStepData as SingleStepData
from ._learner.carried import EligibilityTraces as EligibilityTraces
from ._learner.compile import compile as compile
from ._learner.compile import compile_etrace_graph as compile_etrace_graph
from ._learner.compile import shard as shard
from ._learner.full_rules import KF_RTRL as KF_RTRL
from ._learner.full_rules import RTRL as RTRL
from ._learner.full_rules import UORO as UORO
from ._learner.full_rules import Immediate as Immediate
from ._learner.full_rules import OSTLRecurrent as OSTLRecurrent
from ._learner.full_rules import SnAp as SnAp
from ._learner.functional import FunctionalLearner as FunctionalLearner
from ._learner.functional import LearnerState as LearnerState
from ._learner.learner import ETraceAlgorithm as ETraceAlgorithm
from ._learner.learner import Learner as Learner
from ._learner.rewards import TDTrace as TDTrace
from ._learner.rewards import three_factor_loss as three_factor_loss
from ._learner.unit_rules import D_RTRL as D_RTRL
from ._learner.unit_rules import ES_D_RTRL as ES_D_RTRL
from ._learner.unit_rules import OTTT as OTTT
from ._learner.unit_rules import RFLO as RFLO
from ._learner.unit_rules import EProp as EProp
from ._learner.unit_rules import IODimVjpAlgorithm as IODimVjpAlgorithm
from ._learner.unit_rules import OSTLFeedforward as OSTLFeedforward
from ._learner.unit_rules import ParamDimVjpAlgorithm as ParamDimVjpAlgorithm
from ._learner.unit_rules import pp_prop as pp_prop
from ._rules.plasticity import PairSTDP as PairSTDP
from ._rules.plasticity import RewardSTDP as RewardSTDP
from ._rules.plasticity import TripletSTDP as TripletSTDP
from ._rules.protocol import Rule as Rule
from ._rules.protocol import Site as Site
from .saving import restore as restore
from .saving import save as save
from .streams import river_regressor as river_regressor

__version__ = "2026.12.0"
__version_info__ = tuple(map(int, __version__.split(".")))  # noqa: RUF048 (numbers alone)


def __getattr__(name: str) -> _types.Any:
    raise _missing("braintrace", name)


__all__ = sorted(name for name in globals() if not name.startswith("_"))


def __dir__() -> list[str]:
    return __all__
