"""What the package promises as a whole: its names, its rooms, and what importing it costs."""

import ast
import collections
import graphlib
import importlib.metadata
import importlib.resources
import inspect
import json
import operator
import re
import subprocess
import sys
import tomllib

import jax.numpy as jnp
import pytest
from repository import LAYERS, PUBLIC, ROOT, SOURCES, public_names

import braintrace
from braintrace._ended import REPLACEMENTS
from braintrace._errors import optional_import

# A room imports from the rooms before it.
ROOMS = [
    "_jax",
    "_jax_kernels",
    "_ended",
    "_errors",
    "_typing",
    "_tables",
    "_checks",
    "_brainstate",
    "_from_function",
    "_jaxpr",
    "_etrace_op",
    "_graph",
    "_compiler",
    "_core",
    "_rules",
    "sharding",
    "_model",
    "_picture",
    "_learner",
    "saving",
    "streams",
    "_bptt",
    "_compare",
    "nn",
]
PRIVATE = {
    (
        "_jax.py",
        "_jax_kernels.py",
    ): r"jax\.(core|extend|interpreters)\b|(jax|jaxlib|saiunit)(\.\w+)*\._",
    ("_brainstate.py",): (
        r"brainstate(\.\w+)*\.(_|StateTraceStack\b|transform\.StatefulFunction\b)"
        r"|(.*\.)?(_value|_been_writen|been_writen|state_stack|get_\w+_by_cache)$"
    ),
}
"""What only some files may name: by these."""


LATE = (("braintrace", "_learner", "learner"), ("braintrace", "streams"))
"""A method of the learner imports a later room at its first use."""


def module_of(path):
    """Return ``("braintrace", room, ...)``, with ``__init__`` as a module like any other."""
    return path.relative_to(ROOT).with_suffix("").parts


def imports(source, module):
    """Yield ``(line, absolute dotted name)`` of everything that a module imports."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = module[: -node.level] if node.level else ()
            origin = (*start, *(node.module.split(".") if node.module else ()))
            if node.col_offset and (module, origin) == LATE:
                continue
            yield from ((node.lineno, ".".join((*origin, alias.name))) for alias in node.names)


def dotted_names(source):
    """Yield ``(line, a.b.c)`` of every attribute that is written out, or named by a string."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
        elif isinstance(node, ast.FunctionDef):
            yield node.lineno, node.name


def upward_imports(source, module):
    """Return what a module imports from rooms behind its own."""
    behind = ROOMS[ROOMS.index(module[1]) + 1 :]
    ours = [
        (line, name) for line, name in imports(source, module) if name.startswith("braintrace.")
    ]
    return [(line, name) for line, name in ours if name.split(".")[1] in behind]


def imported_modules(paths):
    """Return the modules that each module imports, those for types and inside functions too."""
    sources = {module_of(path): path.read_text() for path in paths}
    modules = {".".join(m[:-1] if m[-1] == "__init__" else m): m for m in sources}
    found = {}
    for name, module in modules.items():
        names = [imported for _, imported in imports(sources[module], module)]
        of = (one if one in modules else one.rpartition(".")[0] for one in names)
        found[name] = {other for other in of if other in modules}
    return found


def private_names(source, module):
    """Return the private names of dependencies that a module imports or spells out."""
    file = f"{module[-1]}.py"
    private = [re.compile(names) for files, names in PRIVATE.items() if file not in files]
    named = [*imports(source, module), *dotted_names(source)]
    return [(line, name) for line, name in named if any(p.match(name) for p in private)]


def violations(check, paths):
    """Apply a check to files and return ``file:line: name`` of what it finds."""
    return [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in paths
        for line, name in check(path.read_text(), module_of(path))
    ]


def test_the_package_has_a_marker_of_types():
    assert importlib.resources.files("braintrace").joinpath("py.typed").is_file()


def test_version_has_its_numbers():
    assert ".".join(map(str, braintrace.__version_info__)) == braintrace.__version__


@pytest.mark.parametrize("name", [*PUBLIC, *(f"nn.{name}" for name in LAYERS)])
def test_public_names_are_documented(name):
    value = operator.attrgetter(name)(braintrace)
    own = [value.__doc__]
    if inspect.isclass(value):
        methods = [m for n, m in vars(value).items() if not n.startswith("_")]
        # A marked layer of brainstate has the methods of brainstate.
        ours = [m for m in methods if getattr(m, "__module__", "").split(".")[0] == "braintrace"]
        own += [m.__doc__ for m in ours if inspect.isfunction(m)]
        own += [m.__doc__ for m in methods if isinstance(m, property)]
    for text in own:
        assert text, f"{name} or one of its methods has no docstring"
        assert text.strip()
        assert not text.startswith(f"{name}("), f"{name} has only the docstring of a dataclass"


@pytest.mark.parametrize("package", [braintrace, braintrace.nn])
def test_all_public_names_are_exported(package):
    own = [name for name in package.__all__ if not inspect.ismodule(getattr(package, name))]
    assert sorted(own) == public_names(package)


@pytest.mark.parametrize("name", REPLACEMENTS)
def test_an_ended_name_has_a_replacement(name):
    owner = braintrace
    if name.startswith("Learner."):
        owner = braintrace.compile(braintrace.nn.IndRNN(2, 3), "d_rtrl", jnp.ones(2))
    with pytest.raises(AttributeError, match=f"`{name}` has ended: use `"):
        getattr(owner, name.removeprefix("Learner."))


def test_every_file_belongs_to_a_room():
    assert {module_of(path)[1] for path in SOURCES} - {"__init__"} <= set(ROOMS)


def test_rooms_import_downwards():
    assert not violations(upward_imports, [p for p in SOURCES if module_of(p)[1] in ROOMS])


def test_no_modules_import_one_another():
    graphlib.TopologicalSorter(imported_modules(SOURCES)).prepare()


def names_bound_twice(path):
    """Return the names that a module binds more than once at its top level."""
    bound = collections.Counter()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            bound[node.name] += 1
        for target in getattr(node, "targets", ()):
            names = (name for name in ast.walk(target) if isinstance(name, ast.Name))
            bound.update(name.id for name in names if isinstance(name.ctx, ast.Store))
    return {name for name, count in bound.items() if count > 1}


def test_a_module_binds_a_name_once():
    """A later constant would change the functions before it."""
    found = {path: names for path in SOURCES if (names := names_bound_twice(path))}
    assert found == {}


def test_only_listed_files_name_the_internals_of_a_dependency():
    assert not violations(private_names, SOURCES)


def test_files_stay_readable():
    lines = {path.relative_to(ROOT): len(path.read_text().splitlines()) for path in SOURCES}
    assert {path: count for path, count in lines.items() if count > 620} == {}


def test_a_package_that_is_missing_is_told_with_the_extra_that_brings_it(monkeypatch, tmp_path):
    assert optional_import("json.decoder", "examples") is json.decoder
    with pytest.raises(
        braintrace.MissingPackageError, match=r"`plotting_x`.*\[examples\]"
    ) as caught:
        optional_import("plotting_x.figure", "examples")
    assert isinstance(caught.value, ImportError)
    assert caught.value.name == "plotting_x"
    (tmp_path / "broken_package.py").write_text("import a_package_that_nobody_has")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_package_that_nobody_has") as caught:
        optional_import("broken_package", "examples")
    assert not isinstance(caught.value, braintrace.MissingPackageError)


def test_optional_packages_belong_to_extras():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    calls = [
        node
        for path in [*SOURCES, *(ROOT / "benchmarks").rglob("*.py")]
        if "optional_import(" in path.read_text()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "optional_import"
    ]
    assert calls
    assert {call.args[1].value for call in calls} <= set(extras["optional-dependencies"])


def test_import_loads_nothing_that_brainstate_has_not_loaded():
    script = (
        "import sys, brainstate; before = set(sys.modules); import braintrace; "
        "new = {name.split('.')[0] for name in set(sys.modules) - before}; "
        "print(*sorted(new - set(sys.stdlib_module_names)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["braintrace"]
