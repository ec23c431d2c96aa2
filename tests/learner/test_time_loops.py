"""Several steps in an iteration of a loop over time change no result."""

import dataclasses

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from braintrace._core import time_loops

pytestmark = pytest.mark.core

STEPS, BATCH = 7, 2


@dataclasses.dataclass(frozen=True)
class Device:
    platform: str


def gradients(rule, **options):
    brainstate.random.seed(0)
    model = braintrace.nn.LeakyRNN(3, 4)
    xs = np.random.default_rng(0).normal(size=(STEPS, BATCH, 3)).astype(np.float32)
    learner = braintrace.compile(model, rule, xs[0], batch_size=BATCH, **options)
    mask = jnp.asarray([1.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0])
    found = []
    for given in ({}, {"mask": mask}):  # the second sequence continues from traces
        found.append(learner.etrace_grad(xs, step_fn=lambda x: jnp.mean(learner(x) ** 2), **given))
    return found


@pytest.mark.filterwarnings("ignore:.*mixing")
@pytest.mark.parametrize(
    ("rule", "options"),
    [
        ("d_rtrl", {}),
        ("es_d_rtrl", {"decay_or_rank": 0.9}),
        ("rtrl", {}),
        ("d_rtrl", {"window": 6}),
    ],
    ids=["d_rtrl", "es_d_rtrl", "rtrl", "window"],
)
def test_a_loop_over_time_gives_the_same_on_an_accelerator(monkeypatch, rule, options):
    expected = gradients(rule, **options)
    scan, unrolled = jax.lax.scan, []

    def counted(*arguments, **given):
        unrolled.append(given.get("unroll", 1))
        return scan(*arguments, **given)

    monkeypatch.setattr(time_loops, "current_device", lambda: Device("gpu"))
    monkeypatch.setattr(jax.lax, "scan", counted)
    found = gradients(rule, **options)
    assert time_loops.STEPS_AN_ITERATION in unrolled
    for one, other in zip(found, expected, strict=True):
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
