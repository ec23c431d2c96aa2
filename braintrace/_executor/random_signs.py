r"""Random signs of a rule: its key and the number of steps that it has drawn for are traces.

Sample ``b`` draws in step ``c`` from the key ``fold_in(fold_in(key, c), b)``, so that a sequence
draws the same however it is run: batched or mapped, whole or in parts. Under a map of somebody
else's whose lanes would all draw the same, the number of the lane is folded in as well; lanes with
keys of their own draw from these.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._graph import Traces, TraceSpec

KEY, DRAWS = "key", "draws"
"""Names of the traces."""

IMPLEMENTATION = "threefry2x32"
"""The same numbers on every device and whatever JAX is configured to."""


def specs_of_stream(seed: int) -> dict[str, TraceSpec]:
    """Return what is known of the traces that signs are drawn from: a reset leaves them."""
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


def key_of_step(traces: Traces, witness: jax.Array) -> jax.Array:
    """Return the key of this step.

    Parameters
    ----------
    traces
        The key, and the number of steps drawn for.
    witness
        Something that differs between samples: it tells of maps around this.
    """
    key = jax.random.wrap_key_data(traces[KEY], impl=IMPLEMENTATION)
    now = jax.random.key_data(jax.random.fold_in(key, traces[DRAWS]))
    return jax.random.wrap_key_data(
        _apart(now, jax.lax.stop_gradient(witness)), impl=IMPLEMENTATION
    )


def signs(key: jax.Array, shape: tuple[int, int], dtype: Any) -> jax.Array:
    """Return signs ``(samples, size)``, those of every sample from a key of its own."""
    samples, size = shape
    keys = jax.vmap(lambda sample: jax.random.fold_in(key, sample))(jnp.arange(samples))
    return jax.vmap(lambda own: jax.random.rademacher(own, (size,), dtype))(keys)


def _as_they_are(keys: jax.Array, witness: jax.Array) -> jax.Array:
    return keys


_apart = jax.custom_batching.custom_vmap(_as_they_are)
"""Data of keys; under a map, that of another key for every lane."""


def _lanes_apart(
    lanes: int, is_mapped: list[bool], keys: jax.Array, witness: jax.Array
) -> tuple[jax.Array, bool]:
    keys = keys if is_mapped[0] else jnp.broadcast_to(keys, (lanes, *keys.shape))
    alike = (keys == keys[:1]).all() & (lanes > 1)

    def fold(data: jax.Array, lane: jax.Array) -> jax.Array:
        return jax.random.key_data(
            jax.random.fold_in(jax.random.wrap_key_data(data, impl=IMPLEMENTATION), lane)
        )

    each = jnp.arange(lanes).reshape(lanes, *(1,) * (keys.ndim - 2))
    folded = jnp.vectorize(fold, signature="(k),()->(k)")(keys, each)
    return _apart(jnp.where(alike, folded, keys), witness), True


_apart.def_vmap(_lanes_apart)
