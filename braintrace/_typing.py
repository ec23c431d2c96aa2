"""Aliases that two or more rooms use."""

from typing import Any, TypeAlias

Path: TypeAlias = tuple[Any, ...]
"""Where a State sits in a model, as ``model.states()`` names it: ``('cell', 'w')``."""

PyTree: TypeAlias = Any


def path_name(path: Path) -> str:
    """Return the printed form of a path.

    Examples
    --------
    >>> path_name(("cell", "w"))
    'cell/w'
    """
    return "/".join(map(str, path))
