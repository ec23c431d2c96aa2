"""Arrays that are larger than all the memory there is, refused before they are made.

XLA ends the whole process where it cannot allocate an array. What is refused here could not exist:
the limit is all memory and swap of the machine and all memory of its devices together. Where one of
them is unknown, only sizes that no 64-bit number can count are refused.
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
"""A product of sizes that is not looked at any closer."""
MARGIN = 1024
"""Bytes, at most, that a layer has for each element of the product of its sizes."""
HINT = (
    "Choose smaller sizes, or a sparse or low-rank layer; `braintrace.plan` computes the memory of "
    "a model without making it."
)
_OF_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


@functools.cache
def most_bytes() -> int:
    """Return a number of bytes that no array on this machine can exceed."""
    if jax.process_count() > 1:  # an array may be on other machines, too
        return COUNTABLE
    parts = [_of_host(MEMINFO), *map(_of_device, jax.local_devices())]
    known = [part for part in parts if part is not None]
    return min(COUNTABLE, sum(known)) if len(known) == len(parts) else COUNTABLE


def _of_host(meminfo: Path) -> int | None:
    """Return the bytes of memory and swap; ``None`` where the system does not say."""
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        return sum(1024 * int(lines[key].split()[0]) for key in ("MemTotal", "SwapTotal"))
    except (OSError, ValueError, KeyError, IndexError):
        return None


def _of_device(device: jax.Device) -> int | None:
    """Return the bytes of a device beside the host's; ``None`` where it does not say."""
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
        What it is, such as "the parameter 'w'".
    shape, dtype
        Of the array.
    hint
        What to do, a sentence.
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
    """Refuse to begin a module whose States are larger than all memory.

    Parameters
    ----------
    what
        The module in words.
    module, begin
        What is begun, by a constructor or an ``init_state``: tried with shapes in the place of
        numbers, on a copy.
    sizes
        Sizes that its States have axes of. Where their product is small, nothing is tried.

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
            return  # it begins from values, not from shapes alone
        raise
    for path, value in found.items():
        for leaf in jax.tree.leaves(value):
            name = "/".join(map(str, path))
            check_fits(f"{what}: State '{name}'", leaf.shape, leaf.dtype, HINT)
