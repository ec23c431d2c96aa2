"""The public names of the package, and the files of its source."""

import inspect

from places import ROOT

import braintrace
import braintrace.nn

SOURCES = sorted((ROOT / "braintrace").rglob("*.py"))


def public_names(package):
    return sorted(
        name
        for name in dir(package)
        if not name.startswith("_") and not inspect.ismodule(getattr(package, name))
    )


PUBLIC = public_names(braintrace)


LAYERS = public_names(braintrace.nn)
