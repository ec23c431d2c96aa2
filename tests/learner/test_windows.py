"""`window=K`: BPTT inside windows of K steps, the rule's traces for everything before them."""

import functools
import warnings

import brainstate
import catalogue
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import references
from assertions import assert_gradients_close, assert_gradients_differ, assert_same_bits
from drivers import (
    build_algorithm,
    build_learner,
    catalogue_gradient,
    named,
    sequence_gradient,
    summed,
    weights_of,
)

import braintrace

BATCH, LENGTH, WINDOW = 2, 7, 3
MASK = (1.0, 0.0, 2.0, 0.0, 1.0, 0.5, 0.0)
RESETS = tuple((t == 3, t in (1, 5)) for t in range(LENGTH))
"""At the start of a window and inside of two."""

SOME = [
    catalogue.BY_NAME[name]
    for name in ("LeakyRNN", "GRU", "LSTMFused", "RecurrentLIF", "TwoLayersPlainLink")
]
RULES = {
    "d_rtrl": ("d_rtrl", {}, {}),
    "snap": ("snap", {}, {"snap": True}),
    "es_d_rtrl": ("es_d_rtrl", {"decay_or_rank": 0.7}, {"alpha": 0.7}),
    "ottt": ("ottt", {"decay": 0.7}, {"decay": 0.7}),
    "immediate": ("immediate", {}, {"has_past": False}),
}
"""Rules by name: how each is made, and what its traces are to the oracle."""


@functools.cache
def windowed_learner(case, rule, **options):
    algorithm, own, _ = RULES[rule]
    return build_learner(case, algorithm, batch=BATCH, window=WINDOW, **{**own, **options})


def gradient_of(learner, case, **options):
    learner.reset_state()
    data = map(np.asarray, case.sequences(BATCH, LENGTH))
    return sequence_gradient(learner, case, *data, **options)


def reference(case, rule, window=WINDOW, **options):
    return references.dense_multi_step(
        case, BATCH, LENGTH, window=window, **RULES[rule][2], **options
    )


# --- the definition


@pytest.mark.parametrize(
    ("chunk_size", "case", "rule"),
    [
        ("auto", catalogue.BY_NAME["LeakyRNN"], "immediate"),
        (6, catalogue.BY_NAME["LeakyRNN"], "d_rtrl"),
        (6, catalogue.BY_NAME["LeakyRNN"], "snap"),
        (6, catalogue.BY_NAME["LSTMFused"], "es_d_rtrl"),
        (7, catalogue.BY_NAME["ALIFLateThreshold"], "ottt"),
    ],
)
def test_bptt_in_a_window_and_the_trace_before_it(chunk_size, case, rule):
    """With steps that do not count, samples that start anew, and a shorter window at the end."""
    learner = windowed_learner(case, rule)
    weights = {"mask": MASK, "reset": np.asarray(RESETS)}
    found = gradient_of(learner, case, chunk_size=chunk_size, **weights)
    expected = reference(case, rule, step_weights=MASK, resets=RESETS)
    assert_gradients_close(found, expected, 1e-5, case.name)


@pytest.mark.parametrize("case", [pytest.param(SOME[2], id="LSTMFused")])
def test_resets_and_masked_steps_matter(case):
    """What the test above would not notice, were the model or the flags of no weight."""
    for rule in ("d_rtrl", "es_d_rtrl"):
        full = reference(case, rule, step_weights=MASK, resets=RESETS)
        for other in (
            reference(case, rule, step_weights=MASK),
            reference(case, rule, resets=RESETS),
            reference(case, rule, window=2, step_weights=MASK, resets=RESETS),
            reference(case, rule, window=(0, 3, 4), step_weights=MASK, resets=RESETS),
        ):
            assert_gradients_differ(full, other, 1e-3)


@pytest.mark.core
@catalogue.each(SOME[3:4])
def test_a_window_over_the_whole_sequence_is_bptt(case):
    """A longer one as well; `Immediate` has no trace, and is held against it for the others."""
    learner = windowed_learner(case, "d_rtrl")
    exact = references.bptt(case, BATCH, LENGTH)
    for window in (LENGTH, 100):
        assert_gradients_close(gradient_of(learner, case, window=window), exact, 1e-5, case.name)


@catalogue.each([*SOME[1:3], SOME[4]])
def test_shorter_windows(case):
    actual = catalogue_gradient(case, window=2)
    expected = references.dense_multi_step(case, window=2)
    assert_gradients_close(actual, expected, 1e-5, case.name)
    assert_gradients_differ(actual, references.bptt(case), 1e-3, case.name)


@catalogue.each(SOME[:1])
def test_a_window_of_one_step_is_exact_within_the_step(case):
    """It goes back through what couples units, where the rule itself does not."""
    found = catalogue_gradient(case, window=1)
    assert_gradients_close(found, references.dense_multi_step(case, window=1), 1e-5, case.name)
    assert_gradients_differ(found, references.dense_d_rtrl(case), 1e-3, case.name)


@pytest.mark.parametrize(("name", "rule"), [("LSTMFused", "d_rtrl")])
@pytest.mark.filterwarnings("ignore::braintrace.ApproximationWarning")  # of the model, once more
def test_no_window_is_the_rule_itself(name, rule):
    """Also of a learner whose traces follow every state since a call with a window."""
    case, (algorithm, options, _) = catalogue.BY_NAME[name], RULES[rule]
    learner = build_learner(case, algorithm, batch=BATCH, **options)
    fresh = gradient_of(learner, case)
    found = gradient_of(learner, case, window=WINDOW)
    assert_gradients_close(found, reference(case, rule), 1e-5)
    assert_gradients_close(gradient_of(learner, case), fresh, 1e-5)
    assert_same_bits(gradient_of(learner, case), gradient_of(learner, case, window=None))


# --- steps of any kind


def last_result_of_a_branch(u, gain):
    """The first result of the operation is unused, so only its second has a derivative."""
    branches = (lambda: (u, jnp.sin(u * gain))), (lambda: (-u, u + gain))
    return jax.lax.cond(u.sum() > 0, *branches)[1]


def results_of_a_loop(u, gain):
    """The last carry of the loop is unused."""
    return jax.lax.scan(lambda c, _: (c * gain, jnp.sin(c * gain)), u, None, 2)[1].sum(0)


def watched_gain(u, gain):
    """An operation without a result reads a parameter."""
    jax.debug.callback(lambda value: None, gain)
    return u * gain


@pytest.mark.parametrize(
    ("gated", "rule"),
    [(last_result_of_a_branch, "d_rtrl"), (results_of_a_loop, "rtrl"), (watched_gain, "d_rtrl")],
)
@pytest.mark.usefixtures("float64")
@pytest.mark.filterwarnings("ignore::braintrace.ApproximationWarning")  # the gain has no trace
def test_a_parameter_in_an_operation_whose_first_result_has_no_reader(gated, rule):
    def step(params, state, x):
        u = braintrace.matmul(x, params["w"]) + 0.5 * state["h"]
        h = jnp.tanh(gated(u, params["gain"]))
        return {"h": h}, h

    random = np.random.default_rng(0)
    params = {"w": random.normal(size=(3, 4)), "gain": random.normal(size=4)}
    xs, start = random.normal(size=(5, BATCH, 3)), {"h": np.zeros((BATCH, 4))}

    def total(params):
        return jax.lax.scan(functools.partial(step, params), start, xs)[1].sum()

    model = braintrace.from_function(step, params, start)
    learner = braintrace.compile(model, rule, xs[0], batch_size=BATCH)
    found = learner.etrace_grad(xs, step_fn=lambda x: learner(x).sum(), reduction="sum", window=5)
    assert_gradients_close(found, jax.grad(total)(params), 1e-10)


@pytest.mark.parametrize("options", [{}, {"mask": MASK}])
def test_a_loss_that_reads_nothing(options):
    learner, (xs, _) = windowed_learner(SOME[0], "d_rtrl"), SOME[0].sequences(BATCH, LENGTH)
    learner.reset_state()

    def step_fn(x):
        learner(x)
        return jnp.ones(())

    found, losses = learner.etrace_grad(xs, step_fn=step_fn, return_value=True, **options)
    assert not any(map(np.any, jax.tree.leaves(jax.device_get(found))))
    np.testing.assert_array_equal(losses, np.not_equal(options.get("mask", np.ones(LENGTH)), 0))


# --- where windows begin


@pytest.mark.parametrize("first", [4, 3])
def test_windows_align_to_the_start_of_a_call(first):
    """A sequence in two calls has the windows of both; off the grid, the sum is another one."""
    case = SOME[0]
    learner = windowed_learner(case, "d_rtrl")
    xs, targets = map(np.asarray, case.sequences(BATCH, LENGTH))
    learner.reset_state()
    parts = [
        sequence_gradient(learner, case, xs[part], targets[part])
        for part in (slice(0, first), slice(first, LENGTH))
    ]
    found = jax.tree.map(np.add, *parts)
    starts = (0, 3, 4) if first == 4 else (0, 3, 6)
    assert_gradients_close(found, reference(case, "d_rtrl", starts), 1e-5)
    if first == 4:
        assert_gradients_differ(found, reference(case, "d_rtrl"), 1e-3)


class Adding:
    """Add up the gradients of a stream, and leave the parameters as they are."""

    def __init__(self, learner, case):
        self.learner, self.case = learner, case
        weights = weights_of(learner.algorithm.model)
        zeros = {path: jax.tree.map(jnp.zeros_like, w.value) for path, w in weights.items()}
        self.total = brainstate.State(zeros)

    def add(self, gradients, aux=None):
        self.total.value = jax.tree.map(jnp.add, self.total.value, dict(gradients))

    def __call__(self, **options):
        def step_fn(x, target):
            loss = self.case.loss(self.learner(x), target)
            return (loss, loss) if options.get("has_aux") else loss

        self.learner.reset_state()
        self.total.value = jax.tree.map(jnp.zeros_like, self.total.value)
        data = map(np.asarray, self.case.sequences(BATCH, LENGTH))
        losses = self.learner.etrace_online(*data, step_fn=step_fn, update_fn=self.add, **options)
        return named(self.total.value), losses


EACH_RULE = pytest.mark.parametrize("rule", ["d_rtrl", "es_d_rtrl", "ottt", "immediate"])
EACH_MODEL = pytest.mark.parametrize("name", ["LeakyRNN", "LSTMFused", "ALIFLateThreshold"])


@pytest.mark.parametrize(("name", "rule"), [("LeakyRNN", "d_rtrl")])
def test_streams(name, rule):
    """Of single steps, each of which is a window."""
    case = catalogue.BY_NAME[name]
    stream = Adding(windowed_learner(case, rule), case)
    found, (losses, aux) = stream(window=1, has_aux=True)
    assert_gradients_close(found, reference(case, rule, 1), 1e-5)
    assert_same_bits(aux, losses)


@pytest.mark.parametrize(("window", "name", "rule"), [(2, "LeakyRNN", "d_rtrl")])
def test_streams_of_blocks(window, name, rule):
    """`window` divides `every`; a block ends with an update, and so does its last window."""
    case = catalogue.BY_NAME[name]
    stream = Adding(windowed_learner(case, rule), case)
    # The gradient of a block is that of its mean loss: 4 steps, and 3 at the end.
    means = tuple(1 / n for n in (4,) * 4 + (3,) * 3)
    found, _ = stream(every=4, window=window)
    starts = (0, 2, 4, 6) if window == 2 else (0, 4)
    expected = reference(case, rule, starts, step_weights=means)
    assert_gradients_close(found, expected, 1e-5)


@pytest.mark.parametrize(("every", "window"), [(4, 3), (2, 4), (1, 2)])
def test_a_window_that_does_not_divide_the_steps_of_an_update_is_refused(every, window):
    case = SOME[0]
    stream = Adding(windowed_learner(case, "d_rtrl"), case)
    with pytest.raises(
        braintrace.OptionError, match=f"`window` is {window} and `every` is {every}"
    ):
        stream(every=every, window=window)


def test_a_stream_step_by_step_with_the_window_of_its_learner_is_refused():
    case = SOME[0]
    with pytest.raises(braintrace.OptionError, match=r"`window` is 3 and `every` is 1"):
        Adding(windowed_learner(case, "d_rtrl"), case)()


# --- a learner's own `grad`


def windowed_gradient(case, window):
    """One gradient around calls with `MultiStepData`, one call per window."""
    model, algorithm = build_algorithm(case, window=1)
    _, _, xs, targets = references.arguments(case, dtype=np.float32)

    def window_loss(inputs, wanted):
        outputs = algorithm(braintrace.MultiStepData(inputs))
        return jax.vmap(case.loss)(outputs, wanted).sum()

    def total():
        windows = (part.reshape(-1, window, *part.shape[1:]) for part in (xs, targets))
        return brainstate.transform.for_loop(window_loss, *windows).sum()

    gradient = brainstate.transform.grad(total, weights_of(model))
    return named(brainstate.transform.jit(gradient)())


@pytest.mark.parametrize("window", [2])
@catalogue.each(SOME[4:])
def test_multi_step_data_of_any_length_is_one_window(case, window):
    """A single step is one as well: see below."""
    actual = windowed_gradient(case, window)
    expected = references.dense_multi_step(case, window=window)
    assert_gradients_close(actual, expected, 1e-5, case.name)


def test_multi_step_data_without_a_window_is_a_loop_of_single_steps():
    """Without the option a `MultiStepData` is a loop of single steps."""
    case = catalogue.BY_NAME["LeakyRNN"]
    model, algorithm = build_algorithm(case)
    _, _, xs, targets = references.arguments(case, dtype=np.float32)

    def sequence_loss():
        outputs = algorithm(braintrace.MultiStepData(xs))
        return jax.vmap(case.loss)(outputs, targets).sum()

    gradient = brainstate.transform.grad(sequence_loss, weights_of(model))
    actual = named(brainstate.transform.jit(gradient)())
    assert_gradients_close(actual, references.dense_d_rtrl(case), 1e-5, case.name)


@pytest.mark.parametrize("algorithm", [braintrace.D_RTRL, braintrace.ES_D_RTRL])
def test_calls_with_one_step_are_windows_of_one_step(algorithm):
    case = catalogue.BY_NAME["LeakyRNN"]
    _, _, xs, targets = references.arguments(case, dtype=np.float32)

    def gradient_with(wrap):
        model, instance = build_algorithm(case, algorithm, window=WINDOW)

        def step_loss(x, target):
            return case.loss(wrap(instance, x), target)

        gradient = brainstate.transform.grad(step_loss, weights_of(model))
        gradient = brainstate.transform.jit(gradient)
        each = [named(gradient(x, target)) for x, target in zip(xs, targets, strict=True)]
        return summed(each)

    windows = gradient_with(lambda instance, x: instance(braintrace.MultiStepData(x[None]))[0])
    assert_gradients_close(gradient_with(lambda instance, x: instance(x)), windows, 1e-5)
    if algorithm is braintrace.D_RTRL:
        assert_gradients_close(windows, references.dense_multi_step(case, window=1), 1e-5)


# --- rules that follow every way


def layered_reference(case, window):
    """BPTT in a window, and the traces of `oracles.dense_ostl` before it."""
    params, states, xs, targets = references.arguments(case, BATCH, LENGTH)
    xs, targets = np.asarray(xs), np.asarray(targets)
    layered = oracles.Layered(case, tuple(case.groups.items()))
    traces, gradient, start = dict.fromkeys(case.groups, 0.0), 0.0, states
    no_resets = np.zeros((LENGTH, BATCH), bool)
    for t in range(LENGTH):
        if t % window == 0:
            end, weights = min(t + window, LENGTH), np.ones(LENGTH)
            data = oracles.steps_of_window(t, end, xs, targets, weights, no_resets)
            inside, mu = oracles.window_gradients(case, params, states, start, *data)
            gradient = gradient + flat(inside)
            for layer, members in case.groups.items() if t else ():
                own = flat({name: mu[name] for name in members})
                gradient = gradient + own @ traces[layer]
        states, facts = oracles.layered_step(layered, params, states, xs[t], targets[t])
        facts = jax.device_get(facts)
        for layer in case.groups:
            carried = facts[layer]["J"] @ traces[layer] if t else 0.0
            traces[layer] = carried + facts[layer]["F"]
    leaves, tree = jax.tree.flatten(params)
    ends = np.cumsum([np.size(leaf) for leaf in leaves])[:-1]
    parts = np.split(gradient, ends)
    return tree.unflatten(
        part.reshape(leaf.shape) for part, leaf in zip(parts, leaves, strict=True)
    )


def flat(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(jax.device_get(tree))])


@pytest.mark.usefixtures("float64")
def test_windows_of_a_rule_by_layers_go_through_all_layers():
    case = catalogue.BY_NAME["TwoLayers"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", braintrace.ApproximationWarning)
        learner = build_learner(case, "ostl_recurrent", batch=BATCH, dtype=np.float64)
    data = case.sequences(BATCH, LENGTH, np.float64)
    exact = references.bptt(case, BATCH, LENGTH)

    def gradient(**options):
        learner.reset_state()
        return sequence_gradient(learner, case, *data, **options)

    assert_gradients_close(gradient(window=LENGTH), exact, 1e-10)
    found = gradient(window=WINDOW)
    assert_gradients_close(found, layered_reference(case, WINDOW), 1e-10)
    assert_gradients_differ(found, exact, 1e-3)
    assert_gradients_differ(found, gradient(), 1e-3)


def test_rtrl_takes_a_window_without_effect():
    case = SOME[0]
    plain, windows = (build_learner(case, "rtrl", batch=BATCH, **w) for w in ({}, {"window": 3}))
    expected = gradient_of(plain, case, chunk_size=LENGTH)
    assert_same_bits(gradient_of(windows, case, chunk_size=LENGTH), expected)
    assert_same_bits(gradient_of(plain, case, chunk_size=LENGTH, window=2), expected)
    online = [Adding(learner, case)()[0] for learner in (plain, windows)]
    assert_same_bits(*online)


def test_one_window_for_all_rules():
    model, (x, *_) = SOME[0].build(), SOME[0].sequences(BATCH, 1)[0]
    build = functools.partial(braintrace.compile, model, "d_rtrl", x, batch_size=BATCH)
    with pytest.raises(braintrace.OptionError, match="`window`, which applies to all weights"):
        build(rules={"w_in": ("es_d_rtrl", {"window": 2})})
    with pytest.raises(braintrace.OptionError, match="incompatible algorithms"):
        build(rules={"w_in": "rtrl"}, window=2)


# --- a window that a call asks for


def test_a_call_may_ask_for_a_window_at_the_start_of_a_sequence():
    """Traces then follow every state; those of a sequence that has begun leave one out."""
    case = SOME[2]
    learner = build_learner(case, batch=BATCH)
    xs, targets = map(np.asarray, case.sequences(BATCH, LENGTH))
    assert not learner.algorithm.every_state
    state = learner.functional().state()
    learner.etrace_evolve(xs[:1])
    message = r"`window` is 3, but the current traces omit hidden states .*`compile`"
    with pytest.raises(braintrace.OptionError, match=message):
        sequence_gradient(learner, case, xs, targets, window=WINDOW)
    with pytest.raises(braintrace.OptionError, match=message):
        step_fn = functools.partial(loss_of_step, learner, case)
        learner.functional().grad(state, xs, targets, step_fn=step_fn, window=WINDOW)
    assert not learner.algorithm.every_state
    found = gradient_of(learner, case, window=WINDOW)
    assert_gradients_close(found, reference(case, "d_rtrl"), 1e-5)


def loss_of_step(learner, case, x, target):
    return case.loss(learner(x), target)


def test_a_call_may_ask_for_a_window_at_any_time_where_traces_follow_every_state():
    case = SOME[0]
    learner = build_learner(case, batch=BATCH)
    xs, targets = map(np.asarray, case.sequences(BATCH, LENGTH))
    learner.etrace_evolve(xs[:3])
    found = sequence_gradient(learner, case, xs[3:], targets[3:], window=2)
    weights = tuple(float(t >= 3) for t in range(LENGTH))
    expected = reference(case, "d_rtrl", (0, 1, 2, 3, 5), step_weights=weights)
    assert_gradients_close(found, expected, 1e-5)


def test_functional_twins_and_lower_take_a_window():
    case = SOME[0]
    learner, (xs, targets) = windowed_learner(case, "d_rtrl"), case.sequences(BATCH, LENGTH)
    learner.reset_state()
    pure, step_fn = learner.functional(), functools.partial(loss_of_step, learner, case)

    @jax.jit
    def gradient(state):
        return pure.grad(state, xs, targets, step_fn=step_fn, reduction="sum", window=2)[1]

    found = named(gradient(pure.state()))
    assert_gradients_close(found, reference(case, "d_rtrl", 2), 1e-5)


# --- the spelling before


def test_the_old_spelling_keeps_its_numbers_and_warns():
    case = SOME[0]
    with pytest.warns(DeprecationWarning, match="multi-step") as caught:
        learner = build_learner(case, batch=BATCH, vjp_method="multi-step")
    assert len(caught) == 1
    assert caught[0].filename.endswith("drivers.py")
    expected = gradient_of(windowed_learner(case, "d_rtrl"), case)
    assert_same_bits(gradient_of(learner, case, chunk_size=WINDOW), expected)
    assert_same_bits(gradient_of(learner, case, window=WINDOW), expected)
    with pytest.raises(braintrace.OptionError, match="`window` is 2 and `vjp_method`"):
        build_learner(case, window=2, vjp_method="multi-step")
