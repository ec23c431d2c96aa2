"""Arrays on devices of several processes: put there, and read on every host.

Each process has the same program and calls it on the same values. It puts what its own devices hold
of them there, so that nothing is sent. What is read has all parts in every process.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding


def put(leaf: Any, sharding: NamedSharding) -> jax.Array:
    """Return an array as it lies on a mesh.

    Parameters
    ----------
    leaf
        On whatever devices, or on the host; there it is the same in every process.
    sharding
        Where it is to lie.
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
    """Return an array of JAX, or what NumPy takes for one, as a whole."""
    if _is_whole(array) or array.is_fully_replicated:
        return np.asarray(array)
    from jax.experimental import multihost_utils  # most programs have one process

    found: np.ndarray = multihost_utils.process_allgather(array, tiled=True)
    return found


def _is_whole(leaf: Any) -> bool:
    """Tell whether this process alone has all of it."""
    return not isinstance(leaf, jax.Array) or leaf.is_fully_addressable
