"""Processes of their own, in which nothing ran before."""

import concurrent.futures
import multiprocessing
import os
import unittest.mock
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

PACKAGE = Path(__file__).parent
ENVIRONMENT = {
    # A first call compiles, whatever ran before.
    "JAX_ENABLE_COMPILATION_CACHE": "false",
    # Freed memory stays with the process. The page faults of a function would otherwise depend on
    # the sizes that other functions free. The arenas of other threads always return arrays of more
    # than 64 MiB.
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
    "MALLOC_MMAP_THRESHOLD_": str(2**40),
}
Found = TypeVar("Found")


def run_apart(function: Callable[..., Found], *arguments: object) -> Found:
    """Return what a function returns in a new process; a `RuntimeError` if the process dies."""
    context = multiprocessing.get_context("spawn")
    with (
        unittest.mock.patch.dict(os.environ, ENVIRONMENT),
        concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool,
    ):
        return pool.submit(function, *arguments).result()
