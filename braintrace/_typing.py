"""Type aliases shared by several packages."""

from typing import Any, TypeAlias

Path: TypeAlias = tuple[Any, ...]
"""Path of a State in a model, as in ``model.states()``: ``('cell', 'w')``."""

PyTree: TypeAlias = Any


def path_name(path: Path) -> str:
    """Return the printed form of a path.

    Examples
    --------
    >>> path_name(("cell", "w"))
    'cell/w'
    """
    return "/".join(map(str, path))
