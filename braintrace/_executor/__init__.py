"""Pure numerics: functions of a compiled model and arrays."""

from .io_dim import InputOutputTraces as InputOutputTraces
from .io_dim import decay_of as decay_of
from .jacobians import Inputs as Inputs
from .jacobians import operands as operands
from .param_dim import ParameterTraces as ParameterTraces
from .probed_step import Probes as Probes
from .probed_step import hold_old_states as hold_old_states
from .probed_step import zero_probes as zero_probes
from .restart import over_first_axis as over_first_axis
from .restart import restarted as restarted
from .restart import restarted_probes as restarted_probes
from .step import Step as Step
from .step import check_method as check_method
from .step import chunk_gradient as chunk_gradient
from .step import plain_step as plain_step
from .step import recorded_step as recorded_step
from .step import single_step as single_step
from .traces import kept_specs as kept_specs
from .traces import restart_traces as restart_traces
from .traces import size_in_bytes as size_in_bytes
from .traces import starting_traces as starting_traces
from .window import run_window as run_window
from .window import window_step as window_step
from .zero import as_arrays as as_arrays
from .zero import is_zero as is_zero
