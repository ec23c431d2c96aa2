"""A weight whose output reaches several elements of a state is exact."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import small

import braintrace

BEFORE = {
    "loop": lambda y: jax.lax.scan(lambda c, _: (1.1 * jnp.tanh(c), None), y, None, length=3)[0],
    "branch": lambda y: jax.lax.cond(y.sum() > 0, jnp.tanh, lambda y: 0.5 * y, y),
    "rows": lambda y: jax.lax.map(jnp.tanh, y),
}


class Broadcast(brainstate.nn.Module):
    """Every element of an output feeds two elements of a state."""

    def __init__(self, function):
        super().__init__()
        self.w, self.function = (
            brainstate.ParamState(jnp.linspace(-1, 1, 12).reshape(3, 4)),
            function,
        )

    def init_state(self, batch_size=None):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, 4, 2)))

    def update(self, x):
        y = self.function(braintrace.matmul(x, self.w.value))[..., None]
        self.h.value = jnp.array([0.5, 0.8]) * self.h.value + jnp.tanh(y * jnp.array([1.0, 2.0]))
        return self.h.value


@pytest.mark.parametrize("function", BEFORE.values(), ids=BEFORE)
def test_a_broadcast_behind_a_function_of_each_element_is_exact(function):
    xs = np.random.default_rng(1).normal(size=(5, 2, 3)).astype(np.float32)
    model = Broadcast(function)
    check = braintrace.gradient_check(
        model, "d_rtrl", xs, xs, lambda out, _: jnp.sum(out**2), batch_size=2
    )
    assert max(row.deviation for row in check.rows) < 1e-5


def test_what_a_product_makes_of_an_old_state_is_at_no_position_of_it():
    """Beside it, a weight reaches every position and its neighbour."""

    @small({"h": (4,)}, start=1.0, w=np.linspace(-1, 1, 16).reshape(4, 4))
    def beside(self, x):
        z = self.h.value @ jnp.eye(4)[::-1] + braintrace.matmul(x, self.w.value)
        self.h.value = 0.5 * self.h.value + jnp.tanh(z) + 0.3 * jnp.roll(z, 1, axis=-1)
        return self.h.value

    xs = np.random.default_rng(1).normal(size=(1, 2, 4)).astype(np.float32)
    with pytest.warns(braintrace.ApproximationWarning, match="'h' reaches 'h' through"):
        check = braintrace.gradient_check(
            beside(), "d_rtrl", xs, xs, lambda out, _: jnp.sum(out**2), batch_size=2
        )
    assert max(row.deviation for row in check.rows) < 1e-5
