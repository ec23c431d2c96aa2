"""Part of `_jax` that depends on the devices of a program.

XLA partitions a program after JAX has lowered it. Some operations have another form on several
devices, and some arrays are kept replicated if XLA would otherwise transfer parts of them
repeatedly.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec


def current_device() -> jax.Device:
    """Return JAX's default device for programs."""
    found = jax.config.jax_default_device
    if not isinstance(found, jax.Device):  # unset, or the name of a platform
        (found, *_) = jax.local_devices(backend=found)
    return found


def devices_of(ctx: Any) -> int:
    """Return the number of devices that a program is lowered for, from its lowering context."""
    return getattr(ctx.module_context.axis_context, "num_devices", None) or 1


def _lower_is_sharded(ctx: Any) -> Any:
    is_sharded = devices_of(ctx) > 1
    return mlir.lower_fun(lambda: jnp.asarray(is_sharded), multiple_results=False)(ctx)


_is_sharded_p = Primitive("braintrace_is_sharded")
_is_sharded_p.def_abstract_eval(lambda: jax.core.ShapedArray((), jnp.dtype(bool)))
_is_sharded_p.def_impl(lambda: jnp.asarray(False))  # without operands, it runs on one device
mlir.register_lowering(_is_sharded_p, _lower_is_sharded)


_devices: contextvars.ContextVar[int | None] = contextvars.ContextVar("devices", default=None)


@contextlib.contextmanager
def for_devices(count: int | None) -> Iterator[None]:
    """Set the number of devices of the programs traced inside; ``None``: unknown.

    XLA does not simplify branches before it has partitioned a program, so a computation that
    branches share may be repeated in each.
    """
    token = _devices.set(count)
    try:
        yield
    finally:
        _devices.reset(token)


def runs_on_several_devices() -> bool:
    """Test whether the program being traced is known to run on several devices."""
    return (_devices.get() or 1) > 1


def sharding_dependent(
    *operands: Any, sharded: Callable[..., Any], unsharded: Callable[..., Any]
) -> Any:
    """Run one of two functions: for a program on several devices, or on one.

    The choice is made when the program is lowered, as in ``jax.lax.platform_dependent``; one trace
    serves both. If the number of devices is known (see `for_devices`), or there is one device, only
    the chosen function is traced. It is known inside of the two functions.
    """
    devices = _devices.get() or (1 if jax.device_count() == 1 else None)
    if devices is not None:
        return (sharded if devices > 1 else unsharded)(*operands)
    choices = for_devices(jax.device_count())(sharded), for_devices(1)(unsharded)
    return jax.lax.cond(_is_sharded_p.bind(), *choices, *operands)


def _lower_undivided(ctx: Any, value: Any, *, mesh: Any, axis: int) -> Any:
    if getattr(ctx.module_context.axis_context, "manual_axes", None) or devices_of(ctx) == 1:
        return [value]  # a `shard_map` has already sharded all axes
    ndim = len(ctx.avals_in[0].shape)
    names = [None if i == axis else PartitionSpec.UNCONSTRAINED for i in range(ndim)]
    sharding = NamedSharding(mesh, PartitionSpec(*names))

    def held(value: Any) -> Any:
        return jax.lax.with_sharding_constraint(value, sharding)

    return mlir.lower_fun(held, multiple_results=False)(ctx, value)


def _batched_undivided(operands: Any, dims: Any, *, mesh: Any, axis: int) -> tuple[Any, int]:
    (value,), (dim,) = operands, dims
    return unsharded(value, mesh, axis + (dim <= axis)), dim


_unsharded_p = Primitive("braintrace_unsharded")
_unsharded_p.def_impl(lambda value, **_: value)
_unsharded_p.def_abstract_eval(lambda value, **_: value)
mlir.register_lowering(_unsharded_p, _lower_undivided)
ad.deflinear2(_unsharded_p, lambda cotangent, _, *, mesh, axis: [unsharded(cotangent, mesh, axis)])
batching.primitive_batchers[_unsharded_p] = _batched_undivided


def unsharded(value: Any, mesh: Any, axis: int) -> Any:
    """Return an array that is not sharded along one of its axes.

    XLA chooses the sharding of the other axes, and of all axes inside of a ``shard_map``.
    """
    return _unsharded_p.bind(value, mesh=mesh, axis=axis)
