"""Fixtures of the whole suite, whose programs are compiled with few optimisations."""

import gc
import os
import pathlib

import brainstate
import jax
import pytest
import saiunit as u

os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # also for processes that tests start
jax.config.update("jax_disable_most_optimizations", True)
gc.set_threshold(100_000, 20, 20)  # hardly anything that is imported or traced is garbage

if (0, 8) <= jax.__version_info__ < (0, 11):
    # XLA's older code generators compile faster; XLA ends a process whose flags it does not know.
    quick = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {quick}"

collect_ignore = ["data"]  # its scripts need packages that no test does


def pytest_addoption(parser):
    parser.addoption("--update", action="store_true", help="write stored verdicts again")


def pytest_sessionfinish():
    gc.freeze()  # what ends with the process needs no last collection


def pytest_collection_modifyitems(items):
    """Start with what takes longest, so that all processes end together."""
    items.sort(key=lambda item: item.path.name not in ("test_sharding.py", "test_documentation.py"))


@pytest.fixture(scope="module", autouse=True)
def forget_programs():
    """Drop compiled programs before Linux refuses to map more: it allows 65,530 mappings."""
    mappings = pathlib.Path("/proc/self/maps")
    if mappings.exists() and mappings.read_bytes().count(b"\n") > 40_000:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def optimised():
    """Compile with all optimisations, as for users."""
    jax.config.update("jax_disable_most_optimizations", False)
    jax.clear_caches()  # they do not tell apart how a program was compiled
    yield
    jax.config.update("jax_disable_most_optimizations", True)
    jax.clear_caches()


@pytest.fixture
def compilations():
    """The events of what JAX compiles while the test runs."""
    seen, is_on = [], [True]

    def listen(event, duration, **kwargs):
        if is_on and "backend_compile" in event:
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    is_on.clear()


@pytest.fixture
def float64():
    """Double precision for one test, also in threads: they see the options of the process alone."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.fixture
def time_step():
    """A millisecond, for models with time constants."""
    with brainstate.environ.context(dt=1.0 * u.ms):
        yield
