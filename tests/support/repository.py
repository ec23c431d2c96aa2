"""The repository: where its parts are, for programs that tests start too, and its public names."""

import inspect
import os
import pathlib

import braintrace
import braintrace.nn

ROOT = pathlib.Path(__file__).resolve().parents[2]
SUPPORT = ROOT / "tests" / "support"
DOCS = ROOT / "docs"
SEARCHED = os.pathsep.join(map(str, [ROOT, ROOT / "tests", SUPPORT]))
"""The `PYTHONPATH` of a program that imports the library and the models of the tests."""

SOURCES = sorted((ROOT / "braintrace").rglob("*.py"))


def public_names(package):
    return sorted(
        name
        for name in dir(package)
        if not name.startswith("_") and not inspect.ismodule(getattr(package, name))
    )


PUBLIC = public_names(braintrace)
LAYERS = public_names(braintrace.nn)
