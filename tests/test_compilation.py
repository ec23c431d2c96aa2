"""Tests that are marked as optimised share no program with the others."""

import compilation
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_driver_economy import counted


@pytest.mark.optimised
def test_the_two_ways_to_compile_share_nothing():
    function, calls = jax.jit(lambda x: jnp.sin(x) + 3.25), []

    @compilation.cache
    def kept(number):
        calls.append(number)

    for compile_so in (compilation.compile_in_a_hurry, compilation.compile_as_for_users):
        compile_so()
        for is_first in (True, False):
            with counted() as events:
                function(1.0)
            assert bool(events) == is_first
            kept(2)
    assert calls == [2, 2]


MOVES = {
    "zeros": lambda x: jnp.zeros((2, 3, 5)),
    "filled": lambda x: jnp.full((5, 2), 0.1),
    "broadcast": lambda x: jax.lax.broadcast_in_dim(x, (3, 2, 4, 6), (1, 3)),
    "of numpy": lambda x: jnp.asarray(np.arange(14.0).reshape(7, 2)),
    "a step": lambda x: x[1],
    "the last": lambda x: x[-1, 2:5],
    "beyond the end": lambda x: jax.lax.dynamic_slice(x, (1, 3), (2, 4)),
    "every second": lambda x: x[:, ::2],
    "reshaped": lambda x: x.reshape(4, 1, 3).squeeze(1),
    "to integers": lambda x: x.astype(int),
    "of integers": lambda x: jnp.arange(6).astype(jnp.float32),
    "to bool": lambda x: x.astype(bool),
    "to complex": lambda x: x.astype(complex),
    "to half": lambda x: x.astype(jnp.bfloat16),
}


@pytest.mark.optimised
@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_arrays_that_are_moved_by_numpy_are_what_jax_makes_of_them(move):
    x = jnp.sin(jnp.arange(12.0)).reshape(2, 6)
    found = {}
    for compile_so in (compilation.compile_in_a_hurry, compilation.compile_as_for_users):
        compile_so()
        moved = move(x)
        found[compile_so] = moved.aval, moved.committed, moved.sharding, moved.tolist()
    one, other = found.values()
    assert one == other
