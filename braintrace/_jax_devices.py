"""What of JAX depends on the devices that a program runs on; like `_jax`, it names internals.

XLA divides a program after JAX has lowered it. Some operations are written in another way for
several devices, and some arrays are held undivided, where XLA would send parts of them to and fro.
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


def devices_of(ctx: Any) -> int:
    """Return how many devices a program is lowered for, given what a lowering rule is."""
    return getattr(ctx.module_context.axis_context, "num_devices", None) or 1


def _lower_is_divided(ctx: Any) -> Any:
    is_divided = devices_of(ctx) > 1
    return mlir.lower_fun(lambda: jnp.asarray(is_divided), multiple_results=False)(ctx)


_is_divided_p = Primitive("braintrace_is_divided")
_is_divided_p.def_abstract_eval(lambda: jax.core.ShapedArray((), jnp.dtype(bool)))
_is_divided_p.def_impl(lambda: jnp.asarray(False))  # what reads nothing runs on one device
mlir.register_lowering(_is_divided_p, _lower_is_divided)


_devices: contextvars.ContextVar[int | None] = contextvars.ContextVar("devices", default=None)


@contextlib.contextmanager
def for_devices(count: int | None) -> Iterator[None]:
    """Say on how many devices that runs which is traced inside; ``None``: nobody knows.

    XLA does not look into branches before it has divided a program: what it would take for one
    computation otherwise is then done in each.
    """
    token = _devices.set(count)
    try:
        yield
    finally:
        _devices.reset(token)


def runs_on_several_devices() -> bool:
    """Tell whether what is traced now is known to run on several devices."""
    return (_devices.get() or 1) > 1


def divided_dependent(
    *operands: Any, divided: Callable[..., Any], whole: Callable[..., Any]
) -> Any:
    """Run one of two functions: for a program on several devices, or on one.

    It is chosen when the program is lowered, as in ``jax.lax.platform_dependent``; one trace serves
    both. Where it is known before (see `for_devices`), or there is one device, nobody traces the
    other.
    """
    devices = _devices.get() or (1 if jax.device_count() == 1 else None)
    if devices is not None:
        return (divided if devices > 1 else whole)(*operands)
    return jax.lax.cond(_is_divided_p.bind(), divided, whole, *operands)


def _lower_undivided(ctx: Any, value: Any, *, mesh: Any, axis: int) -> Any:
    if getattr(ctx.module_context.axis_context, "manual_axes", None) or devices_of(ctx) == 1:
        return [value]  # a `shard_map` has divided everything already
    ndim = len(ctx.avals_in[0].shape)
    names = [None if i == axis else PartitionSpec.UNCONSTRAINED for i in range(ndim)]
    sharding = NamedSharding(mesh, PartitionSpec(*names))

    def held(value: Any) -> Any:
        return jax.lax.with_sharding_constraint(value, sharding)

    return mlir.lower_fun(held, multiple_results=False)(ctx, value)


def _batched_undivided(operands: Any, dims: Any, *, mesh: Any, axis: int) -> tuple[Any, int]:
    (value,), (dim,) = operands, dims
    return undivided(value, mesh, axis + (dim <= axis)), dim


_undivided_p = Primitive("braintrace_undivided")
_undivided_p.def_impl(lambda value, **_: value)
_undivided_p.def_abstract_eval(lambda value, **_: value)
mlir.register_lowering(_undivided_p, _lower_undivided)
ad.deflinear2(_undivided_p, lambda cotangent, _, *, mesh, axis: [undivided(cotangent, mesh, axis)])
batching.primitive_batchers[_undivided_p] = _batched_undivided


def undivided(value: Any, mesh: Any, axis: int) -> Any:
    """Return an array that no axis of a mesh divides along one of its own.

    The other axes are left to XLA, as are all of them inside of a ``shard_map``.
    """
    return _undivided_p.bind(value, mesh=mesh, axis=axis)
