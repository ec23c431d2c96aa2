"""Arrays that are only moved or converted: by NumPy, not by a program for every shape.

Tests make thousands of arrays of zeros, of other dtypes, of one step of a sequence, each of a shape
of its own. Where nothing is traced, JAX compiles a program for each such shape, and about a third
of all the programs that tests compile do nothing else.
"""

import functools

import jax
import numpy as np
from jax import lax

EXACT = {*"?bhilBHILfdFD"}
"""Dtypes that NumPy converts to as XLA does, by their characters; 16 bits it may round twice."""


def broadcast_in_dim(x, *, shape, broadcast_dimensions, **_):
    sizes = np.ones(len(shape), int)
    sizes[list(broadcast_dimensions)] = x.shape
    return np.broadcast_to(x.reshape(sizes), shape)


def squeeze(x, *, dimensions, **_):
    return np.squeeze(x, dimensions)


def reshape(x, *, new_sizes, **_):
    return x.reshape(new_sizes)


def slice_(x, *, start_indices, limit_indices, strides, **_):
    strides = strides or [1] * x.ndim
    return x[tuple(map(slice, start_indices, limit_indices, strides))]


def dynamic_slice(x, *starts, slice_sizes, **_):
    sizes = zip(starts, slice_sizes, x.shape, strict=True)
    return x[tuple(slice(s := min(max(int(a), 0), m - n), s + n) for a, n, m in sizes)]


def convert_element_type(x, *, new_dtype, **_):
    """Convert it where that has one result only: a float beyond all integers has none."""
    from_float_to = {"f": "fc", "c": "c"}
    if new_dtype.char in EXACT and new_dtype.kind in from_float_to.get(x.dtype.kind, "biufc"):
        return x.astype(new_dtype)
    return None


def stage(x, **_):
    return x


MOVES = [
    broadcast_in_dim,
    squeeze,
    reshape,
    slice_,
    dynamic_slice,
    convert_element_type,
    stage,
]


def move_by_numpy(is_wanted):
    """Let JAX do so outside of what it traces, for arrays on one device, while it is wanted."""
    from jax._src.interpreters import pxla

    def put(value, aval):
        (device,) = jax.devices()[:1]
        sharding = jax.sharding.SingleDeviceSharding(device)
        value = np.array(value, aval.dtype, order="C")
        return pxla.batched_device_put(aval, sharding, [value], [device], committed=False)

    def implement(primitive, move):
        compiled = primitive.impl

        @functools.wraps(compiled)
        def implementation(*arguments, **parameters):
            if is_wanted() and is_plain() and all(map(is_on_one_device, arguments)):
                moved = move(*map(np.asarray, arguments), **parameters)
                if moved is not None:
                    avals = list(map(jax.typeof, arguments))
                    kept = move is stage  # of which JAX 0.12 has no other type
                    aval = avals[0] if kept else primitive.abstract_eval(*avals, **parameters)[0]
                    return put(moved, aval)
            return compiled(*arguments, **parameters)

        primitive.impl = implementation

    for move in MOVES:
        primitive = getattr(lax, f"{move.__name__.strip('_')}_p", None)
        if primitive is not None:
            implement(primitive, move)


def is_plain():
    """Tell whether arrays go to the first device, of which no mesh is made."""
    return jax.config.jax_default_device is None and jax.sharding.get_abstract_mesh().empty


def is_on_one_device(x):
    if isinstance(x, jax.Array):
        is_ours = not x.is_deleted() and not x._committed and len(x.devices()) == 1
        return is_ours and isinstance(x.dtype, np.dtype)  # keys of random numbers have others
    is_index = type(x) is int and abs(x) < 2**31
    return is_index or (isinstance(x, np.ndarray) and x.dtype.char in EXACT)
