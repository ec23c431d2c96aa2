"""UORO and KF-RTRL: the numbers of their recursions by every driver, and RTRL in the mean."""

import dataclasses
import functools

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_oracles
import references
from assertions import assert_gradients_close, assert_gradients_differ, assert_same_bits
from catalogue import BY_NAME
from drivers import (
    build_learner,
    compiled_once,
    drawn_signs,
    named,
    sequence_gradient,
    snapshot,
    weights_of,
)
from models import small

import braintrace
from braintrace._rules.full.chunk_vjp import parameters_behind

LENGTH, BATCH = 6, 2
MASK = np.array([1, 0, 2, 0.5, 1, 0])
ALL_AT_3 = np.arange(LENGTH) == 3
NEVER = np.zeros((LENGTH, BATCH), bool)
SOME = np.stack([np.arange(LENGTH) == 2, np.arange(LENGTH) % 4 == 1], axis=1)


def in_order_of_oracle(learner):
    """Signs of UORO, (time, samples, states by name)."""
    whole = learner.graph.flat_state
    found = drawn_signs(learner, (whole.samples, whole.size), LENGTH)
    names = [leaf.name for leaf in whole.leaves]
    parts = dict(zip(names, np.split(found, np.cumsum(whole.sizes)[:-1], axis=2), strict=True))
    return np.concatenate([parts[name] for name in sorted(parts)], axis=2)


def by_operation(model, learner):
    """Those of KF-RTRL, {operation: (time, samples)}."""
    graph, whole = learner.graph, learner.graph.flat_state
    products = [use for use in whole.uses if use.kind == "product"]
    found = drawn_signs(learner, (whole.samples, len(products)), LENGTH)
    signs = {}
    for index, use in enumerate(products):
        names = parameters_behind(graph, use)
        behind = {name.partition("#")[0] for name in names}
        case = model.recorded()
        (operation,) = (op for op in case.relations if case.parameters_of(op) == behind)
        signs[operation] = found[:, :, index]
    return signs


def expected(name, learner, **options):
    case = BY_NAME[name]
    arguments = jax.tree.map(np.asarray, references.arguments(case, BATCH, LENGTH))
    if isinstance(learner.algorithm, braintrace.UORO):
        return random_oracles.uoro(case, *arguments, in_order_of_oracle(learner), **options)
    return random_oracles.kf_rtrl(case, *arguments, by_operation(case, learner), **options)


def data(name, dtype=np.float64):
    return jax.tree.map(np.asarray, BY_NAME[name].sequences(BATCH, LENGTH, dtype))


def rewound(learner, draws=0):
    """Let a learner draw what it drew before."""
    traces = learner.algorithm.traces
    traces.value = {**traces.value, "draws": jnp.uint32(draws)}


BOTH = {"resets": SOME, "step_weights": MASK}
ROWS = [
    ("uoro", "GRU", "batch axis", {}),
    ("uoro", "ALIFLateThreshold", "batch axis", BOTH),
    ("uoro", "TiedPair", "mapped", {"resets": ALL_AT_3}),
    ("kf_rtrl", "GRU", "mapped", {"resets": ALL_AT_3}),
    ("kf_rtrl", "IndRNN", "batch axis", BOTH),
    ("kf_rtrl", "LeakyWithMaskedWeight", "batch axis", {"chunk_size": 4}),
    ("uoro", "LSTMFused", "mapped", {"chunk_size": 4}),
    ("uoro", "LearntLeak", "batch axis", {"step_weights": MASK, "chunk_size": 1}),
    ("uoro", "TwoLayers", "mapped", {"resets": SOME}),
    ("uoro", "LayerNormRNN", "batch axis", {}),
    ("uoro", "LeakyWithMaskedWeight", "mapped", {}),
    ("uoro", "Rotation", "batch axis", {"resets": ALL_AT_3}),
    ("kf_rtrl", "LSTMFused", "batch axis", BOTH),
    ("kf_rtrl", "TwoLayers", "batch axis", {"resets": SOME}),
    ("kf_rtrl", "ALIFLateThreshold", "mapped", {"step_weights": MASK}),
    ("kf_rtrl", "LearntLeak", "mapped", {}),
    ("kf_rtrl", "LeakyRNN", "mapped", {"resets": ALL_AT_3}),
]


@pytest.mark.parametrize(
    ("algorithm", "name", "style", "options"),
    [("uoro", "GRU", "batch axis", {}), ("kf_rtrl", "LeakyRNN", "mapped", {"resets": ALL_AT_3})],
)
@pytest.mark.usefixtures("float64")
def test_the_gradient_of_a_sequence(algorithm, name, style, options):
    options = dict(options)
    chunks = {"chunk_size": options.pop("chunk_size", "auto")}
    case = BY_NAME[name]
    learner = build_learner(case, algorithm, style, dtype=np.float64)
    call = {"reset": options.get("resets"), "mask": options.get("step_weights")}
    found = sequence_gradient(learner, case, *data(name), **call, **chunks)
    assert_gradients_close(found, expected(name, learner, **options), 1e-10, name)


RANDOM = ["uoro", "kf_rtrl"]


READS_OLD_STATES = {"ALIFLateThreshold"}
"""What a step gives depends on old states not through the new ones alone."""
STREAMS = [("uoro", "ALIFLateThreshold"), ("kf_rtrl", "LeakyRNN")]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("algorithm", "name"), STREAMS)
def test_parameters_that_change_at_every_step(algorithm, name):
    """Each step on its own: its gradient reads the traces after it, where they tell of the past."""
    case, (xs, targets) = BY_NAME[name], data(name)
    learner = build_learner(case, algorithm, dtype=np.float64)
    assert bool(learner.graph.read_by_output) == (name in READS_OLD_STATES)
    weights = weights_of(learner.algorithm.model)

    def descend(gradients):
        for path, weight in weights.items():
            weight.value = jax.tree.map(lambda w, g: w - 0.1 * g, weight.value, gradients[path])

    learner.etrace_online(
        xs,
        targets,
        step_fn=lambda x, target: case.loss(learner(x), target),
        update_fn=descend,
        reset=SOME,
    )
    found = named({path: weight.value for path, weight in weights.items()})
    assert_gradients_close(found, expected(name, learner, resets=SOME, rate=0.1), 1e-10)
    assert_gradients_differ(found, case.params(), 1e-3)


@small({"h": (4,)}, start=1.0, w=np.linspace(-1.0, 1.0, 12).reshape(3, 4))
def delayed(self, x):
    """What is returned is what was there before; no state depends on the one before."""
    before = self.h.value
    self.h.value = braintrace.matmul(x, self.w.value)
    return before


@pytest.mark.usefixtures("float64")
def test_steps_that_give_what_was_before_them():
    """Nothing is left of it in the traces after such a step."""
    xs = np.random.default_rng(0).normal(size=(LENGTH, BATCH, 3))
    learner = braintrace.compile(delayed(), "uoro", xs[0], batch_size=BATCH)

    def step(x):
        return (learner(x) ** 2).sum()

    (sequence,) = learner.etrace_grad(xs, step_fn=step, reduction="sum", chunk_size=2).values()
    learner.reset_state(BATCH)
    rewound(learner)
    kept = []
    learner.etrace_online(
        xs, step_fn=step, update_fn=lambda found: jax.debug.callback(kept.append, found)
    )
    jax.effects_barrier()
    stream = sum(np.asarray(value) for found in kept for value in found.values())
    np.testing.assert_allclose(stream, sequence, rtol=1e-10)
    assert np.abs(sequence).max() > 0.1


# --- the mean and the variance of many draws ------------------------------------------------------

DRAWS = [
    pytest.param(2_000, id="2,000 draws"),
    pytest.param(20_000, id="20,000 draws"),
]


@functools.cache
def of_keys(name, algorithm):
    """A state to begin with, and gradients by parameter, for a key and for many at once.

    Of a loss with weights for the samples, which begin with any hidden state.
    """
    case = BY_NAME[name]
    learner = build_learner(case, algorithm, dtype=np.float64)
    pure = learner.functional()
    start = pure.state()

    def of_key(key, weights, hidden, xs, targets):
        state = dataclasses.replace(start, hidden=hidden, traces={**start.traces, "key": key})

        def step_fn(x, target):
            return (jax.vmap(case.loss)(learner(x), target) * weights).mean()

        return pure.grad(state, xs, targets, step_fn=step_fn, reduction="sum")[1]

    return start, of_key, jax.jit(jax.vmap(of_key, in_axes=(0, *4 * [None])))


def keys_of(draws):
    return jax.random.key_data(jax.random.split(jax.random.key(1), draws))


@functools.cache
def estimates(name, algorithm, draws, weights=(1.0, 1.0), twins=False):
    (start, _, gradients), sequences = of_keys(name, algorithm), data(name)
    hidden = start.hidden
    if twins:  # all samples are the first one
        sequences = [np.repeat(sequence[:, :1], BATCH, axis=1) for sequence in sequences]
        hidden = {path: np.repeat(h[:1], BATCH, axis=0) for path, h in hidden.items()}
    return named(jax.device_get(gradients(keys_of(draws), np.array(weights), hidden, *sequences)))


@pytest.mark.parametrize(("algorithm", "name", "draws"), [("uoro", "TanhRNN", 2000)])
@pytest.mark.usefixtures("float64")
def test_the_mean_is_the_gradient_of_rtrl(algorithm, name, draws):
    exact = jax.tree.leaves(references.bptt(BY_NAME[name], BATCH, LENGTH))
    found = jax.tree.leaves(estimates(name, algorithm, draws))
    noise = 0.0
    for wanted, each in zip(exact, found, strict=True):
        error = np.abs(each.mean(0) - wanted)
        deviation = each.std(0, ddof=1)
        assert np.all(error <= 4 * deviation / np.sqrt(draws) + 1e-10 * np.abs(wanted).max())
        noise = noise + deviation.sum()
    assert noise > 0


def noise_of(found):
    """Deviations from the mean, (draws, entries)."""
    leaves = [leaf.reshape(len(leaf), -1) for leaf in jax.tree.leaves(found)]
    return np.concatenate([leaf - leaf.mean(0) for leaf in leaves], axis=1)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", ["TanhRNN"])
def test_kronecker_factors_vary_less_than_rank_one(name):
    first, second = (noise_of(estimates(name, algorithm, 2_000)) for algorithm in RANDOM)
    assert 0 < (second**2).sum() < 0.5 * (first**2).sum()


@pytest.mark.parametrize("algorithm", ["uoro"])
@pytest.mark.usefixtures("float64")
def test_samples_draw_apart(algorithm):
    """The noise of two samples that are alike in all else is that of independent draws."""
    first, second = (
        noise_of(estimates("TanhRNN", algorithm, 2_000, weights, twins=True))
        for weights in ((1.0, 0.0), (0.0, 1.0))
    )
    together = (first * second).sum(1).mean() / (first**2).sum(1).mean()
    assert abs(together) < 0.1


@functools.cache
def leaky(algorithm):
    """What gives a learner of a leaky layer as if it were new."""
    return compiled_once(lambda: build_learner(BY_NAME["Leaky"], algorithm))


# --- the random stream ----------------------------------------------------------------------------


@pytest.mark.usefixtures("float64")
def test_a_seed_says_what_is_drawn():
    """With the key, all is as it was: see the mean over keys."""
    case = BY_NAME["Leaky"]
    x = data("Leaky", np.float32)[0][0]
    learners = [
        braintrace.compile(case.build(), "uoro", x, batch_size=BATCH, seed=seed)
        for seed in (5, 5, 6)
    ]
    first, same, other = (drawn_signs(learner, (BATCH, 50), LENGTH) for learner in learners)
    np.testing.assert_array_equal(first, same)
    rows = np.concatenate([first, other]).reshape(-1, 50)
    assert len(np.unique(rows, axis=0)) == 2 * LENGTH * BATCH
    assert set(np.unique(rows)) == {-1.0, 1.0}


@pytest.mark.parametrize("algorithm", ["uoro"])
def test_a_reset_is_a_fresh_start_whatever_there_was(algorithm):
    """But for the random stream, which goes on: the next sequence has noise of its own."""
    case, (xs, targets) = BY_NAME["Leaky"], data("Leaky", np.float32)
    learner, flags = leaky(algorithm)(), NEVER.copy()
    first = sequence_gradient(learner, case, xs, targets, reset=flags)
    learner.reset_state()
    start = snapshot(learner)
    again = sequence_gradient(learner, case, xs, targets, reset=flags)
    assert_gradients_differ(again, first, 1e-2)
    assert int(learner.algorithm.traces.value["draws"]) == 2 * LENGTH
    flags[0] = True
    spoiled = jax.tree.map(
        lambda leaf: leaf * np.nan if leaf.dtype == np.float32 else leaf,
        learner.algorithm.traces.value,
    )
    learner.algorithm.traces.value = spoiled
    rewound(learner)
    again = sequence_gradient(learner, case, xs, targets, reset=flags)
    assert_gradients_close(again, first, 1e-5)
    learner.algorithm.traces.value = spoiled
    learner.reset_state(where=np.ones(BATCH, bool))
    rewound(learner, LENGTH)
    assert_same_bits(snapshot(learner), start)


@small({"h": (4,)}, start=1.0, w=np.eye(4) / 2)
def one_sample(self, x):
    """A recurrent layer of one sample."""
    self.h.value = jnp.tanh(x + braintrace.matmul(self.h.value, self.w.value))
    return self.h.value


@pytest.mark.parametrize("algorithm", ["uoro"])
def test_lanes_of_somebody_elses_map_draw_apart(algorithm):
    """Also of a map in a map; lanes with keys of their own draw from these."""
    model, lanes = one_sample(), 3
    instance = braintrace.compile(one_sample(), algorithm, jnp.ones(4)).algorithm
    instance = type(instance)(model)

    def initialise(x):
        brainstate.nn.init_all_states(model)
        instance.compile_graph(x)

    x = jnp.ones((2, lanes, 4))
    for size, tag in ((lanes, "inner"), (2, "outer")):
        options = {"axis_size": size, "state_tag": tag}
        initialise = brainstate.transform.vmap_new_states(initialise, **options)
    initialise(x)
    run = brainstate.nn.Vmap(instance, vmap_states="inner")
    run = brainstate.transform.jit(brainstate.nn.Vmap(run, vmap_states="outer"))
    for _ in range(8):
        run(x)
    noise = jax.tree.leaves(instance.traces.value)[-1]
    rows = np.asarray(noise, np.float64).reshape(2 * lanes, -1)
    assert len(np.unique(rows.round(5), axis=0)) == 2 * lanes


@pytest.mark.usefixtures("float64")
def test_learners_that_are_mapped_draw_from_keys_of_their_own():
    """Each as if it were alone; and apart where the map has given all of them one key."""
    start, of_key, _ = of_keys("TanhRNN", "uoro")
    keys, rest = keys_of(2_000), (start.hidden, *data("TanhRNN"))
    mapped, alone = estimates("TanhRNN", "uoro", 2_000), jax.jit(of_key)
    for lane in range(2):
        own = jax.tree.map(lambda leaf, lane=lane: leaf[lane], mapped)
        assert_gradients_close(own, named(alone(keys[lane], np.ones(BATCH), *rest)), 1e-10)
    lanes = jax.jit(jax.vmap(of_key, in_axes=(None, 0, *3 * [None])))
    same = named(jax.device_get(lanes(keys[0], np.ones((2, BATCH)), *rest)))
    assert_gradients_differ(
        *(jax.tree.map(lambda leaf, lane=lane: leaf[lane], same) for lane in range(2)), 1e-2
    )


# --- what is carried ------------------------------------------------------------------------------


def test_what_is_carried_is_reported_in_its_dtype():
    case = BY_NAME["GRU"]
    learner = build_learner(case, "uoro", trace_dtype=jnp.bfloat16)
    size = sum(np.size(w) for name, w in case.params().items() if name != "w_out")
    traces = learner.algorithm.traces.value
    assert {leaf.dtype for leaf in jax.tree.leaves((traces["s"], traces["t"]))} == {
        np.dtype(jnp.bfloat16)
    }
    report = learner.report()
    assert report.carried_bytes == 2 * BATCH * (4 + size) + 8 + 4
    assert report.stored_bytes == 4 * BATCH * (4 + size) + 8 + 4
    assert {row.parameters for row in report.relations} == {("w_z",), ("w_r",), ("w_h",)}
    reasons = [(row.parameter, row.reason) for row in report.without_trace]
    assert reasons == [("w_out", "reaches no hidden state")]
    with pytest.raises(braintrace.OptionError, match="none by this rule"):
        learner.eligibility("w_z")
    case, sequences = BY_NAME["Leaky"], data("Leaky", np.float32)
    learner = build_learner(case, "uoro", trace_dtype=jnp.bfloat16)
    found = sequence_gradient(learner, case, *sequences)
    exact = sequence_gradient(leaky("uoro")(), case, *sequences, reset=NEVER)
    assert_gradients_close(found, exact, 0.05)


def test_factors_and_exact_traces_are_reported():
    learner = build_learner(BY_NAME["IndRNN"], "kf_rtrl")
    traces = learner.algorithm.traces.value
    shapes = {name: [leaf.shape for leaf in traces[name].values()] for name in ("u", "A", "exact")}
    assert shapes == {"u": [(BATCH, 3 + 1)], "A": [(BATCH, 4, 4)], "exact": [(BATCH, 4, 4)]}
    report = learner.report()
    assert report.carried_bytes == report.stored_bytes == 4 * BATCH * (4 + 16 + 16) + 8 + 4
    rows = [(row.operation, row.parameters, row.stored_bytes) for row in report.relations]
    assert rows == [
        ("etp_mm", ("w_in", "b_in"), 4 * BATCH * (4 + 16)),
        ("any", ("w_rec",), 4 * BATCH * 16),
    ]
    assert [row.parameter for row in report.without_trace] == ["w_out"]
    assert learner.eligibility("w_rec")["h"].shape == (BATCH, 4, 4)
    with pytest.raises(braintrace.OptionError, match="no trace of its shape"):
        learner.eligibility("w_in")


@small({"h": (2, 5)}, start=1.0, kernel=np.ones((2, 2, 3)) / 6)
def convolving(self, x):
    """A convolution of the past."""
    past = braintrace.conv(self.h.value, self.kernel.value, padding="SAME")
    self.h.value = jnp.tanh(x + past)
    return self.h.value


@small({"h": (4,)}, start=1.0, table=np.ones((3, 4)))
def words(self, x):
    """A leaky state that rows of a table drive."""
    self.h.value = 0.9 * self.h.value + braintrace.embedding(x, self.table.value)
    return self.h.value


def test_what_meets_its_input_in_several_places_has_no_kronecker_factors():
    x = jnp.ones((BATCH, 2, 5))
    with pytest.raises(braintrace.PrimitiveError, match=r"KF_RTRL.*`etp_conv`.*Use UORO"):
        braintrace.compile(convolving(), "kf_rtrl", x, batch_size=BATCH)
    with pytest.raises(braintrace.PrimitiveError, match=r"KF_RTRL.*`etp_embed`.*Use UORO"):
        braintrace.compile(words(), "kf_rtrl", jnp.zeros(BATCH, int), batch_size=BATCH)
    learner = braintrace.compile(words(), "uoro", jnp.zeros(BATCH, int), batch_size=BATCH)
    assert learner.algorithm.traces.value["t"]["table"].shape == (BATCH, 3, 4)
    learner = braintrace.compile(convolving(), "uoro", x, batch_size=BATCH)
    assert learner.algorithm.traces.value["t"]["kernel"].shape == (BATCH, 2, 2, 3)


@pytest.mark.parametrize("algorithm", RANDOM)
def test_norms_that_are_zero_make_no_numbers_that_are_none(algorithm):
    """Silent inputs, states and weights: every factor is zero at first, and some for ever."""
    case = BY_NAME["TanhRNN"]
    learner = build_learner(case, algorithm)
    for state in learner.algorithm.model.states().values():
        state.value = jax.tree.map(jnp.zeros_like, state.value)
    xs, targets = data("TanhRNN", np.float32)
    found = sequence_gradient(learner, case, 0 * xs, targets)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((found, snapshot(learner))))


def summed_by_steps(learner, case, xs, targets):
    """The gradient of the summed loss, one step after another in the user's own `grad`."""
    weights = weights_of(learner.algorithm.model)
    of_step = brainstate.transform.grad(lambda x, y: case.loss(learner(x), y), weights)
    found = [named(of_step(x, y)) for x, y in zip(xs, targets, strict=True)]
    return jax.tree.map(lambda *parts: sum(part.astype(jnp.float32) for part in parts), *found)
