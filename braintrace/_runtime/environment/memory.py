"""Memory of a device."""

import functools
import os
from collections.abc import Iterator
from pathlib import Path

import jax

CGROUPS, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


@functools.cache
def memory_of(device: jax.Device) -> int | None:
    """Return the bytes of a device's memory, or ``None`` if unknown.

    For a GPU, this is the limit of JAX's allocations; for a CPU, the physical memory, or the limit
    of the process (in a container, for example).
    """
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if limit is not None:
        return int(limit)
    return min([*_physical(), *limits_of_cgroups(CGROUPS, OWN_CGROUPS)], default=None)


def _physical() -> Iterator[int]:
    try:
        yield os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not available on Windows and some systems
        return


def limits_of_cgroups(root: Path, own: Path) -> Iterator[int]:
    """Yield the memory limits of the Linux control groups of a process.

    Parameters
    ----------
    root, own
        Folder of the groups, and the file that lists the groups of the process.
    """
    for line in _read(own).splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":  # version 2
            top, name = root, "memory.max"
        elif "memory" in controllers.split(","):
            top, name = root / "memory", "memory.limit_in_bytes"
        else:
            continue
        group = top / path.lstrip("/")
        for place in (group, *group.parents):
            if place.is_relative_to(top) and (limit := _read(place / name).strip()).isdigit():
                yield int(limit)


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
