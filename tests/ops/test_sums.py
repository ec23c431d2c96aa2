"""Sums over samples: additions on a CPU, reductions elsewhere, and the same gradient either way."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_gradients_close
from operation_cases import BATCH, CASES, Diagonal, bptt, by_name, loss

import braintrace
from braintrace._etrace_op.sums import added_up, reduced, sum_over_samples


def product(operands):
    a, b = operands
    return {"product": a[..., None] * b}


@pytest.mark.usefixtures("optimised")
@pytest.mark.parametrize("lead", [(1,), (5,), (33,), (2, 3, 4), (0, 2)])
def test_all_forms_give_the_sum(lead):
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=(*lead, *rest)) for rest in [(6,), (6, 2)])
    operands = {"float32": (a, b), "complex64": (a - 2j * a, b + 1j * b**2)}
    forms = [sum_over_samples, reduced] if 0 in lead else [sum_over_samples, reduced, added_up]

    @jax.jit
    def sums(operands):
        return [form(product, operands, axes=len(lead))["product"] for form in forms]

    for dtype, (a, b) in operands.items():
        expected = (a[..., None] * b).sum(tuple(range(len(lead))))
        for found in sums((jnp.asarray(a, dtype), jnp.asarray(b, dtype))):
            assert found.dtype == dtype
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lead", [(32,), (40,), (8, 5)])
def test_a_gpu_gets_reductions_and_no_chain_of_additions(lead):
    """XLA joins a reduction to the kernel that updates the trace, and no chain of additions.

    Of several axes it would join two reductions to each other, were there nothing between them.
    """
    operands = jnp.ones((*lead, 6)), jnp.ones((*lead, 6, 2))
    axes = len(lead)
    traced = jax.jit(lambda operands: sum_over_samples(product, operands, axes)).trace(operands)
    texts = {
        platform: traced.lower(lowering_platforms=(platform,)).as_text()
        for platform in ("cpu", "cuda")
    }
    additions = {
        platform: text.count("stablehlo.slice") + text.count("stablehlo.dynamic_slice")
        for platform, text in texts.items()
    }
    assert additions["cpu"] >= 16
    assert additions["cuda"] == 0
    assert texts["cuda"].count("stablehlo.reduce(") == axes
    assert texts["cuda"].count("optimization_barrier") == axes - 1


@pytest.mark.parametrize("name", ["sparse_matmul with bias"])
def test_steps_with_reductions_agree_with_the_oracle(name, monkeypatch):
    calls = []

    def elsewhere(*operands, default, **_):
        calls.append(default)
        return default(*operands)

    monkeypatch.setattr(jax.lax, "platform_dependent", elsewhere)
    (case,) = (case for case in CASES if case.name == name)
    learner = braintrace.compile(Diagonal(case), "d_rtrl", case.inputs[0], batch_size=BATCH)
    options = {"step_fn": lambda x: loss(learner(x)), "reduction": "sum", "chunk_size": 1}
    found = by_name(learner.etrace_grad(case.inputs, **options))
    assert_gradients_close(found, bptt(case), 1e-5)
    assert calls
