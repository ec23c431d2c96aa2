"""Quantities through the operations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit
from ops_catalogue import CSR, DENSE, ENTRIES, array, quick_jit

from braintrace._etrace_op import (
    conv,
    element_wise,
    feedback_matmul,
    grouped_matmul,
    lora_matmul,
    matmul,
    sparse_matmul,
)

VOLT, SIEMENS, AMPERE = saiunit.volt, saiunit.siemens, saiunit.amp
BIAS = array(2, 4)


def _conv(x, weight, bias=None):
    y = conv(x[:, None, :], weight[None], bias, dimension_numbers=("NWC", "WIO", "NWC"))
    return y[:, 0]


def _lora(x, weight, bias=None):
    return lora_matmul(x, weight, jnp.eye(4), bias=bias)


def _feedback(x, weight, bias=None):
    return feedback_matmul(x, weight, -2 * jax.lax.stop_gradient(weight), bias)


def _grouped(x, weight, bias=None):
    bias = None if bias is None else bias[None]
    return grouped_matmul(x[:, None], weight[None], bias)[:, 0]


def _sparse(x, weight, bias=None):
    return sparse_matmul(x, weight, sparse_mat=CSR, bias=bias)


OPERATIONS = {
    "matmul": (matmul, array(1, 3, 4)),
    "conv": (_conv, array(1, 3, 4)),
    "lora_matmul": (_lora, array(1, 3, 4)),
    "feedback_matmul": (_feedback, array(1, 3, 4)),
    "grouped_matmul": (_grouped, array(1, 3, 4)),
    "sparse_matmul": (_sparse, ENTRIES),
}


def mapped(f):
    return lambda x, *rest: jax.vmap(lambda sample: f(sample[None], *rest)[0])(x)


def in_scan(f):
    def run(x, *rest):
        _, y = jax.lax.scan(lambda carry, step: (carry, f(step, *rest)), 0, x[None])
        return y[0]

    return run


def in_while_loop(f):
    def run(*arguments):
        def body(carry):
            return carry[0] + 1, f(*arguments)

        start = jax.tree.map(jnp.zeros_like, f(*arguments))
        return jax.lax.while_loop(lambda carry: carry[0] < 1, body, (0, start))[1]

    return run


def in_custom_vjp(f):
    function = jax.custom_vjp(f)
    function.defvjp(lambda *arguments: jax.vjp(f, *arguments), lambda pull, y_bar: pull(y_bar))
    return lambda *arguments: jax.vjp(function, *arguments)[0]


TRANSFORMATIONS = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "vmap": mapped,
    "nested vmap": lambda f: lambda x, *rest: jax.vmap(lambda xs: mapped(f)(xs, *rest))(x[None])[0],
    "jit(vmap)": lambda f: jax.jit(mapped(f)),
    "checkpoint": jax.checkpoint,
    "jvp": lambda f: lambda *arguments: jax.jvp(f, arguments, arguments)[0],
    "vjp": lambda f: lambda *arguments: jax.vjp(f, *arguments)[0],
    "linearize": lambda f: lambda *arguments: jax.linearize(f, *arguments)[0],
    "scan": in_scan,
    "cond": lambda f: lambda *arguments: jax.lax.cond(True, f, f, *arguments),
    "while_loop": in_while_loop,
    "custom_vjp": in_custom_vjp,
    "lower().compile()": lambda f: lambda *a: jax.jit(f).lower(*a).compile()(*a),
}


@pytest.mark.parametrize("transformation", TRANSFORMATIONS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_product_carries_its_unit_and_rescales_the_bias(name, transformation):
    operation, weight = OPERATIONS[name]
    x = array(0, 2, 3)
    run = TRANSFORMATIONS[transformation](operation)
    if transformation not in ("eager", "lower().compile()"):
        run = quick_jit(run)
    got = run(x * saiunit.mV, weight * SIEMENS, BIAS * saiunit.uA)
    assert saiunit.get_unit(got).has_same_dim(AMPERE)
    dense = DENSE if name == "sparse_matmul" else weight
    want = np.asarray(x) @ np.asarray(dense) + 1e-3 * np.asarray(BIAS)
    np.testing.assert_allclose(got.to_decimal(saiunit.mA), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", OPERATIONS)
def test_gradients_carry_the_unit_of_loss_over_weight(name):
    operation, weight = OPERATIONS[name]
    x = array(0, 2, 3)

    def loss(weight):
        return (operation(x * VOLT, weight) ** 2).sum()

    def plain_loss(weight):
        return (operation(x, weight) ** 2).sum()

    gradient = saiunit.autograd.grad(loss)(weight * SIEMENS)
    unit = AMPERE**2 / SIEMENS
    assert saiunit.get_unit(gradient).has_same_dim(unit)
    np.testing.assert_allclose(
        gradient.to_decimal(unit), jax.grad(plain_loss)(weight), rtol=1e-5, atol=1e-5
    )


def test_units_that_cancel_leave_a_plain_array_of_the_right_size():
    got = matmul(array(0, 2, 3) * saiunit.mV, array(1, 3, 4) / VOLT)
    assert not isinstance(got, saiunit.Quantity)
    np.testing.assert_allclose(got, 1e-3 * np.asarray(array(0, 2, 3) @ array(1, 3, 4)), rtol=1e-5)


def test_element_wise_keeps_the_unit_that_its_function_returns():
    weight = array(0, 3)
    kept = element_wise(weight * saiunit.mV)
    assert saiunit.get_unit(kept) == saiunit.mV
    np.testing.assert_array_equal(kept.mantissa, weight)
    squared = element_wise(weight * saiunit.mV, fn=lambda w: w**2)
    assert saiunit.get_unit(squared).has_same_dim(VOLT**2)
    np.testing.assert_allclose(squared.to_decimal(saiunit.mV**2), weight**2, rtol=1e-6)
    made = element_wise(weight, fn=lambda w: jnp.exp(w) * saiunit.ms)
    np.testing.assert_allclose(made.to_decimal(saiunit.ms), np.exp(weight), rtol=1e-6)
