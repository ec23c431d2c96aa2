"""Runtime of a compiled model: States, traces, and the programs that advance them.

`compiled_model` keeps a `compiled_step` for each batch size and all attributes among its
`known_steps`, and `changes` compiles again if the model has changed. The programs of a step go on
if another does the same (`same_step`), and its traces if they stand for the same (`meaning`). A
single call uses `stepping`, and a sequence uses a driver of the learner. Both read values from
`states.model_states` and traces from `carried_traces`, run a `program`, and write its results
through one `Store`: the States of the learner, or a state that the user gives. `resets` resets
samples to `states.initial_values`. `traces` is the State that users read and restore.
`states.companions` detects hidden states that other code has written, to which the traces do not
belong. `step_data` contains the wrappers that mark arguments as sequences.

All calls go through `environment.mesh`, for arrays that JAX types with their sharding, and
`environment.threads`, which serialises callers. A compiled step contains the values of
`environment.attributes` and `environment.environ` as constants, and a compiled ``init_state``
contains the values of `environment.captured`: these modules detect their changes.
"""
