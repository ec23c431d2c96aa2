"""How the programs of tests are compiled: in a hurry, or as those of users are.

Nearly all of the suite's time goes into compiling programs that then run for a millisecond. JAX
has a switch that leaves out most optimisations. On a CPU most of what is left is the time of XLA's
own code generators, of which the older ones take far less; a process chooses them by a variable of
its environment, before it runs its first program.
"""

import contextlib
import functools
import gc
import os
import pathlib
import subprocess
import sys
import threading

import jax
from jax.interpreters import mlir

QUICK_GENERATORS = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"

FEW_OPTIMIZATIONS = "JAX_DISABLE_MOST_OPTIMIZATIONS"

MOST_MAPPINGS = 50_000
"""Of memory. A compiled program has about 15; Linux lets no process have more than 65,530."""

PROGRAMS_PER_CONTEXT = 300
"""A context keeps the constants of all programs that are written in it."""

_in_a_hurry = False


def choose_quick_generators():
    """Choose them for this process and for those that it starts, if this version has them.

    XLA ends a process whose options it does not know, so another process tries them. Without them
    the tests only take longer.
    """
    flags = with_flags(QUICK_GENERATORS)
    if QUICK_GENERATORS in os.environ.get("XLA_FLAGS", ""):
        return  # chosen by the process that has started this one
    trial = [sys.executable, "-c", "import jax; jax.jit(lambda x: x + 1)(1.0)"]
    environment = {**os.environ, "XLA_FLAGS": flags}
    if subprocess.run(trial, env=environment, capture_output=True).returncode == 0:
        os.environ["XLA_FLAGS"] = flags


def share_contexts():
    """Let JAX write many programs in one MLIR context, if this version lets a test say so.

    It makes one for each program, which takes 4 ms: as long as all else before XLA compiles a small
    one. What comes out of it is the same.
    """
    make = getattr(mlir, "make_ir_context", None)
    where = sys.modules.get(getattr(make, "__module__", None))
    if where is not None:
        where.make_ir_context = shared(make, PROGRAMS_PER_CONTEXT)


def shared(make, times):
    """Return a function that makes something for each thread, and anew after so many calls."""
    own = threading.local()

    def shared_one():
        if not getattr(own, "left", 0):
            own.made, own.left = make(), times
        own.left -= 1
        return own.made

    return shared_one


def with_flags(*flags):
    """Return the options of XLA of this process, with others."""
    return " ".join([os.environ.get("XLA_FLAGS", ""), *flags]).strip()


def compile_in_a_hurry():
    """Compile everything from now on with few optimisations."""
    _switch(True)


def compile_as_for_users():
    """Compile everything from now on as JAX does, nothing of what is compiled already used."""
    _switch(False)


def is_in_a_hurry():
    """Tell how programs are compiled now."""
    return _in_a_hurry


def forget_if_many():
    """Let go of programs where there are so many that memory could soon map no further one.

    First of those that nothing refers to any more, and if that is not enough, of all.
    """
    if _has_many():
        gc.collect()
        if _has_many():
            jax.clear_caches()
            gc.collect()


def _has_many():
    mappings = pathlib.Path("/proc/self/maps")
    return mappings.exists() and mappings.read_bytes().count(b"\n") > MOST_MAPPINGS


def cache(function):
    """Keep results, as `functools.cache` does, for each of the two ways to compile."""

    @functools.cache
    def by_way(_, *arguments, **options):
        return function(*arguments, **options)

    @functools.wraps(function)
    def cached(*arguments, **options):
        return by_way(_in_a_hurry, *arguments, **options)

    return cached


def _switch(in_a_hurry):
    global _in_a_hurry
    if in_a_hurry != _in_a_hurry:
        os.environ[FEW_OPTIMIZATIONS] = str(in_a_hurry)  # for processes that tests start
        jax.config.update("jax_disable_most_optimizations", in_a_hurry)
        jax.clear_caches()  # they do not tell apart how a program was compiled
    _in_a_hurry = in_a_hurry


compilations = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, *_, **__: compilations.append(event) if "compile" in event else None
)


@contextlib.contextmanager
def counted():
    """The events of tracing and compiling inside the block."""
    start, found = len(compilations), []
    yield found
    found += compilations[start:]
