"""A trained model's step leaves the library: through jax.export and through ONNX."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from matrices import normal

import braintrace

INPUTS = normal(0, 6, 2, 3)


class Leaky(brainstate.nn.Module):
    def __init__(self):
        super().__init__()
        self.w_in = brainstate.ParamState(normal(1, 3, 4) / 2)
        self.w_rec = brainstate.ParamState(normal(2, 4, 4) / 2)
        self.leak = brainstate.ParamState(normal(3, 4))

    def init_state(self, batch_size=None, **kwargs):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, 4)))

    def update(self, x):
        drive = braintrace.matmul(x, self.w_in.value)
        drive += braintrace.matmul(self.h.value, self.w_rec.value)
        decay = 1 / (1 + jnp.exp(-braintrace.element_wise(self.leak.value)))
        self.h.value = decay * self.h.value + (1 - decay) * jnp.tanh(drive)
        return self.h.value


@pytest.fixture(scope="module")
def trained():
    """A pure step ``(h, x) -> h`` of a model after some updates, and what it yields."""
    model = Leaky()
    learner = braintrace.compile(model, "d_rtrl", INPUTS[0], batch_size=2)
    parameters = model.states(brainstate.ParamState)
    for _ in range(2):
        learner.reset_state(2)
        found = learner.etrace_grad(INPUTS, step_fn=lambda x: jnp.sum((learner(x) - 0.5) ** 2))
        for path, state in parameters.items():
            state.value = state.value - 0.1 * found[path]
    learner.reset_state(2)
    expected = np.asarray(learner.predict(INPUTS))
    values = {path: state.value for path, state in parameters.items()}

    def step(h, x):
        drive = braintrace.matmul(x, values[("w_in",)]) + braintrace.matmul(h, values[("w_rec",)])
        decay = 1 / (1 + jnp.exp(-braintrace.element_wise(values[("leak",)])))
        return decay * h + (1 - decay) * jnp.tanh(drive)

    return step, expected


def outputs(step):
    h, results = np.zeros((2, 4), np.float32), []
    for x in np.asarray(INPUTS):
        h = np.asarray(step(h, x))
        results.append(h)
    return np.stack(results)


def test_a_step_through_jax_export_gives_the_same(trained):
    step, expected = trained
    shapes = jax.ShapeDtypeStruct((2, 4), "float32"), jax.ShapeDtypeStruct((2, 3), "float32")
    exported = export.export(jax.jit(step))(*shapes)
    np.testing.assert_allclose(outputs(exported.call), expected, rtol=1e-5, atol=1e-6)


def test_predictions_through_onnx_are_the_same(trained):
    jax2onnx = pytest.importorskip("jax2onnx", reason="the extra `onnx` is not installed")
    onnxruntime = pytest.importorskip("onnxruntime", reason="the extra `onnx` is not installed")
    step, expected = trained
    model = jax2onnx.to_onnx(braintrace.inline(step), inputs=[(2, 4), (2, 3)])
    session = onnxruntime.InferenceSession(model.SerializeToString())
    names = [entry.name for entry in session.get_inputs()]

    def run(h, x):
        return session.run(None, dict(zip(names, (h, x), strict=True)))[0]

    np.testing.assert_allclose(outputs(run), expected, rtol=1e-5, atol=1e-6)
