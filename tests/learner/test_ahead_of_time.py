"""Programs of a learner before they are run: they are those that its methods run."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u
from catalogue import BY_NAME
from drivers import build_learner

import braintrace

XS = np.ones((6, 2, 3), np.float32)
MODEL = BY_NAME["IndRNN"]
SHAPE = jax.ShapeDtypeStruct(XS.shape, XS.dtype)


def calls_of(learner):
    """Every method, with its options."""

    def step_fn(x):
        return jnp.sum(learner(x) ** 2)

    def update_fn(gradients):
        for path, state in learner.algorithm.param_states.items():
            state.value = jax.tree.map(jnp.subtract, state.value, gradients[path])

    return {
        "etrace_grad": {"step_fn": step_fn},
        "etrace_online": {"step_fn": step_fn, "update_fn": update_fn},
        "etrace_evolve": {"chunk_size": 2},
        "predict": {},
        "update": {},
    }


def called(learner, method):
    given = XS[0] if method == "update" else XS
    return jax.block_until_ready(getattr(learner, method)(given, **calls_of(learner)[method]))


@pytest.mark.parametrize(
    "method",
    [
        "etrace_online",
        "update",
    ],
)
def test_nothing_is_compiled_twice(method, compilations):
    called(build_learner(MODEL), method)  # whatever JAX keeps of its own
    learner = build_learner(MODEL)
    compilations.clear()
    expected = called(learner, method)
    needed = len(compilations)

    learner = build_learner(MODEL)
    options = calls_of(learner)[method]
    shape = jax.ShapeDtypeStruct(SHAPE.shape[1:], SHAPE.dtype) if method == "update" else SHAPE
    compilations.clear()
    lowered = learner.lower(method, shape, **options)
    assert not compilations
    compiled = lowered.compile()
    assert len(compilations) == 1
    assert compiled.memory_analysis().argument_size_in_bytes > 0
    assert compiled.cost_analysis() is not None
    given = XS[0] if method == "update" else XS
    found = getattr(learner, method)(given, **options)
    assert len(compilations) == needed
    assert jax.tree.structure(found) == jax.tree.structure(expected)


def test_other_methods_are_refused():
    with pytest.raises(braintrace.OptionError, match="`method` is 'reset_state'"):
        build_learner(MODEL).lower("reset_state")


ELSEWHERE = """
import pathlib, sys
import jax, numpy as np
folder = pathlib.Path(sys.argv[1])
step = jax.jit(jax.export.deserialize((folder / "program").read_bytes()).call)
state, losses = dict(np.load(folder / "state.npz")), []
for x in np.load(folder / "xs.npy"):
    state, loss = step(state, x)
    losses.append(loss)
assert "braintrace" not in sys.modules and "brainstate" not in sys.modules
np.savez(folder / "found.npz", losses=losses, **state)
"""


def test_a_nan_label_does_not_reach_the_parameters_of_an_exported_step():
    pytest.importorskip("flatbuffers", reason="the extra `export` is not installed")
    learner = build_learner(MODEL)

    def step_fn(x, y):
        return jnp.sum((learner(x) - y) ** 2)

    _, update_fn = calls_of(learner)["etrace_online"].values()
    y = np.ones((2, 2), np.float32)
    program, start = learner.export_step(XS[0], y, step_fn=step_fn, update_fn=update_fn)
    step = jax.export.deserialize(program).call
    state, loss = step(start, XS[0], np.nan * y)
    assert np.isnan(loss)
    state, loss = step(state, XS[0], y)
    learner.etrace_evolve(XS[:1])
    expected = learner.etrace_online(XS[:1], y[None], step_fn=step_fn, update_fn=update_fn)
    np.testing.assert_allclose(loss, expected[0], rtol=1e-5)
    for path, value in learner.functional().state().parameters.items():
        names = [name for name in state if name.startswith(f"parameters/{'/'.join(path)}")]
        for name, leaf in zip(names, jax.tree.leaves(value), strict=True):
            np.testing.assert_allclose(state[name], leaf, rtol=1e-5)


def test_an_exported_prediction_has_no_traces():
    pytest.importorskip("flatbuffers", reason="the extra `export` is not installed")
    learner = build_learner(MODEL)
    program, state = learner.export_predict(SHAPE.update(shape=SHAPE.shape[1:]))
    assert not [name for name in state if name.startswith(("traces/", "optimizer/"))]
    step = jax.export.deserialize(program).call
    before, expected = dict(state), learner.predict(XS)
    for x, output in zip(XS, expected, strict=True):
        state, found = step(state, x)
        np.testing.assert_allclose(found, output, rtol=1e-5)
    same = [name for name in state if np.array_equal(state[name], before[name])]
    assert "parameters/w_rec" in same
    assert "hidden/h" not in same


def test_an_exported_prediction_has_no_forecasts():
    """Forecasts that wait change neither program nor names, so new parameters fit an old one."""
    pytest.importorskip("flatbuffers", reason="the extra `export` is not installed")
    learner = build_learner(MODEL)
    old, before = learner.export_predict(XS[0])
    learner.init_forecasts(XS[0], max_delay=2)
    learner.forecast(XS[0])
    new, state = learner.export_predict(XS[0])
    assert set(state) == set(before)
    assert len(new) == len(old)
    expected = learner.predict(XS)  # continues after the forecast
    step = jax.export.deserialize(old).call
    for x, output in zip(XS, expected, strict=True):
        state, found = step(state, x)
        np.testing.assert_allclose(found, output, rtol=1e-5)


def test_units_cannot_be_exported():
    pytest.importorskip("flatbuffers", reason="the extra `export` is not installed")
    learner = build_learner(MODEL)

    def step_fn(x):
        return jnp.sum(learner(x)) * u.mV

    with pytest.raises(braintrace.OptionError, match="`slice 0` is in mV"):
        learner.export_step(XS[0] * u.mV, step_fn=step_fn, update_fn=lambda gradients: None)
    with pytest.raises(braintrace.OptionError, match="result of the step is in mV"):
        learner.export_step(
            XS[0], step_fn=step_fn, update_fn=lambda gradients: None, unit_aware=True
        )


def test_an_exported_step_updates_as_rarely_as_asked():
    pytest.importorskip("flatbuffers", reason="the extra `export` is not installed")
    optax = pytest.importorskip("optax", reason="it accumulates gradients")
    learner, other = build_learner(MODEL), build_learner(MODEL)
    with pytest.raises(braintrace.OptionError, match="`every` is 2, but an exported step") as said:
        learner.export_step(XS[0], **online(learner, optax.sgd(0.1)), every=2)
    assert "optax.MultiSteps(optimizer, 2).gradient_transformation()" in str(said.value)
    accumulating = optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation()
    program, state = learner.export_step(XS[0], **online(learner, accumulating))
    for x in XS:
        state, _ = jax.export.deserialize(program).call(state, x)
    other.etrace_online(XS, **online(other, optax.sgd(0.1)), every=2)
    expected = other.functional().state().parameters
    np.testing.assert_allclose(state["parameters/w_rec"], expected[("w_rec",)], rtol=1e-5)


def online(learner, optimizer):
    return {"step_fn": lambda x: jnp.sum(learner(x) ** 2), "optimizer": optimizer}


def test_a_state_is_an_argument_of_an_exported_function():
    pytest.importorskip("flatbuffers", reason="the extra `export` is not installed")
    learner = build_learner(MODEL)
    pure = learner.functional()
    exported = jax.export.export(jax.jit(pure.predict))(pure.state(), XS)
    again = jax.export.deserialize(bytes(exported.serialize()))
    state, outputs = again.call(pure.state(), XS)
    expected, wanted = pure.predict(pure.state(), XS)
    assert jax.tree.structure(state) == jax.tree.structure(expected)
    np.testing.assert_allclose(outputs, wanted, rtol=1e-5)


def test_without_flatbuffers_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "flatbuffers", None)
    with pytest.raises(braintrace.MissingPackageError, match=r"\[export\]"):
        build_learner(MODEL).export_step(SHAPE, step_fn=jnp.sum)
