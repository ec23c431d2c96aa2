"""The change of a state, as `update` returns it, has an exact gradient on each path."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_gradients_close
from gradient_paths import RUNS

import braintrace

GENERATOR = np.random.default_rng(0)
WEIGHT = GENERATOR.normal(size=(3, 4)).astype(np.float32)
XS = GENERATOR.normal(size=(5, 2, 3)).astype(np.float32)


class Changing(brainstate.nn.Module):
    """A leaky layer whose output is the change of its state."""

    def __init__(self):
        super().__init__()
        self.w = brainstate.ParamState(WEIGHT)

    def init_state(self, batch_size=None):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, 4)))

    def update(self, x):
        before = self.h.value
        self.h.value = 0.9 * before + jnp.tanh(braintrace.matmul(x, self.w.value))
        return self.h.value - before


def penalty(weight):
    h, total = jnp.zeros((2, 4)), 0.0
    for x in XS:
        new = 0.9 * h + jnp.tanh(x @ weight)
        total, h = total + ((new - h) ** 2).sum(), new
    return total


@pytest.mark.parametrize(
    ("run", "rule"), [("sequence", "d_rtrl"), ("own loop", "rtrl"), ("stream", "d_rtrl")]
)
def test_a_penalty_on_it_is_that_of_backpropagation(run, rule):
    learner = braintrace.compile(Changing(), rule, XS[0], batch_size=2)
    expected = {("w",): jax.grad(penalty)(WEIGHT)}
    assert_gradients_close(RUNS[run](learner, XS), expected, 1e-5)
