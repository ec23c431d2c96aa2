"""Rademacher vectors of the random rules, with a key and a step counter as traces.

Signs are the bits of a hash of the key, the step and the sample index (Threefry, a pair of words at
a time), so a sequence has the same signs batched or mapped, in one call or several. Under a
``vmap`` whose elements have equal keys, the index of the element is folded into the key; elements
with different keys use these.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._graph import Traces, TraceSpec
from ..._jax import threefry_2x32

KEY, DRAWS = "key", "draws"
"""Names of the traces."""

IMPLEMENTATION = "threefry2x32"
"""Generator with the same numbers on every device and for every configuration of JAX."""

BITS_OF_A_PAIR = 64
"""Bits of the two words of a hash of a step and an index."""


def specs_of_stream(seed: int) -> dict[str, TraceSpec]:
    """Return the specifications of the key and the counter, which a reset does not change."""
    with jax.ensure_compile_time_eval():
        data = np.asarray(jax.random.key_data(jax.random.key(seed, impl=IMPLEMENTATION)))
    return {
        KEY: TraceSpec(
            data.shape,
            data.dtype,
            ("entry",),
            operand="key",
            initial=data,
            takes_trace_dtype=False,
            outlives_reset=True,
        ),
        DRAWS: TraceSpec(
            (),
            jnp.dtype("uint32"),
            (),
            operand="draws",
            takes_trace_dtype=False,
            outlives_reset=True,
        ),
    }


def signs(traces: Traces, witness: jax.Array, shape: tuple[int, int], dtype: Any) -> jax.Array:
    """Return signs ``(samples, size)`` for this step.

    Parameters
    ----------
    traces
        The key, and the number of steps drawn so far.
    witness
        A value that differs between samples, which shows enclosing maps.
    shape, dtype
        Shape and dtype of the signs.
    """
    samples, size = shape
    key = _keys_of_elements(traces[KEY], jax.lax.stop_gradient(witness))
    pairs = math.ceil(size / BITS_OF_A_PAIR)
    numbers = jnp.arange(samples * pairs, dtype=jnp.uint32)
    steps = jnp.broadcast_to(traces[DRAWS], numbers.shape)
    words = threefry_2x32((key[0], key[1]), jnp.concatenate([steps, numbers])).reshape(2, -1)
    bits = (words.T[..., None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    return 1 - 2 * bits.reshape(samples, -1)[:, :size].astype(dtype)


def _unchanged(keys: jax.Array, witness: jax.Array) -> jax.Array:
    return keys


_keys_of_elements = jax.custom_batching.custom_vmap(_unchanged)
"""Key data; under a map, different key data for every element."""


def _fold_in_elements(
    size: int, is_mapped: list[bool], keys: jax.Array, witness: jax.Array
) -> tuple[jax.Array, bool]:
    keys = keys if is_mapped[0] else jnp.broadcast_to(keys, (size, *keys.shape))
    alike = (keys == keys[:1]).all() & (size > 1)

    def fold(data: jax.Array, index: jax.Array) -> jax.Array:
        return jax.random.key_data(
            jax.random.fold_in(jax.random.wrap_key_data(data, impl=IMPLEMENTATION), index)
        )

    each = jnp.arange(size).reshape(size, *(1,) * (keys.ndim - 2))
    folded = jnp.vectorize(fold, signature="(k),()->(k)")(keys, each)
    return _keys_of_elements(jnp.where(alike, folded, keys), witness), True


_keys_of_elements.def_vmap(_fold_in_elements)
