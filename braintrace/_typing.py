"""Type aliases shared by several packages."""

from typing import Any, TypeAlias

Path: TypeAlias = tuple[Any, ...]
"""Path of a State in a model, as in ``model.states()``: ``('cell', 'w')``."""

PyTree: TypeAlias = Any
