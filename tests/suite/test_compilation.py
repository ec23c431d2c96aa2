"""Tests that are marked as optimised share no program with the others."""

import compilation
import jax
import jax.numpy as jnp
import pytest
from compilation import counted


@pytest.mark.optimised
def test_the_two_ways_to_compile_share_nothing():
    function, calls = jax.jit(lambda x: jnp.sin(x) + 3.25), []

    @compilation.cache
    def stored(number):
        calls.append(number)

    for compile_so in (compilation.compile_in_a_hurry, compilation.compile_as_for_users):
        compile_so()
        for is_first in (True, False):
            with counted() as events:
                function(1.0)
            assert bool(events) == is_first
            stored(2)
    assert calls == [2, 2]
