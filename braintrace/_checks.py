"""Checks of public arguments, and how errors name values and calls.

A check is written where a wrong value would give a wrong number in silence, or where newcomers go
wrong first. All other mistakes raise the error of JAX, brainstate or Python.
"""

import contextlib
import functools
import inspect
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import brainstate
import jax
import saiunit

from ._errors import BraintraceError, OptionError, ShapeError
from ._typing import Path

LONGEST = 60
"""Characters of a printed value."""


def is_quantity(value: Any) -> bool:
    """Test whether a value has a physical unit."""
    return isinstance(value, saiunit.Quantity)


def shown(value: Any) -> str:
    """Describe a value for an error, arrays without their numbers."""
    if is_quantity(value):
        return f"{shown(saiunit.get_mantissa(value))} in {saiunit.get_unit(value)}"
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"an array of dtype {value.dtype} and shape {tuple(value.shape)}"
    if callable(value) or isinstance(value, brainstate.State):
        return f"the {type(value).__name__} `{getattr(value, '__qualname__', '')}`"
    if isinstance(value, (list, tuple, dict)):
        return f"a {type(value).__name__} of {', '.join(map(shown, jax.tree.leaves(value)[:4]))}"
    text = repr(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def quoted(names: Sequence[str]) -> str:
    """Print names, each in quotes."""
    return ", ".join(f"'{name}'" for name in names)


def path_name(path: Path) -> str:
    """Return the printed form of a path.

    Examples
    --------
    >>> path_name(("cell", "w"))
    'cell/w'
    """
    return "/".join(map(str, path))


def named(names: Sequence[str], values: Sequence[Any]) -> str:
    """Format arguments by name, with their types instead of their numbers."""
    every = [*names, *(f"argument {index}" for index in range(len(names), len(values)))]
    pairs = zip(every, values, strict=False)
    return ", ".join(f"`{name}` = {shown(value)}" for name, value in pairs) or "no argument"


def parameter_names(function: Any, count: int) -> list[str]:
    """Return names of the first positional arguments of a function.

    Examples
    --------
    >>> parameter_names(lambda x, *rest: x, 3)
    ['x', 'rest', 'argument 2']
    """
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # functions written in C may have no signature
        names = []
    return [*names, *(f"argument {index}" for index in range(len(names), count))][:count]


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


@contextlib.contextmanager
def in_words(call: Callable[[], str]) -> Iterator[None]:
    """Add the call to an error that is raised inside."""
    try:
        yield
    except BraintraceError:
        raise
    except Exception as error:
        error.add_note(f"braintrace: {call()}")
        raise


def check_choice(name: str, value: Any, *choices: Any) -> None:
    """Refuse a value that is none of the choices, which code would take for the last of them."""
    if value not in choices:
        raise OptionError(
            f"`{name}` is {shown(value)}; expected one of {', '.join(map(repr, choices))}."
        )


def check_model(model: Any) -> None:
    """Refuse a function or a module of another library as a model."""
    if not isinstance(model, brainstate.nn.Module):
        raise OptionError(
            f"`model` is {shown(model)}; expected a `brainstate.nn.Module` whose `update` is one "
            "time step. Of a function, Flax or Equinox `braintrace.from_function` makes one."
        )


def path_filter(given: Any) -> Callable[[Path], bool]:
    """Return a path such as ``'cell/w'``, the beginning of one, or a function as a function."""
    if not isinstance(given, (str, tuple)):
        return given
    start = tuple(map(str, given.split("/") if isinstance(given, str) else given))
    return lambda path: tuple(map(str, path[: len(start)])) == start


_first = operator.itemgetter(slice(1))


def common_length(shapes: Sequence[tuple[int, ...]]) -> int:
    """Return the common length of the first axis of all sequences: their number of time steps.

    Raises
    ------
    ShapeError
        Without arrays, without steps, or if their lengths differ.
    """
    lengths = set(map(_first, shapes))
    if len(lengths) != 1 or lengths & {(), (0,)}:
        raise ShapeError(
            f"Every sequence needs the same leading time axis, of at least one step; the shapes "
            f"given are {', '.join(map(str, shapes)) or 'none'}."
        )
    return lengths.pop()[0]


def differences(found: Any, expected: Any) -> list[str]:
    """Return a line for every leaf that is missing, unexpected, or of another shape or dtype."""
    leaves = (jax.tree_util.tree_leaves_with_path(tree) for tree in (found, expected))
    one, other = (
        {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in pairs}
        for pairs in leaves
    )
    lines = []
    for name in sorted(one.keys() | other.keys()):
        if name not in one:
            lines.append(f"\n- '{name}' is missing; expected {shown(other[name])}")
        elif name not in other:
            lines.append(f"\n- '{name}' is unexpected: {shown(one[name])}")
        elif _type(one[name]) != _type(other[name]):
            lines.append(f"\n- '{name}' is {shown(one[name])}; expected {shown(other[name])}")
    trees = [jax.tree.structure(tree) for tree in (found, expected)]
    if not lines and trees[0] != trees[1]:
        lines.append(f"\n- the structure is {trees[0]}; expected {trees[1]}")
    return lines


def _type(leaf: Any) -> Any:
    """Return a shape, and a dtype as JAX has it: a NumPy array may lose its double precision."""
    dtype = getattr(leaf, "dtype", None)
    known = functools.partial(jax.dtypes.canonicalize_dtype, allow_extended_dtype=True)
    return getattr(leaf, "shape", None), dtype if dtype is None else known(dtype)
