"""Runtime of a compiled model: States, traces, and the programs that advance them.

`compiled_model` has a `compiled_step` for each batch size and each combination of flags of
``brainstate.environ``; it selects one, and compiles again for a new window. A single call uses
`stepping`, and a sequence uses a driver of the learner. Both read the values of States and the
traces from a `Store`, run a `Program`, and write its results to the same `Store`: the States of the
learner, or a state that the user gives. `resets` resets samples to `initial_values`.
`carried_traces` is the State of packed or deferred traces, and `traces` the one that users read and
restore.
"""
