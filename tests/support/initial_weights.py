"""Weights that are drawn without programs of their own."""

import contextlib
from unittest import mock

import brainstate
import jax
import numpy as np


def normal(seed, *shape):
    """Numbers of single precision."""
    return jax.device_put(np.float32(np.random.default_rng(seed).normal(size=shape)))


_truncated_normal = brainstate.random.RandomState.truncated_normal


def _drawn(self, lower, upper, size=None, dtype=None, **others):
    if others or size is None:
        return _truncated_normal(self, lower, upper, size, dtype=dtype, **others)
    key = self.split_key()
    if isinstance(key, jax.core.Tracer):
        return _truncated_normal(self, lower, upper, size, key=key, dtype=dtype)
    seed = np.asarray(jax.random.key_data(key)).ravel()
    values = np.clip(np.random.default_rng(seed).standard_normal(size), lower, upper)
    return jax.device_put(np.asarray(values, dtype or brainstate.environ.dftype()))


@contextlib.contextmanager
def quick_draws():
    """Initial weights come from NumPy: brainstate compiles seven programs for every shape.

    And one at every call. Under a transformation they come from JAX all the same.
    """
    with mock.patch.object(brainstate.random.RandomState, "truncated_normal", _drawn):
        yield
