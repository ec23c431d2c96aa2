"""The scripts under `docs/examples`, as modules."""

import importlib.util

import places

FOLDER = places.DOCS / "examples"


def load(name):
    """Return the script of that name, imported anew."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
