"""Tests that are marked as optimised share no program with the others; contexts are shared."""

import itertools
import threading

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


def test_what_is_shared_is_made_once_per_thread_and_anew_after_some_calls():
    shared, found = compilation.shared(itertools.count().__next__, 2), []

    def call():
        found.append([shared() for _ in range(3)])

    call()
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    call()
    assert found == [[0, 0, 1], [2, 2, 3], [1, 4, 4]]
