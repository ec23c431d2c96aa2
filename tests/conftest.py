"""Fixtures of the whole suite."""

import os

import jax
import pytest

# Nearly all of the suite's time goes into compiling programs that then run for a millisecond.
jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(scope="session", autouse=True)
def compilation_cache(tmp_path_factory):
    """Programs that several tests compile alike are compiled once per run, in any process."""
    folder = tmp_path_factory.getbasetemp()
    shared = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    jax.config.update("jax_compilation_cache_dir", str(shared / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    yield
    jax.config.update("jax_compilation_cache_dir", None)


@pytest.fixture
def float64():
    """Double precision for one test."""
    with jax.enable_x64(True):
        yield
