"""Quantities in a model: gradients have the numbers and units of backpropagation's."""

import functools
import math

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u
from backpropagation import backpropagated
from matrices import csr, normal

import braintrace

INPUTS = jax.device_put(np.float32(0.3) * np.asarray(normal(7, 5, 2, 3))) * u.mV


def line(start, end, *shape):
    """Numbers in equal distances."""
    return jax.device_put(
        np.linspace(start, end, math.prod(shape), dtype=np.float32).reshape(shape)
    )


class Membrane(brainstate.nn.Module):
    """A leaky membrane driven through a conductance: mV times S is a current in mA."""

    def __init__(self):
        super().__init__()
        self.conductance = brainstate.ParamState(jnp.arange(12.0).reshape(3, 4) / 9 * u.siemens)
        self.bias = brainstate.ParamState(300.0 * jnp.ones(4) * u.uA)
        self.leak = brainstate.ParamState(line(0.1, 1.0, 4))

    def init_state(self, batch_size=None, **kwargs):
        self.v = brainstate.HiddenState(jnp.zeros((batch_size, 4)) * u.mV)

    def update(self, x):
        current = braintrace.matmul(x, self.conductance.value, self.bias.value)
        decay = braintrace.element_wise(self.leak.value, jax.nn.sigmoid)
        self.v.value = decay * self.v.value + (current * (0.5 * u.ohm)).to(u.mV)
        return self.v.value


def energy(v):
    return (v**2).sum()


def plain_energy(v):
    return energy(v / u.mV)


def online(loss, unit_aware, driver):
    learner = braintrace.compile(Membrane(), "d_rtrl", INPUTS[0], batch_size=2)
    if driver == "sequence":
        return learner.etrace_grad(
            INPUTS,
            step_fn=lambda x: loss(learner(x)),
            reduction="sum",
            chunk_size=2,
            unit_aware=unit_aware,
        )

    def total():
        return brainstate.transform.for_loop(lambda x: loss(learner(x)), INPUTS).sum()

    parameters = learner.algorithm.model.states(brainstate.ParamState)
    gradient = brainstate.transform.grad(total, parameters, unit_aware=unit_aware)
    return brainstate.transform.jit(gradient)()


@pytest.mark.parametrize(
    ("loss", "unit_aware", "driver"),
    [
        (plain_energy, False, "sequence"),
        (plain_energy, True, "per step"),
        (energy, True, "sequence"),
    ],
)
@pytest.mark.core
def test_gradients_have_the_units_of_backpropagation(loss, unit_aware, driver):
    expected = backpropagated(
        Membrane(), lambda model, x: loss(model(x)), INPUTS, batch_size=2, unit_aware=unit_aware
    )
    found = online(loss, unit_aware, driver)
    assert set(found) == set(expected)
    for path, gradient in expected.items():
        assert u.get_unit(found[path]) == u.get_unit(gradient), path
        np.testing.assert_allclose(
            u.get_mantissa(found[path]), u.get_mantissa(gradient), rtol=1e-5, err_msg=str(path)
        )


PATTERN = csr(np.float32([[0.4, 0, 0.2, 0], [0, 0.3, 0, 0.6], [0.1, 0, 0, 0.5]]))
OPERATIONS = {
    "element_wise": (
        {"w": line(0.2, 1, 4) * u.mA},
        lambda x, p: braintrace.element_wise(p["w"]),
    ),
    "conv": (
        {"w": line(-1, 1, 1, 1, 4) * u.siemens},
        lambda x, p: braintrace.conv(
            x[:, :, None], p["w"], padding="VALID", dimension_numbers=("NWC", "WIO", "NWC")
        )[:, 0],
    ),
    "sparse_matmul": (
        {"w": PATTERN.data * u.siemens},
        lambda x, p: braintrace.sparse_matmul(x, p["w"], sparse_mat=PATTERN),
    ),
    "lora_matmul": (
        {
            "B": line(-1, 1, 3, 2) * u.siemens,
            "A": line(-0.5, 1, 2, 4),
        },
        lambda x, p: braintrace.lora_matmul(x, p["B"], p["A"]),
    ),
    "feedback_matmul": (
        {
            "w": line(-1, 1, 3, 4) * u.siemens,
            "feedback": line(1e-3, -2e-3, 3, 4) * u.ksiemens,
        },
        lambda x, p: braintrace.feedback_matmul(x, p["w"], p["feedback"]),
    ),
    "embedding": (
        {"w": line(-1, 1, 2, 4) * u.mA},
        lambda x, p: braintrace.embedding((u.get_mantissa(x)[:, 0] > 0).astype(int), p["w"]),
    ),
    "einsum": (
        {"w": line(-1, 1, 2, 2, 3) * u.siemens},
        lambda x, p: braintrace.einsum("bk,mnk->bnm", x, p["w"]).reshape((-1, 4)),
    ),
}


class Driven(brainstate.nn.Module):
    """A leaky membrane driven by a current that some operation yields."""

    def __init__(self, parameters, operation):
        super().__init__()
        self.operation = operation
        self.weights = {name: brainstate.ParamState(value) for name, value in parameters.items()}

    def init_state(self, batch_size=None, **kwargs):
        self.v = brainstate.HiddenState(jnp.zeros((batch_size, 4)) * u.mV)

    def update(self, x):
        current = self.operation(x, {name: state.value for name, state in self.weights.items()})
        self.v.value = 0.8 * self.v.value + (current * (0.5 * u.ohm)).to(u.mV)
        return self.v.value


@pytest.mark.parametrize(
    ("name", "algorithm"),
    [
        ("element_wise", "d_rtrl"),
        ("lora_matmul", "d_rtrl"),
        ("feedback_matmul", "d_rtrl"),
        ("einsum", "d_rtrl"),
    ],
)
def test_every_operation_learns_with_units(name, algorithm):
    model = Driven(*OPERATIONS[name])

    def loss(model, x):
        return model(x).sum() / u.mV

    expected = backpropagated(model, loss, INPUTS, batch_size=2)
    learner = braintrace.compile(model, algorithm, INPUTS[0], batch_size=2)
    step_fn = functools.partial(loss, learner)
    found = learner.etrace_grad(INPUTS, step_fn=step_fn, reduction="sum", unit_aware=False)
    for path, gradient in expected.items():
        assert u.get_unit(found[path]) == u.get_unit(gradient), path
        if algorithm == "d_rtrl":
            np.testing.assert_allclose(
                u.get_mantissa(found[path]), u.get_mantissa(gradient), rtol=2e-5, atol=1e-6
            )
        else:
            assert np.abs(u.get_mantissa(found[path])).max() > 1e-3


def test_es_d_rtrl_gives_gradients_in_the_parameters_units():
    learner = braintrace.compile(Membrane(), "es_d_rtrl", INPUTS[0], batch_size=2)
    found = learner.etrace_grad(INPUTS, step_fn=lambda x: plain_energy(learner(x)))
    assert u.get_unit(found[("conductance",)]) == u.siemens
    assert u.get_unit(found[("bias",)]) == u.uA
    assert np.abs(u.get_mantissa(found[("conductance",)])).max() > 1e-3


def test_a_state_that_changes_its_unit_is_refused():
    class Drifting(Membrane):
        def update(self, x):
            super().update(x)
            self.v.value = self.v.value.to(u.volt)
            return self.v.value

    # brainstate refuses it by itself in some versions, with a ValueError of its own.
    with pytest.raises(ValueError, match=r"mV|'v'"):
        braintrace.compile(Drifting(), "d_rtrl", INPUTS[0], batch_size=2)


def test_a_state_that_changes_its_shape_is_refused():
    class Growing(Membrane):
        def update(self, x):
            super().update(x)
            self.v.value = self.v.value[:1]
            return self.v.value

    with pytest.raises(braintrace.CompilationError, match=r"State 'v'.*\[2, 4\].*\[1, 4\]"):
        braintrace.compile(Growing(), "d_rtrl", INPUTS[0], batch_size=2)
