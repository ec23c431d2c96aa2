"""What runs the benchmarks: the machine, without its name on any network, and the versions."""

import importlib.metadata
import os
import platform
import re
from pathlib import Path
from typing import Any

PACKAGES = ("braintrace", "brainstate", "jax", "jaxlib")


def processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, flags=re.MULTILINE)
    return found.group(1).strip() if found else platform.processor() or platform.machine()


def cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def describe() -> dict[str, Any]:
    import jax

    device = jax.devices()[0]
    own = f"{processor()}, {cores()} cores"
    return {
        "name": own if device.platform == "cpu" else device.device_kind,
        "platform": device.platform,
        "processor": own,
        "python": platform.python_version(),
        "versions": {package: version(package) for package in PACKAGES},
    }


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
