"""What is not finite is gone after a reset, and does not count where the mask is zero."""

import functools
import warnings

import brainstate
import catalogue
import jax
import jax.numpy as jnp
import numpy as np
import operation_cases
import optax
import pytest
from assertions import assert_gradients_close, assert_same_bits
from drivers import build_learner, compiled_once, named, snapshot, weights_of
from rules import OF_SOME_MODELS, OTHERS

import braintrace
from braintrace._core.chunk import pure_step

LENGTH, BATCH = 7, 2
# One sample is NaN in step 2, and starts anew before step 4; the last step is padding.
RESET = np.zeros((LENGTH, BATCH), bool)
RESET[0], RESET[4, 0] = True, True
MASK = np.isin(np.arange(LENGTH), (2, 3, 6), invert=True)
ES = {"decay_or_rank": 0.8}
WINDOW = {"window": 3}
METHODS = [
    ("Rotation", "d_rtrl", "batch axis", {}, (1, 3)),
    ("LSTMFused", "d_rtrl", "mapped", {"trace_dtype": jnp.bfloat16}, (LENGTH,)),
    ("ALIFLateThreshold", "es_d_rtrl", "batch axis", ES, (3, LENGTH)),
    ("ALIFLateThreshold", "d_rtrl", "mapped", WINDOW, (3, LENGTH)),
    ("LSTMFused", "es_d_rtrl", "batch axis", {**ES, **WINDOW}, (6,)),  # two windows, then a step
    *(("ALIFLateThreshold", rule.name, "batch axis", {}, (3, LENGTH)) for rule in OTHERS),
    *((rule.case, rule.name, "batch axis", {}, (3, LENGTH)) for rule in OF_SOME_MODELS),
]


def sequences(case):
    """Inputs with and without what is not finite, and targets."""
    xs, targets = case.sequences(BATCH, LENGTH)
    clean, dirty = np.array(xs), np.array(xs)
    clean[2, 0], clean[6] = 0, 0
    dirty[2, 0], dirty[6] = np.nan, np.inf
    return clean, dirty, targets


@pytest.mark.parametrize(
    ("name", "algorithm", "style", "options", "chunk_sizes"),
    [
        ("LSTMFused", "d_rtrl", "mapped", {"trace_dtype": jnp.bfloat16}, (7,)),
        ("LSTMFused", "es_d_rtrl", "batch axis", {"decay_or_rank": 0.8, "window": 3}, (6,)),
    ],
)
def test_gradients_of_a_sequence(name, algorithm, style, options, chunk_sizes):
    case = catalogue.BY_NAME[name]
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
    case = catalogue.BY_NAME["Rotation"]
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
    ("name", "algorithm", "options"), [("Rotation", "d_rtrl", {}), ("LSTMFused", "es_d_rtrl", ES)]
)
def test_parameters_of_a_stream(name, algorithm, options):
    """An `update_fn` that skips steps whose gradient is not finite; later ones learn."""
    case = catalogue.BY_NAME[name]
    clean, dirty, targets = sequences(case)
    reset = RESET if algorithm == "d_rtrl" else RESET.any(1)
    begin = compiled_once(lambda: build_learner(case, algorithm, **options))
    learner = begin()
    weights = weights_of(learner.algorithm.model)

    def update(gradients, counts):
        for path, weight in weights.items():
            weight.value = jax.tree.map(
                lambda w, g: jnp.where(counts, w - 0.1 * g, w), weight.value, gradients[path]
            )

    def step_fn(x, target, counts):
        return case.loss(learner(x), target), counts

    def run(xs):
        begin()
        for part in (slice(0, 3), slice(3, LENGTH)):  # NaN in the last step of the first call
            now = (xs[part], targets[part], MASK[part])
            functions = {"step_fn": step_fn, "update_fn": update}
            rest = {"has_aux": True, "reset": reset[part], "nonfinite": "ignore"}
            learner.etrace_online(*now, **functions, **rest)
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
    reset = jax.jit(instance.compiled.reset)
    found, kept = (jax.device_get(reset(t, flags)) for t in (not_finite, traces))
    for leaf, whole, before in zip(*map(jax.tree.leaves, (found, kept, traces)), strict=True):
        anew, other = leaf.reshape(BATCH, -1)
        np.testing.assert_array_equal(anew, 0)
        assert leaf.dtype == jnp.int32 or np.isnan(other).all()
        np.testing.assert_array_equal(whole.reshape(BATCH, -1)[1], before.reshape(BATCH, -1)[1])


# --- what a stream does about it --------------------------------------------------------------


def warns(*found):
    return pytest.warns(braintrace.NonFiniteWarning, match=".*".join(found))


def learning(learner, case, xs, targets, rate=0.1, **options):
    return learner.etrace_online(
        xs,
        targets,
        step_fn=lambda x, target: case.loss(learner(x), target),
        optimizer=optax.sgd(rate, momentum=0.9),
        **options,
    )


STREAMS = [
    ("ALIFLateThreshold", "d_rtrl", "batch axis", {}),
    ("Leaky", "d_rtrl", "mapped", {}),
]


@pytest.mark.core
@pytest.mark.parametrize(("name", "algorithm", "style", "options"), STREAMS)
def test_updates_that_are_not_finite_are_left_out(name, algorithm, style, options):
    """A sample that is spoiled starts anew; the other one, and the optimizer, go on."""
    case = catalogue.BY_NAME[name]
    found, expected = (build_learner(case, algorithm, style, BATCH, **options) for _ in range(2))
    xs, targets = map(np.array, case.sequences(BATCH, LENGTH))
    spoiled = np.array(xs)
    spoiled[2, 0] = np.nan
    with warns("first at step 2 ", "skipped: 1", "Samples that were reset.*: 0\\."):
        losses = learning(found, case, spoiled, targets)
    assert found.skipped_updates == 1
    assert "1" in str(found.report()).rpartition("left out")[2]

    reset = np.zeros((LENGTH, BATCH), bool)
    reset[3, 0] = True
    alone = learning(expected, case, xs, targets, reset=reset, mask=np.arange(LENGTH) != 2)
    kept = np.arange(LENGTH) != 2
    np.testing.assert_allclose(losses[kept], alone[kept], rtol=1e-5)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    jax.tree.map(close, snapshot(found), snapshot(expected))
    jax.tree.map(close, found.optimizer_state, expected.optimizer_state)


@pytest.mark.parametrize("every", [1, 3])
def test_a_step_without_weight_spoils_no_later_one(every):
    """A sample that it has spoiled starts anew after its block, in the same call or in the next."""
    case = catalogue.BY_NAME["ALIFLateThreshold"]
    xs, targets = map(np.array, case.sequences(BATCH, LENGTH))
    spoiled, counts = np.array(xs), np.arange(LENGTH) != 2
    spoiled[2, 0] = np.nan
    begin = compiled_once(lambda: build_learner(case, batch=BATCH))
    learner, reset = begin(), np.zeros((LENGTH, BATCH), bool)
    reset[3, 0] = True
    learning(learner, case, xs, targets, reset=reset, mask=counts, every=every)
    expected = snapshot(learner)

    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    for parts in ([slice(None)], [slice(0, 3), slice(3, None)]):
        begin()
        for part in parts:
            learning(learner, case, spoiled[part], targets[part], mask=counts[part], every=every)
        assert learner.skipped_updates == 0
        jax.tree.map(close, snapshot(learner), expected)


def test_losses_that_are_not_finite_spoil_no_sample():
    """Where states and traces are finite, they go on; a block is left out as a whole."""
    case = catalogue.BY_NAME["Leaky"]
    found, expected = (build_learner(case, batch=BATCH) for _ in range(2))
    xs, targets = map(np.array, case.sequences(BATCH, LENGTH))
    wrong = np.array(targets)
    wrong[4] = np.inf
    with warns("first at step 3 ", "all samples are finite"):
        learning(found, case, xs, wrong, every=3)
    assert found.skipped_updates == 1
    learning(expected, case, xs, targets, mask=np.arange(LENGTH) // 3 != 1, every=3)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, snapshot(found), snapshot(expected))


def test_skipping_within_functions_of_the_state():
    """Also mapped: each learner skips for itself."""
    case = catalogue.BY_NAME["Leaky"]
    learner = build_learner(case, batch=BATCH)
    learner.init_optimizer(optax.sgd(0.1, momentum=0.9))
    pure = learner.functional()
    xs, targets = map(np.array, case.sequences(BATCH, LENGTH))
    spoiled = np.array(xs)
    spoiled[2, 0] = np.nan

    def run(xs):
        return pure.online(
            pure.state(),
            xs,
            targets,
            step_fn=lambda x, target: case.loss(learner(x), target),
            optimizer=optax.sgd(0.1, momentum=0.9),
        )

    state, losses = jax.vmap(run)(jnp.stack([xs, spoiled]))
    skipped = state.others[("braintrace", "skipped_updates")]
    np.testing.assert_array_equal(skipped, [0, 1])
    assert np.all(np.isfinite(jax.tree.leaves(state.parameters)[0]))
    np.testing.assert_allclose(losses[0], learning(learner, case, xs, targets), rtol=1e-5)


@pytest.mark.core
@pytest.mark.parametrize(("where", "every"), [("loss", 1), ("gradient", 3)])
def test_a_stream_that_is_not_finite_is_refused(where, every):
    """The message names step, loss and parameter; the learner is as it was."""
    case = catalogue.BY_NAME["Leaky"]
    learner = build_learner(case, batch=BATCH)
    xs, targets = map(np.array, case.sequences(BATCH, LENGTH))
    learning(learner, case, xs, targets, nonfinite="raise", every=every)
    before = snapshot(learner), learner.optimizer_state

    @jax.custom_jvp
    def cut(h, scale):
        return h

    cut.defjvp(lambda primals, tangents: (primals[0], tangents[0] * primals[1]))

    def step_fn(x, target, scale):
        out = cut(learner(x), scale) if where == "gradient" else learner(x) * scale
        return case.loss(out, target)

    scales = np.where(np.arange(LENGTH) == 4, np.float32(np.inf), np.float32(1))
    with pytest.raises(braintrace.NonFiniteError) as caught:
        learner.etrace_online(
            xs,
            targets,
            scales,
            step_fn=step_fn,
            optimizer=optax.sgd(0.1, momentum=0.9),
            nonfinite="raise",
            every=every,
        )
    error = caught.value
    assert isinstance(error, FloatingPointError)
    assert error.step == (3 if where == "gradient" and every == 3 else 4)
    assert error.steps == every and error.parameter == "w_in"
    assert np.isfinite(error.loss) == (where == "gradient")
    assert "'w_in'" in str(error) and str(error.step) in str(error)
    assert_same_bits((snapshot(learner), learner.optimizer_state), before)


@pytest.mark.parametrize("nonfinite", ["skip", "raise"])
def test_a_single_gradient_is_looked_at_before_the_update_hides_it(nonfinite):
    case = catalogue.BY_NAME["Leaky"]
    learner = build_learner(case, batch=BATCH)
    xs, targets = case.sequences(BATCH, 1)

    def hide(gradients):
        gradients.update(jax.tree.map(jnp.nan_to_num, gradients))

    def step():
        learner.etrace_online(
            xs,
            targets * jnp.inf,
            step_fn=lambda x, target: case.loss(learner(x), target),
            update_fn=hide,
            nonfinite=nonfinite,
        )

    if nonfinite == "raise":
        with pytest.raises(braintrace.NonFiniteError, match="'w_in'"):
            step()
    else:
        with warns("first at step 0 "):
            step()
            assert learner.skipped_updates == 1


def spoiled_stream(case, *steps):
    """Inputs of which sample 0 is NaN in some steps, and targets."""
    xs, targets = map(np.array, case.sequences(BATCH, LENGTH))
    xs[list(steps), 0] = np.nan
    return xs, targets


@pytest.mark.core
def test_by_default_one_nan_destroys_no_parameter_and_warns_once():
    """Also step by step, and in blocks; a reset in the same step is no other warning."""
    case = catalogue.BY_NAME["Leaky"]
    xs, targets = spoiled_stream(case, 2, 4)
    flags = np.arange(LENGTH) == 4
    for every in (1, 2):
        learner = build_learner(case, batch=BATCH)
        with warns("first at step 2 ") as caught:
            learning(learner, case, xs, targets, every=every, reset=flags)
        assert len(caught) == 1 and learner.skipped_updates == 2
        assert np.isfinite(jax.tree.leaves(snapshot(learner))[0]).all()
    single = build_learner(case, batch=BATCH)
    with warns("first at step 0 ", "skipped: 1") as caught:
        for step in range(LENGTH):
            part = slice(step, step + 1)
            learning(single, case, xs[part], targets[part], reset=flags[part])
        assert single.skipped_updates == 2
    assert len(caught) == 1


@pytest.mark.core
def test_an_accelerator_skips_the_same_updates(monkeypatch):
    """It selects the results of large updates, which a processor leaves out."""
    case, found = catalogue.BY_NAME["Leaky"], []
    xs, targets = spoiled_stream(case, 2)
    monkeypatch.setattr(pure_step, "FEW", 0)
    for platform in ("cpu", "default"):
        choose = functools.partial(chosen_branch, platform)
        monkeypatch.setattr(jax.lax, "platform_dependent", choose)
        learner = build_learner(case, batch=BATCH)
        with warns("first at step 2 ", "skipped: 1", "Samples that were reset.*: 0\\."):
            learning(learner, case, xs, targets)
        found.append((snapshot(learner), learner.optimizer_state))
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, *found)


def chosen_branch(platform, *arguments, **branches):
    return branches[platform](*arguments)


def test_a_call_of_one_step_warns_at_the_latest_in_the_eighth_call_after_it():
    case = catalogue.BY_NAME["Leaky"]
    learner = build_learner(case, batch=BATCH)
    xs, targets = spoiled_stream(case, 0)
    with warns("first at step 0 of a call", "Samples that were reset.*: 0\\."):
        for step in [0] + 8 * [1]:
            learning(learner, case, xs[step : step + 1], targets[step : step + 1])
    assert learner.skipped_updates == 1


def test_the_next_warning_follows_at_ten_times_as_many():
    case = catalogue.BY_NAME["Leaky"]
    learner = build_learner(case, batch=BATCH)
    counts = []
    for bad in ([3], range(LENGTH), [1], [5]):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", braintrace.NonFiniteWarning)
            learning(learner, case, *spoiled_stream(case, *bad), rate=1e-4)
        counts.append((learner.skipped_updates, len(caught)))
    assert counts == [(1, 1), (8, 0), (9, 0), (10, 1)]


def test_a_logged_call_counts_steps_from_its_start():
    case = catalogue.BY_NAME["Leaky"]
    learner = build_learner(case, batch=BATCH)
    xs, targets = spoiled_stream(case, 5)
    with warns("first at step 5 "):
        learning(learner, case, xs, targets, log_every=1, on_log=lambda step, metrics: None)


@pytest.mark.parametrize("kind", ["jax", "brainstate"])
def test_updates_that_a_transformation_skips_are_counted_and_the_next_call_warns(kind):
    case = catalogue.BY_NAME["Leaky"]
    learner = build_learner(case, batch=BATCH)
    xs, targets = spoiled_stream(case, 2)
    learner.init_optimizer(optax.sgd(0.1, momentum=0.9))
    if kind == "jax":
        pure = learner.functional()
        options = {
            "step_fn": lambda x, target: case.loss(learner(x), target),
            "optimizer": optax.sgd(0.1, momentum=0.9),
        }
        state, _ = jax.jit(lambda state: pure.online(state, xs, targets, **options))(pure.state())
        pure.restore(state)
    else:
        brainstate.transform.jit(lambda: learning(learner, case, xs, targets))()
    assert learner.skipped_updates == 1
    assert np.isfinite(jax.tree.leaves(snapshot(learner))[0]).all()
    with warns("inside a transformation", "restored: 1"):
        learner.predict(targets[:1] if xs.shape[1:] == targets.shape[1:] else xs[:1])
    learner.predict(xs[1:2])


def test_the_count_survives_in_a_state_and_warns_in_another_learner():
    case = catalogue.BY_NAME["Leaky"]
    learner, other = (build_learner(case, batch=BATCH) for _ in range(2))
    xs, targets = spoiled_stream(case, 2)
    with warns("skipped: 1"):
        learning(learner, case, xs, targets)
    other.functional().restore(learner.functional().state())
    assert other.skipped_updates == 1
    with warns("state was restored: 1") as caught:
        learning(other, case, xs[:1], targets[:1])
    assert len(caught) == 1
    learning(other, case, xs, targets)  # 2 is less than ten times as many
    assert other.skipped_updates == 2


def test_random_initial_states_are_drawn_for_a_skipped_update_alone():
    class Noisy(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = brainstate.ParamState(jnp.ones(3))

        def init_state(self, batch_size=None):
            start = brainstate.random.normal(size=(batch_size, 3))
            self.h = brainstate.HiddenState(start)

        def update(self, x):
            self.h.value = jnp.tanh(0.5 * self.h.value + braintrace.element_wise(self.w.value) * x)
            return self.h.value

    brainstate.random.seed(0)
    model = Noisy()
    learner = braintrace.compile(model, "d_rtrl", jnp.ones((BATCH, 3)), batch_size=BATCH)
    key = jax.random.key_data(brainstate.random.DEFAULT.value)
    xs = jnp.ones((4, BATCH, 3))
    options = {"step_fn": lambda x: jnp.sum(learner(x)), "optimizer": optax.sgd(0.1)}
    learner.etrace_online(xs, **options)
    np.testing.assert_array_equal(jax.random.key_data(brainstate.random.DEFAULT.value), key)
    with warns("reset, with non-finite states or traces: 1"):
        learner.etrace_online(xs.at[3, 1].set(jnp.nan), **options)
    assert np.any(jax.random.key_data(brainstate.random.DEFAULT.value) != key)
    assert np.isfinite(model.h.value).all() and np.isfinite(model.w.value).all()
    assert np.unique(model.h.value[1]).size == 3  # a new draw
