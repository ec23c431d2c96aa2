"""Pure numerics: functions of a compiled model and arrays."""

from . import io_dim as io_dim
from . import param_dim as param_dim
from .jacobians import operands as operands
from .probed_step import Probes as Probes
from .probed_step import zero_probes as zero_probes
from .restart import over_first_axis as over_first_axis
from .restart import restarted as restarted
from .restart import restarted_probes as restarted_probes
from .step import Step as Step
from .step import TraceMethod as TraceMethod
from .step import carried_into as carried_into
from .step import enter_window as enter_window
from .step import plain_step as plain_step
from .step import recorded_step as recorded_step
from .step import single_step as single_step
from .step import solve_chunk as solve_chunk
from .step import window_step as window_step
from .zero import as_arrays as as_arrays
from .zero import is_zero as is_zero
