"""Arrays on devices of several processes: placing them, and reading them on every host.

Every process runs the same program on the same values, and moves its own devices' parts there, so
nothing is sent. Reading an array gathers all parts in every process.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding


def put(leaf: Any, sharding: NamedSharding) -> jax.Array:
    """Return an array with a sharding.

    Parameters
    ----------
    leaf
        An array on any devices, or on the host; on the host it must be equal in all processes.
    sharding
        The sharding of the result.
    """
    if sharding.is_fully_addressable:
        return jax.device_put(leaf, sharding)
    if jnp.issubdtype(getattr(leaf, "dtype", None), jax.dtypes.prng_key):
        data = put(jax.random.key_data(leaf), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    if not _is_whole(leaf):
        return jax.device_put(leaf, sharding)
    whole = np.asarray(leaf, jnp.result_type(leaf))
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])


def on_host(array: Any) -> np.ndarray:
    """Return a JAX array, or any array-like, as a full NumPy array."""
    if _is_whole(array) or array.is_fully_replicated:
        return np.asarray(array)
    from jax.experimental import multihost_utils  # most programs have one process

    found: np.ndarray = multihost_utils.process_allgather(array, tiled=True)
    return found


def _is_whole(leaf: Any) -> bool:
    """Test whether this process has all of an array."""
    return not isinstance(leaf, jax.Array) or leaf.is_fully_addressable
