"""What is not finite is gone after a restart, and does not count where the mask is zero."""

import brainstate
import cases
import jax
import jax.numpy as jnp
import numpy as np
import operation_cases
import pytest
from assertions import assert_gradients_close, assert_same_bits
from drivers import build_learner, named, snapshot, weights_of
from rules import OF_SOME_MODELS, OTHERS

import braintrace

LENGTH, BATCH = 7, 2
# One sample is NaN in step 2, and starts anew before step 4; the last step is padding.
RESET = np.zeros((LENGTH, BATCH), bool)
RESET[0], RESET[4, 0] = True, True
MASK = np.isin(np.arange(LENGTH), (2, 3, 6), invert=True)
ES = {"decay_or_rank": 0.8}
WINDOW = {"vjp_method": "multi-step"}
METHODS = [
    ("rotation", "d_rtrl", "batch axis", {}, (1, 3)),
    ("lstm_fused", "d_rtrl", "mapped", {"trace_dtype": jnp.bfloat16}, (LENGTH,)),
    ("alif_late_threshold", "es_d_rtrl", "batch axis", ES, (3, LENGTH)),
    ("alif_late_threshold", "d_rtrl", "mapped", WINDOW, (3,)),
    ("lstm_fused", "es_d_rtrl", "batch axis", {**ES, **WINDOW}, (3,)),
    *(("alif_late_threshold", rule.name, "batch axis", {}, (3, LENGTH)) for rule in OTHERS),
    *(
        pytest.param(rule.case, rule.name, "batch axis", {}, (3, LENGTH), marks=pytest.mark.nightly)
        for rule in OF_SOME_MODELS
    ),
]


def sequences(case):
    """Inputs with and without what is not finite, and targets."""
    xs, targets = case.sequences(BATCH, LENGTH)
    clean, dirty = np.array(xs), np.array(xs)
    clean[2, 0], clean[6] = 0, 0
    dirty[2, 0], dirty[6] = np.nan, np.inf
    return clean, dirty, targets


@pytest.mark.parametrize(("name", "algorithm", "style", "options", "chunk_sizes"), METHODS)
def test_gradients_of_a_sequence(name, algorithm, style, options, chunk_sizes):
    case = cases.BY_NAME[name]
    learner = build_learner(case, algorithm, style, BATCH, **options)
    clean, dirty, targets = sequences(case)

    def step_fn(x, target):
        return case.loss(learner(x), target)

    def gradient(xs, **kinds):
        _ = learner.algorithm.traces.value  # read, so that one program serves all
        return learner.etrace_grad(
            xs, targets, step_fn=step_fn, reduction="sum", return_value=True, **kinds
        )

    for chunk_size in chunk_sizes:
        kinds = {"mask": MASK, "reset": RESET, "chunk_size": chunk_size}
        expected, losses = gradient(clean, **kinds)
        for call in ("masked", "the next"):
            found, values = gradient(dirty, **kinds)
            assert_gradients_close(found, expected, 1e-6, f"{call} call in chunks of {chunk_size}")
            assert_same_bits(values, losses)


@pytest.mark.parametrize("options", [{}, {"algorithm": "es_d_rtrl", **ES}])
def test_states_and_traces_of_a_sequence(options):
    case = cases.BY_NAME["rotation"]
    learner = build_learner(case, **options)
    clean, dirty, _ = sequences(case)
    found = []
    for xs in (clean, dirty, dirty):
        _ = learner.algorithm.traces.value
        learner.etrace_evolve(xs[:6], reset=RESET[:6], chunk_size=3)
        found.append(snapshot(learner))
    for after in found[1:]:
        assert_same_bits(after, found[0])


@pytest.mark.parametrize(
    ("name", "algorithm", "options"), [("rotation", "d_rtrl", {}), ("lstm_fused", "es_d_rtrl", ES)]
)
def test_parameters_of_a_stream(name, algorithm, options):
    """Steps whose gradient is not finite are skipped; those after the restart learn."""
    case = cases.BY_NAME[name]
    clean, dirty, targets = sequences(case)
    reset = RESET if algorithm == "d_rtrl" else RESET.any(1)

    def run(xs):
        learner = build_learner(case, algorithm, **options)
        weights = weights_of(learner.algorithm.model)

        def update(gradients, counts):
            for path, weight in weights.items():
                weight.value = jax.tree.map(
                    lambda w, g: jnp.where(counts, w - 0.1 * g, w), weight.value, gradients[path]
                )

        def step_fn(x, target, counts):
            return case.loss(learner(x), target), counts

        for part in (slice(0, 3), slice(3, LENGTH)):  # NaN in the last step of the first call
            now = (xs[part], targets[part], MASK[part])
            functions = {"step_fn": step_fn, "update_fn": update}
            learner.etrace_online(*now, **functions, has_aux=True, reset=reset[part])
        return named({path: weight.value for path, weight in weights.items()})

    assert_gradients_close(run(dirty), run(clean), 1e-6, name)


@pytest.mark.parametrize(
    ("algorithm", "case"),
    [(braintrace.D_RTRL, case) for case in operation_cases.CASES]
    + [(braintrace.ES_D_RTRL, case) for case in operation_cases.CASES[2:6]],
    ids=lambda value: getattr(value, "name", ""),
)
def test_traces_of_single_samples(algorithm, case):
    model = operation_cases.Diagonal(case)
    brainstate.nn.init_all_states(model, batch_size=BATCH)
    instance = algorithm(model)
    instance.compile_graph(case.inputs[0])
    traces = jax.tree.map(lambda leaf: np.asarray(leaf) + leaf.dtype.type(3), instance.traces.value)
    not_finite = jax.tree.map(
        lambda leaf: np.full_like(leaf, np.nan) if leaf.dtype == np.float32 else leaf, traces
    )
    flags = np.array([True, False])
    restart = jax.jit(instance.compiled.restart)
    found, kept = (restart(t, flags) for t in (not_finite, traces))
    for leaf, whole, before in zip(*map(jax.tree.leaves, (found, kept, traces)), strict=True):
        anew, other = leaf.reshape(BATCH, -1)
        np.testing.assert_array_equal(anew, 0)
        assert leaf.dtype == jnp.int32 or np.isnan(other).all()
        np.testing.assert_array_equal(whole.reshape(BATCH, -1)[1], before.reshape(BATCH, -1)[1])
