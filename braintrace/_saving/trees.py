"""Pytrees that come back without anybody saying what they look like.

A tree becomes plain data for a JSON file, beside which its arrays are kept by name. What JSON has
(None, booleans, integers, floats, strings, lists) stands for itself, everything else for an object
with a key that says what it is.
"""

import collections
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import saiunit

from .._arguments import is_quantity, is_state, shown
from .._errors import OptionError
from .._jax import is_tracer
from .._typing import PyTree
from .units import unit_as_data, unit_of_data

Arrays = dict[str, Any]
"""Arrays of JAX or NumPy by name."""

_AS_THEY_ARE = (bool, int, float, str)


def as_data(tree: PyTree, name: str, arrays: Arrays) -> Any:
    """Return a tree as plain data.

    Parameters
    ----------
    tree
        Arrays, numbers, strings and None, in lists, tuples and dicts.
    name
        What it is called: the beginning of the names of its arrays.
    arrays
        To which they are added.

    Raises
    ------
    OptionError
        If there is something else in it.
    """
    if tree is None or type(tree) in _AS_THEY_ARE:
        return tree
    if type(tree) is complex:
        return {"complex": [tree.real, tree.imag]}
    if is_quantity(tree):
        mantissa = as_data(saiunit.get_mantissa(tree), name, arrays)
        return {"quantity": mantissa, "unit": unit_as_data(saiunit.get_unit(tree))}
    if isinstance(tree, (jax.Array, np.ndarray, np.generic)):
        return _array_as_data(tree, name, arrays)
    if isinstance(tree, dict):
        pairs = enumerate(tree.items())
        return {
            "dict": [
                [as_data(k, f"{name}/key {i}", arrays), as_data(v, f"{name}/{_word(k, i)}", arrays)]
                for i, (k, v) in pairs
            ]
        }
    if isinstance(tree, (list, tuple)):
        parts = [as_data(part, f"{name}/{i}", arrays) for i, part in enumerate(tree)]
        if type(tree) is list:
            return parts
        if type(tree) is tuple:
            return {"tuple": parts}
        if (fields := getattr(tree, "_fields", None)) is not None:
            kind = f"{type(tree).__module__}:{type(tree).__qualname__}"
            return {"namedtuple": kind, "fields": list(fields), "parts": parts}
    raise OptionError(_refused(tree, name))


def of_data(data: Any, arrays: Mapping[str, Any]) -> PyTree:
    """Return the tree that has become plain data.

    A named tuple is of its class where the program has imported that, and otherwise of one with
    the same name and fields.

    Parameters
    ----------
    data
        The data.
    arrays
        Its arrays by name, as NumPy has them.
    """
    if isinstance(data, list):
        return [of_data(part, arrays) for part in data]
    if not isinstance(data, dict):
        return data
    kind = next(iter(data))
    return _KINDS[kind](data, arrays)


def _array_as_data(array: Any, name: str, arrays: Arrays) -> Any:
    if isinstance(array, np.generic):
        kind, array = "scalar", np.asarray(array)
    else:
        kind = "jax" if isinstance(array, jax.Array) else "numpy"
    is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
    if is_tracer(array) or not (is_key or _is_numeric(array.dtype)):
        raise OptionError(_refused(array, name))
    data = {"array": name, "of": kind}
    if is_key:
        data["keys"] = str(jax.random.key_impl(array))
        array = jax.random.key_data(array)
    while name in arrays:  # two keys of dicts are printed alike
        name = data["array"] = f"{name}'"
    arrays[name] = array
    return data


def _array_of_data(data: Any, arrays: Mapping[str, Any]) -> Any:
    array = arrays[data["array"]]
    if "keys" in data:
        return jax.random.wrap_key_data(jnp.asarray(array), impl=data["keys"])
    if data["of"] == "scalar":
        return array[()]
    return jnp.asarray(array) if data["of"] == "jax" else array


def _namedtuple_of_data(data: Any, arrays: Mapping[str, Any]) -> Any:
    module, _, name = data["namedtuple"].partition(":")
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    fields = tuple(data["fields"])
    if not (isinstance(found, type) and getattr(found, "_fields", None) == fields):
        make: Callable[..., Any] = collections.namedtuple
        found = make(name.rpartition(".")[2], fields)
    return found(*of_data(data["parts"], arrays))


def _dict_of_data(data: Any, arrays: Mapping[str, Any]) -> Any:
    return {of_data(key, arrays): of_data(value, arrays) for key, value in data["dict"]}


_KINDS: dict[str, Callable[[Any, Mapping[str, Any]], Any]] = {
    "complex": lambda data, _: complex(*data["complex"]),
    "quantity": lambda data, arrays: saiunit.Quantity(
        of_data(data["quantity"], arrays), unit=unit_of_data(data["unit"])
    ),
    "array": _array_of_data,
    "tuple": lambda data, arrays: tuple(of_data(data["tuple"], arrays)),
    "namedtuple": _namedtuple_of_data,
    "dict": _dict_of_data,
}


def _is_numeric(dtype: Any) -> bool:
    """Tell whether arrays of a dtype can be kept, as JAX has them."""
    return dtype.itemsize <= 16 and any(jnp.issubdtype(dtype, k) for k in (np.number, np.bool_))


def _word(key: Any, index: int) -> str:
    """Return a key of a dict as a part of a name."""
    if isinstance(key, tuple):
        return "/".join(map(str, key))
    return str(key) if isinstance(key, (str, int)) else f"value {index}"


def _refused(leaf: Any, name: str) -> str:
    hint = ""
    if is_state(leaf):
        hint = " Give its `.value`."
    elif jax.tree.structure(leaf) != jax.tree.structure(0):
        hint = (
            " Give `jax.tree.leaves` of it, and put them back by `jax.tree.unflatten` with the "
            "structure that the resumed program has."
        )
    return (
        f"`{name}` is {shown(leaf)}; expected arrays, numbers, strings and None, in lists, tuples "
        f"and dicts.{hint}"
    )
