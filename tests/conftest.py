"""Fixtures of the whole suite, and which of its tests run how."""

import gc
import itertools
import os
import pathlib

import brainstate
import compilation
import jax
import pytest
import saiunit as u
from by_day import pytest_pycollect_makeitem as pytest_pycollect_makeitem
from initial_weights import quick_draws

compilation.compile_in_a_hurry()
gc.set_threshold(100_000, 20, 20)  # what is imported, traced or compiled is hardly ever garbage

LAYERS = pathlib.Path(__file__).parent.parent / "braintrace" / "nn"
"""Their examples train a network each and are run at night; other docstrings' run by day."""

_tests = itertools.count()


def pytest_addoption(parser):
    parser.addoption(
        "--nightly",
        action="store_true",
        help="run also the rows that a short run leaves out, all compiled as for users",
    )


def pytest_configure(config):
    """Choose how XLA generates code; processes of pytest-xdist inherit the choice.

    By day hardly any program takes long enough to be kept in files, and to find out what it would
    be called there takes longer than to compile those few again.
    """
    jax.config.update("jax_enable_compilation_cache", config.getoption("--nightly"))
    if not config.getoption("--nightly"):
        compilation.share_contexts()
        if not hasattr(config, "workerinput"):
            compilation.choose_quick_generators()


def pytest_collection_modifyitems(config, items):
    """Leave out the rows of the night; bring together tests that share what they compile.

    A test or a row that is named on the command line runs by day too. The optimised ones are at
    the end, and tests that share their oracles at the beginning.
    """
    for item in items:
        if isinstance(item, pytest.DoctestItem) and item.path.is_relative_to(LAYERS):
            item.add_marker(pytest.mark.nightly)
    if not config.getoption("--nightly"):
        named = {*config.args}
        of_the_night = {
            item
            for item in items
            if item.get_closest_marker("nightly") and item.nodeid not in named
        }
        config.hook.pytest_deselected(items=of_the_night)
        items[:] = [item for item in items if item not in of_the_night]

    def place(item):
        has_oracles = hasattr(getattr(item, "module", None), "references")
        return item.get_closest_marker("optimised") is not None, not has_oracles

    items.sort(key=place)


def pytest_collection_finish(session):
    """Look for no garbage among modules, of which JAX keeps a million objects that live on."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item):
    """Compile as the test wants it, and as if anew where many programs have been."""
    if next(_tests) % 20 == 0:  # to count mappings takes milliseconds
        compilation.forget_if_many()
    if item.get_closest_marker("optimised") or item.config.getoption("--nightly"):
        compilation.compile_as_for_users()
    else:
        compilation.compile_in_a_hurry()


@pytest.fixture
def compilations():
    """The events of what JAX compiles, as long as the test runs."""
    seen, is_on = [], [True]

    def listen(event, duration, **kwargs):
        if is_on and "backend_compile" in event:
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    is_on.clear()


@pytest.fixture(scope="session", autouse=True)
def compilation_cache(tmp_path_factory):
    """Programs that several tests compile alike are compiled once per run, in any process.

    Those of other processes are read from files, which is worth it for the large ones: at night.
    """
    folder = tmp_path_factory.getbasetemp()
    shared = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    jax.config.update("jax_compilation_cache_dir", str(shared / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    yield
    jax.config.update("jax_compilation_cache_dir", None)


@pytest.fixture(autouse=True)
def initial_weights(request):
    """By day, layers draw initial weights from NumPy; tests of pages draw as the pages say."""
    of_pages = request.path.parent.name == "documentation"
    if of_pages or request.config.getoption("--nightly"):
        yield
    else:
        with quick_draws():
            yield


@pytest.fixture
def float64():
    """Double precision for one test."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def float64_in_every_thread():
    """The same where Python is called back: in threads that know of the process's options alone."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.fixture
def time_step():
    """A millisecond, for models of time constants."""
    with brainstate.environ.context(dt=1.0 * u.ms):
        yield
