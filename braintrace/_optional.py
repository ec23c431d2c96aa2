"""Packages that a single feature needs, imported when somebody uses it."""

import importlib
from types import ModuleType

from ._errors import MissingPackageError


def optional_import(name: str, extra: str) -> ModuleType:
    """Import a module of a package that the library works without.

    Parameters
    ----------
    name
        Dotted name of the module, such as ``"matplotlib.figure"``.
    extra
        The extra of this distribution that brings the package.

    Raises
    ------
    MissingPackageError
        If the package is not installed. One that is installed and broken raises what it raises.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if name != missing and not name.startswith(f"{missing}."):
            raise
        raise MissingPackageError(
            f"This needs `{missing}`, which is not installed. From the folder of the sources: "
            f'pip install -e ".[{extra}]"',
            name=missing,
        ) from error
