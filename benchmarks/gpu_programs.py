"""Programs compiled for a GPU that this machine does not have, and what they would do there.

XLA compiles for a card from its description. The program shows which kernels run and which arrays
they read and write, not how long they take.
"""

import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax

from .case import NotOffered

H200 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 150754820096
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 1 }
device_description_str: "NVIDIA H200"
"""

BYTES = {"pred": 1, "bf16": 2, "f16": 2, "c64": 8, "f64": 8, "s64": 8, "u64": 8, "c128": 16}
BYTES |= {"s8": 1, "u8": 1, "f32": 4, "s32": 4, "u32": 4}
UNCOUNTED = {"conditional", "call", "async-start"}
NO_KERNEL = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while"}

INSTRUCTION = re.compile(r"\s+(?:ROOT )?(%[\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*?)\)")
LOOP = re.compile(r'body=(%[\w.\-]+).*?known_trip_count":\{"n":"(\d+)"')


def compile_for_gpu(
    function: Callable[..., Any], *arguments: Any, donate: tuple[int, ...] = ()
) -> str:
    """Return the program that XLA makes of a function for an H200, as text.

    Raises
    ------
    NotOffered
        If JAX's CUDA plugin is not installed.
    """
    from jax.experimental import topologies

    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # it asks for a driver
    try:
        card = topologies.get_topology_desc(
            "h200", "cuda", target_config=H200, topology="1x1x1"
        ).devices[0]
    except NotImplementedError:
        raise NotOffered(
            'programs for a GPU need JAX\'s plugin: pip install "jax[cuda12]"'
        ) from None
    place = jax.sharding.SingleDeviceSharding(card)
    placed = jax.jit(function, donate_argnums=donate, in_shardings=place, out_shardings=place)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), arguments)
    return str(placed.lower(*shapes).compile().as_text())


def _check_countable(program: str) -> None:
    """Refuse programs in which the text does not say how often a kernel runs.

    Raises
    ------
    ValueError
        For branches, calls, and loops without a known number of rounds.
    """
    for line in program.splitlines():
        instruction = INSTRUCTION.match(line)
        operation = instruction.group(3) if instruction else None
        if operation in UNCOUNTED or (operation == "while" and not LOOP.search(line)):
            raise ValueError(f"Nothing says how often this runs: {line.strip()}")


def _computations(program: str) -> dict[str, list[str]]:
    """Return the lines of every computation by name; the first one to run is ``ENTRY``."""
    found = {}
    for text in re.split(r"\n(?=ENTRY |%)", program):
        head, *lines = text.splitlines()
        found["ENTRY" if head.startswith("ENTRY ") else head.split(" ")[0]] = lines
    return found


def _kernels(lines: list[str]) -> Iterator[int]:
    """Yield the bytes that each kernel of a computation reads and writes."""
    sizes: dict[str, int] = {}
    for line in lines:
        instruction = INSTRUCTION.match(line)
        if instruction:
            name, result, operation, operands = instruction.groups()
            sizes[name] = _size(result)
            if operation not in NO_KERNEL:
                read = re.findall(r"%[\w.\-]+", operands)
                yield sizes[name] + sum(sizes.get(operand, 0) for operand in read)


def _size(shapes: str) -> int:
    total = 0
    for kind, axes in re.findall(r"(\w+)\[([\d,]*)\]", shapes):
        elements = 1
        for axis in filter(None, axes.split(",")):
            elements *= int(axis)
        total += elements * BYTES[kind]
    return total


def bytes_moved(program: str) -> int:
    """Return what all kernels of a program without loops read and write, each array in full.

    Raises
    ------
    ValueError
        For a program with loops, branches or calls.
    """
    _check_countable(program)
    if LOOP.search(program):
        raise ValueError(
            "The program has loops: the bytes that an iteration reads of an array are unknown."
        )
    return sum(_kernels(_computations(program)["ENTRY"]))


def kernels_started(program: str) -> int:
    """Return how many kernels run, those in loops as often as they do."""
    _check_countable(program)
    computations = _computations(program)

    def started(name: str) -> int:
        lines = computations[name]
        loops = LOOP.findall("\n".join(lines))
        return sum(1 for _ in _kernels(lines)) + sum(
            int(times) * started(body) for body, times in loops
        )

    return started("ENTRY")
