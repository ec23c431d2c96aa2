"""Faults put into important lines of the library, each of which some test must notice.

    python tests/mutants/mutations.py            all of them
    python tests/mutants/mutations.py NAME...    some

Each is put into a copy of the repository, in which the tests named for it then run. One that they
do not notice survives, and the script fails; so it does where a line is no longer as it is
written here, or a test fails or is missing without any fault.
"""

import argparse
import dataclasses
import pathlib
import sys
import tempfile
import time

from mutation_runs import FAILED, PASSED, copy_repository, run_tests


@dataclasses.dataclass(frozen=True)
class Mutation:
    """One fault.

    file: in `braintrace/`.
    old, new: a text that is there once, and what stands there instead.
    tests: those of which at least one must fail, as pytest takes them.
    why: what goes wrong with it.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    why: str


BATCH_ROLES = "tests/runtime/test_batch_roles.py"
STEP_GRAPH = "tests/compiler/test_step_graph.py"


def zoo(*rows):
    test = "tests/models/test_zoo.py::test_all_paths_and_chunk_sizes_equal_the_dense_oracle"
    return tuple(f"{test}[{row}]" for row in rows)


def operations(test, *names):
    return tuple(f"tests/ops/test_operations_online.py::{test}[some-{name}]" for name in names)


CHUNKS = "test_d_rtrl_equals_bptt_for_chunks"
CHOICE = "tests/learner/test_chunk_choice.py"
DEFINITION = "test_es_d_rtrl_equals_its_definition"
COUPLED = "tests/rules/test_coupled_states.py"
MARKS = "tests/compiler/test_marks.py::test"
OUT_OF_RANGE = "tests/compiler/test_out_of_range.py::test_the_gradient_is_that_of_jax"
LAWS = "tests/properties/test_executor_laws.py"
RESETS = "tests/learner/test_resets.py::test_one_flag_per_step_is_as_separate_sequences"
SHARDED = "tests/sharding/test_sharding.py::test_a_divided_learner_gives_what_one_device_gives"
ECONOMY = "tests/learner/test_driver_economy.py"
SEAM = "tests/rules/test_method_seam.py"
OWN_RULES = "tests/rules/test_own_rules.py::test"
NEURONS = "tests/nn/test_nn_neurons.py"
LAYOUTS = "tests/sharding/test_layouts.py"
OPTIONS = "tests/learner/test_options.py"
PLANS = "tests/reports/test_planning.py"
COMPARISON = "tests/learner/test_compare_rules.py::test"
JACOBIANS = "tests/compiler/test_jacobians.py"
FLOW = "tests/jaxpr/test_dataflow.py::test_an_element_depends_on_what_the_engine_names"
RELATIONS = (
    "tests/compiler/test_compiled_relations.py"
    "::test_a_broadcast_behind_a_function_of_each_element_is_exact"
)
LABELS = "tests/jaxpr/test_dataflow.py::test_labels_are_the_image_of_sets"
LINEAR = "tests/jaxpr/test_backward_rules.py::test_linear_is_what_is_linear_in_numbers"
VARIABLES = "tests/jaxpr/test_dataflow_of_variables.py"

READOUTS = "tests/compiler/test_linear_readouts.py::test_equals_bptt"
NO_READOUT = (
    "tests/compiler/test_linear_readouts.py"
    "::test_what_is_no_linear_readout_stays_as_it_is_and_says_why"
)
UNCHANGED = "tests/compiler/test_unchanged_states.py::test_what_is_not_the_same_is_a_state"
RESIZED = "tests/runtime/test_batch_axes.py::test_equals_a_learner_of_that_size"

MUTATIONS = [
    # States that a step leaves unchanged
    Mutation(
        "a state in another order counts as unchanged",
        "_compiler/frontend/unchanged.py",
        "if name not in IN_ORDER or is_by_column:",
        "if name not in IN_ORDER:",
        (f"{UNCHANGED}[read by column]",),
        "a state that each step transposes is held constant",
    ),
    Mutation(
        "a branch that changes a state counts as unchanged",
        "_compiler/frontend/unchanged.py",
        "return first if first == second else CHANGED",
        "return second",
        (f"{UNCHANGED}[one branch]",),
        "a state that one branch changes is held constant",
    ),
    # linear readouts
    Mutation(
        "a filter forgets",
        "_compiler/readouts/readout_filters.py",
        "(_times(fixed, old[source]) + self._current(source, known)).astype(aval.dtype)",
        "self._current(source, known).astype(aval.dtype)",
        (f"{READOUTS}[rates-plain]",),
        "what the readout remembers is left out",
    ),
    Mutation(
        "a decay that learns by the filters as well",
        "_compiler/readouts/readout_filters.py",
        "fixed = jax.lax.stop_gradient(kappa)",
        "fixed = kappa",
        ("tests/compiler/test_linear_readouts.py::test_split_calls[alif-with_everything]",),
        "the decay of one step is counted twice",
    ),
    Mutation(
        "a decay that learns without a mark",
        "_compiler/readouts/readout_filters.py",
        "kappa = kappa if self._is_marked() else element_wise(kappa)",
        "kappa = kappa if self._is_marked() else kappa",
        (
            "tests/compiler/test_linear_readouts.py::test_steps_that_do_not_count[lif-in_small_steps]",
        ),
        "the decay gets the gradient of the current step alone",
    ),
    Mutation(
        "a bias without its filter of ones",
        "_compiler/readouts/readout_filters.py",
        'values[operand] = values[operand] * sources["ones", aval.shape, aval.dtype]',
        "values[operand] = 1 * values[operand]",
        (
            "tests/compiler/test_linear_readouts.py::test_steps_that_do_not_count[lif-in_small_steps]",
        ),
        "a bias gets the gradient of the current step alone",
    ),
    Mutation(
        "data without a filter",
        "_compiler/readouts/linear_filters.py",
        "if others[end] or end in self._with_gradient)",
        "if end in self._with_gradient)",
        (f"{READOUTS}[rates-of_several]",),
        "a coefficient of data gets the gradient of the current step alone",
    ),
    Mutation(
        "a decay with what is added",
        "_compiler/readouts/linear_filters.py",
        "operands.append(numbers.get(atom, zero) if is_var(atom) else zero)",
        "operands.append(numbers.get(atom, constant(1.0)) if is_var(atom) else zero)",
        (f"{READOUTS}[rates-plain]",),
        "what the readout is added counts as a part of its decay",
    ),
    Mutation(
        "filters of what is not at positions",
        "_compiler/readouts/linear_readouts.py",
        "if state.walk.states_met or not others.isdisjoint(_coupled(step, walk)):",
        "if state.walk.states_met:",
        (f"{NO_READOUT}[rates-nonlinear_before]",),
        "a readout behind a softmax counts as linear",
    ),
    Mutation(
        "readouts that others read",
        "_compiler/readouts/linear_readouts.py",
        "    for reader in _readers(step, states, state):\n",
        "    for reader in ():\n",
        (f"{NO_READOUT}[rates-read_by_another]",),
        "what another state takes from a readout is lost",
    ),
    Mutation(
        "filters behind a backward pass that clips",
        "_compiler/readouts/linear_filters.py",
        "return derivative.is_the_same_for_all(data) and derivative.nonlinear.isdisjoint(data)",
        "return derivative.is_the_same_for_all(data)",
        (f"{NO_READOUT}[rates-clipped_on_the_way]",),
        "a sum over steps is clipped, not each of them",
    ),
    Mutation(
        "filters for readouts that are read late",
        "_compiler/readouts/linear_readouts.py",
        "    if _is_read_late(step, state):\n",
        "    if False:\n",
        (f"{NO_READOUT}[alif-twice]",),
        "what the outputs read of a readout before its step has no past, and nothing says so",
    ),
    Mutation(
        "callbacks at every evaluation",
        "_executor/probed_step.py",
        "    return {**inputs, **dict(zip(traced.callback_results, results, strict=True))}\n",
        "    evaluate(callbacks, callbacks.out_atoms, known, effects=True)\n"
        "    return {**inputs, **dict(zip(traced.callback_results, results, strict=True))}\n",
        ("tests/jaxpr/test_callbacks.py::test_every_rule[nested-rtrl]",),
        "a step asks twice",
    ),
    Mutation(
        "functions that hold values of a transformation are kept",
        "_learner/compilations.py",
        "        if any(key.holds_tracers for key in keys.values()):\n",
        "        if False:\n",
        (f"{ECONOMY}::test_nothing_is_kept_of_a_transformation_around_a_call",),
        "a learner leaks the values of a program that has been traced",
    ),
    Mutation(
        "filters that outlive a reset",
        "_algorithms/algorithm.py",
        "            self.filters[leaf.name].value = start_of_filter(leaf)\n",
        "            pass\n",
        ("tests/compiler/test_linear_readouts.py::test_every_path",),
        "a sequence begins with what the last one has left",
    ),
    Mutation(
        "filters that `predict` moves on",
        "_executor/step.py",
        "    if model is None:\n        return finish",
        "    if True:\n        return finish",
        (
            "tests/compiler/test_linear_readouts.py::test_after_steps_without_a_loss[lif-in_small_steps]",
        ),
        "filters follow steps that the traces do not",
    ),
    # the recursions of a chunk
    Mutation(
        "D of a single step, diagonal only",
        "_executor/recursion.py",
        "return now, {(i, j): D[0].astype(dtype) for (i, j), D in blocks.items() if i in rows}",
        "return now, {(i, j): D[0].astype(dtype) for (i, j), D in blocks.items() if i == j}",
        zoo("ReshapedStates-d_rtrl"),
        "one state of a group forgets what it reads of another",
    ),
    Mutation(
        "the diagonal of a product, twice",
        "_executor/diagonal.py",
        "added = factor * taken(dx, inputs)",
        "added = 2 * factor * taken(dx, inputs)",
        ("tests/rules/test_snap.py::test_the_literal_recursion[gru]",),
        "what a product passes from a position to itself counts twice",
    ),
    Mutation(
        "states that are read through products alone count as downstream",
        "_compiler/groups/hidden_groups.py",
        "is_read = [is_seen or a in carried for a, is_seen in enumerate(is_read)]",
        "is_read = list(is_read)",
        ("tests/rules/test_snap.py::test_a_state_that_only_a_product_reads_has_a_trace",),
        "a state that only a recurrent weight reads keeps no trace",
    ),
    Mutation(
        "suffix products, one step too late",
        "_executor/recursion.py",
        "        return before, carry\n\n    first, each",
        "        return before, before\n\n    first, each",
        operations(CHUNKS, "matmul"),
        "what enters in a chunk decays once too often",
    ),
    Mutation(
        "adjoint without the steps after it",
        "_executor/recursion.py",
        "adjoint = {a: s + carry[a] if a in carry else s for a, s in signal_now.items()}",
        "adjoint = dict(signal_now)",
        operations(CHUNKS, "matmul"),
        "no signal goes back within a chunk",
    ),
    Mutation(
        "D transposed in the adjoint",
        "_executor/recursion.py",
        "[times(adjoint[a], D[a, d]) for a, d in D if d == c]",
        "[times(adjoint[d], D[a, d]) for a, d in D if a == c]",
        zoo("TwoCompartments-d_rtrl"),
        "coupled states exchange what they pass back",
    ),
    Mutation(
        "signals of old values, in the step that reads them",
        "_executor/recursion.py",
        "found[a] = found[a] + jnp.concatenate([pre_step[1:], jnp.zeros_like(pre_step[:1])])",
        "found[a] = found[a] + pre_step",
        (
            "tests/rules/test_d_rtrl_exact.py"
            "::test_float64_in_several_chunks_and_a_remainder[alif_late_threshold]",
        ),
        "an output that reads a state as it was teaches the state as it is",
    ),
    Mutation(
        "late probe of the last step",
        "_executor/step.py",
        "signal[probe][0] for name",
        "signal[probe][-1] for name",
        (
            "tests/rules/test_d_rtrl_exact.py"
            "::test_float64_in_several_chunks_and_a_remainder[alif_late_threshold]",
        ),
        "what the first step of a chunk reads of the states before it is taken of another",
    ),
    # one step
    Mutation(
        "a step reads the new trace whenever any state has one",
        "_executor/param_dim.py",
        "if after is not None and {a for a, _ in group.transition} <= stored:",
        "if after is not None and {a for a, _ in group.transition} & stored:",
        zoo("ReadsAnOldState-d_rtrl"),
        "what a state without a trace has from the step before is lost",
    ),
    Mutation(
        "a step without the states that have no trace",
        "_executor/param_dim.py",
        "adjoint = {a: now[a] for a in heard - stored}",
        "adjoint = {}",
        zoo("LSTMSeparate-d_rtrl"),
        "an output gate learns nothing",
    ),
    Mutation(
        "probes on all states of the own group",
        "_executor/probed_step.py",
        "outside = {v: value for v, (g, value) in probed.items() if sees_own or g is not group}",
        "outside = {v: value for v, (g, value) in probed.items()}",
        (
            "tests/rules/test_d_rtrl_exact.py"
            "::test_float64_in_several_chunks_and_a_remainder[synapse_read_out]",
        ),
        "a signal counts by way of the other states of its group as well, twice",
    ),
    Mutation(
        "old states in the gradient of a step",
        "_executor/probed_step.py",
        "jax.lax.stop_gradient(value) if var in old else value",
        "value",
        ("tests/rules/test_d_rtrl_exact.py::test_one_gradient_around_a_loop_of_calls",),
        "one gradient around several calls counts the past twice",
    ),
    Mutation(
        "outputs without a trace, held like those with one",
        "_executor/jacobians.py",
        "return [jnp.where(traced, y, differentiated)]",
        "return [y]",
        (
            "tests/learner/test_plain_parameters.py::test_outputs_without_a_trace_next_to_others_with_one",
        ),
        "a reset gate beside an update gate gets no gradient",
    ),
    Mutation(
        "cuts that are not made",
        "_executor/jacobians.py",
        "stopped = [jax.lax.stop_gradient(v) if i in held else v for i, v in enumerate(values)]",
        "stopped = list(values)",
        zoo("LateralInhibition-d_rtrl", "LayerNormRNN-d_rtrl"),
        "a derivative to several positions is taken for one to the own position",
    ),
    # derivatives with respect to hidden states
    Mutation(
        "old states that carry what traces carry",
        "_runtime/old_states.py",
        "        if not (is_joint or goes_on):\n",
        "        if True:\n",
        ("tests/learner/test_state_derivatives.py::test_two_gradients_equal_backpropagation",),
        "the past of a parameter is counted twice",
    ),
    Mutation(
        "a first step that leaves no mark",
        "_runtime/old_states.py",
        "(zeros, _zero_of(moved, mark))\n",
        "(zeros, past)\n",
        (
            "tests/learner/test_state_derivatives.py::test_what_depends_on_parameters_stops_at_old_states",
        ),
        "the second step of a gradient takes states of the first for those of the user",
    ),
    Mutation(
        "a gradient of states and parameters at once",
        "_runtime/old_states.py",
        "        if asked and not goes_on and (is_joint or not through_steps):\n",
        "        if asked and not goes_on and not through_steps:\n",
        (
            "tests/learner/test_state_derivatives.py::test_states_and_parameters_at_once[in_a_loop-d_rtrl]",
        ),
        "the derivative of the hidden states is zero without an error",
    ),
    Mutation(
        "a start from a parameter after steps",
        "_runtime/old_states.py",
        "        if not (_is_zero(past) or all(map(_is_zero, change))):\n",
        "        if False:\n",
        ("tests/learner/test_state_derivatives.py::test_starts_from_a_parameter_between_steps",),
        "a learned initial state gets a part of its gradient",
    ),
    Mutation(
        "a reset that keeps the mark",
        "_algorithms/algorithm.py",
        "            self.step_mark.value = jnp.zeros(())\n",
        "            pass\n",
        (
            "tests/learner/test_state_derivatives.py::test_state_written_from_what_is_differentiated",
        ),
        "states written after a reset are taken for those of the step before",
    ),
    # loops of unknown length
    Mutation(
        "a loop in a branch without its refusal",
        "_executor/one_way.py",
        "        return rebuilt(equation, operands, run)\n",
        "        return None\n",
        ("tests/jaxpr/test_one_way.py::test_loops_inside_of_others_are_found",),
        "a gradient through it ends in an error of JAX's own",
    ),
    Mutation(
        "a loop without its refusal",
        "_executor/one_way.py",
        "return [one_way(y, CompilationError, message) for y in results]",
        "return results",
        ("tests/jaxpr/test_one_way.py::test_a_gradient_through_a_loop_is_refused_by_name",),
        "a gradient through it ends in an error of JAX's own",
    ),
    Mutation(
        "every parameter before a loop",
        "_executor/one_way.py",
        "leaves = [leaf for leaf in traced.leaves if leaf.in_var in behind]",
        "leaves = traced.leaves",
        ("tests/jaxpr/test_one_way.py::test_a_gradient_through_a_loop_is_refused_by_name",),
        "the refusal names parameters that the loop does not read",
    ),
    # marks lost to a map
    Mutation(
        "a lost mark without a scope",
        "_etrace_op/primitive.py",
        'f"{_LOST}:{primitive}:',
        'f"found:{primitive}:',
        ("tests/compiler/test_lost_marks.py::test_the_error_names_the_map[etp_mm-jax]",),
        "an operation mapped over its weights is not named",
    ),
    Mutation(
        "scopes lost where a step is rewritten",
        "_jax.py",
        "source_info_util.current_name_stack() + source.name_stack",
        "source_info_util.current_name_stack()",
        ("tests/compiler/test_lost_marks.py::test_the_error_names_the_map[etp_mm-jax]",),
        "the rewritten step no longer says which operation an equation is of",
    ),
    Mutation(
        "lost marks of readouts",
        "_compiler/reports/lost_marks.py",
        "        if names and states:\n",
        "        if names:\n",
        ("tests/compiler/test_lost_marks.py",),
        "a mapped readout, which needs no mark, is reported",
    ),
    # fan-outs and layouts
    Mutation(
        "first of several positions in a chunk",
        "_executor/direct.py",
        "else jnp.sum(factor, axis=1)",
        "else factor[:, 0]",
        zoo("SharedDrive-d_rtrl"),
        "an output that drives several units learns for one of them",
    ),
    Mutation(
        "first of several positions of a trace",
        "_executor/param_dim.py",
        "found = jax.tree.map(lambda product: jnp.sum(product, axis=0), found)",
        "found = jax.tree.map(lambda product: product[0], found)",
        zoo("SharedDrive-d_rtrl"),
        "an output that drives several units learns for one of them",
    ),
    Mutation(
        "input of the first operation for all",
        "_executor/layout.py",
        "return next(r.key for r in relations if r.x_var is relation.x_var)",
        "return next(r.key for r in relations if r.x_var is not None)",
        zoo("OneWeightTwice-d_rtrl"),
        "a weight in two operations has the traces of one",
    ),
    Mutation(
        "layouts taken for their inverse",
        "_executor/layout.py",
        "element[layout.ravel()] = np.arange(layout.size)",
        "element[: layout.size] = layout.ravel()",
        zoo("ReshapedStates-d_rtrl"),
        "a state that is kept transposed gives its signals to other units",
    ),
    Mutation(
        "shared output traces across a state",
        "_executor/layout.py",
        "while y not in states and len(program.readers.get(y, ())) == 1:",
        "while len(program.readers.get(y, ())) == 1:",
        (
            "tests/learner/test_driver_surroundings.py::test_output_traces_are_not_shared_across_a_state",
        ),
        "an operation that enters behind a state has the trace of one before it",
    ),
    Mutation(
        "groups in reverse",
        "_compiler/groups/hidden_groups.py",
        "return sorted(map(tuple, components([*map(sorted, coupled)])))",
        "return sorted(map(tuple, components([*map(sorted, coupled)])), reverse=True)",
        (
            "tests/models/test_zoo.py::test_relations_groups_and_diagnostics[Stacked]",
            *zoo("Stacked-d_rtrl"),
        ),
        "layers are not taken in the order of the step",
    ),
    # a learner and its state
    Mutation(
        "the States of a model as they were",
        "_runtime/found_states.py",
        "        for now, values in self._lists:\n",
        "        for now, values in ():\n",
        ("tests/runtime/test_found_states.py::test_changes_are_seen[appended]",),
        "a State that is added to a list later does not learn",
    ),
    Mutation(
        "pure functions that keep old values",
        "_learner/state.py",
        "fields[place.field].update(place.entries(value))",
        "pass",
        ("tests/learner/test_functional.py::test_each_function_is_the_method",),
        "a learner that is a pure function does not learn",
    ),
    # Forecasts
    Mutation(
        "late labels from the current states",
        "_learner/late_labels.py",
        """_where(waiting["count"] == 0, self.written(values), waiting["learned"])
        return {**waiting, "learned": learned}""",
        """self.written(values)
        return {**waiting, "learned": learned}""",
        (
            "tests/learner/test_forecasts.py::test_late_labels_change_only_the_forecasts[lstm_fused-es_d_rtrl-2]",
        ),
        "a late label is learned from the states of another sample",
    ),
    Mutation(
        "no traces for samples without a label",
        "_learner/late_labels.py",
        """            return {**after_first(waiting), "learned": learned}, traces\n""",
        """            return {**after_first(waiting), "learned": learned}, carry[1]\n""",
        ("tests/learner/test_forecasts.py::test_samples_without_a_label_are_passed_over[2]",),
        "the next label is learned without the samples before it",
    ),
    Mutation(
        "forecasts that stay NaN",
        "_learner/late_labels.py",
        """options.nonfinite == "skip" and room(held.value) > 1""",
        "False",
        ("tests/learner/test_forecasts.py::test_nan_is_skipped_and_forecasts_are_finite_again[2]",),
        "one NaN input makes all later forecasts NaN",
    ),
    Mutation(
        "exported steps that learn NaN",
        "_learner/options.py",
        """nonfinite: str = field(default="skip",""",
        """nonfinite: str = field(default="ignore",""",
        (
            "tests/learner/test_ahead_of_time.py::test_a_nan_label_does_not_reach_the_parameters_of_an_exported_step",
        ),
        "one NaN label destroys a model where nothing can warn",
    ),
    # ES_D_RTRL
    Mutation(
        "no correction of the first steps",
        "_executor/io_dim.py",
        "seen = -jnp.expm1(log_alpha * jnp.maximum(steps, 1))",
        "seen = jnp.ones(steps.shape)",
        operations(DEFINITION, "matmul"),
        "filters that start at zero are too small",
    ),
    Mutation(
        "counts that start anew with every chunk",
        "_executor/filters.py",
        "    if records.restart is None:\n        return before + index",
        "    if records.restart is None:\n        return index",
        operations(DEFINITION, "matmul"),
        "later chunks are corrected like the first",
    ),
    Mutation(
        "counts that a restart leaves alone",
        "_executor/filters.py",
        "return jnp.where(began == 0, before + index, index - began + 1)",
        "return before + index",
        (f"{RESETS}[alif_late_threshold-es_d_rtrl-batch axis-{{'decay_or_rank': 0.8}}]",),
        "a sequence that starts anew is corrected as the one before",
    ),
    Mutation(
        "filtered sensitivity without its weight",
        "_executor/filters.py",
        "terms += [(1 - alpha) * Df[key]] if key in Df else []",
        "terms += [Df[key]] if key in Df else []",
        operations(DEFINITION, "matmul"),
        "gradients are too large by 1 / (1 - alpha)",
    ),
    Mutation(
        "filtered sensitivity that does not decay",
        "_executor/filters.py",
        "terms = [alpha * D[key][c] * before[c] for c in D.get(key, ()) if c in before]",
        "terms = [D[key][c] * before[c] for c in D.get(key, ()) if c in before]",
        operations(DEFINITION, "matmul"),
        "the filter of the sensitivity is another",
    ),
    Mutation(
        "filtered inputs that a restart leaves alone",
        "_executor/input_filters.py",
        "key: jnp.where(rows_of_samples(graph, key, eps.ndim, restart), 0, eps)",
        "key: jnp.where(rows_of_samples(graph, key, eps.ndim, restart), eps, eps)",
        (f"{RESETS}[alif_late_threshold-es_d_rtrl-batch axis-{{'decay_or_rank': 0.8}}]",),
        "inputs of the sequence before go on",
    ),
    Mutation(
        "decays of a chunk in the order of time",
        "_executor/filtered_factors.py",
        "alpha ** np.arange(steps)[::-1]",
        "alpha ** np.arange(steps)",
        (
            "tests/rules/test_input_filter.py"
            "::test_chunks_restarts_and_streams_equal_the_recursion[of the library]",
        ),
        "a filter that advances once weighs the newest step least",
    ),
    # restarts
    Mutation(
        "transitions that a restart leaves alone",
        "_executor/restart.py",
        "transitions[key] = jnp.where(is_new, 0, transitions[key])",
        "transitions[key] = jnp.where(is_new, transitions[key], transitions[key])",
        (f"{RESETS}[rotation-d_rtrl-batch axis-{{}}]",),
        "traces of the sequence before go on",
    ),
    Mutation(
        "probes on old values that a restart leaves alone",
        "_executor/restart.py",
        "= jnp.where(is_new, 0, probe)",
        "= probe",
        (
            "tests/learner/test_online.py::test_samples_restart_one_by_one[d_rtrl-alif_late_threshold]",
        ),
        "an output that reads initial values teaches the sequence before",
    ),
    Mutation(
        "traces of a sample multiplied by zero",
        "_executor/param_dim.py",
        "if kept is not None:  # they are selected",
        "if False:  # they are selected",
        ("tests/learner/test_not_finite.py::test_parameters_of_a_stream",),
        "one NaN stays in the traces, and then in the parameters, for ever",
    ),
    Mutation(
        "steps that do not count multiplied by zero",
        "_executor/products.py",
        "return SELECTING if records.has_mask else PLAIN",
        "return PLAIN",
        ("tests/learner/test_not_finite.py::test_gradients_of_a_sequence",),
        "a padded input that is NaN makes the whole gradient NaN",
    ),
    Mutation(
        "reset_state without the traces",
        "_algorithms/algorithm.py",
        "fresh, batch_size)\n            self._reset_traces()",
        "fresh, batch_size)",
        (f"{LAWS}::test_reset_starts_over",),
        "a new sequence has the traces of the last",
    ),
    # chunks, masks, sums
    Mutation(
        "chunks that overlap",
        "_learner/chunks.py",
        "starts = jnp.arange(count) * length",
        "starts = jnp.arange(count) * (length - 1)",
        operations(CHUNKS, "matmul"),
        "some steps are run twice",
    ),
    Mutation(
        "the budget of records",
        "_learner/chunks.py",
        "most = max(budget, work.trace_bytes)",
        "most = 2**60",
        (f"{CHOICE}::test_records_stay_below_the_budget_or_the_traces",),
        "memory grows with the sequence",
    ),
    Mutation(
        "traces after the last chunk are always computed",
        "_learner/chunk_costs.py",
        "updates = chunks - 1 if from_zero else chunks",
        "updates = chunks",
        (f"{CHOICE}::test_what_is_chosen",),
        "a sequence that needs no trace is cut",
    ),
    Mutation(
        "traces that are carried on count as zero",
        "_learner/gradient.py",
        "key = steps, from_zero = steps_of(sequences), traces is None",
        "key = steps, from_zero = steps_of(sequences), True",
        (f"{CHOICE}::test_every_budget_gives_the_same_and_the_report_says_how",),
        "the chunks that are chosen, and reported, are those of a fresh start",
    ),
    Mutation(
        "mean over all steps, whatever the mask",
        "_learner/gradient.py",
        "return mask / jnp.where(total == 0, 1, total)",
        "return mask / mask.size",
        (f"{LAWS}::test_reductions_and_mask",),
        "padded steps make gradients smaller",
    ),
    Mutation(
        "backward passes of steps without weight",
        "_learner/over_time.py",
        "jax.lax.cond(scale != 0, counted, masked, parameters, probes)",
        "jax.lax.cond(scale == scale, counted, masked, parameters, probes)",
        (f"{ECONOMY}::test_steps_without_weight_have_no_backward_pass",),
        "a mask saves no time",
    ),
    Mutation(
        "masked steps at their own values",
        "_learner/over_time.py",
        "lambda value: only_counted(value, value[first])",
        "lambda value: value",
        ("tests/learner/test_split_steps.py::test_masked_steps_have_a_derivative_of_zero",),
        "an infinite derivative at a padded step makes a gradient NaN",
    ),
    Mutation(
        "an effect with a derivative that runs in two loops",
        "_learner/split.py",
        "equation.replace(effects=set()) if has_derivative else equation",
        "equation",
        ("tests/learner/test_split_steps.py::test_an_effect_with_a_derivative_runs_once",),
        "a callback of the loss is called twice",
    ),
    Mutation(
        "sums in half precision",
        "_learner/over_time.py",
        "return jnp.zeros(value.shape, jnp.float32 if is_half(value.dtype) else value.dtype)",
        "return jnp.zeros(value.shape, value.dtype)",
        ("tests/learner/test_driver_surroundings.py::test_gradients_in_half_precision_add_up",),
        "a sum of ones stops at 256",
    ),
    Mutation(
        "sums over samples without the rest of the blocks",
        "_etrace_op/sums.py",
        "has_rest = full < samples",
        "has_rest = False",
        (
            "tests/ops/test_sums.py::test_all_forms_give_the_sum[lead1]",
            "tests/ops/test_sums.py::test_all_forms_give_the_sum[lead2]",
        ),
        "some samples of a large batch do not count",
    ),
    Mutation(
        "branches mapped over time",
        "_learner/split.py",
        'STEP_BY_STEP = frozenset({"cond", "while"',
        'STEP_BY_STEP = frozenset({"while"',
        (
            "tests/learner/test_split_steps.py::test_what_cannot_be_mapped_over_time_stays_in_the_loop",
        ),
        "both branches run at every step",
    ),
    Mutation(
        "layers of a stack that share a loop",
        "_learner/stages.py",
        "(graph.component_of[s], s in products)",
        "(graph.component_of[s], False)",
        ("tests/learner/test_split_steps.py::test_layers_have_loops_of_their_own[Stack]",),
        "products between layers are taken step by step",
    ),
    # buffers
    Mutation(
        "traces given away while somebody holds them",
        "_runtime/carried_traces.py",
        "            return self.read(), False",
        "            return self.read(), True",
        (f"{ECONOMY}::test_buffers_are_donated_unless_somebody_reads_the_traces",),
        "arrays that a user has read are deleted",
    ),
    Mutation(
        "traces taken for zero",
        "_runtime/carried_traces.py",
        "return isinstance(own, LazyTraces) and own.zero and not is_watched()",
        "return isinstance(own, LazyTraces) and not is_watched()",
        ("tests/rules/test_d_rtrl_exact.py::test_traces_carry_on_from_call_to_call",),
        "every call starts a new sequence",
    ),
    Mutation(
        "known traces of no use",
        "_learner/chunk_gradient.py",
        "return None if isinstance(kept, Kept) else kept",
        "return None",
        (f"{ECONOMY}::test_traces_that_a_gradient_computes_anyway_are_not_computed_again",),
        "traces are computed twice",
    ),
    Mutation(
        "traces overwritten while they are read",
        "_executor/overwriting.py",
        "return jnp.any(jnp.stack([(n != n) & (n == n) for n in map(_one_number, first)]))",
        "return jnp.asarray(False)",
        (f"{COUPLED}::test_a_loop_over_chunks_copies_no_trace[each other]",),
        "XLA copies the traces at every chunk",
    ),
    Mutation(
        "traces overwritten before what is computed from them",
        "_executor/overwriting.py",
        "if not _readers(keys, reads, chain(*left))",
        "if _readers(keys, reads, chain(*left))",
        (f"{COUPLED}::test_a_step_copies_no_trace[a filter of both]",),
        "XLA copies the traces of neurons below a readout at every step",
    ),
    # packed traces
    Mutation(
        "conjugated factor of a pair",
        "_executor/complex_packing.py",
        "yield jax.lax.complex(real, -imaginary), trace",
        "yield jax.lax.complex(real, imaginary), trace",
        (f"{COUPLED}::test_the_gradient_equals_bptt_for_every_operation[matmul with bias]",),
        "the second of two coupled states learns with the wrong sign",
    ),
    Mutation(
        "pairs for rules that do not take complex numbers",
        "_etrace_op/rules.py",
        "rules = (spec.yw_to_w, spec.contract)",
        "rules = (spec.contract,)",
        (f"{COUPLED}::test_only_rules_that_compute_with_complex_numbers_see_them[conjugated]",),
        "a rule of a user's own is given numbers that it does not know",
    ),
    Mutation(
        "a copy that holds the packed traces of another",
        "_runtime/traces.py",
        "        hold(twin, traces)\n",
        "",
        (f"{COUPLED}::test_copies_carry_packed_traces_of_their_own",),
        "two States move each other's traces on",
    ),
    Mutation(
        "the trace of the last operation that uses a weight",
        "_executor/eligibility.py",
        "return jnp.add(first, second)",
        "return second",
        ("tests/reports/test_eligibility.py::test_several_operations_on_one_weight",),
        "a part of a weight's trace is missing",
    ),
    # operations
    Mutation(
        "groups of a convolution in the wrong order",
        "_etrace_op/operations/conv.py",
        'result = {"weight": jnp.swapaxes(by_group, 0, 1)}',
        'result = {"weight": by_group.reshape(by_group.shape[1], -1, by_group.shape[2])}',
        operations(CHUNKS, "grouped 1-D conv"),
        "a grouped kernel has its gradient in other places",
    ),
    Mutation(
        "low-rank factors without their scale",
        "_etrace_op/operations/lora.py",
        '"effective": alpha * (weights',
        '"effective": (weights',
        operations(CHUNKS, "lora_matmul with bias"),
        "what traces carry of a low-rank weight has another size",
    ),
    Mutation(
        "a feedback that is the weight",
        "_etrace_op/operations/feedback.py",
        "jnp.matmul(dx, feedback)",
        "jnp.matmul(dx, weight)",
        ("tests/rules/test_rflo.py::test_equals_its_definition[batch axis]",),
        "errors go back by the weight",
    ),
    Mutation(
        "an adaptive feedback that does not learn",
        "_etrace_op/operations/feedback.py",
        "(feedback - jax.lax.stop_gradient(feedback))",
        "0 * feedback",
        operations(CHUNKS, "feedback_matmul with bias"),
        "the feedback stays what it was, and never becomes like the weight",
    ),
    Mutation(
        "rows of a table where they are not",
        "_etrace_op/operations/embedding.py",
        "now = jnp.where(indices[0] < 0, indices[0] + rows, indices[0])",
        "now = jnp.where(indices[0] < 0, indices[0] + rows, indices[0] + 1)",
        operations(CHUNKS, "embedding"),
        "what a step adds to a trace goes to the next row",
    ),
    Mutation(
        "a table that is looked up again and again",
        "_etrace_op/operations/embedding.py",
        "return row_counts.at[index].add(1, ",
        "return row_counts.at[index].max(1, ",
        operations(DEFINITION, "embedding"),
        "the filter of a table counts how often a row was looked up",
    ),
    Mutation(
        "groups that meet each other",
        "_etrace_op/operations/grouped.py",
        "return np.asarray(inputs // in_features == outputs // out_features)",
        "return np.ones(inputs.shape, bool)",
        (
            "tests/ops/test_ops_rules.py::test_the_derivative_to_the_input_is_the_jacobian_of_a_sample"
            "[etp_gmm-its own]",
        ),
        "every output is taken to depend on the inputs of all groups",
    ),
    Mutation(
        "an element-wise weight that is a product",
        "_etrace_op/operations/einsum.py",
        "    if axes.free and axes.contracted:\n",
        "    if True:\n",
        ("tests/models/test_zoo.py::test_relations_groups_and_diagnostics[Heads]",),
        "a weight without a free axis cuts the relation of another one",
    ),
    Mutation(
        "sparse traces by row",
        "_etrace_op/sparse/product_forms.py",
        "return _at(of_outputs, sparse_mat.columns, sparse_mat)",
        "return _at(of_outputs, sparse_mat.rows, sparse_mat)",
        operations(CHUNKS, "sparse_matmul with bias"),
        "an entry follows the unit of its row",
    ),
    Mutation(
        "sparse sums of the last part only",
        "_etrace_op/sparse/sddmm.py",
        "(sums + of_part(part), None)",
        "(of_part(part), None)",
        ("tests/ops/test_sddmm.py::test_sums_of_parts_and_blocks[7-2-lead1]",),
        "steps are taken part by part, and all of them count",
    ),
    Mutation(
        "sparse sums in the order of their blocks",
        "_etrace_op/sparse/sddmm.py",
        "return picked(by_block, ordered[2])",
        "return by_block",
        ("tests/ops/test_sddmm.py::test_sums_of_parts_and_blocks[7-2-lead1]",),
        "entries that are sorted go back to where they were",
    ),
    Mutation(
        "entries divided in another order than their outputs",
        "_etrace_op/sparse/pattern.py",
        "| (self.columns[::stride] // outputs == np.arange(0, self.nnz, stride) // entries)",
        "| (self.columns[::stride] // outputs < parts)",
        ("tests/ops/test_sorted_by_column.py::test_entries_that_cannot_be_divided",),
        "only entries that lie with their outputs may be divided with them",
    ),
    # rules that are names
    Mutation(
        "a modulator laid along units",
        "_algorithms/three_factor.py",
        "(*modulator.shape, *(1,) * (h.ndim - modulator.ndim))",
        "(*(1,) * (h.ndim - modulator.ndim), *modulator.shape)",
        ("tests/rules/test_three_factor.py::test_units_multiply",),
        "the reward of a sample goes to units, or is refused",
    ),
    Mutation(
        "recurrence by States that are no hidden states",
        "_algorithms/ostl_feedforward.py",
        'leaf.kind in ("hidden", "other")',
        'leaf.kind in ("hidden",)',
        (
            "tests/rules/test_ostl_feedforward.py"
            "::test_refuses_recurrence_through_a_product_by_name[by another State]",
        ),
        "a network with recurrence passes for one without",
    ),
    # windows, maxima, units, maps
    Mutation(
        "windows without a past",
        "_executor/window.py",
        "scan_over_time(step, start, sequences)",
        "scan_over_time(step, jax.lax.stop_gradient(start), sequences)",
        ("tests/learner/test_windows.py::test_shorter_windows[gru]",),
        "the gradient of a window ends at its start",
    ),
    Mutation(
        "what a sample that starts anew in a window leaves in the traces before it",
        "_executor/step.py",
        "signal, before, records.zeros_select)",
        "signal, before, False)",
        (
            "tests/learner/test_not_finite.py::test_gradients_of_a_sequence"
            "[lstm_fused es_d_rtrl batch axis-decay_or_rank-window]",
        ),
        "a NaN of a padded step is in the gradient of the next window",
    ),
    Mutation(
        "windows with the traces that single steps keep",
        "_executor/param_dim.py",
        "stored = site.influence.reached if every_state else site.influence.stored",
        "stored = site.influence.stored",
        ("tests/learner/test_windows.py::test_shorter_windows[lstm_fused]",),
        "a window gets nothing by way of states that only mixing reads",
    ),
    Mutation(
        "windows longer than they are",
        "_learner/chunks.py",
        "length * max(1, most // length)",
        "length * max(1, -(-most // length))",
        ("tests/learner/test_windows.py::test_a_plan_has_the_chunks_of_its_windows",),
        "a chunk has more steps than the user allows",
    ),
    Mutation(
        "a chunk as one window",
        "_learner/chunk_gradient.py",
        "return min(steps, self._window)",
        "return steps",
        (
            "tests/learner/test_windows.py::test_bptt_in_a_window_and_the_trace_before_it[6-gru-d_rtrl]",
        ),
        "`chunk_size` changes the gradient, since windows are as long as chunks",
    ),
    Mutation(
        "windows of a chunk without the time before them",
        "_executor/window.py",
        "signal[name] = jnp.concatenate([of_first[None], rest])",
        "signal[name] = 0 * jnp.concatenate([of_first[None], rest])",
        (
            "tests/learner/test_windows.py::test_bptt_in_a_window_and_the_trace_before_it[6-gru-d_rtrl]",
        ),
        "only the first window of a chunk is credited with what has been before",
    ),
    Mutation(
        "signals of a window one step late",
        "_executor/recursion.py",
        "jnp.concatenate([pre_step[1:], jnp.zeros_like(pre_step[:1])])",
        "pre_step",
        (
            "tests/learner/test_windows.py"
            "::test_bptt_in_a_window_and_the_trace_before_it[6-lstm_fused-es_d_rtrl]",
        ),
        "the signal for the states before a step goes to those after it",
    ),
    Mutation(
        "windows by layers",
        "_executor/window.py",
        "return _recorded(graph, inputs, _in_full)",
        "return passed_step(graph, inputs)",
        ("tests/learner/test_windows.py::test_windows_of_a_rule_by_layers_go_through_all_layers",),
        "`OSTLRecurrent` ignores its window",
    ),
    Mutation(
        "windows over updates",
        "_learner/online.py",
        "if isinstance(window, int) and every % window:",
        "if isinstance(window, int) and window > every:",
        (
            "tests/learner/test_windows.py"
            "::test_a_window_that_does_not_divide_the_steps_of_an_update_is_refused[4-3]",
        ),
        "the last window before every update is shorter than its user says",
    ),
    Mutation(
        "a window in a stream of single steps",
        "_learner/online.py",
        "        if window is not None:\n            return _of_single_steps",
        "        if False:\n            return _of_single_steps",
        ("tests/learner/test_windows.py::test_streams[lstm_fused-d_rtrl]",),
        "`etrace_online(window=1)` ignores its window",
    ),
    Mutation(
        "windows of a call on traces that leave states out",
        "_runtime/changes.py",
        "    if is_alike:\n        return\n",
        "    return\n",
        (
            "tests/learner/test_windows.py::test_a_call_may_ask_for_a_window_at_the_start_of_a_sequence",
        ),
        "a window that only a call asks for misses what only mixing reads",
    ),
    Mutation(
        "maxima as JAX differentiates them",
        "_executor/maxima.py",
        "if equation.primitive.name in DIFFERENTIABLE\n    }",
        "if False\n    }",
        ("tests/rules/test_maxima.py::test_equals_backpropagation",),
        "where XLA rounds an operand twice, a maximum has no derivative",
    ),
    Mutation(
        "units of gradients upside down",
        "_learner/units.py",
        "return with_unit(mantissa, loss_unit / unit)",
        "return with_unit(mantissa, loss_unit * unit)",
        ("tests/learner/test_learning_units.py::test_gradients_have_the_units_of_backpropagation",),
        "a gradient has the unit of loss times parameter",
    ),
    Mutation(
        "probes that a map around the algorithm does not see",
        "_jax.py",
        "_zeros_p.bind(*jax.tree.leaves(operands), shapes=shapes))",
        "_zeros(shapes=shapes))",
        ("tests/runtime/test_foreign_maps.py::test_every_operation[matmul-d_rtrl]",),
        "the lanes of a map learn from each other's signals",
    ),
    Mutation(
        "a line of the model that another one stands for",
        "_jaxpr/evaluate.py",
        "equation = with_source_of(equation, caller)",
        "pass",
        (
            "tests/jaxpr/test_interpreter.py"
            "::test_what_a_function_of_jax_does_stands_in_the_line_that_calls_it[bind]",
        ),
        "a diagnostic names the line that has called a function of JAX first",
    ),
    Mutation(
        "a value given for a variable that its equation replaces",
        "_jaxpr/evaluate.py",
        "known.setdefault(var, value)",
        "known[var] = value",
        (
            "tests/jaxpr/test_interpreter.py"
            "::test_an_override_stands_where_its_equation_is_run_for_another_output",
        ),
        "a probe on one result of an operation is lost where another result is needed",
    ),
    Mutation(
        "a gradient plus a number taken for linear",
        "_jaxpr/dataflow/kinds.py",
        "return LINEAR if distinct == {ZERO, LINEAR} else unknown(distinct)",
        "return LINEAR if LINEAR in distinct else unknown(distinct)",
        (
            "tests/jaxpr/test_backward_rules.py::test_every_bent_gradient_is_reported_wherever_the_rule_stands",
        ),
        "a backward rule that adds something is multiplied by the learning signal without a word",
    ),
    Mutation(
        "sums of gradients that a backward rule bends",
        "_learner/split.py",
        "        or _bends_sums(step, differentiable)\n",
        "",
        (
            "tests/jaxpr/test_backward_rules.py"
            "::test_a_rule_on_a_plain_parameter_bends_the_gradient_of_every_step",
        ),
        "a clipped gradient of a sequence is clipped once, and not at every step",
    ),
    Mutation(
        "filtered inputs that do not decay",
        "_executor/input_filters.py",
        "alpha * before[key], x[x_key(graph, r)]",
        "before[key], x[x_key(graph, r)]",
        operations(DEFINITION, "matmul"),
        "the filter of the inputs is another",
    ),
    Mutation(
        "masks in States as they were at the first call",
        "_learner/gradient.py",
        "        values.update(zip(self._paths, others, strict=True))\n",
        "",
        ("tests/compiler/test_masked_weights.py::test_every_call_uses_the_mask_as_it_is",),
        "a weight that has been pruned learns as before",
    ),
    Mutation(
        "a derivative that uses an element several times",
        "_jaxpr/dataflow/lattices.py",
        "added[places[added[places] != values]] = TOP",
        "pass",
        (
            "tests/compiler/test_reported_paths.py::test_reported_with_names_and_line_and_refused_by_strict",
        ),
        "the last of several uses stands for all of them",
    ),
    Mutation(
        "elements known up to the first question only",
        "_compiler/core/analysis.py",
        "if known < last:",
        "if not found:",
        ("tests/models/test_zoo.py::test_relations_groups_and_diagnostics[LinearRecurrentUnit]",),
        "a weight that reaches a second state further on is reported to mix there",
    ),
    Mutation(
        "diagnostics before the rule is known",
        "_compiler/reports/reporting.py",
        "if jacobian in REPORTED[f.kind]",
        "if REPORTED[f.kind]",
        ("tests/compiler/test_diagnostics.py::test_a_rule_that_passes_weights_hears_of_none",),
        "a rule that follows every path is told what others leave out",
    ),
    # the whole state
    Mutation(
        "cotangents that go back past a restart",
        "_executor/whole_chunk.py",
        "before = _where_alive(whole, ~restart, before)",
        "pass",
        ("tests/rules/test_rtrl.py::test_resets_and_masks[gru-both]",),
        "what lies before a restart within a chunk stays in the traces",
    ),
    Mutation(
        "rows of a trace that nothing reads",
        "_executor/whole_traces.py",
        "trace = where_flagged((transition != 0).any(1), trace)",
        "pass",
        ("tests/rules/test_rtrl.py::test_nothing_of_what_was_not_finite_before_a_restart_is_left",),
        "zero times NaN",
    ),
    Mutation(
        "layers that remember each other",
        "_executor/whole_state.py",
        "kept = evaluate(program, new, now, _constant(seen))",
        "kept = evaluate(program, new, now, seen)",
        ("tests/rules/test_ostl_recurrent.py::test_layers_are_apart_over_time[two_layers-mapped]",),
        "a chunk goes back from layer to layer over time, and the traces do not",
    ),
    # the seam between executor and learning rule
    Mutation(
        "samples that keep their traces between steps",
        "_executor/traces.py",
        "return jnp.where(is_new, spec.initial, trace)",
        "return trace",
        (f"{SEAM}::test_samples_start_anew_along_the_axis_of_the_batch",),
        "a new sequence starts with the traces of the one before",
    ),
    Mutation(
        "every trace in the dtype that the user gives",
        "_executor/traces.py",
        "spec.takes_trace_dtype and jnp.issubdtype",
        "jnp.issubdtype",
        (f"{SEAM}::test_traces_start_as_their_specifications_say",),
        "what a rule counts in its traces is rounded",
    ),
    Mutation(
        "several rules in windows without their traces",
        "_executor/composed.py",
        "gradients.update(self.rules[name].entry_gradient(own, *arrays, zeros_select))",
        "self.rules[name].entry_gradient(own, *arrays, zeros_select)",
        ("tests/rules/test_rules_by_path.py::test_streams_own_loops_and_windows[layers]",),
        "the gradient of a window leaves out the time before it",
    ),
    # learning rules of a user's own
    Mutation(
        "a rule that does not restart",
        "_rules/by_operation.py",
        "own = leaves.restarted(own, restart)",
        "own = dict(own)",
        (f"{OWN_RULES}_masks_and_resets_leave_nothing_of_what_does_not_count",),
        "a new sequence is learned as if the one before had caused it",
    ),
    Mutation(
        "a rule of all states that does not restart",
        "_rules/by_state.py",
        "arrays = leaves.restarted(arrays, records.restart[0])",
        "arrays = dict(arrays)",
        ("tests/rules/test_rule_laws.py::test_every_driver_gives_the_same[carrying]",),
        "a new sequence is learned as if the one before had caused it",
    ),
    Mutation(
        "traces of samples that do not count",
        "_rules/by_operation.py",
        "own = leaves.without(own, _silent(graph, site, signal))",
        "own = dict(own)",
        (f"{OWN_RULES}_masks_and_resets_leave_nothing_of_what_does_not_count",),
        "a padded step with NaN makes the gradient of all samples NaN",
    ),
    Mutation(
        "the Jacobian of a rule transposed by states",
        "_rules/by_operation.py",
        "yield (names[a], names[c]), transition_key(group, a, c)",
        "yield (names[c], names[a]), transition_key(group, a, c)",
        (
            f"{OWN_RULES}_a_rule_that_carries_everything_is_backpropagation"
            "[elementwise-element_wise scalar]",
        ),
        "each state carries what another one remembers",
    ),
    Mutation(
        "the Jacobian of all states transposed",
        "_rules/by_state.py",
        "jnp.moveaxis(to_rows(whole, pulled.old), 1, 0)",
        "jnp.moveaxis(to_rows(whole, pulled.old), 0, 2)",
        (f"{OWN_RULES}_a_rule_that_carries_everything_is_backpropagation[layered-embedding]",),
        "old states are taken for new ones",
    ),
    Mutation(
        "a rule contracted before its step",
        "_rules/by_operation.py",
        "found = _contracted(graph, sites, arrays, mu_now, selects)",
        "found = _contracted(graph, sites, carry[0], mu_now, selects)",
        (f"{OWN_RULES}_every_path[embedding-sequence]",),
        "no step learns from its own input",
    ),
    Mutation(
        "a fan-out that is not added up",
        "_rules/site.py",
        "terms = jax.tree.map(lambda layers: jnp.sum(layers, axis=0), terms)",
        "terms = jax.tree.map(lambda layers: layers[0], terms)",
        (
            f"{OWN_RULES}_a_rule_that_carries_everything_is_backpropagation"
            "[elementwise-element_wise scalar]",
        ),
        "a weight that all samples share learns from the first one",
    ),
    Mutation(
        "a filter of a rule without the last input",
        "_rules/site.py",
        "return None if x is None else add_to_filter(*self.place.operation, kept, x)",
        "return kept",
        ("tests/rules/test_every_rule.py::test_every_operation[filtering-embedding]",),
        "no weight learns",
    ),
    Mutation(
        "a factor of a rule for the first element alone that an output reaches",
        "_rules/site.py",
        "at_output = signal.sum(0) if self.place.has_fan_out else signal",
        "at_output = signal[0] if self.place.has_fan_out else signal",
        ("tests/rules/test_every_rule.py::test_every_operation[filtering-element_wise]",),
        "a weight that all samples share learns from the first one",
    ),
    Mutation(
        "shapes of a rule that nobody compares",
        "_rules/leaves.py",
        "if shape != wanted_shape:",
        "if len(shape) != len(wanted_shape):",
        (f"{OWN_RULES}_a_wrong_rule_is_told_with_its_place[a shape that changes]",),
        "a loop over time fails deep inside JAX, or an array is broadcast",
    ),
    Mutation(
        "axes of samples of a rule that nobody counts",
        "_rules/leaves.py",
        "len(spec.axes) == len(spec.shape) and sizes in ((), site.samples)",
        "len(spec.axes) == len(spec.shape)",
        (f"{OWN_RULES}_a_wrong_rule_is_told_with_its_place[axes that do not fit]",),
        "the first reset of a sample fails deep inside JAX",
    ),
    Mutation(
        "kinds of dtypes of a rule that nobody compares",
        "_rules/leaves.py",
        "if _kind(dtype) != _kind(like.dtype):",
        "if _kind(dtype) > len(KINDS):",
        (f"{OWN_RULES}_a_wrong_rule_is_told_with_its_place[a dtype that changes]",),
        "a trace of booleans becomes one of numbers",
    ),
    Mutation(
        "an algorithm for each instance of a rule",
        "_algorithms/own_rule.py",
        "@functools.lru_cache(maxsize=256)\n",
        "",
        (f"{OWN_RULES}_a_learner_names_the_rule_and_its_options",),
        "equal rules of a model have traces of their own",
    ),
    Mutation(
        "traces of a rule in another dtype than they are kept in",
        "_rules/leaves.py",
        "return {key: leaf.astype(traces[key].dtype) for key, leaf in arrays.items()}",
        "return dict(arrays)",
        (f"{OWN_RULES}_a_trace_is_any_pytree_of_arrays",),
        "`trace_dtype` holds until the first step",
    ),
    Mutation(
        "names of a class for those that inherit from it",
        "_algorithms/names.py",
        'vars(algorithm).get("names", ())',
        "algorithm.names",
        (f"{SEAM}::test_a_subclass_has_names_of_its_own",),
        "an algorithm takes the name of the one that it is made from",
    ),
    Mutation(
        "samples with the same random signs",
        "_executor/random_signs.py",
        "numbers = jnp.arange(samples * pairs, dtype=jnp.uint32)",
        "numbers = jnp.arange(samples * pairs, dtype=jnp.uint32) % pairs",
        ("tests/rules/test_random_rules.py::test_samples_draw_apart[uoro]",),
        "the noise of samples adds up instead of averaging out",
    ),
    Mutation(
        "lanes of a map with the same random signs",
        "_executor/random_signs.py",
        "_apart(jnp.where(alike, folded, keys), witness)",
        "_apart(keys, witness)",
        ("tests/rules/test_random_rules.py::test_lanes_of_somebody_elses_map_draw_apart[uoro]",),
        "the noise of lanes adds up instead of averaging out",
    ),
    Mutation(
        "the traces after a step in place of those before it",
        "_executor/step.py",
        "records, before, after = residuals",
        "records, _, before = residuals\n        after = before",
        ("tests/rules/test_random_rules.py::test_steps_that_give_what_was_before_them",),
        "the signal for the states before a step meets the trace of the states after it",
    ),
    Mutation(
        "a bias whose norm is that of its weight",
        "_etrace_op/operations/dense.py",
        'result["bias"] = of_output',
        'result["bias"] = result["weight"]',
        ("tests/ops/test_ops_rules.py::test_squared_norms_are_those_of_the_terms_of_a_step",),
        "the factors of UORO do not balance: the estimate is another one, with more noise",
    ),
    Mutation(
        "what a sample has been is multiplied by zero",
        "_executor/restart.py",
        "jnp.where(over_first_axis(flags, value.ndim), value, 0)",
        "over_first_axis(flags, value.ndim) * value",
        (
            "tests/rules/test_random_rules.py::test_a_reset_is_a_fresh_start_whatever_there_was[uoro]",
        ),
        "a trace that was NaN stays NaN",
    ),
    # several devices
    Mutation(
        "products over time and batch that bring samples together",
        "_learner/chunk_runner.py",
        "if is_divided and is_mapped else None",
        "if False else None",
        (SHARDED,),
        "devices send each other the activity of all samples instead of adding up a gradient",
    ),
    Mutation(
        "gradients that are added up over devices at every step",
        "_learner/split.py",
        "is_large = extra > 0 and not runs_on_several_devices()",
        "is_large = extra > 0",
        (SHARDED,),
        "a sequence sends the gradient of all weights as often as it has steps",
    ),
    Mutation(
        "a step whose traces gather what the model has gathered",
        "_runtime/compiled_step.py",
        "return single_step(*step, self.placement.records)",
        "return single_step(*step)",
        (SHARDED,),
        "a stream sends the activity of all units twice",
    ),
    Mutation(
        "an update of traces that gathers activity for each weight",
        "_learner/evolve.py",
        "records = algorithm.placement.records(records)",
        "pass",
        (SHARDED,),
        "the activity of all units is sent once for every operation and state",
    ),
    Mutation(
        "operations without traces that no mesh divides",
        "_runtime/on_mesh.py",
        "placement_of(step.graph_of_positions, ",
        "placement_of(step.graph, ",
        (SHARDED,),
        "every device has all states and weights that a rule has no traces of",
    ),
    # another batch size
    Mutation(
        "the first axis of an argument is always the batch",
        "_compiler/core/batch.py",
        "return likely if set(found) == {None} else found",
        "return likely",
        (f"{RESIZED}[argument without a batch]",),
        "a reset to another batch size resizes units and windows of time",
    ),
    Mutation(
        "States are as many samples as when they were compiled",
        "_runtime/compiled_model.py",
        "return next(sizes, batch.samples)",
        "return batch.samples",
        ("tests/runtime/test_batch_axes.py",),
        "States made by hand for another known batch size cannot be reset",
    ),
    # functions as models
    Mutation(
        "samples share a random key",
        "_runtime/initial_values.py",
        "jax.random.split(key, size), out_axes=1",
        "jnp.broadcast_to(key, (size,)), out_axes=1",
        (
            "tests/models/test_function_model.py::"
            "test_samples_that_are_mapped_have_random_keys_of_their_own",
        ),
        "all samples of a mapped model have one noise",
    ),
    Mutation(
        "a function's start that the user may change",
        "_function_model/model.py",
        "_Given(step, _kept(state))",
        "_Given(step, state)",
        ("tests/models/test_function_model.py::test_arrays_that_are_given_may_change_afterwards",),
        "a reset starts from what somebody has made of the array since",
    ),
    Mutation(
        "gradients on leaves in reverse order",
        "_function_model/tree.py",
        "path = self.paths[number]\n            return",
        "path = self.paths[-1 - number]\n            return",
        ("tests/models/test_function_model.py::test_every_way_to_a_gradient_gives_the_pytree",),
        "leaves of one shape get the gradients of each other",
    ),
    Mutation(
        "a marked weight with its axes exchanged",
        "_etrace_op/operations/einsum.py",
        "arranged(weight, axes.weight, [*by_group, axes.contracted, free])",
        "arranged(weight, axes.weight, [*by_group, free, axes.contracted])",
        (f"{MARKS}_learns_as_its_marked_twin[product]",),
        "numbers of a transposed weight stand in other places",
    ),
    Mutation(
        "a low rank whose factors have their axes in another order",
        "_compiler/marking/products.py",
        "upper = arranged(upper, second.weight, [of_second, second.free])",
        "upper = arranged(upper, second.weight, [second.contracted[::-1], second.free])",
        (f"{MARKS}_learns_as_its_marked_twin[a low rank]",),
        "the two axes of a rank are exchanged in one of its factors",
    ),
    Mutation(
        "a weight with noise marked element by element",
        "_compiler/marking/mark_plan.py",
        "            return back_from_outputs(uses.analysis.constants, equation)[operand] is CUT\n",
        "            return False\n",
        (
            f"{MARKS}_a_form_without_a_mark_has_the_gradient_of_the_step_and_names_an_operation"
            "[noise in a weight]",
        ),
        "what is reported names no operation to call",
    ),
    Mutation(
        "a row that an index has not read as the nearest one",
        "_compiler/marking/lookups.py",
        "        return jnp.where(has_row, y, fill if is_filled else jax.lax.stop_gradient(y))\n",
        "        return y\n",
        (
            f"{OUT_OF_RANGE}[promise_in_bounds]",
            f"{OUT_OF_RANGE}[filled with a number]",
        ),
        "an index out of range that JAX gives no gradient changes a row",
    ),
    Mutation(
        "axes of one entry counted among the places of a lookup",
        "_compiler/marking/lookups.py",
        "whole = [place - sum(one < place for one in ones) for place in whole]",
        "whole = [*whole]",
        (f"{MARKS}_has_the_relations_of_its_marked_twin[inside calls]",),
        "a slice of one row has its axes exchanged",
    ),
    Mutation(
        "a mark for every function of a parameter",
        "_compiler/marking/mark_plan.py",
        "next(link for link in chain if passing[link] == ends[chain[-1]])",
        "chain[0]",
        (f"{MARKS}_has_the_relations_of_its_marked_twin[a low rank with a bias]",),
        "a decay and one minus it have a trace each",
    ),
    Mutation(
        "States that are written taken for constants",
        "_compiler/marking/marks.py",
        "time = time_of(array.kind, array.written or (is_mapped and array.per_sample))",
        "time = time_of(array.kind, is_mapped and array.per_sample)",
        (f"{MARKS}_learns_as_its_marked_twin[branches]",),
        "what a hidden state is multiplied with is computed from parameters alone",
    ),
    # saving
    Mutation(
        "the checkpoint before is deleted first",
        "_saving/store.py",
        "        if UNFINISHED.fullmatch(child.name):\n",
        "        if UNFINISHED.fullmatch(child.name) or NAME.fullmatch(child.name):\n",
        ("tests/saving/test_saving.py::test_a_save_that_fails_leaves_the_one_before",),
        "a program that is ended while it saves has nothing to go on from",
    ),
    Mutation(
        "checksums are not looked at",
        "_saving/store.py",
        "        if checksum != expected[name]:",
        "        if False:",
        (
            "tests/saving/test_saving.py::test_arrays_that_are_not_those_that_were_saved_are_refused",
        ),
        "a damaged file gives other numbers",
    ),
    Mutation(
        "a checkpoint is not read back",
        "_saving/store.py",
        "        if not same:",
        "        if False:",
        (
            "tests/saving/test_checkpoint_folders.py::"
            "test_what_reads_back_as_other_numbers_replaces_nothing",
        ),
        "the last checkpoint that can be read is deleted",
    ),
    Mutation(
        "the checksum of a part as if it stood at the beginning",
        "_saving/checksums.py",
        "        total += 2 * stride * _by_place(along, start[axis])",
        "        total += 2 * stride * _by_place(along, 0)",
        ("tests/saving/test_saving.py::test_a_checksum_is_that_of_its_parts[float32]",),
        "what several processes save is taken for damaged",
    ),
    Mutation(
        "the state of another optimizer is taken",
        "_saving/contents.py",
        "    optimizers = saved.has_optimizer and own.has_optimizer",
        "    optimizers = False",
        ("tests/saving/test_saving.py::test_what_an_optimizer_keeps_waits_for_it",),
        "it is lost without a word",
    ),
    Mutation(
        "traces of gradients are cut by a product",
        "_learner/td_trace.py",
        "kept = jnp.where(factor == 0, jnp.zeros_like(z), factor * z)",
        "kept = factor * z",
        ("tests/learner/test_td_trace.py::test_an_episode_leaves_nothing_behind",),
        "0 * NaN is NaN: what was not finite in one episode is in all that follow",
    ),
    Mutation(
        "traces of gradients keep all but the discount",
        "_learner/td_trace.py",
        "factor = _beside(self.decay * discounts, z)",
        "factor = _beside(discounts, z)",
        ("tests/learner/test_td_trace.py::test_equals_a_plain_loop[by_scan]",),
        "the decay is accepted and ignored: TD(1)",
    ),
    Mutation(
        "errors of environments are added",
        "_learner/td_trace.py",
        "weights = -deltas.astype(z.dtype) / len(deltas)",
        "weights = -deltas.astype(z.dtype)",
        ("tests/learner/test_td_trace.py::test_equals_a_plain_loop[by_scan]",),
        "the size of an update grows with the number of environments",
    ),
    # layers, cells and neurons
    Mutation(
        "signs that weights do not keep",
        "nn/_layers/signs.py",
        "magnitude = saiunit.math.abs(weight)",
        "magnitude = weight",
        ("tests/nn/test_signs.py",),
        "an excitatory neuron inhibits",
    ),
    Mutation(
        "adaptation that does not decay",
        "nn/_spiking/neurons.py",
        "self.a.value = decay(self.tau_a) * self.a.value + spike",
        "self.a.value = self.a.value + spike",
        (f"{NEURONS}::test_an_adaptive_threshold_makes_intervals_longer",),
        "the threshold of a neuron rises without end",
    ),
    Mutation(
        "a hard reset that passes the potential",
        "nn/_spiking/neurons.py",
        "return V - (jax.lax.stop_gradient(V) - V_reset) * spike",
        "return V - (V - V_reset) * spike",
        (f"{NEURONS}::test_the_derivative_of_a_hard_reset_takes_the_fall_as_constant",),
        "the derivative of a hard reset is another one",
    ),
    Mutation(
        "gates of a GRU exchanged",
        "nn/_cells/gated.py",
        "        r, z = jnp.split(gates, 2, axis=-1)\n        candidate",
        "        z, r = jnp.split(gates, 2, axis=-1)\n        candidate",
        ("tests/nn/test_nn_cells.py::test_equations[GRUCell]",),
        "weights of brainstate's cell mean something else",
    ),
    Mutation(
        "an alpha synapse that reads its new input",
        "nn/_spiking/synapses.py",
        "self.g.value = left * (g + (time_step() / self.tau) * h)",
        "self.g.value = left * (g + (time_step() / self.tau) * (h + x))",
        (f"{NEURONS}::test_alpha_synapse",),
        "its response begins a step early",
    ),
    Mutation(
        "a projection of its last population",
        "nn/_spiking/projection.py",
        "            total = total + y",
        "            total = y",
        ("braintrace/nn/_spiking/projection.py::braintrace.nn._spiking.projection.Projection",),
        "the other populations send nothing",
    ),
    # sharding, without devices
    Mutation(
        "elements in reverse order count as sharded",
        "_sharding/parts.py",
        "return bool(np.all(is_free | (parts == own)) and not is_free.all())",
        "return not is_free.all()",
        (f"{LAYOUTS}::test_parts_of_axes",),
        "every step sends states and traces to other devices",
    ),
    Mutation(
        "sparse entries in any order are sharded",
        "_sharding/layout.py",
        "return is_divided and (not _has_entries(site) or self._entries_fit(site))",
        "return is_divided",
        (f"{LAYOUTS}::test_samples_and_units_are_sharded[by_source]",),
        "entries that follow the inputs are sent to the units at every step",
    ),
    Mutation(
        "states of all samples that one sample resets",
        "_executor/restart.py",
        "return flags.all(-1)",
        "return flags.any(-1)",
        (
            f"{BATCH_ROLES}::test_shared_states_go_on_until_all_samples_are_reset"
            "[Sideways-all equal]",
        ),
        "a sample resets what the others are still using",
    ),
    Mutation(
        "axes that follow the batch size by a multiple",
        "_compiler/core/batch.py",
        "if len(axes) == 1 and after[axes[0]] == size else None",
        "if len(axes) == 1 else None",
        (f"{BATCH_ROLES}::test_what_is_ambiguous_is_refused_by_name",),
        "samples one after the other in one axis count as one sample each",
    ),
    Mutation(
        "states that are made without a batch, and reached like one",
        "_compiler/core/batch.py",
        "        elif any(axis is not None for axis in batch_axes):\n",
        "        elif False:\n",
        (f"{BATCH_ROLES}::test_a_state_of_one_shape_among_others_is_refused",),
        "samples are never reset in a state whose batch is fixed",
    ),
    Mutation(
        "states without a batch axis",
        "_sharding/layout.py",
        "                    names[batch] = self._data\n",
        "                    names[batch] = None\n",
        (f"{LAYOUTS}::test_samples_and_units_are_sharded[dense]",),
        "every device has the states of all samples",
    ),
    Mutation(
        "parameters that are computed from sharded by their last axis",
        "_sharding/parts.py",
        "axes = (axis for axis, size in enumerate(var.aval.shape) if size % count == 0)",
        "axes = (len(var.aval.shape) - 1,)",
        (f"{LAYOUTS}::test_samples_and_units_are_sharded[masked]",),
        "a weight that is used transposed is replicated",
    ),
    Mutation(
        "traces of biases are replicated",
        "_sharding/layout.py",
        "            if is_same and is_divided_along(own.ndim - 1, own, self._count):\n"
        "                names[-1] = self._model\n",
        "            pass\n",
        (f"{LAYOUTS}::test_samples_and_units_are_sharded[recurrent]",),
        "every device has the traces of all units",
    ),
    # options
    Mutation(
        "an option that type checkers do not know",
        "_learner/options.py",
        "    every: int\n    nonfinite: str\n",
        "    every: int\n",
        (OPTIONS,),
        "a method takes other options than its documentation says",
    ),
    Mutation(
        "a program that serves another reduction",
        "_learner/options.py",
        'metadata=_static(one_of("mean", "sum"))',
        'metadata=_checked(one_of("mean", "sum"))',
        (OPTIONS,),
        "the second call returns the mean in the place of the sum",
    ),
    Mutation(
        "a program that keeps the arrays of the call it was compiled in",
        "_learner/driver.py",
        "kept = Request(request.method, (), options.compiled, request.chosen)",
        "kept = request",
        (OPTIONS,),
        "a mask as long as the sequence stays in memory",
    ),
    Mutation(
        "a plan with a default of its own",
        "_planning/plan.py",
        "every: int = 1,",
        "every: int = 2,",
        (OPTIONS,),
        "a plan is for another call than the one that follows",
    ),
    Mutation(
        "an algorithm with a default of its own",
        "_algorithms/algorithm.py",
        "unroll_limit: int = 32,",
        "unroll_limit: int = 16,",
        (OPTIONS,),
        "an algorithm and `compile_etrace_graph` compile one model differently",
    ),
    # plans
    Mutation(
        "a loop counts as one step",
        "_planning/flops.py",
        "return times * sum(bodies)",
        "return sum(bodies)",
        (f"{PLANS}::test_operations_are_counted",),
        "a sequence costs as much as one step of it",
    ),
    Mutation(
        "an optimizer outside the program takes nothing",
        "_planning/plan.py",
        "total=once + found.temp + outside)",
        "total=once + found.temp)",
        (f"{PLANS}::test_an_optimizer_is_counted",),
        "a plan fits, and the learner does not",
    ),
    Mutation(
        "devices that are added instead of multiplied",
        "_planning/plan.py",
        "data=parts.data * times)",
        "data=parts.data + times)",
        (f"{PLANS}::test_what_does_not_fit_is_told_with_what_would",),
        "the plan asks for numbers of devices that the batch cannot be divided between",
    ),
    Mutation(
        "arrays that the mesh shards count in full",
        "_planning/plan.py",
        "return sum(size_of(a) // (parts.model if a.is_divided else 1) for a in found)",
        "return sum(size_of(a) for a in found)",
        (f"{PLANS}::test_samples_and_outputs_are_divided",),
        "a model does not fit on any number of devices",
    ),
    Mutation(
        "replicated arithmetic counts as sharded",
        "_planning/plan.py",
        "// work.steps // shares",
        "// work.steps // parts.model",
        (f"{PLANS}::test_what_is_not_divided_is_computed_as_a_whole",),
        "devices seem to share what each of them computes",
    ),
    # the comparison of rules
    Mutation(
        "states outside the model that a comparison leaves changed",
        "_comparison/compare.py",
        "with restored([*states, *bptt.outside]) as rewind, _bar",
        "with restored(states) as rewind, _bar",
        (f"{COMPARISON}_nothing_changes[None-0]",),
        "the user's own States keep what the comparison wrote",
    ),
    Mutation(
        "a write before the call of the model that stays",
        "_comparison/workload.py",
        "with contextlib.suppress(_Called), undone(), in_words",
        "with contextlib.suppress(_Called), in_words",
        (f"{COMPARISON}_nothing_changes[None-0]",),
        "the user's own States keep what the first look wrote",
    ),
    Mutation(
        "the loss of a masked step has a derivative in BPTT",
        "_comparison/bptt.py",
        "return after, jnp.zeros_like(loss)",
        "return after, loss",
        (f"{COMPARISON}_units_masks_and_padding",),
        "a target without a value makes the exact gradient NaN",
    ),
    Mutation(
        "padding after the last loss takes part in BPTT",
        "_comparison/bptt.py",
        "steps = int(np.max(np.flatnonzero(weights), initial=0)) + 1",
        "steps = len(weights)",
        (f"{COMPARISON}_units_masks_and_padding",),
        "padding that is NaN makes the exact gradient NaN",
    ),
    Mutation(
        "all windows of a rule are one row",
        "_comparison/compare.py",
        "key = entry.name, length",
        "key = entry.name, None",
        (f"{COMPARISON}_exact_rules_and_windows_over_everything_are_exact",),
        "a window seems to change nothing",
    ),
    Mutation(
        "samples that draw the same noise in BPTT",
        "_comparison/bptt.py",
        "jax.random.split(state.value, size) if is_key else state.value",
        "jnp.stack([state.value] * size) if is_key else state.value",
        (f"{COMPARISON}_mapped_models_draw_the_same_noise",),
        "an exact rule seems to deviate",
    ),
    # the dataflow engine
    Mutation(
        "an unknown primitive counts as elementwise",
        "_jaxpr/dataflow/primitives.py",
        "_UNKNOWN = Entry()",
        "_UNKNOWN = Entry(lambda *given: _by_element(*given))",
        ("tests/jaxpr/test_dataflow.py::test_an_unknown_primitive_couples_everything",),
        "a primitive of a later JAX, or of a user, gets zeros that are none",
    ),
    Mutation(
        "an unknown primitive counts as proportional",
        "_jaxpr/dataflow/kinds.py",
        "most of them assert\n        return False",
        "most of them assert\n        return True",
        (f"{VARIABLES}::test_an_unknown_primitive_is_not_proportional",),
        "a primitive of a user's own is summed up over time before it is applied",
    ),
    Mutation(
        "a loop whose length depends on a gradient counts as proportional to it",
        "_jaxpr/dataflow/linearity.py",
        "return None if choice in INDEPENDENT else OTHER",
        "return None",
        (f"{LINEAR}[a while on g]", f"{LINEAR}[a branch on g]"),
        "a nonlinear backward rule is not reported",
    ),
    Mutation(
        "both branches count where one is never taken",
        "_jaxpr/dataflow/linearity.py",
        "return (ZERO, TRUE).index(choice) if choice in (ZERO, TRUE) else None",
        "return None",
        (f"{LINEAR}[all finite]",),
        "a gradient that is checked for infinity is reported as nonlinear",
    ),
    Mutation(
        "an index that a parameter decides counts as parameter-derived",
        "_jaxpr/dataflow/taint.py",
        "return time if carries_derivative(var) else _held(time)",
        "return time",
        (f"{VARIABLES}::test_a_parameter_is_followed_as_far_as_a_derivative_goes",),
        "a lookup by an index from a parameter is marked as a product with it",
    ),
    Mutation(
        "parameters are lost behind a custom derivative",
        "_jaxpr/dataflow/taint.py",
        "if equation.primitive.name in OWN_DERIVATIVE:",
        "if False:",
        (
            f"{VARIABLES}::test_a_parameter_behind_a_custom_derivative_is_followed_though_its_value_is_held",
        ),
        "a weight behind a straight-through estimator stays without a mark",
    ),
    Mutation(
        "a State that the step writes counts as constant",
        "_compiler/core/binding_times.py",
        'return BindingTime.DATA if changes or kind == "random" else BindingTime.CONSTANT',
        'return BindingTime.DATA if kind == "random" else BindingTime.CONSTANT',
        ("tests/compiler/test_masked_weights.py::test_a_mask_that_changes_within_a_sequence",),
        "a trace is taken for one of a mask that is another one at every step",
    ),
    Mutation(
        "numbers drawn without a key count as constants",
        "_jaxpr/dataflow/taint.py",
        "if equation.primitive.name in DRAWS:",
        "if False:",
        (f"{VARIABLES}::test_random_numbers_without_a_key_are_data",),
        "noise on a weight is taken for a part of the weight",
    ),
    Mutation(
        "what a loop carries counts as what it starts from",
        "_jaxpr/dataflow/flow.py",
        "carried = fixpoint(join, lambda c: results(c, loop.sequences)[:count], loop.carried)",
        "carried = loop.carried",
        (f"{VARIABLES}::test_what_a_loop_carries_is_data_if_a_later_step_or_its_end_is",),
        "data that a later step adds to a parameter are missed",
    ),
    Mutation(
        "the body of a custom derivative counts as its derivative",
        "_jaxpr/dataflow/flow.py",
        "if body is not None and (name in TRANSPARENT_CALLS or not question.derivatives):",
        "if body is not None:",
        ("tests/jaxpr/test_dataflow.py::test_the_body_of_a_custom_derivative_is_not_followed",),
        "a surrogate gradient that couples elements is taken for elementwise",
    ),
    Mutation(
        "labels of which the highest counts",
        "_jaxpr/dataflow/lattices.py",
        "labels = np.where(low == top, top, TOP)",
        "labels = top",
        (f"{LABELS}[reduce_sum]",),
        "a mean over the batch seems to belong to the last sample",
    ),
    Mutation(
        "a scan that ends with its first step",
        "_jaxpr/dataflow/flow.py",
        "is_steady = all(s is None or (s == s[:1]).all() for s in sequences)",
        "is_steady = True",
        (f"{FLOW}[scan-map]",),
        "all rows seem to depend on the first one",
    ),
    Mutation(
        "a scan that does not carry",
        "_jaxpr/dataflow/flow.py",
        "        carried = flows[:count]\n",
        "        pass\n",
        (f"{FLOW}[scan-running]",),
        "what earlier steps add is lost",
    ),
    Mutation(
        "a while loop that is followed once",
        "_jaxpr/dataflow/flow.py",
        "        if all(same(a, b) for a, b in zip(carried, after, strict=True)):\n",
        "        if True:\n",
        (f"{FLOW}[while-counted]",),
        "what a second step adds is lost",
    ),
    Mutation(
        "a loop whose condition decides nothing",
        "_jaxpr/dataflow/flow.py",
        "decided = _everywhere(question.lattice, goes_on, atoms.carried)",
        "decided = [None] * len(atoms.carried)",
        (f"{FLOW}[while-decided]",),
        "samples that stop the loop for all of them seem independent",
    ),
    Mutation(
        "windows without their stride",
        "_jaxpr/dataflow/windows.py",
        "at = np.arange(outputs)[:, None] * stride + np.arange(window) * rate - low",
        "at = np.arange(outputs)[:, None] + np.arange(window) * rate - low",
        (f"{FLOW}[conv_general_dilated-strides]",),
        "a pooled element seems to come from its neighbours",
    ),
    Mutation(
        "a convolution that joins all feature groups",
        "_jaxpr/dataflow/windows.py",
        "inputs // of_features, *rest)",
        "inputs // of_features, *rest)[:, ::-1]",
        (f"{FLOW}[conv_general_dilated-groups]",),
        "a depthwise convolution passes to the wrong channels",
    ),
    Mutation(
        "a triangular solve from the other end",
        "_jaxpr/dataflow/primitives.py",
        'backward = params["lower"] == params["transpose_a"]',
        'backward = params["lower"] != params["transpose_a"]',
        (f"{FLOW}[triangular_solve-(True, True, False)]",),
        "unknowns seem to depend on later rows",
    ),
    Mutation(
        "a write of several slots that ends with the first",
        "_compiler/frontend/slot_writes.py",
        "slots == slot, buffer, value",
        "slots == 0, buffer, value",
        ("tests/compiler/test_ring_buffers.py::test_a_write_is_what_it_is_in_jax",),
        "a buffer forgets all but one of the values that a step stores",
    ),
    Mutation(
        "all updates in one slot",
        "_compiler/frontend/slot_writes.py",
        "np.arange(places.size) - np.searchsorted(in_order, in_order)",
        "0",
        ("tests/compiler/test_ring_buffers.py::test_a_write_is_what_it_is_in_jax",),
        "of the values that a step stores, one takes the places of all",
    ),
    Mutation(
        "a scatter that leaves what was there",
        "_jaxpr/dataflow/moves.py",
        "flow = _cleared(lattice, flow, targets)",
        "pass",
        (f"{FLOW}[scatter-constant]",),
        "an element that is written over seems to have an influence",
    ),
    Mutation(
        "an applied function counts as a scatter",
        "_jaxpr/dataflow/moves.py",
        'if equation.params.get("update_jaxpr") is None or equation.primitive.name != "scatter":',
        "if True:",
        (f"{FLOW}[scatter-applied]",),
        "what a function is applied to in place has no derivative",
    ),
    Mutation(
        "slices that reach out are always dropped",
        "_jaxpr/dataflow/moves.py",
        "start = np.clip(start, 0, last)",
        "pass",
        (f"{FLOW}[gather-clipped]",),
        "a clipped index has no derivative",
    ),
    Mutation(
        "places from data count as the first ones",
        "_jaxpr/dataflow/moves.py",
        "flow = spread(lattice, anywhere, equation.invars[0].aval.shape)",
        "pass",
        (f"{FLOW}[gather-batched]",),
        "only the first row of a table seems to be read",
    ),
    Mutation(
        "a transposition counts as in order",
        "_jaxpr/dataflow/primitives.py",
        '**_move("transpose", moves.transpose),',
        '**_move("transpose", moves.transpose, in_order=True),',
        ("tests/jaxpr/test_dataflow.py::test_a_moved_element_is_its_source[transpose]",),
        "a state that each step transposes is held constant",
    ),
    Mutation(
        "a written slice whose elements count as those of the array",
        "_jaxpr/dataflow/moves.py",
        "after[targets[targets != NOWHERE]] = updates[targets != NOWHERE]",
        "pass",
        ("tests/jaxpr/test_dataflow.py::test_a_moved_element_is_its_source",),
        "a new value seems to be an old one",
    ),
    Mutation(
        "a product with the axes of its partner in front",
        "_jaxpr/dataflow/primitives.py",
        "missing = tuple(i for i, a in enumerate(result) if a not in names)",
        "missing = tuple(range(len(result) - len(kept)))",
        (f"{FLOW}[dot_general-outer]",),
        "rows and columns of a product are exchanged",
    ),
    Mutation(
        "a moved state that holds what joins it",
        "_compiler/core/walk.py",
        "        if not in_place and self._is_followed(var, moved):",
        "        if False:",
        ("tests/compiler/test_reported_paths.py::test_only_the_move_of_an_old_state_is_cut",),
        "an input that is added to a moved state is learned without a trace",
    ),
    Mutation(
        "a moved state that is followed to the state itself",
        "_compiler/core/walk.py",
        "        return is_computed and all(np.array_equal(ids, uses[0][1]) for _, ids in uses)",
        "        return all(np.array_equal(ids, uses[0][1]) for _, ids in uses)",
        (
            "tests/compiler/test_reported_paths.py::test_an_old_state_that_only_moves_is_not_carried",
        ),
        "an old state counts as carried in the unit that it is moved to",
    ),
    Mutation(
        "a custom derivative that couples elements counts as elementwise",
        "_compiler/core/back_through.py",
        "flows = flows_back(Labels(), constants, equation, labels)",
        "flows = [f if f is None else np.maximum(f, BOTTOM) for f in flows_back("
        "Labels(), constants, equation, labels) or []] or None",
        (f"{JACOBIANS}::test_what_a_custom_derivative_couples_is_reported[rolled and in place]",),
        "a path is truncated in silence",
    ),
    Mutation(
        "a custom derivative that couples elements is not followed forward",
        "_compiler/core/back_through.py",
        "if targets is None or np.any(targets == TOP):",
        "if targets is None:",
        (f"{JACOBIANS}::test_what_a_custom_derivative_couples_is_reported[running]",),
        "the Jacobian of SnAp lacks entries",
    ),
    Mutation(
        "an equation that couples elements counts as a broadcast",
        "_compiler/core/back_through.py",
        "return (is_mixed and not is_alone) or _couples(constants, equation, operand)",
        "return False",
        (
            "tests/compiler/test_reported_paths.py::test_reported_with_names_and_line_and_refused_by_strict",
        ),
        "a path is truncated in silence",
    ),
    Mutation(
        "of elements that meet, the one that was moved most counts",
        "_jaxpr/dataflow/lattices.py",
        "first | np.int32(self._several), np.minimum(first, second))",
        "first | np.int32(self._several), np.maximum(first, second))",
        ("tests/jaxpr/test_dataflow.py::test_of_elements_that_meet_the_least_moved_counts",),
        "a path that stays in place is truncated, and a neighbour's is carried",
    ),
    Mutation(
        "moved elements count as in place",
        "_jaxpr/dataflow/lattices.py",
        "flow + has_room.view(np.int8) * np.int32(self._once)",
        "flow",
        ("tests/jaxpr/test_dataflow.py::test_of_elements_that_meet_the_least_moved_counts",),
        "where a state meets its neighbours, neither is known",
    ),
    Mutation(
        "a cotangent that goes around a loop of unknown length once",
        "_jaxpr/dataflow/vjp.py",
        "carried = fixpoint(join, lambda after: before(after)[fixed:], cotangents)",
        "carried = before(cotangents)[fixed:]",
        ("tests/jaxpr/test_dataflow.py::test_a_loop_of_unknown_length_is_followed_back",),
        "what a second step couples is carried as if it were elementwise",
    ),
    Mutation(
        "loops couple everything before a broadcast",
        "_jaxpr/dataflow/flow.py",
        "drive = DRIVERS.get(name)",
        "drive = None",
        (f"{FLOW}[scan-rolled]", f"{RELATIONS}[branch]"),
        "a weight that is exact is refused",
    ),
    Mutation(
        "parts that a parameter does not have",
        "_sharding/parts.py",
        "return labels is not None and np.array_equal(labels, parts)",
        "return labels is not None",
        ("tests/sharding/test_layouts.py",),
        "parameters are sharded along an axis that their operand does not follow",
    ),
    # what a trace truncates
    Mutation(
        "running sums count as elementwise",
        "_jaxpr/dataflow/primitives.py",
        '**_each("cumsum", _cumulative, kind=_sum_of(0)),',
        '**_elementwise("cumsum", kind=_sum_of(0)),',
        (f"{JACOBIANS}::test_what_is_truncated_in_a_random_cell_is_reported",),
        "a path that couples elements is carried as if it did not",
    ),
    Mutation(
        "coupling by ordinary operations without a diagnostic",
        "_compiler/reports/diagnose_groups.py",
        '    if states:\n        yield Diagnostic(\n            "warning",',
        '    if False:\n        yield Diagnostic(\n            "warning",',
        (f"{JACOBIANS}::test_what_d_rtrl_truncates_is_reported[PlainRecurrentRNN]",),
        "nothing says that a recurrent weight is left out",
    ),
    Mutation(
        "products that keep what several elements reach",
        "_compiler/whole_state/jacobian_sparsity.py",
        "(is_used @ by_sample.astype(np.float32) > 0)",
        "(is_used @ by_sample.astype(np.float32) > 1)",
        (f"{JACOBIANS}::test_samples_and_the_sparsity_of_snap[Stacked]",),
        "SnAp drops influences that it should keep",
    ),
    Mutation(
        "layers after those that read them",
        "_compiler/whole_state/layers.py",
        "for layer in components(reads)]",
        "for layer in components(reads)[::-1]]",
        (f"{JACOBIANS}::test_layers_are_in_order_and_what_they_truncate_is_reported[Stacked]",),
        "a layer is learned before what it reads is known",
    ),
    Mutation(
        "constants that a gradient passes",
        "_compiler/core/step_graph.py",
        "        if equation.primitive.name in CONSTANT:\n            continue\n        mask",
        "        mask",
        (STEP_GRAPH,),
        "a state read through stop_gradient counts as one that learns",
    ),
    Mutation(
        "paths forward that pass where they end",
        "_compiler/core/step_graph.py",
        "            if node in ends:",
        "            if False:",
        (STEP_GRAPH,),
        "a way through an ETP operation counts as one without",
    ),
    Mutation(
        "paths backward that pass where they end",
        "_compiler/core/step_graph.py",
        "return () if var in ends else (",
        "return () if False else (",
        (STEP_GRAPH,),
        "a state below another one counts as read directly",
    ),
    Mutation(
        "nodes that are looked through",
        "_compiler/core/step_graph.py",
        "            if atom in nodes:",
        "            if False:",
        (STEP_GRAPH,),
        "nothing is behind a State, so that no layer reads another",
    ),
    Mutation(
        "steps that do not follow each other",
        "_compiler/core/step_graph.py",
        "self._before.setdefault(new, set()).add(old)",
        "self._before.setdefault(old, set()).add(new)",
        (STEP_GRAPH,),
        "RTRL forgets parameters that reach a state in a later step",
    ),
]


class NotKilledError(Exception):
    """A mutation that no test noticed, or that could not be tried out."""


def try_out(mutation, folder):
    """Put one fault into the copy, run its tests, and take it out again.

    Raises
    ------
    NotKilledError
        If the text is not there once, or no test notices.
    """
    path = folder / "braintrace" / mutation.file
    text = path.read_text()
    if text.count(mutation.old) != 1:
        raise NotKilledError(f"{mutation.file} has its text {text.count(mutation.old)} times")
    path.write_text(text.replace(mutation.old, mutation.new))
    try:
        status, printed = run_tests(folder, mutation.tests)
    finally:
        path.write_text(text)
    if status == PASSED:
        raise NotKilledError("SURVIVED")
    if status != FAILED:
        raise NotKilledError(f"its tests did not run:\n{printed}")


def chosen(names):
    known = {mutation.name: mutation for mutation in MUTATIONS}
    unknown = [name for name in names if name not in known]
    if unknown or len(known) < len(MUTATIONS):
        sys.exit(f"Not a mutation, or not one alone: {', '.join(unknown)}")
    return [known[name] for name in names] or MUTATIONS


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutations; all without any")
    mutations = chosen(parser.parse_args().names)
    failures = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        copy_repository(folder)
        tests = dict.fromkeys(test for mutation in mutations for test in mutation.tests)
        status, printed = run_tests(folder, tests)
        if status != PASSED:
            sys.exit(f"The tests do not pass without a fault:\n{printed}")
        for mutation in mutations:
            start = time.perf_counter()
            try:
                try_out(mutation, folder)
                found = "killed"
            except NotKilledError as error:
                found = str(error)
                failures.append(mutation.name)
            print(f"{found:9} {time.perf_counter() - start:4.0f} s  {mutation.name}", flush=True)
    print(f"{len(mutations) - len(failures)} of {len(mutations)} killed")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
