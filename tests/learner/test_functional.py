"""A learner as pure functions of its state does what its methods do, also when it is mapped."""

import dataclasses
import functools

import brainstate
import catalogue
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_same_bits
from drivers import build_learner, snapshot
from rules import OTHERS

import braintrace

BATCH, SEEDS = 2, 8
ROWS = [
    pytest.param("Leaky", "d_rtrl", marks=pytest.mark.core),
    pytest.param("ALIF", "d_rtrl"),
    pytest.param("Leaky", "es_d_rtrl"),
    *(pytest.param("Leaky", rule.name) for rule in OTHERS),
]


close = functools.partial(
    jax.tree.map, functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
)


class Bench:
    """A learner, an optimizer with States of its own, and data."""

    def __init__(self, name, algorithm, **options):
        case = catalogue.BY_NAME[name]
        self.learner = learner = build_learner(case, algorithm, batch=BATCH, **options)
        self.weights = weights = learner.algorithm.model.states(brainstate.ParamState)
        self.momentum = momentum = {
            path: brainstate.State(jax.tree.map(jnp.zeros_like, weight.value))
            for path, weight in weights.items()
        }
        self.sequences = tuple(map(np.asarray, case.sequences(BATCH, 4)))
        self.functional = learner.functional(momentum=momentum)
        self.start = self.functional.state()

        def update(gradients):
            for path, weight in weights.items():
                kept = jax.tree.map(lambda m, g: 0.9 * m + g, momentum[path].value, gradients[path])
                momentum[path].value = kept
                weight.value = jax.tree.map(lambda w, m: w - 0.1 * m, weight.value, kept)

        self.update_fn = update
        self.step_fn = lambda x, y: case.loss(learner(x), y)
        flags = np.zeros((4, BATCH), bool)
        flags[2, 0] = True
        self.streaming = {"step_fn": self.step_fn, "update_fn": update, "reset": flags}
        self.chunks = {"step_fn": self.step_fn, "chunk_size": 3, "mask": [1.0, 0.0, 1.0, 1.0]}

    def grad(self, state, *sequences):
        return self.functional.grad(state, *(sequences or self.sequences), **self.chunks)

    def online(self, state, *sequences):
        return self.functional.online(state, *(sequences or self.sequences), **self.streaming)

    def stack(self):
        """States that differ in their parameters."""

        start = jax.tree.map(np.asarray, self.start)

        def scaled(seed):
            parameters = jax.tree.map(lambda w: np.float32(1 + 0.1 * seed) * w, start.parameters)
            return dataclasses.replace(start, parameters=parameters)

        return jax.tree.map(lambda *leaves: np.stack(leaves), *map(scaled, range(SEEDS)))


@functools.cache
def bench(name="Leaky", algorithm="d_rtrl"):
    return Bench(name, algorithm)


@pytest.mark.parametrize(("name", "algorithm"), ROWS[2:4])
def test_each_function_is_the_method(name, algorithm):
    """Also: what the user has closed over (an optimizer) is part of the state, and keeps."""
    own = bench(name, algorithm)
    learner, pure, (xs, ys) = own.learner, own.functional, own.sequences
    pure.restore(own.start)
    before, state = snapshot(learner), own.start
    where = np.array([True, False])
    calls = [
        (own.grad, lambda: learner.etrace_grad(xs, ys, **own.chunks)),
        (own.online, lambda: learner.etrace_online(xs, ys, **own.streaming)),
        (lambda s: pure.evolve(s, xs, chunk_size=3), lambda: learner.etrace_evolve(xs)),
        (lambda s: pure.predict(s, xs), lambda: learner.predict(xs)),
        (lambda s: pure.step(s, xs[0]), lambda: learner(xs[0])),
        (lambda s: (pure.reset(s, where=where), None), lambda: learner.reset_state(where=where)),
        (lambda s: (pure.reset(s), None), learner.reset_state),
    ]
    found = []
    for function, _ in calls:
        state, result = function(state)
        found.append((state, result))
    assert_same_bits(snapshot(learner), before)
    for (_, method), (state, result) in zip(calls, found, strict=True):
        close(result, method())
        close(state, pure.state())
        assert jax.tree.structure(state) == jax.tree.structure(own.start)


@pytest.mark.parametrize(
    ("name", "algorithm", "method"),
    [
        ("Leaky", "d_rtrl", Bench.grad),
        ("Leaky", "es_d_rtrl", Bench.online),
        ("Leaky", "immediate", Bench.online),
        ("Leaky", "snap", Bench.grad),
    ],
)
def test_learners_that_are_mapped_learn_alone(name, algorithm, method):
    run = functools.partial(method, bench(name, algorithm))
    stack = bench(name, algorithm).stack()
    found = jax.device_get(jax.jit(jax.vmap(run))(stack))
    alone = jax.jit(run)
    for seed in range(SEEDS):
        of_seed = functools.partial(jax.tree.map, lambda leaf, seed=seed: leaf[seed])
        close(of_seed(found), alone(of_seed(stack)))
    assert not np.allclose(*(jax.tree.leaves(found[1])[0][seed] for seed in (0, 1)))


@pytest.mark.parametrize("method", [Bench.grad, Bench.online])
def test_a_scan_over_windows(method):
    own = bench()
    run = functools.partial(method, own)
    windows = jax.tree.map(lambda leaf: np.stack([leaf, 2 * leaf]), own.sequences)
    found, results = jax.lax.scan(lambda state, now: run(state, *now), own.start, windows)
    state = own.start
    for index in range(2):
        state, result = run(state, *jax.tree.map(lambda leaf, i=index: leaf[i], windows))
        close(jax.tree.map(lambda leaf, i=index: np.asarray(leaf)[i], results), result)
    close(found, state)
    moved = jax.tree.map(lambda now, start: not np.array_equal(now, start), found, own.start)
    assert any(jax.tree.leaves(moved))


@pytest.mark.parametrize("window", [None, 2])
def test_the_derivative_of_a_step_is_the_online_gradient(window):
    own = Bench("Leaky", "d_rtrl", window=window)
    state, (xs, ys) = own.functional.evolve(own.start, own.sequences[0])[0], own.sequences

    def loss(parameters):
        now = dataclasses.replace(state, parameters=parameters)
        after, output = own.functional.step(now, xs[0])
        return catalogue.BY_NAME["Leaky"].loss(output, ys[0]), after

    found, after = jax.grad(loss, has_aux=True)(state.parameters)
    expected = own.functional.grad(state, xs[:1], ys[:1], step_fn=own.step_fn)
    close((after, found), expected)


def names(state):
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path in paths]


@pytest.mark.parametrize(("name", "algorithm"), ROWS[1:3])
def test_a_state_that_is_saved_goes_on_in_another_learner(name, algorithm, tmp_path):
    own, file = bench(name, algorithm), tmp_path / "state.npz"
    state, _ = own.online(own.start)
    leaves = jax.tree.leaves(state)
    assert len(set(names(state))) == len(leaves)
    np.savez(file, **dict(zip(names(state), leaves, strict=True)))
    expected = own.online(state)

    other = Bench(name, algorithm)
    with np.load(file) as saved:
        kept = [saved[name] for name in names(other.start)]
    other.functional.restore(jax.tree.unflatten(jax.tree.structure(other.start), kept))
    close(expected[1], other.learner.etrace_online(*other.sequences, **other.streaming))
    close(expected[0], other.functional.state())


def test_traces_are_those_of_single_states():
    state = bench("ALIF").start
    assert sorted(state.traces) == ["w_in@mm0>V", "w_in@mm0>a"]
    assert {leaf.dtype for leaf in jax.tree.leaves(state.traces)} == {np.dtype("float32")}
    assert {"parameters/w_in", "hidden/V", "others/momentum/w_in"} <= set(names(state))


class Noisy(brainstate.nn.Module):
    """A leaky unit with noise, which begins anywhere."""

    def __init__(self):
        super().__init__()
        self.w = brainstate.ParamState(jnp.ones((3, 4)))

    def init_state(self, batch_size=None, **_):
        self.h = brainstate.HiddenState(brainstate.random.normal(size=(batch_size, 4)))

    def update(self, x):
        noise = brainstate.random.normal(size=self.h.value.shape)
        self.h.value = 0.5 * self.h.value + braintrace.matmul(x, self.w.value) + noise
        return self.h.value


def test_random_numbers_are_those_of_the_state():
    brainstate.random.seed(0)
    xs = jnp.ones((4, BATCH, 3))
    learner = braintrace.compile(Noisy(), "d_rtrl", xs[0], batch_size=BATCH)
    pure = learner.functional()
    start, reset = pure.state(), np.array([True, False, True, False])
    first, again = (pure.evolve(start, xs, reset=reset) for _ in range(2))
    assert_same_bits(first, again)
    assert not np.allclose(pure.evolve(first[0], xs, reset=reset)[1], first[1])
    close(learner.etrace_evolve(xs, reset=reset), first[1])
    close(pure.state(), first[0])
    fresh = [pure.reset(state).hidden["h",] for state in (start, start, first[0])]
    np.testing.assert_array_equal(fresh[0], fresh[1])
    assert not np.allclose(fresh[0], fresh[2])
    pure.restore(start)
    close(learner.etrace_evolve(xs, reset=reset), first[1])


def changed(field, entry, value):
    def change(state):
        entries = {**getattr(state, field), entry: value}
        return dataclasses.replace(state, **{field: entries})

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            changed("traces", "w_in@mm0>h", jnp.zeros(3)),
            r"'traces/w_in@mm0>h' .* shape \(3,\); expected a dict",
        ),
        (
            changed("hidden", ("h",), jnp.zeros((3, 4))),
            r"(?s)'hidden/h' .*\(3, 4\); expected .*\(2, 4\).* call `reset_state`",
        ),
        (
            changed("parameters", ("w_in",), jnp.zeros((3, 4), int)),
            "'parameters/w_in' .* dtype int32 .*; expected .* dtype float32",
        ),
        (changed("others", ("v",), jnp.zeros(3)), "'others/v' is unexpected"),
        (lambda state: dataclasses.replace(state, traces={}), "'traces/w_in@mm0>h' is missing"),
        (lambda state: state.parameters, "`state` is a dict .*; expected a `LearnerState`"),
        (
            changed("parameters", "w_in", jnp.zeros((3, 4))),
            "'w_in' in `parameters` is no path; expected a tuple of names",
        ),
        (changed("hidden", 1, jnp.zeros(3)), "1 in `hidden` is no path; expected a tuple of names"),
        (
            lambda state: dataclasses.replace(state, hidden=None),
            "`hidden` is None; expected a dict",
        ),
        (
            lambda state: dataclasses.replace(state, rule="SnAp(n=1)"),
            r"belongs to a learner with `SnAp\(n=1\)`, but this learner has `D_RTRL`",
        ),
    ],
    ids=["trace", "batch", "dtype", "more", "less", "other", "name", "number", "no field", "rule"],
)
def test_states_of_something_else_are_refused(change, message):
    own = bench()
    own.functional.restore(own.start)
    before, wrong = snapshot(own.learner), change(own.start)
    for function in (own.functional.restore, own.functional.reset, own.grad):
        with pytest.raises(braintrace.BraintraceError, match=message):
            function(wrong)
    assert_same_bits(snapshot(own.learner), before)


def test_states_of_the_user_are_named():
    own = bench()
    unnamed = own.learner.functional()
    with pytest.raises(braintrace.OptionError, match=r"learner\.functional"):
        unnamed.online(unnamed.state(), *own.sequences, **own.streaming)
    with pytest.raises(braintrace.OptionError, match="`optimizer` is"):
        own.learner.functional(optimizer=own.update_fn).state()


def test_names_of_the_users_states_are_not_those_of_the_models():
    """Two States under one name would get one value."""
    model = Noisy()
    model.count = brainstate.State(jnp.zeros(()))
    learner = braintrace.compile(model, "d_rtrl", jnp.ones((BATCH, 3)), batch_size=BATCH)
    own = brainstate.State(jnp.ones(()))
    with pytest.raises(braintrace.OptionError, match="'count' is the name of another State"):
        learner.functional(count=own).state()
    others = learner.functional(counted=own, model=model).state().others
    own = {("braintrace", "skipped_updates"): 0}
    assert others == {("count",): 0.0, ("counted",): 1.0} | own


def over_devices():
    """Samples over devices, with one state on each: the gradient is the mean of theirs.

    Also outside of a transformation, where the axes of the mesh are explicit.
    """
    divided, whole = Bench("Leaky", "d_rtrl"), Bench("Leaky", "d_rtrl")
    xs, ys = catalogue.BY_NAME["Leaky"].sequences(4 * BATCH, 4)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    stack = jax.tree.map(lambda leaf: jnp.stack([leaf] * 4), divided.start)

    def train(stack, xs, ys):
        state = jax.tree.map(lambda leaf: leaf[0], stack)
        state, losses = divided.online(state, xs, ys)
        _, gradients = divided.grad(state, xs, ys)
        stack = jax.tree.map(lambda leaf: leaf[None], state)
        return stack, losses[None], jax.lax.pmean(gradients, "data")

    found = jax.jit(
        jax.shard_map(
            train,
            mesh=mesh,
            in_specs=(spec("data"), spec(None, "data"), spec(None, "data")),
            out_specs=(spec("data"), spec("data"), spec()),
            check_vma=False,
        )
    )(stack, xs, ys)
    expected = []
    for part in range(4):
        own = [leaf[:, part * BATCH : (part + 1) * BATCH] for leaf in (xs, ys)]
        state, losses = whole.online(whole.start, *own)
        expected.append((state, losses, whole.grad(state, *own)[1]))
    states, losses, gradients = jax.tree.map(lambda *leaves: jnp.stack(leaves), *expected)
    close(found, (states, losses, jax.tree.map(lambda leaf: leaf.mean(0), gradients)))

    explicit = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    put = functools.partial(
        jax.tree.map,
        lambda leaf: jax.device_put(leaf, jax.sharding.NamedSharding(explicit, spec())),
    )
    close(divided.grad(put(divided.start), *put(own)), whole.grad(whole.start, *own))


if __name__ == "__main__":
    over_devices()
