"""Refusal of arrays that are larger than all memory.

XLA ends the whole process if it cannot allocate an array. The arrays refused here could not exist:
the limit is all memory and swap of the machine plus all memory of its devices. If one of these is
unknown, only sizes beyond 64-bit integers are refused.
"""

import copy
import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import brainstate
import jax
import numpy as np

from ._brainstate import trace_stateful
from ._errors import BraintraceError, OptionError
from ._jax import is_transforming

MEMINFO = Path("/proc/meminfo")
COUNTABLE = 2**63 - 1
"""Bytes of the largest array that a 64-bit number can count."""
HARMLESS = 2**20
"""A product of sizes below which nothing is checked."""
MARGIN = 1024
"""Maximum bytes of a layer for each element of the product of its sizes."""
HINT = (
    "Choose smaller sizes, or a sparse or low-rank layer; `braintrace.plan` computes the memory of "
    "a model without allocating it."
)
_OF_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


@functools.cache
def most_bytes() -> int:
    """Return an upper limit of the bytes of an array on this machine."""
    if jax.process_count() > 1:  # arrays may be sharded over other machines
        return COUNTABLE
    parts = [_of_host(MEMINFO), *map(_of_device, jax.local_devices())]
    known = [part for part in parts if part is not None]
    return min(COUNTABLE, sum(known)) if len(known) == len(parts) else COUNTABLE


def _of_host(meminfo: Path) -> int | None:
    """Return the bytes of memory and swap; ``None`` if unknown."""
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        return sum(1024 * int(lines[key].split()[0]) for key in ("MemTotal", "SwapTotal"))
    except (OSError, ValueError, KeyError, IndexError):
        return None


def _of_device(device: jax.Device) -> int | None:
    """Return the bytes of a device in addition to the host's; ``None`` if unknown."""
    if device.platform == "cpu":
        return 0
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return None if limit is None else int(limit)


def check_fits(
    what: str,
    shape: Sequence[int],
    dtype: Any,
    hint: str,
    kind: type[BraintraceError] = OptionError,
) -> None:
    """Refuse an array that is larger than all memory.

    Parameters
    ----------
    what
        Name of the array, such as "the parameter 'w'".
    shape, dtype
        Shape and dtype of the array.
    hint
        The fix, as a sentence.
    kind
        The error that is raised.
    """
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return
    size = math.prod(map(int, shape)) * np.dtype(dtype).itemsize
    if size > most_bytes():
        raise kind(
            f"{what} would have shape {tuple(shape)} and dtype {np.dtype(dtype)}, that is "
            f"{size:,} bytes; this machine and its devices hold {most_bytes():,} at most. {hint}"
        )


def check_module_fits(
    what: str, module: brainstate.nn.Module, begin: Callable[[Any], Any], sizes: Sequence[int]
) -> None:
    """Refuse to initialise a module whose States are larger than all memory.

    Parameters
    ----------
    what
        The module as text.
    module, begin
        The module, and its constructor or ``init_state``, which is traced with shapes on a copy.
    sizes
        Sizes of axes of its States. If their product is small, nothing is traced.

    Raises
    ------
    OptionError
        If a State does not fit, with its path, shape and bytes.
    """
    elements = math.prod(sizes)
    if elements < HARMLESS or is_transforming() or MARGIN * elements < most_bytes():
        return
    found: dict[Any, Any] = {}

    def build() -> None:
        twin = copy.copy(module)
        begin(twin)
        for path, state in twin.states().items():
            found[path] = jax.tree.map(jax.typeof, state.value)

    try:
        trace_stateful(build)
    except Exception as error:
        if isinstance(error, _OF_VALUES) or isinstance(error.__cause__, _OF_VALUES):
            return  # the initial values depend on numbers, not only on shapes
        raise
    for path, value in found.items():
        for leaf in jax.tree.leaves(value):
            name = "/".join(map(str, path))
            check_fits(f"{what}: State '{name}'", leaf.shape, leaf.dtype, HINT)
