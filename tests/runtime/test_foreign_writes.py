"""Hidden states that something else than the learner has written are noticed."""

import brainstate
import compilation
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interrupts import Interrupts
from models import small

import braintrace

XS = np.random.default_rng(0).standard_normal((4, 2, 3)).astype(np.float32)
STALE = pytest.raises(braintrace.LostTracesError, match="reset_state")


@small({"c": (4,), "h": (4,)}, w=np.linspace(-1.0, 1.0, 12).reshape(3, 4))
def two_states(self, x):
    """A leaky state and another one that reads it."""
    self.c.value = 0.5 * self.c.value + braintrace.matmul(x, self.w.value)
    self.h.value = 0.9 * self.h.value + jnp.tanh(self.c.value)
    return self.h.value


class Bench:
    """A learner with ways to move it on, each of which returns what it computes."""

    def __init__(self, algorithm="d_rtrl", **options):
        brainstate.random.seed(3)
        self.model, self.options = two_states(), options
        self.learner = self.another(algorithm)
        self.weights = self.model.states(brainstate.ParamState)
        self.drawn = {path: weight.value for path, weight in self.weights.items()}

    def again(self):
        """Begin anew with the weights of the beginning, whatever has been done to the learner."""
        for path, weight in self.weights.items():
            weight.value = self.drawn[path]
        self.learner.reset_state()
        return self

    def another(self, algorithm="d_rtrl"):
        options = {"decay_or_rank": 0.9} if algorithm == "es_d_rtrl" else {}
        options |= self.options
        return braintrace.compile(self.model, algorithm, XS[0], batch_size=2, **options)

    def loss(self, x):
        return (self.learner(x) ** 2).mean()

    def step(self):
        return self.learner(XS[1])

    def gradient(self):
        return self.learner.etrace_grad(XS, step_fn=self.loss)

    def evolution(self):
        return self.learner.etrace_evolve(XS[:2])

    def descend(self, gradients):
        for path, weight in self.weights.items():
            weight.value = jax.tree.map(lambda w, g: w - 0.1 * g, weight.value, gradients[path])

    def stream(self):
        return self.learner.etrace_online(XS[:2], step_fn=self.loss, update_fn=self.descend)

    def prediction(self):
        return self.learner.predict(XS[1:3])

    def partial_reset(self):
        self.learner.reset_state(where=np.array([True, False]))

    def in_jit(self):
        return brainstate.transform.jit(lambda: self.learner(XS[2]))()

    def in_grad(self):
        return brainstate.transform.grad(lambda: self.loss(XS[2]), self.weights)()

    def hidden(self):
        return self.model.states(brainstate.HiddenState)

    def write(self, function):
        for state in self.hidden().values():
            state.value = function(state.value)

    def values(self):
        return [jax.tree.map(np.asarray, s.value) for s in self.learner.states().values()]


@compilation.cache
def compiled_once(algorithm, is_left_alone):
    return Bench(algorithm)


def shared(algorithm="d_rtrl", *, is_left_alone=False):
    """Return a bench that tests of this file share: one of two, of which one is left alone.

    No past is left by a reset, or a test of this file fails.
    """
    return compiled_once(algorithm, is_left_alone).again()


MOVES = [Bench.step, Bench.gradient, Bench.evolution, Bench.stream]


def initialised(bench):
    brainstate.nn.init_all_states(bench.model, batch_size=2)


def with_a_second_learner(bench):
    bench.another().etrace_evolve(XS[:3])


def written(bench):
    bench.model.h.value = bench.model.h.value + 1


def moved_by_the_model(bench):
    bench.model.update(XS[0])


FOREIGN = [initialised, with_a_second_learner, written, moved_by_the_model]


@pytest.mark.by_day("initialised-step", "written-evolution")
@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("foreign", FOREIGN)
def test_stale_traces_are_refused(foreign, move):
    """By every call, until the learner is reset: the gradient is then that of a new sequence."""
    bench = shared()
    before = bench.values()
    bench.step()
    move(bench)
    foreign(bench)
    left = bench.values()
    pure = bench.learner.functional()
    for call in (*MOVES, Bench.prediction, Bench.partial_reset, lambda _: pure.state()):
        with STALE:
            call(bench)
    jax.tree.map(np.testing.assert_array_equal, bench.values(), left)
    bench.learner.reset_state()
    fresh = shared(is_left_alone=True)
    for path, weight in fresh.weights.items():
        weight.value = bench.weights[path].value
    found, expected = bench.gradient(), fresh.gradient()
    jax.tree.map(lambda f, e: np.testing.assert_allclose(f, e, rtol=1e-6), found, expected)
    assert jax.tree.structure(before) == jax.tree.structure(bench.values())


@pytest.mark.parametrize(
    ("foreign", "said"),
    [
        (initialised, r"State 'c' is a new object .* initialised again"),
        (with_a_second_learner, "another learner was compiled"),
        (written, r"State 'h' was written since .* `update`"),
    ],
)
def test_the_message_says_what_happened(foreign, said):
    bench = shared()
    bench.step()
    foreign(bench)
    with pytest.raises(braintrace.LostTracesError, match=said):
        bench.step()


def nothing(bench):
    """Do nothing."""


def new_objects_after_a_reset(bench):
    bench.learner.reset_state()
    initialised(bench)


def initial_values_after_a_reset(bench):
    bench.learner.reset_state()
    bench.write(lambda value: value + 0.5)


def everything_reset(bench):
    bench.step()
    brainstate.nn.reset_all_states(bench.learner, batch_size=2)


def written_back(bench):
    bench.step()
    before = {path: state.value for path, state in bench.hidden().items()}
    bench.prediction()
    for path, state in bench.hidden().items():
        state.value = before[path]


def put_on_a_device(bench):
    bench.step()
    bench.write(lambda value: jax.device_put(np.asarray(value), jax.devices()[0]))


def nan_put_on_a_device(bench):
    bench.learner(np.nan * XS[0])
    bench.write(lambda value: jax.device_put(np.asarray(value), jax.devices()[0]))
    bench.step()
    bench.learner.reset_state()


def restored(bench):
    bench.step()
    pure = bench.learner.functional()
    state = pure.state()
    bench.gradient()
    pure.restore(state)


def restored_by_another_tool(bench):
    bench.step()
    states = bench.learner.states()
    kept = {path: jax.tree.map(np.array, state.value) for path, state in states.items()}
    bench.gradient()
    for path, state in states.items():
        state.value = jax.tree.map(jnp.asarray, kept[path])


def parameters_written(bench):
    bench.step()
    for weight in bench.weights.values():
        weight.value = jax.tree.map(lambda w: 0.9 * w, weight.value)


def predictions_in_jit(bench):
    bench.step()
    predict = brainstate.transform.jit(bench.prediction)
    for _ in range(2):
        predict()
        bench.step()


def loop_of_ones_own(bench):
    bench.step()
    train = brainstate.transform.jit(bench.in_grad)
    for _ in range(2):
        train()
    bench.step()
    brainstate.transform.for_loop(bench.learner, XS)


def part_of_the_samples(bench):
    bench.step()
    bench.partial_reset()


def another_batch_and_back(bench):
    bench.step()
    bench.learner.reset_state(5)
    bench.learner.reset_state(2)


ALLOWED = [
    nothing,
    new_objects_after_a_reset,
    initial_values_after_a_reset,
    everything_reset,
    written_back,
    put_on_a_device,
    nan_put_on_a_device,
    restored,
    restored_by_another_tool,
    parameters_written,
    predictions_in_jit,
    loop_of_ones_own,
    part_of_the_samples,
    another_batch_and_back,
]


@pytest.mark.by_day(
    "nothing",
    "new_objects_after_a_reset",
    "initial_values_after_a_reset",
    "nan_put_on_a_device",
    "part_of_the_samples",
)
@pytest.mark.parametrize("use", ALLOWED)
def test_other_uses_are_left_alone(use):
    bench = shared()
    use(bench)
    for move in (Bench.step, Bench.gradient, Bench.prediction, Bench.stream):
        move(bench)


@pytest.mark.by_day(
    "initialised-in_jit",
    "with_a_second_learner-in_grad",
    "with_a_second_learner-in_jit",
    "written-in_jit",
    "moved_by_the_model-in_grad",
    "moved_by_the_model-in_jit",
)
@pytest.mark.parametrize("move", [Bench.in_grad, Bench.in_jit])
@pytest.mark.parametrize("foreign", FOREIGN)
def test_stale_traces_are_refused_where_a_transformation_is_traced(foreign, move):
    """By the values from before it, also where it reads the States in a loop inside."""
    bench = shared()
    bench.step()
    foreign(bench)
    left = bench.values()
    inside = lambda: brainstate.transform.for_loop(bench.learner, XS)  # noqa: E731
    for call in (lambda: move(bench), inside, brainstate.transform.jit(inside)):
        with STALE:
            call()
    jax.tree.map(np.testing.assert_array_equal, bench.values(), left)
    bench.learner.reset_state()
    move(bench)


def test_rules_without_traces_compare_nothing():
    bench = Bench("immediate")
    for foreign in (initialised, written, moved_by_the_model):
        bench.gradient()
        foreign(bench)
        bench.gradient()


def test_new_state_objects_are_seen_by_a_learner_whose_predictions_ran_elsewhere():
    bench = Bench()
    predictions_in_jit(bench)
    initialised(bench)
    with STALE:
        bench.step()


# --- at random


class Attack:
    """A learner that is interfered with, and one that does the same without interference."""

    def __init__(self, seed, algorithm):
        self.draw = np.random.default_rng(seed)
        self.attacked, self.oracle = Bench(algorithm), shared(algorithm, is_left_alone=True)
        self.both, self.algorithm = (self.attacked, self.oracle), algorithm
        self.kept = [bench.learner.functional().state() for bench in self.both], False
        self.has_traces = self.is_noted = False

    def run(self, count):
        names = [name for name in dir(self) if name.startswith("do_")]
        for _ in range(count):
            getattr(self, self.draw.choice(names))()
            found, expected = (bench.values() for bench in self.both)
            jax.tree.map(np.testing.assert_array_equal, found, expected)

    def on_both(self, move):
        found, expected = map(move, self.both)
        jax.tree.map(np.testing.assert_array_equal, found, expected)

    def do_move(self):
        self.on_both(MOVES[self.draw.integers(len(MOVES))])
        self.has_traces = self.is_noted = True

    do_more = do_move

    def do_predict(self):
        self.on_both(Bench.prediction)

    def do_reset(self):
        for bench in self.both:
            bench.learner.reset_state()
        self.has_traces = self.is_noted = False

    def do_partial_reset(self):
        if self.algorithm == "d_rtrl" and self.is_noted:
            self.on_both(Bench.partial_reset)

    def do_own_transformation(self):
        self.on_both(self.draw.choice([Bench.in_jit, Bench.in_grad]))
        self.has_traces, self.is_noted = True, False

    def do_copy(self):
        self.attacked.write(lambda value: jnp.asarray(np.array(value)))

    def do_keep(self):
        self.kept = [b.learner.functional().state() for b in self.both], self.has_traces

    def do_restore(self):
        states, self.has_traces = self.kept
        for bench, state in zip(self.both, states, strict=True):
            bench.learner.functional().restore(state)
        self.is_noted = False

    def do_interrupt(self):
        if not self.is_noted:  # what a first call compiles takes long to trace
            return
        number = int(self.draw.integers(1, 400))
        Interrupts(number)(lambda: Bench.evolution(self.attacked))
        if not jax.tree.all(
            jax.tree.map(np.array_equal, self.attacked.values(), self.oracle.values())
        ):
            Bench.evolution(self.oracle)

    def do_interfere(self):
        if self.has_traces and not self.is_noted:
            return
        FOREIGN[self.draw.integers(len(FOREIGN))](self.attacked)
        if self.has_traces:
            with STALE:
                MOVES[self.draw.integers(len(MOVES))](self.attacked)
            self.do_reset()
        else:  # the states may be written before a sequence begins
            for path, state in self.oracle.hidden().items():
                state.value = self.attacked.hidden()[path].value


@pytest.mark.by_day("d_rtrl")
@pytest.mark.parametrize("algorithm", ["d_rtrl", "es_d_rtrl"])
def test_random_interference(algorithm):
    Attack(0, algorithm).run(30)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(1, 5))
@pytest.mark.parametrize("algorithm", ["d_rtrl", "es_d_rtrl", "rtrl"])
def test_long_random_interference(seed, algorithm):
    Attack(seed, algorithm).run(120)
