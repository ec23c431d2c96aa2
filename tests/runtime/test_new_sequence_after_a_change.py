"""A change of the model that needs other traces holds from the start of the next sequence on."""

import pickle

import brainstate
import compilation
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drivers import calls_gradient
from gradient_paths import RUNS, loss_of, sequence

import braintrace

BATCH = 2
XS = np.random.default_rng(0).normal(size=(4, BATCH, 3)).astype(np.float32)
WEIGHT = np.random.default_rng(1).normal(size=(3, 4)).astype(np.float32)


class Model(brainstate.nn.Module):
    """Two leaky states, coupled in one direction; attributes say how they are computed."""

    def __init__(self):
        super().__init__()
        self.order, self.mask, self.is_wide, self.dtype = ("w", "v"), 1.0, False, jnp.float32
        self.w = brainstate.ParamState(jnp.asarray(WEIGHT))
        self.v = brainstate.ParamState(jnp.asarray(-WEIGHT))

    def init_state(self, batch_size=None):
        shape = (4,) if batch_size is None else (batch_size, 4)
        self.h = brainstate.HiddenState(jnp.zeros(shape, self.dtype))
        self.k = brainstate.HiddenState(jnp.zeros(shape, self.dtype))

    def update(self, x):
        x = x.astype(self.dtype)
        before = {name: (self.h if name == "w" else self.k).value for name in self.order}
        more = braintrace.matmul(x**2, self.v.value) if self.is_wide else 0.0
        drive = braintrace.matmul(x, self.mask * self.w.value).astype(self.dtype)
        other = braintrace.matmul(x, self.v.value)
        self.h.value = (0.7 * before["w"] + drive + more).astype(self.dtype)
        self.k.value = (0.4 * before["v"] + 0.3 * self.h.value + other).astype(self.dtype)
        return self.h.value - self.k.value


CHANGES = {
    "a function of a weight": ("mask", 0.5),
    "another operation": ("is_wide", True),
    "the order of states": ("order", ("v", "w")),
    "a type": ("dtype", jnp.bfloat16),
}


def compiled(model, rule="d_rtrl", **options):
    return braintrace.compile(model, rule, XS[0], batch_size=BATCH, **options)


def changed(change):
    model = Model()
    setattr(model, *CHANGES[change])
    return model


@compilation.cache
def unchanged(rule, which, **options):
    """Return one of several learners that rows share: each row begins with a reset of it."""
    return compiled(Model(), rule, **options)


@compilation.cache
def otherwise(change, rule, **options):
    """Return a shared learner that was compiled for the changed model."""
    return compiled(changed(change), rule, **options)


ROWS = [
    *(("rtrl", {}, change, "sequence") for change in CHANGES),
    *(("d_rtrl", {}, change, "own loop") for change in CHANGES if change != "the order of states"),
    ("rtrl", {}, "the order of states", "pure"),
    ("d_rtrl", {}, "another operation", "stream"),
    ("snap", {"n": 2}, "another operation", "sequence"),
    ("es_d_rtrl", {"decay_or_rank": 0.8}, "another operation", "pure"),
]


@pytest.mark.by_day(
    "rtrl-options1-another operation-sequence",
    "rtrl-options7-the order of states-pure",
    "d_rtrl-options4-a function of a weight-own loop",
    "d_rtrl-options6-a type-own loop",
    "d_rtrl-options8-another operation-stream",
)
@pytest.mark.parametrize(("rule", "options", "change", "run"), ROWS)
def test_a_reset_starts_with_the_changed_model(rule, options, change, run):
    """The gradient is that of a learner that was compiled for the changed model."""
    learner = compiled(Model(), rule, **options)
    expected = otherwise(change, rule, **options)
    expected.reset_state()
    RUNS[run](learner, XS[:2])
    setattr(learner.algorithm.model, *CHANGES[change])
    if change != "a function of a weight" or rule == "d_rtrl":
        with pytest.raises(braintrace.BraintraceError):
            RUNS[run](learner, XS[2:])
    learner.reset_state()
    found, wanted = RUNS[run](learner, XS[:2]), RUNS[run](expected, XS[:2])
    assert found.keys() == wanted.keys()
    for path in wanted:
        np.testing.assert_allclose(found[path], wanted[path], rtol=1e-5)


def test_another_size_starts_with_the_changed_model():
    learner, expected = compiled(Model()), compiled(changed("another operation"))
    sequence(learner, XS)
    setattr(learner.algorithm.model, *CHANGES["another operation"])
    larger = np.concatenate([XS, XS[:, :1]], axis=1)
    for each in (learner, expected):
        each.reset_state(3)
    found, wanted = sequence(learner, larger), sequence(expected, larger)
    for path in wanted:
        np.testing.assert_allclose(found[path], wanted[path], rtol=1e-5)


class Readout(brainstate.nn.Module):
    """Its readout reads one of two states, or both."""

    def __init__(self, is_wide=False):
        super().__init__()
        self.w, self.is_wide = brainstate.ParamState(jnp.asarray(WEIGHT)), is_wide
        self.out = brainstate.ParamState(jnp.asarray(WEIGHT.T[:, :2]))

    def init_state(self, batch_size=None):
        self.h, self.k, self.y = (
            brainstate.HiddenState(jnp.zeros((batch_size, n))) for n in (4, 4, 2)
        )

    def update(self, x):
        drive = braintrace.matmul(x, self.w.value)
        self.h.value = 0.7 * self.h.value + drive
        self.k.value = jnp.tanh(0.3 * self.k.value + drive)
        read = self.h.value + self.k.value if self.is_wide else self.h.value
        self.y.value = 0.5 * self.y.value + braintrace.matmul(read, self.out.value)
        return self.y.value


def test_filters_of_readouts_start_anew():
    learner = compiled(Readout())
    sequence(learner, XS)
    before = len(learner.algorithm.filters)
    learner.algorithm.model.is_wide = True
    with pytest.raises(braintrace.NotCompiledError, match="needs other traces"):
        sequence(learner, XS)
    learner.reset_state()
    assert len(learner.algorithm.filters) > before
    found, wanted = sequence(learner, XS), sequence(compiled(Readout(True)), XS)
    for path in wanted:
        np.testing.assert_allclose(found[path], wanted[path], rtol=1e-5)


def test_a_compiled_loop_cannot_start_with_other_traces():
    model = Model()
    learner = compiled(model)
    learner(XS[0])
    model.is_wide = True
    with pytest.raises(braintrace.NotCompiledError, match=r"needs other traces.*`is_wide`"):
        brainstate.transform.jit(learner.reset_state)()
    learner.reset_state()
    learner(XS[0])


@pytest.mark.parametrize("change", ["a function of a weight", "another operation"])
def test_a_foreign_map_refuses_other_traces(change):
    model = Model()
    algorithm = braintrace.D_RTRL(model)

    def initialise(x):
        brainstate.nn.init_all_states(model)
        algorithm.compile_graph(x)

    lanes = {"axis_size": BATCH, "state_tag": "lane"}
    brainstate.transform.vmap_new_states(initialise, **lanes)(XS[0])
    run = brainstate.nn.Vmap(algorithm, vmap_states="lane")
    calls_gradient(model, lambda x: (run(x) ** 2).sum(), XS[:2])
    setattr(model, *CHANGES[change])
    for call in (run, lambda x: calls_gradient(model, lambda x: (run(x) ** 2).sum(), x[None])):
        with pytest.raises(braintrace.NotCompiledError, match="needs other traces"):
            call(XS[2])


def test_a_given_state_of_other_traces_is_refused():
    """Also if the learner itself has started a new sequence: the given traces have not."""
    model = Model()
    learner = compiled(model, "rtrl")
    functional = learner.functional()
    state, _ = functional.step(functional.state(), XS[0])
    calls = (
        lambda: functional.step(state, XS[0]),
        lambda: functional.grad(state, XS, step_fn=loss_of(learner)),
        lambda: functional.reset(state),
    )
    model.mask = 0.5  # RTRL has derivatives by the parameter itself
    for call in calls:
        call()
    model.order = ("v", "w")
    for call in calls:
        with pytest.raises(braintrace.NotCompiledError, match="needs other traces"):
            call()
    learner.reset_state()
    for call in calls:
        with pytest.raises(braintrace.OptionError, match="stand for something else"):
            call()


@pytest.mark.parametrize("way", ["state", "pickle", "leaves"])
@pytest.mark.parametrize(
    ("rule", "options", "change"),
    [
        ("rtrl", {}, "the order of states"),
        ("snap", {"n": 2}, "the order of states"),
        ("d_rtrl", {}, "a function of a weight"),
    ],
)
def test_the_state_of_another_learner_is_refused_if_its_traces_stand_for_something_else(
    rule, options, change, way
):
    one, twin = (unchanged(rule, which, **options).functional() for which in range(2))
    other = otherwise(change, rule, **options).functional()
    state, _ = one.step(one.reset(one.state()), XS[0])
    if way == "pickle":
        state = pickle.loads(pickle.dumps(state))
    if way == "leaves":
        leaves, tree = jax.tree.flatten(state)
        state = jax.tree.unflatten(tree, jax.device_get(leaves))
    twin.restore(state)
    for call in (other.restore, lambda state: other.step(state, XS[1])):
        with pytest.raises(braintrace.OptionError, match="stand for something else"):
            call(state)
    np.testing.assert_array_equal(twin.step(twin.state(), XS[1])[1], one.step(state, XS[1])[1])
