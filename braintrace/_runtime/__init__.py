"""A model at work: its States, its traces, and programs that move both on.

An algorithm has its model analysed and keeps what comes of it: `compiled_model`, with a
`compiled_step` for each batch size. `batch_axes` makes example arguments of another size, and
`environment` notices when something changes that the step has read besides. A call goes through
`stepping`, a sequence through a driver of its own; both take values from `model_states` and traces
from `carried_traces`, run a `program`, and store all of its results or none. `restart` starts
samples anew, with `initial_values`, which are compiled as long as their `surroundings` are the
same. `traces` is the State that users read and restore; `companions` notices hidden states that
something else has written, which they do not belong to.

Around all of it stand `mesh`, for arrays that JAX types with their sharding, and `threads`, for
callers that have to wait. `step_data` says which arguments are sequences.
"""

from .carried_traces import CarriedTraces as CarriedTraces
from .companions import check_companions as check_companions
from .companions import note_companions as note_companions
from .etrace_graph import compile_etrace_graph as compile_etrace_graph
from .memory import current_device as current_device
from .memory import memory_of as memory_of
from .mesh import as_users_have_it as as_users_have_it
from .mesh import in_automatic_region as in_automatic_region
from .mesh import on_automatic_axes as on_automatic_axes
from .mesh import traced_on_automatic_axes as traced_on_automatic_axes
from .model_states import States as States
from .model_states import add_to_states as add_to_states
from .model_states import all_states as all_states
from .model_states import read_arguments as read_arguments
from .model_states import read_states as read_states
from .model_states import short_term as short_term
from .model_states import values_by_path as values_by_path
from .model_states import whole_values as whole_values
from .model_states import write_states as write_states
from .program import Program as Program
from .program import Take as Take
from .program import advance as advance
from .program import write_values as write_values
from .recent import Recent as Recent
from .restart import check_where as check_where
from .restart import flags_of_samples as flags_of_samples
from .restart import start_anew as start_anew
from .restart import values_anew as values_anew
from .step_data import MultiStepData as MultiStepData
from .step_data import SingleStepData as SingleStepData
from .step_data import first_step as first_step
from .step_data import unwrap as unwrap
from .threads import one_thread_at_a_time as one_thread_at_a_time
from .traces import EligibilityTraces as EligibilityTraces
