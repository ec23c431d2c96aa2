"""Values of `brainstate.environ` that change after a model has been compiled."""

import contextlib
import copy
import enum

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u

import braintrace
from braintrace._runtime.environment import environ

BATCH = 2
XS = np.random.default_rng(0).normal(size=(3, BATCH, 3)).astype(np.float32)
context = brainstate.environ.context


class Phase(enum.Enum):
    FIRST = 1
    SECOND = 2


class Model(brainstate.nn.Module):
    """A leaky layer whose decay is a function of the environment, in values or derivatives."""

    def __init__(self, decay, slope=None):
        super().__init__()
        self.w = brainstate.ParamState(jnp.ones((3, 4)))
        self.decay = decay
        self.activation = jnp.tanh if slope is None else with_slope(slope)

    def init_state(self, batch_size=None):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, 4)))

    def update(self, x):
        self.h.value = self.decay() * self.h.value + braintrace.matmul(x, self.w.value)
        return self.activation(self.h.value)


def with_slope(slope):
    """Return ``tanh`` with a derivative that reads the environment when it is traced."""

    @jax.custom_jvp
    def spike(x):
        return jnp.tanh(x)

    @spike.defjvp
    def rule(primals, tangents):
        (x,), (t,) = primals, tangents
        return spike(x), slope() * t

    return spike


def get(key, default=None):
    return brainstate.environ.get(key, default)


def compiled(decay, slope=None):
    return braintrace.compile(Model(decay, slope), "d_rtrl", XS[0], batch_size=BATCH)


def step_of(learner):
    return lambda x: (learner(x) ** 2).sum()


CALLS = {
    "step": lambda learner: learner(XS[0]),
    "sequence": lambda learner: learner.etrace_grad(XS, step_fn=step_of(learner)),
    "prediction": lambda learner: learner.predict(XS[:2]),
    "pure": lambda learner: learner.functional().step(learner.functional().state(), XS[0]),
}
READERS = {
    "a default": (lambda: 0.1 if get("fit", False) else 0.9, {"fit": True}, {}),
    "a key that is there": (lambda: 0.1 if get("fit") is None else 0.9, {}, {"fit": False}),
    "identity": (lambda: 0.1 if get("fit") is True else 0.9, {"fit": False}, {"fit": True}),
    "a member": (
        lambda: 0.1 if get("phase") is Phase.FIRST else 0.9,
        {"phase": Phase.SECOND},
        {"phase": Phase.FIRST},
    ),
    "a class": (
        lambda: 0.1 if isinstance(get("mode"), brainstate.mixin.Training) else 0.9,
        {"mode": brainstate.mixin.Batching()},
        {"mode": brainstate.mixin.Training()},
    ),
    "a type of number": (lambda: 0.1 if isinstance(get("k"), int) else 0.9, {"k": 1.0}, {"k": 1}),
    "a number": (lambda: get("k"), {"k": 0.9}, {"k": 0.1}),
    "a number above another": (
        lambda: 0.1 if isinstance(get("k"), float) and get("k") > 10 else 0.9,
        {"k": 1.0},
        {"k": 20.0},
    ),
    "the text of a number": (lambda: {"1": 0.9}.get(f"{get('k')}", 0.1), {"k": 1}, {"k": 2}),
    "a shape": (
        lambda: 0.9 if len(get("k")) > 1 else 0.1,
        {"k": np.ones(9)},
        {"k": np.ones(1)},
    ),
    "a type in a dict": (
        lambda: 0.1 if type(get("k")["x"]) is int else 0.9,
        {"k": {"x": 1.0}},
        {"k": {"x": 1}},
    ),
    "a quantity": (
        lambda: get("dt") / u.ms,
        {"dt": 0.9 * u.ms},
        {"dt": 0.1 * u.ms},
    ),
}


@pytest.mark.by_day(
    *(f"{reader}-step" for reader in READERS), *(f"identity-{call}" for call in CALLS)
)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("reader", READERS)
def test_a_value_that_is_read_in_any_way_is_refused(reader, call):
    decay, before, after = READERS[reader]
    key = "phase" if "phase" in after else next(iter({**before, **after}))
    with context(**before):
        learner = compiled(decay)
        learner(XS[0])
    with context(**after):
        for _ in range(2):
            with pytest.raises(braintrace.NotCompiledError, match=f"`update` reads '{key}'"):
                CALLS[call](learner)
    with context(**before):
        CALLS[call](learner)


def test_a_value_that_the_rule_of_a_derivative_reads_is_refused():
    with context(slope=1.0, kind="narrow"):
        learner = compiled(lambda: 0.9, lambda: get("slope") * (2 if get("kind") == "wide" else 1))
        learner(XS[0])
    for changed, key in (({"slope": 2.0, "kind": "narrow"}, "slope"), ({"kind": "wide"}, "kind")):
        refused = pytest.raises(braintrace.NotCompiledError, match=f"reads '{key}'")
        with context(**{"slope": 1.0, **changed}), refused:
            CALLS["sequence"](learner)


def test_a_value_that_update_needs_may_be_absent_later():
    """Another one cannot be meant: an absent value would be an error."""
    with context(dt=0.9, fit=True):
        learner = compiled(lambda: brainstate.environ.get("dt") * (1 if get("fit", False) else 0.1))
        learner(XS[0])
    with context(fit=True):
        before = np.asarray(learner.algorithm.model.h.value)
        learner(XS[1])
        expected = 0.9 * before + XS[1].sum(-1, keepdims=True)
        np.testing.assert_allclose(learner.algorithm.model.h.value, expected, rtol=1e-5)
    with pytest.raises(braintrace.NotCompiledError, match=r"'fit' .* which was True"):
        learner(XS[2])
    with context(dt=0.5, fit=True), pytest.raises(braintrace.NotCompiledError, match="reads 'dt'"):
        learner(XS[2])


class Neurons(brainstate.nn.Module):
    def __init__(self):
        super().__init__()
        self.input, self.neurons = braintrace.nn.Linear(3, 4), braintrace.nn.LIF(4)

    def update(self, x):
        return self.neurons(self.input(x) * u.mA)


def test_neurons_keep_a_time_step_that_is_absent_later():
    """Their error for an absent one is not that of brainstate."""
    with context(dt=1.0 * u.ms):
        learner = braintrace.compile(Neurons(), "d_rtrl", XS[0], batch_size=BATCH)
        expected = learner(XS[0])
    learner.reset_state()
    np.testing.assert_array_equal(learner(XS[0]), expected)


def test_values_that_matter_together_are_refused_together():
    """At once or one after the other; each alone changes nothing."""
    before = {"fit": False, "noise": False, "k": 0.9}
    together = {
        "two flags": (lambda: 0.1 if get("fit") and get("noise") else 0.9, {"noise": True}),
        "a number under a flag": (lambda: get("k") if get("fit") else 0.9, {"k": 0.1}),
    }
    for decay, other in together.values():
        for is_in_turn in (False, True):
            with context(**before):
                learner = compiled(decay)
            if is_in_turn:
                for alone in ({"fit": True}, other):
                    with context(**{**before, **alone}):
                        learner(XS[0])
            refused = pytest.raises(braintrace.NotCompiledError, match="`update` reads")
            with context(**{**before, "fit": True, **other}), refused:
                learner(XS[0])


def test_an_attribute_may_make_a_step_read_a_value():
    model = Model(lambda: 0.1 if model.is_on and get("fit") else 0.9)
    model.is_on = False
    with context(fit=True):
        learner = braintrace.compile(model, "d_rtrl", XS[0], batch_size=BATCH)
        learner(XS[0])
    model.is_on = True
    with context(fit=False):
        learner.reset_state()
        learner(XS[0])
    with context(fit=True), pytest.raises(braintrace.NotCompiledError, match="reads 'fit'"):
        learner(XS[1])


def test_the_model_of_a_copy_is_the_one_that_reads():
    class Own(Model):
        def decay_now(self):
            return 0.1 if self.is_on and get("fit") else 0.9

        def update(self, x):
            self.h.value = self.decay_now() * self.h.value + braintrace.matmul(x, self.w.value)
            return self.h.value

    model = Own(None)
    model.is_on = True
    learner = braintrace.compile(model, "d_rtrl", XS[0], batch_size=BATCH)
    twin = copy.deepcopy(learner)
    model.is_on = False
    with context(other=1):
        twin(XS[0])
    with context(fit=True), pytest.raises(braintrace.NotCompiledError, match="reads 'fit'"):
        twin(XS[0])


def test_a_dict_that_changes_in_place_is_refused():
    settings = {"decay": 0.9}
    with context(settings=settings):
        learner = compiled(lambda: get("settings")["decay"])
        learner(XS[0])
        settings["decay"] = 0.1
        with pytest.raises(braintrace.NotCompiledError, match="reads 'settings'"):
            learner(XS[0])


@pytest.mark.parametrize("value", [3, True, 2.0 * u.ms])
def test_a_step_function_may_set_what_the_model_does_not_read(value):
    learner, same = (compiled(lambda: 0.9) for _ in range(2))

    def step(x):
        with context(other=value):
            return (learner(x) ** 2).sum()

    found = learner.etrace_grad(XS, step_fn=step)
    expected = same.etrace_grad(XS, step_fn=step_of(same))
    np.testing.assert_array_equal(found["w",], expected["w",])


def test_a_step_function_must_not_set_what_the_model_reads():
    with context(fit=False):
        learner = compiled(lambda: 0.1 if get("fit") else 0.9)

        def step(x):
            with context(fit=True):
                return (learner(x) ** 2).sum()

        refused = pytest.raises(braintrace.NotCompiledError, match="reads 'fit'")
        with refused:
            learner.etrace_grad(XS, step_fn=step)
        with refused:
            learner.etrace_online(XS, step_fn=step, update_fn=lambda gradients: None)


def test_what_is_not_read_may_change_at_every_call():
    """Numbers without another trace after the first change; other values once for each."""
    traced = []

    def decay():
        traced.append(get("other"))
        return 0.9

    learner = compiled(decay)
    graph = learner.graph
    values = [1, 2.0, 3 * u.ms, jnp.ones(2), True, "a", None, Phase.FIRST]
    for repeat in range(2):
        for value in values:
            with context(other=value):
                for call in CALLS.values():
                    call(learner)
        if not repeat:
            before = len(traced)
    assert len(traced) == before and learner.graph is graph
    with context(other=0):
        learner(XS[0])
    learner(XS[0])
    for step in range(3):
        with context(other=100 + step, precision=16 * 2**step):
            learner(XS[0])
    assert len(traced) == before


def test_the_index_of_a_loop_may_be_in_the_environment():
    learner = compiled(lambda: 0.9)

    def step(i, x):
        with context(i=i):
            return learner(x)

    outputs = brainstate.transform.for_loop(step, jnp.arange(3), XS)
    learner.reset_state()
    np.testing.assert_allclose(outputs, [learner(x) for x in XS], rtol=1e-6)


def test_an_object_that_is_made_anew_at_each_call_is_told(monkeypatch):
    monkeypatch.setattr(environ, "MOST_ACCEPTED", 4)
    learner = compiled(lambda: 0.5)
    for number in range(7):
        expected = contextlib.nullcontext()
        if number == 3:
            told = "for 4 values of 'settings' in `brainstate.environ`"
            expected = pytest.warns(braintrace.RecompilationWarning, match=told)
        with context(settings=object()), expected:
            learner(XS[0])
