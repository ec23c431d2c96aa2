"""Checks of public arguments, with uniform error messages.

Each check names the argument, the value found and the values expected. A `Kind` describes the
values of an option, and is shared by all options of that kind.
"""

import dataclasses
import difflib
import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np

from ._errors import DtypeError, OptionError, ShapeError
from ._jax import is_there, is_tracer, to_array
from ._shown import CONTAINERS as CONTAINERS
from ._shown import DEEPEST as DEEPEST
from ._shown import is_endless as is_endless
from ._shown import is_quantity as is_quantity
from ._shown import is_state as is_state
from ._shown import shown as shown
from ._signatures import leaf_names as leaf_names
from ._signatures import parameter_names as parameter_names
from ._signatures import signature_of
from ._typing import Path

LARGEST = 2**63
"""Upper limit of sizes, and of the integers of NumPy and JAX."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """The accepted values of an option.

    Attributes
    ----------
    words
        Printed form, as in "expected True or False".
    accepts
        Predicate of the accepted values.
    """

    words: str
    accepts: Callable[[Any], bool]

    def or_else(self, value: Any) -> "Kind":
        """Return the kind that accepts one more value, such as None or 'auto'."""
        accepts = self.accepts
        return Kind(
            f"{self.words} or {value!r}",
            lambda other: other is value or _equals(other, value) or accepts(other),
        )


def is_integer(value: Any) -> bool:
    """Test whether a value is an integer, and not a boolean."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def one_of(*choices: str) -> Kind:
    """Return the kind of a choice among some strings."""
    listed = ", ".join(map(repr, choices[:-1])) + f" or {choices[-1]!r}"
    return Kind(listed, lambda value: isinstance(value, str) and value in choices)


def _equals(value: Any, expected: Any) -> bool:
    return isinstance(value, str) and value == expected


def _is_floating(value: Any) -> bool:
    try:
        is_dtype = isinstance(value, (str, type, np.dtype))
        return is_dtype and bool(jnp.issubdtype(value, jnp.floating))
    except Exception:  # NumPy raises various errors for values that are not dtypes
        return False


BOOLEAN = Kind("True or False", lambda value: isinstance(value, (bool, np.bool_)))
POSITIVE = Kind("a positive integer", lambda value: is_integer(value) and 1 <= value < LARGEST)
NOT_NEGATIVE = Kind(
    "an integer of at least 0", lambda value: is_integer(value) and 0 <= value < LARGEST
)
DECAY = Kind(
    "a float in [0, 1)",
    lambda value: isinstance(value, (float, np.floating)) and bool(0.0 <= value < 1.0),
)
FRACTION = Kind(
    "a number from 0 to 1",
    lambda v: (is_integer(v) or isinstance(v, (float, np.floating))) and bool(0 <= v <= 1),
)
SEED = Kind("an integer from 0 to 2**32 - 1", lambda v: is_integer(v) and 0 <= v < 2**32)
BATCH_SIZE = POSITIVE.or_else(None)
NAME = Kind("a string", lambda value: isinstance(value, str)).or_else(None)
FUNCTION = Kind("a function", callable)
FLOATING = Kind("a floating-point dtype such as `jnp.bfloat16`", _is_floating)
PATHS = Kind(
    "a path such as 'cell/w' or ('cell', 'w'), the beginning of one, or a function of a path",
    lambda v: isinstance(v, (str, tuple)) or (callable(v) and not isinstance(v, type)),
)
MARK = Kind(
    f"'explicit', 'auto' or a filter over the parameters to be marked ({PATHS.words})",
    PATHS.accepts,
).or_else(None)
MODEL = Kind(
    "a `brainstate.nn.Module`, initialised, whose `update` is one time step (of a function, Flax "
    "or Equinox `braintrace.from_function` makes one)",
    lambda value: isinstance(value, brainstate.nn.Module),
)


def check_option(name: str, value: Any, kind: Kind, where: str = "") -> None:
    """Refuse an option that is not of its kind.

    Raises
    ------
    OptionError
        If it is not.
    """
    if not kind.accepts(value):
        told = f"{where}`{name}` is {shown(value)}; expected {kind.words}.{_hint(value)}"
        raise OptionError(told)


def path_filter(given: Any) -> Callable[[Path], bool]:
    """Return a value that `PATHS` accepts as a function of a path."""
    if isinstance(given, (str, tuple)):
        return Below(tuple(given.split("/")) if isinstance(given, str) else given)
    fits: Callable[[Path], bool] = given
    return fits


@dataclasses.dataclass(frozen=True)
class Below:
    """Predicate: whether a path starts with another path."""

    start: tuple[Any, ...]

    def __call__(self, path: Path) -> bool:
        """Test a path; indices of lists may be given as strings."""
        return tuple(map(str, path[: len(self.start)])) == tuple(map(str, self.start))


def check_takes(name: str, function: Any, arguments: Sequence[Any], what: str) -> None:
    """Refuse a value that is not a function of some positional arguments.

    Raises
    ------
    OptionError
        If it is not a function, or does not accept the arguments.
    """
    check_option(name, function, FUNCTION)
    if (signature := signature_of(function)) is None:
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise OptionError(
            f"`{name}` takes {signature}, but is called with {what}: {error}."
        ) from error


def common_length(shapes: Sequence[tuple[int, ...]], what: str) -> int:
    """Return the common length of the first axis of all arrays: their number of time steps.

    Raises
    ------
    ShapeError
        If there are no arrays, they have no steps, or their lengths differ.
    """
    lengths = {shape[0] if shape else 0 for shape in shapes}
    if len(lengths) != 1 or 0 in lengths:
        raise ShapeError(
            f"Every {what} needs the same leading time axis, of at least one step; the shapes "
            f"given are {', '.join(map(str, shapes)) or 'none'}."
        )
    return lengths.pop()


def flags_of(
    name: str, value: Any, shapes: str, is_shape: Callable[[jax.Array], bool]
) -> jax.Array:
    """Return booleans as an array.

    Parameters
    ----------
    name, value
        The argument.
    shapes
        The accepted shapes as text.
    is_shape
        Predicate of the accepted shapes.

    Raises
    ------
    ShapeError
        If it has another shape, or is not boolean.
    """
    flags = array_of(name, value)
    if flags.dtype != bool or not is_shape(flags):
        raise ShapeError(
            f"`{name}` has shape {flags.shape} and dtype {flags.dtype}; expected booleans of "
            f"shape {shapes}."
        )
    return flags


def array_of(name: str, value: Any, where: str = "") -> jax.Array:
    """Return a value as an array.

    Raises
    ------
    DtypeError
        If it is not a JAX type.
    """
    try:
        return to_array(_nested_to_an_end(value))
    # Exceptions raised by signal handlers must pass.
    except (TypeError, ValueError, OverflowError, RuntimeError, Warning) as error:
        raise not_an_array(name, value, where) from error


def numbers_of(name: str, value: Any, where: str = "") -> jax.Array:
    """Return a value as an array of numbers; arrays of random keys are refused.

    Raises
    ------
    DtypeError
        If it is not an array of numbers.
    """
    array = array_of(name, value, where)
    if not isinstance(array.dtype, np.dtype):  # random keys have no NumPy dtype
        raise not_an_array(name, value, where)
    return array


def not_an_array(name: str, value: Any, where: str = "") -> DtypeError:
    """Return the error for a value that is not a JAX type."""
    return DtypeError(
        f"{where}`{name}` is {shown(value)}; expected an array of numbers.{_hint(value)}"
    )


def _nested_to_an_end(value: Any) -> Any:
    if is_endless(value):
        raise TypeError(f"nested deeper than {DEEPEST} levels")
    return value


def _hint(value: Any) -> str:
    """Return the fix for a value that is not an array of numbers: a sentence or nothing."""
    if is_state(value):
        return " Give its `.value`."
    if isinstance(value, np.ma.MaskedArray):
        return " Fill the masked entries first: `array.filled(value)`."
    if hasattr(type(value), "to_numpy"):
        return " Give numbers of one dtype: `.to_numpy('float32')`."
    if isinstance(value, jax.Array) and is_tracer(value):
        return (
            " It has leaked from a transformation (`jit`, `grad`, `vmap`) that has ended: "
            "return it from there."
        )
    if isinstance(value, jax.Array) and not is_there(value):
        return (
            " Its buffer was donated (`donate_argnums`) or deleted (`delete()`): create it again, "
            "or donate a copy."
        )
    return ""


def type_of(value: Any) -> Any:
    """Return shape, dtype and sharding of a value.

    Raises
    ------
    TypeError, ValueError
        If it is not a JAX type, or has been deleted.
    """
    if isinstance(value, jax.Array) and not is_there(value):
        raise TypeError("an array without its numbers")
    if is_integer(value) and not -LARGEST <= value < LARGEST:
        raise OverflowError("no integer of 64 bits")
    return jax.typeof(value)


def check_arrays(name: str, tree: Any, where: str = "") -> None:
    """Refuse a pytree with leaves that are not JAX types.

    Raises
    ------
    DtypeError
        If a leaf is not.
    """
    check_tree(name, tree, where)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_state):
        try:
            type_of(leaf)
        except (TypeError, ValueError, OverflowError):  # integers of more than 64 bits overflow
            raise not_an_array(f"{name}{jax.tree_util.keystr(path)}", leaf, where) from None


def check_tree(name: str, tree: Any, where: str = "") -> None:
    """Refuse a value that is not a pytree: nested in itself, or with keys that have no order.

    Raises
    ------
    DtypeError
        If it is not a pytree.
    """
    try:
        jax.tree.structure(_nested_to_an_end(tree))
    except (TypeError, ValueError) as error:
        raise DtypeError(
            f"{where}`{name}` is {shown(tree)}; expected a pytree: {error}."
        ) from error


def did_you_mean(name: str, known: Collection[str]) -> str:
    """Return a question that suggests the most similar known name; empty if none is similar."""
    near = difflib.get_close_matches(name, known, n=1)
    return "".join(f"did you mean {match!r}? " for match in near)


def wrong_names(given: Collection[str], known: Mapping[str, bool]) -> str | None:
    """Return what is wrong with the names of given options, as the end of a sentence.

    Parameters
    ----------
    given
        Their names.
    known
        Whether an option is needed, by the names of all that are taken.

    Examples
    --------
    >>> wrong_names(["foo"], {"step_fn": True, "mask": False})
    'does not accept `foo` and needs `step_fn`; its options are `step_fn`, `mask`.'
    >>> wrong_names(["step_fn"], {"step_fn": True}) is None
    True
    """
    unknown = [name for name in given if name not in known]
    missing = [name for name, is_needed in known.items() if is_needed and name not in given]
    if not unknown and not missing:
        return None
    faults = ["does not accept " + _listed(unknown)] * bool(unknown)
    faults += ["needs " + _listed(missing)] * bool(missing)
    near = "".join(did_you_mean(name, known) for name in unknown[:1])
    return f"{' and '.join(faults)}; {near}its options are {_listed(known) or 'none'}."


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def named(names: Sequence[str], values: Sequence[Any]) -> str:
    """Format arguments by name, with their types instead of their numbers."""
    count = len(names)
    every = [*names, *(f"argument {index}" for index in range(count, len(values)))]
    pairs = zip(every, values, strict=False)
    return ", ".join(f"`{name}` = {shown(value)}" for name, value in pairs) or "no argument"


def differences(
    found: Mapping[str, Any],
    expected: Mapping[str, Any],
    is_like: Callable[[Any, Any], bool],
) -> list[str]:
    """Return a line for every entry, by name, that is missing, unexpected or different."""
    lines = []
    for name in sorted(found.keys() | expected.keys()):
        if name not in found:
            lines.append(f"\n- '{name}' is missing; expected {shown(expected[name])}")
        elif name not in expected:
            lines.append(f"\n- '{name}' is unexpected: {shown(found[name])}")
        elif not is_like(found[name], expected[name]):
            lines.append(f"\n- '{name}' is {shown(found[name])}; expected {shown(expected[name])}")
    return lines


_FILES = (__file__, *map(inspect.getfile, (jax, brainstate)))
_NOT_THE_USERS = tuple(str(FilePath(file).parent) for file in _FILES)


def level_of_user() -> int:
    """Return the ``stacklevel`` of the first line of user code, for the caller."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame, level = frame.f_back, level + 1
    return level
