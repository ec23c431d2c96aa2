"""Import of optional packages at their first use."""

import importlib
from types import ModuleType

from ._errors import MissingPackageError


def optional_import(name: str, extra: str) -> ModuleType:
    """Import a module of an optional package.

    Parameters
    ----------
    name
        Dotted name of the module, such as ``"matplotlib.figure"``.
    extra
        The extra of this distribution that installs the package.

    Raises
    ------
    MissingPackageError
        If the package is not installed. A broken installation raises its own error.
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
