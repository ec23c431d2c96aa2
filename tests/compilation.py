"""How the programs of tests are compiled: in a hurry, or as those of users are.

Nearly all of the suite's time goes into compiling programs that then run for a millisecond. JAX
can switch off the optimisations of LLVM. On a CPU most of what is left is the time of XLA's own
code generators, of which the older ones take a quarter of it. JAX takes such options of XLA for one
program, or for a process; here they are put in where JAX makes those of every program.

Two more costs of every program are none of its own. JAX makes a context of MLIR for it and loads
all dialects into that, of which programs for a CPU are written in a few; a context serves several
programs here, as it does in newer versions. And JAX reads what was compiled before from files; what
this process has compiled last is kept in memory as well.
"""

import contextlib
import functools
import gc
import inspect
import pathlib
import threading

import jax
import moving

QUICK_GENERATORS = {
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}

MOST_MAPPINGS = 40_000
"""Of memory. A compiled program has about 15; Linux lets no process have more than 65,530."""

MOST_COMPILED = 200
"""Programs that are kept in memory although nothing uses them; older ones are rarely asked for."""

USES_OF_A_CONTEXT = 10
"""By one program after the other, as in newer versions of JAX."""

_in_a_hurry = False
_added: dict[str, object] = {}
_compiled: dict[str, object] = {}


def compile_in_a_hurry():
    """Compile everything from now on with few optimisations."""
    _switch(True, _quick_generators())


def compile_as_for_users():
    """Compile everything from now on as JAX does, nothing of what is compiled already used."""
    _switch(False, {})


def is_in_a_hurry():
    """Tell how programs are compiled now."""
    return _in_a_hurry


def forget_if_many():
    """Let go of programs where there are so many that memory could soon map no further one.

    First of those that nothing refers to any more, and if that is not enough, of all.
    """
    if _has_many():
        _compiled.clear()
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
    def kept(_, *arguments, **options):
        return function(*arguments, **options)

    @functools.wraps(function)
    def cached(*arguments, **options):
        return kept(_in_a_hurry, *arguments, **options)

    return cached


def _switch(in_a_hurry, added):
    global _in_a_hurry
    if in_a_hurry != _in_a_hurry:
        jax.config.update("jax_disable_most_optimizations", in_a_hurry)
        jax.clear_caches()  # they do not tell apart how a program was compiled
    _in_a_hurry = in_a_hurry
    _added.clear()
    _added.update(added)
    _make_little_around_programs()


@functools.cache
def _quick_generators():
    """The options that choose them, as far as this version of XLA and JAX takes them.

    Without them the tests only take longer.
    """
    try:
        jax.jit(lambda x: x + 1).lower(1.0).compile(compiler_options=QUICK_GENERATORS)
    except Exception as error:
        if "option" not in str(error):
            raise
        return {}
    return QUICK_GENERATORS if _add_to_options_of_every_program() else {}


def _add_to_options_of_every_program():
    """Let `_added` go into the options of every program, and tell whether it does."""
    try:
        from jax._src import compiler

        original = compiler.get_compile_options
    except (ImportError, AttributeError):
        return False

    def get_compile_options(*arguments, env_options_overrides=None, **options):
        overrides = {**_added, **(env_options_overrides or {})}
        return original(*arguments, env_options_overrides=overrides, **options)

    compiler.get_compile_options = get_compile_options
    return True


@functools.cache
def _make_little_around_programs():
    """Load few dialects of MLIR, and keep compiled programs in memory, where JAX has what it takes.

    Without that the tests only take longer.
    """
    with contextlib.suppress(ImportError, AttributeError):
        _load_few_dialects()
        _use_contexts_again()
        _keep_in_memory()
        moving.move_by_numpy(is_in_a_hurry)


def _load_few_dialects():
    from jax._src.interpreters import mlir

    load_all = mlir.JaxIrContext.load_all_available_dialects

    def load(context):
        if _in_a_hurry:
            context.dialects["func"]  # makes a dialect load; JAX itself asks for those of StableHLO
        else:
            load_all(context)

    mlir.JaxIrContext.load_all_available_dialects = load


def _use_contexts_again():
    from jax._src.interpreters import mlir

    make = mlir.make_ir_context
    last = threading.local()

    def make_ir_context():
        if mlir.ir.Context.current is not None:
            return make()  # for what is lowered inside another
        kind, context, left = getattr(last, "context", (None, None, 0))
        if not left or kind != _in_a_hurry:
            context, left = make(), USES_OF_A_CONTEXT
        last.context = _in_a_hurry, context, left - 1
        return context

    mlir.make_ir_context = make_ir_context


def _keep_in_memory():
    from jax._src import compiler

    read, write = compiler._cache_read, compiler._cache_write
    if "host_callbacks" not in inspect.signature(write).parameters:
        return  # of other versions, that also keep programs that call back

    def read_first_here(module_name, cache_key, *arguments):
        if cache_key in _compiled:
            return _compiled[cache_key], 0
        return read(module_name, cache_key, *arguments)

    def write_also_here(cache_key, seconds, name, backend, executable, host_callbacks):
        if jax.config.jax_compilation_cache_dir and not host_callbacks:
            if len(_compiled) == MOST_COMPILED:
                del _compiled[next(iter(_compiled))]
            _compiled[cache_key] = executable
        write(cache_key, seconds, name, backend, executable, host_callbacks)

    compiler._cache_read, compiler._cache_write = read_first_here, write_also_here
