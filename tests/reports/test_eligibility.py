"""What a user reads of the trace of one weight."""

import brainstate
import catalogue
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drivers import build_learner

import braintrace

BATCH, STEPS, INPUTS, UNITS = 2, 3, 3, 4
DECAY = 0.8
XS = np.random.default_rng(0).normal(size=(STEPS, BATCH, INPUTS)).astype(np.float32)
W = np.random.default_rng(1).normal(size=(INPUTS, UNITS)).astype(np.float32)
MIXING = np.array([[0.8, -0.3], [0.4, 0.6]], np.float32)


class Layer(brainstate.nn.Module):
    """``h' = decay h + tanh(drive)``; ``drive(x, w, a)`` uses its weights as a test wants."""

    def __init__(self, drive):
        super().__init__()
        self.drive = drive
        self.w = brainstate.ParamState(jnp.asarray(W))
        self.a = brainstate.ParamState(jnp.ones(UNITS))

    def init_state(self, batch_size=None):
        batch = () if batch_size is None else (batch_size,)
        self.h = brainstate.HiddenState(jnp.zeros((*batch, UNITS)))

    def update(self, x):
        self.h.value = DECAY * self.h.value + jnp.tanh(self.drive(x, self.w.value, self.a.value))
        return self.h.value


class Net(brainstate.nn.Module):
    """Two coupled states of a cell; the weight has a path of two names."""

    def __init__(self):
        super().__init__()
        self.cell = Coupled()

    def update(self, x):
        return self.cell(x)


class Coupled(brainstate.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = brainstate.ParamState(jnp.asarray(W))

    def init_state(self, batch_size=None):
        self.V = brainstate.HiddenState(jnp.zeros((batch_size, UNITS)))
        self.a = brainstate.HiddenState(jnp.zeros((batch_size, UNITS)))

    def update(self, x):
        old = self.V.value, self.a.value
        drive = jnp.tanh(braintrace.matmul(x, self.w.value))
        for state, (first, second) in zip((self.V, self.a), MIXING, strict=True):
            state.value = first * old[0] + second * old[1] + drive
        return self.V.value


def once(x, w, a):
    return braintrace.matmul(x, w)


def after_steps(model, algorithm="d_rtrl", **options):
    learner = braintrace.compile(model, algorithm, XS[0], batch_size=BATCH, **options)
    for x in XS:
        learner(x)
    return learner


def direct(x):
    """The derivative of the drive of this step, by sample, with respect to the weight."""
    return x[:, :, None] * (1 - np.tanh(x @ W) ** 2)[:, None, :]


@pytest.mark.core
@pytest.mark.parametrize("options", [{}, {"vmap": True}], ids=["batched", "mapped"])
def test_the_eligibility_of_a_leaky_layer_is_its_filtered_input(options):
    learner = after_steps(Layer(once), **options)
    expected = np.zeros((BATCH, INPUTS, UNITS), np.float32)
    for x in XS:
        expected = DECAY * expected + direct(x)
    (found,) = learner.eligibility(("w",)).items()
    assert found[0] == "h"
    np.testing.assert_allclose(found[1], expected, rtol=1e-5, atol=1e-6)
    learner.reset_state()
    assert not learner.algorithm.eligibility("w")["h"].any()


def test_coupled_states():
    learner = after_steps(Net())
    expected = np.zeros((2, BATCH, INPUTS, UNITS), np.float32)
    for x in XS:
        expected = np.einsum("ac,c...->a...", MIXING, expected) + direct(x)
    found = learner.eligibility("cell/w")
    assert list(found) == ["cell/V", "cell/a"]
    for trace, wanted in zip(found.values(), expected, strict=True):
        np.testing.assert_allclose(trace, wanted, rtol=1e-5, atol=1e-6)
    assert set(learner.algorithm.traces.value) == {"cell/w@mm0>cell/V", "cell/w@mm0>cell/a"}


def test_several_operations_on_one_weight():
    def twice(x, w, a):
        return braintrace.matmul(x, w) + braintrace.matmul(x**2, w)

    expected = np.zeros((BATCH, INPUTS, UNITS), np.float32)
    for x in XS:
        slope = 1 - np.tanh((x + x**2) @ W) ** 2
        expected = DECAY * expected + (x + x**2)[:, :, None] * slope[:, None, :]
    found = after_steps(Layer(twice)).eligibility("w")["h"]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_traces_of_different_forms_are_not_added():
    def both(x, w, a):
        product = braintrace.lora_matmul(x[:, :2], w[:2, :2], w[:2])
        return product + braintrace.element_wise(w)[0]

    model = Layer(both)
    with pytest.raises(braintrace.ShapeError, match="which cannot be added"):
        after_steps(model).eligibility("w")


def test_outputs_without_a_trace_are_zero():
    """The output gate reaches no state that is remembered."""
    case = catalogue.BY_NAME["LSTMFused"]
    learner = build_learner(case, "d_rtrl")
    xs, _ = case.sequences(2, 2)
    for x in xs:
        learner(x)
    graph = learner.graph
    for relation in graph.hidden_param_op_relations:
        path = relation.trainable_paths["weight"]
        shape = relation.trainable_vars["weight"].aval.shape
        for traces in learner.eligibility(path).values():
            assert traces["weight"].shape == (2, *shape)
            gates = np.asarray(traces["weight"]).any((0, 1)).reshape(4, -1)
            assert sorted(map(bool, gates.any(1))) == [False, True, True, True]


@pytest.mark.core
def test_every_step_of_a_loop_of_a_user_s_own():
    learner = braintrace.compile(Net(), "d_rtrl", XS[0], batch_size=BATCH)

    def step(x):
        learner(x)
        return learner.eligibility("cell/w")

    over_time = brainstate.transform.for_loop(step, jnp.asarray(XS))
    now = learner.eligibility(("cell", "w"))
    assert jax.tree.map(jnp.shape, over_time) == {n: (STEPS, *t.shape) for n, t in now.items()}
    for name, trace in now.items():
        np.testing.assert_allclose(over_time[name][-1], trace, rtol=1e-5, atol=1e-6)


def test_what_has_no_trace_is_refused():
    learner = after_steps(Layer(once))
    for path in ("v", ("cell", "w"), "a", 3):
        with pytest.raises(braintrace.OptionError, match=r"and have one: 'w'\."):
            learner.eligibility(path)
    for rule, options in (("es_d_rtrl", {"decay_or_rank": 0.9}), ("snap", {"n": 2})):
        others = after_steps(Layer(once), rule, **options)
        with pytest.raises(braintrace.OptionError, match=r"`traces\.value`"):
            others.eligibility("w")
    with pytest.raises(braintrace.NotCompiledError):
        braintrace.D_RTRL(Layer(once)).eligibility("w")
