"""Runtime of a compiled model: States, traces, and the programs that advance them.

`compiled_model` keeps a `compiled_step` for each batch size, and `changes` compiles again if the
model has changed. A single call uses `stepping`, and a sequence uses a driver of the learner. Both
read values from `states.model_states` and traces from `carried_traces`, run a `program`, and write
its results through one `Store`: the States of the learner, or a state that the user gives. `resets`
resets samples to `states.initial_values`. `traces` is the State that users read and restore.
`states.companions` detects hidden states that other code has written, to which the traces do not
belong. `step_data` contains the wrappers that mark arguments as sequences.

All calls go through `environment.mesh`, for arrays that JAX types with their sharding, and
`environment.threads`, which serialises callers. A compiled step contains the values of
`environment.attributes` and `environment.environ` as constants, and a compiled ``init_state``
contains the values of `environment.captured`: these modules detect their changes.
"""

from .carried_traces import CarriedTraces as CarriedTraces
from .environment.memory import memory_of as memory_of
from .environment.mesh import as_users_have_it as as_users_have_it
from .environment.mesh import in_automatic_region as in_automatic_region
from .environment.mesh import on_automatic_axes as on_automatic_axes
from .environment.mesh import traced_on_automatic_axes as traced_on_automatic_axes
from .environment.threads import lock_of as lock_of
from .environment.threads import one_thread_at_a_time as one_thread_at_a_time
from .etrace_graph import compile_etrace_graph as compile_etrace_graph
from .program import Changes as Changes
from .program import OwnStates as OwnStates
from .program import Program as Program
from .program import Store as Store
from .program import Take as Take
from .program import write_values as write_values
from .resets import check_where as check_where
from .resets import flags_of_samples as flags_of_samples
from .resets import reset_array as reset_array
from .resets import reset_values as reset_values
from .states.model_states import States as States
from .states.model_states import add_to_states as add_to_states
from .states.model_states import all_states as all_states
from .states.model_states import read_arguments as read_arguments
from .states.model_states import read_states as read_states
from .states.model_states import short_term as short_term
from .states.model_states import values_by_path as values_by_path
from .states.model_states import whole_values as whole_values
from .states.model_states import write_states as write_states
from .states.recent import Recent as Recent
from .step_data import MultiStepData as MultiStepData
from .step_data import SingleStepData as SingleStepData
from .step_data import first_step as first_step
from .step_data import unwrap as unwrap
from .traces import EligibilityTraces as EligibilityTraces
