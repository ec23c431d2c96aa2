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


def current_device() -> jax.Device:
    """Return JAX's default device for programs."""
    found = jax.config.jax_default_device
    if not isinstance(found, jax.Device):  # unset, or the name of a platform
        (found, *_) = jax.local_devices(backend=found)
    return found


def devices_of(ctx: Any) -> int:
    """Return the number of devices that a program is lowered for, from its lowering context."""
    return getattr(ctx.module_context.axis_context, "num_devices", None) or 1


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
    """Run one of two functions: for a program on several devices, or on one; see `for_devices`."""
    return (sharded if runs_on_several_devices() else unsharded)(*operands)
