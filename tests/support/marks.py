"""Marks that a model may carry for the tests; without a recorder they change nothing."""

import jax
import jax.numpy as jnp

recorder = None


def mixing(value):
    """A value in which the positions of a hidden state are mixed by plain operations."""
    return value if recorder is None else recorder.mixing(value)


def spike(v):
    """Heaviside step with a smooth surrogate derivative."""
    z = _heaviside(v)
    return z if recorder is None else recorder.spike(z)


def spike_reverse_only(v):
    """The same step function, its surrogate defined for reverse mode only."""
    z = _heaviside_reverse_only(v)
    return z if recorder is None else recorder.spike(z)


@jax.custom_jvp
def _heaviside(v):
    return (v >= 0).astype(v.dtype)


@_heaviside.defjvp
def _heaviside_jvp(primals, tangents):
    (v,), (dv,) = primals, tangents
    return _heaviside(v), dv / (1 + 2 * jnp.abs(v)) ** 2


@jax.custom_vjp
def _heaviside_reverse_only(v):
    return (v >= 0).astype(v.dtype)


_heaviside_reverse_only.defvjp(
    lambda v: (_heaviside_reverse_only(v), v),
    lambda v, cotangent: (cotangent / (1 + 2 * jnp.abs(v)) ** 2,),
)
