"""Names of the arguments of functions, and of the leaves of these arguments."""

import inspect
from collections.abc import Sequence
from typing import Any

import jax


def signature_of(function: Any) -> inspect.Signature | None:
    """Return the signature of a function, if it has one."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):  # functions written in C may have no signature
        return None


def parameter_names(function: Any, count: int) -> list[str]:
    """Return the names of the first positional arguments of a function.

    Examples
    --------
    >>> parameter_names(lambda x, *rest: x, 3)
    ['x', 'rest[0]', 'rest[1]']
    """
    kinds = inspect.Parameter
    names: list[str] = []
    signature = signature_of(function)
    for parameter in signature.parameters.values() if signature else ():
        if parameter.kind is kinds.VAR_POSITIONAL:
            names += [f"{parameter.name}[{index}]" for index in range(count - len(names))]
        elif parameter.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
    return names[:count]


def leaf_names(names: Sequence[str], arguments: Any) -> tuple[str, ...]:
    """Return the name of every leaf of named arguments.

    Examples
    --------
    >>> leaf_names(["x", "y"], ({"a": 1.0}, 2.0))
    ("x['a']", 'y')
    """
    paths = (path for path, _ in jax.tree_util.tree_leaves_with_path(arguments))
    keystr = jax.tree_util.keystr
    return tuple(f"{names[path[0].idx]}{keystr(path[1:])}" for path in paths)
