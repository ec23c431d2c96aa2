"""ETP operations: user functions, primitives, and the rules of their traces.

The registries are stable names: scripts import them from here.
"""

from .registry import BATCHED_PRIMITIVES as BATCHED_PRIMITIVES
from .registry import ETP_PRIMITIVES as ETP_PRIMITIVES
from .registry import ETP_RULES_INIT_DRTRL as ETP_RULES_INIT_DRTRL
from .registry import ETP_RULES_INIT_PP as ETP_RULES_INIT_PP
from .registry import ETP_RULES_XY_TO_DW as ETP_RULES_XY_TO_DW
from .registry import ETP_RULES_YW_TO_W as ETP_RULES_YW_TO_W
