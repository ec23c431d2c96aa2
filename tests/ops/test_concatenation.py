"""Inputs in parts give what the joined input gives, part by part where the operation allows it."""

from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from braintrace._etrace_op import Concatenation, as_one, pull_back

STEPS, BATCH, SIZES, OUT = 3, 2, (1, 4, 2), 5
RANDOM = np.random.default_rng(1)
X = RANDOM.normal(size=(STEPS, BATCH, sum(SIZES))).astype(np.float32)
PARTS = tuple(np.split(X, np.cumsum(SIZES)[:-1], axis=-1))
SIGNAL = RANDOM.normal(size=(STEPS, BATCH, OUT)).astype(np.float32)


def test_as_one_array_they_are_side_by_side() -> None:
    np.testing.assert_array_equal(as_one(Concatenation(PARTS)), X)
    assert as_one(None) is None


@pytest.mark.parametrize("has_bias", [True, False])
def test_the_rows_of_a_matrix_are_divided_like_its_input(has_bias: bool) -> None:
    weights = {"weight": jnp.ones((sum(SIZES), OUT))} | (
        {"bias": jnp.ones(OUT)} if has_bias else {}
    )

    def gradients(*parts: jax.Array) -> dict[str, jax.Array]:
        params = {"has_bias": has_bias}
        return pull_back(braintrace.etp_mm_p, params, Concatenation(parts), SIGNAL, weights)

    found = jax.jit(gradients)(*PARTS)
    np.testing.assert_allclose(found["weight"], np.einsum("tbi,tbo->io", X, SIGNAL), rtol=1e-5)
    if has_bias:
        np.testing.assert_allclose(found["bias"], SIGNAL.sum((0, 1)), rtol=1e-5)
    written = {tuple(a.shape) for a in _arrays(jax.make_jaxpr(gradients)(*PARTS).jaxpr)}
    assert X.shape not in written
    assert (STEPS * BATCH, sum(SIZES)) not in written


def test_an_operation_of_other_factors_gets_its_input_as_one() -> None:
    weights = {"lora_b": jnp.ones((sum(SIZES), 2)), "lora_a": jnp.full((2, OUT), 0.5)}
    operation = braintrace.etp_lora_mm_p, {"alpha": 1.0, "has_bias": False}
    found = pull_back(*operation, Concatenation(PARTS), SIGNAL, weights)
    assert found.keys() == weights.keys()
    whole = np.einsum("tbi,tbo->io", X, SIGNAL)
    np.testing.assert_allclose(found["lora_b"], whole @ weights["lora_a"].T, rtol=1e-5)


def _arrays(jaxpr: jax.extend.core.Jaxpr) -> list[Any]:
    found = [var.aval for equation in jaxpr.eqns for var in equation.outvars]
    for equation in jaxpr.eqns:
        for value in jax.tree.leaves(list(equation.params.values())):
            found += _arrays(value.jaxpr) if hasattr(value, "jaxpr") else []
    return found
