"""Self-describing serialisation of pytrees.

A tree becomes plain data for a JSON file, with its arrays stored separately by name. JSON types
(None, booleans, integers, floats, strings, lists) represent themselves. Every other value is an
object with a key that names its kind.
"""

import collections
import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import saiunit

from .._arguments import DEEPEST, is_quantity, is_state, shown
from .._errors import OptionError
from .._jax import is_there, is_tracer
from .._typing import PyTree
from .units import unit_as_data, unit_of_data

Arrays = dict[str, Any]
"""Arrays of JAX or NumPy by name."""

LONGEST = 2048
"""Maximum bits of an integer: it can be read with every ``sys.set_int_max_str_digits``."""

DTYPES = (
    "bool int2 int4 int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 "
    "complex64 complex128 bfloat16 float4_e2m1fn float8_e3m4 float8_e4m3b11fnuz float8_e4m3fn "
    "float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"
)
"""Names of the dtypes of arrays that can be saved: supported by both JAX and orbax."""

_AS_THEY_ARE = (bool, int, float, str)


def as_data(tree: PyTree, name: str, arrays: Arrays, level: int = 0) -> Any:
    """Return a tree as plain data.

    Parameters
    ----------
    tree
        Arrays, numbers, strings and None, in lists, tuples and dicts.
    name
        Name of the tree: the prefix of the names of its arrays.
    arrays
        Mapping to which its arrays are added.
    level
        Number of enclosing containers.

    Raises
    ------
    OptionError
        If the tree contains anything else.
    """
    if level > DEEPEST:
        raise OptionError(
            f"`{name[:60]}…` is deeper than {DEEPEST} levels of lists, tuples and dicts, or it "
            "contains itself. Give a flatter tree."
        )
    if type(tree) is int and tree.bit_length() > LONGEST:
        raise OptionError(
            f"`{name}` is an integer of {tree.bit_length()} bits; expected at most {LONGEST}. Give "
            "it as a string: `hex` writes it, and `int(text, 16)` reads it."
        )
    if tree is None or type(tree) in _AS_THEY_ARE:
        return tree
    if type(tree) is complex:
        return {"complex": [tree.real, tree.imag]}
    if is_quantity(tree):
        mantissa = as_data(saiunit.get_mantissa(tree), name, arrays, level + 1)
        return {"quantity": mantissa, "unit": unit_as_data(saiunit.get_unit(tree))}
    if isinstance(tree, (jax.Array, np.ndarray, np.generic)):
        return _array_as_data(tree, name, arrays)
    if isinstance(tree, dict):
        return {
            "dict": [
                [
                    as_data(key, f"{name}/key {index}", arrays, level + 1),
                    as_data(value, f"{name}/{_word(key, index)}", arrays, level + 1),
                ]
                for index, (key, value) in enumerate(tree.items())
            ]
        }
    if isinstance(tree, (list, tuple)):
        parts = [as_data(p, f"{name}/{i}", arrays, level + 1) for i, p in enumerate(tree)]
        if type(tree) is list:
            return parts
        if type(tree) is tuple:
            return {"tuple": parts}
        if (fields := getattr(tree, "_fields", None)) is not None:
            kind = f"{type(tree).__module__}:{type(tree).__qualname__}"
            return {"namedtuple": kind, "fields": list(fields), "parts": parts}
    raise OptionError(_refused(tree, name))


def of_data(data: Any, arrays: Mapping[str, Any], level: int = 0) -> PyTree:
    """Return the tree that plain data describe.

    A named tuple has its original class if the program has imported it, and otherwise a new class
    with the same name and fields.

    Parameters
    ----------
    data
        The data.
    arrays
        Its arrays by name, as NumPy arrays.
    level
        Number of enclosing containers.

    Raises
    ------
    ValueError
        If the data do not describe a tree.
    """
    if level > DEEPEST:
        raise ValueError(f"`extra` is deeper than {DEEPEST} levels")
    if isinstance(data, list):
        return [of_data(part, arrays, level + 1) for part in data]
    if not isinstance(data, dict):
        return data
    kind = next((kind for kind in _KINDS if kind in data), None)
    if kind is None:
        raise ValueError(f"`extra` has none of {', '.join(_KINDS)}")
    return _KINDS[kind](data, arrays, level)


def _array_as_data(array: Any, name: str, arrays: Arrays) -> Any:
    whole, kind = array, "jax" if isinstance(array, jax.Array) else "numpy"
    if isinstance(array, np.generic):
        kind, array = "scalar", np.asarray(array)
    is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
    if isinstance(array, (np.ma.MaskedArray, np.matrix)):
        raise OptionError(
            f"`{name}` is a {type(array).__name__}, which contains more than values. Save "
            "`numpy.asarray` of it, or its `data` and its `mask`."
        )
    is_gone = isinstance(array, jax.Array) and not is_there(array)
    if is_gone or is_tracer(array) or not (is_key or array.dtype.name in DTYPES.split()):
        raise OptionError(_refused(whole, name))
    if isinstance(array, np.ndarray):
        array = np.asarray(array.astype(array.dtype.newbyteorder("="), copy=False))
    name = f"extra/{len(arrays)}"
    data: dict[str, Any] = {"array": name, "of": kind}
    if is_key:
        data["keys"] = str(jax.random.key_impl(array))
        array = jax.random.key_data(array)
    arrays[name] = array
    return {**data, "dtype": str(array.dtype), "shape": list(array.shape)}


def _array_of_data(data: Any, arrays: Mapping[str, Any], level: int) -> Any:
    if (array := arrays.get(data["array"])) is None:
        raise ValueError(f"there is no array '{data['array']}'")
    dtype, shape = str(array.dtype), list(array.shape)
    if (dtype, shape) != (data.get("dtype", dtype), data.get("shape", shape)):
        raise ValueError(f"'{data['array']}' has dtype {dtype} and shape {tuple(shape)}")
    if "keys" in data:
        return jax.random.wrap_key_data(jnp.asarray(array), impl=data["keys"])
    if data["of"] != "jax":
        return array if data["of"] == "numpy" else array[()]
    if jax.dtypes.canonicalize_dtype(array.dtype) != array.dtype:
        raise ValueError(f"'{data['array']}' has dtype {dtype}: set `jax_enable_x64` to read it")
    return jnp.asarray(array)


def _namedtuple_of_data(data: Any, arrays: Mapping[str, Any], level: int) -> Any:
    """Return a named tuple; only subclasses of tuple are looked up or called."""
    module, _, name = data["namedtuple"].partition(":")
    fields, parts = tuple(data["fields"]), of_data(data["parts"], arrays, level)
    if len(fields) != len(parts):
        raise ValueError(f"a named tuple of {len(fields)} fields has {len(parts)} parts")
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    is_class = isinstance(found, type) and issubclass(found, tuple)
    if not is_class or getattr(found, "_fields", None) != fields:
        make: Callable[..., Any] = collections.namedtuple
        found = make(name.rpartition(".")[2], fields)
    return tuple.__new__(found, parts)


def _dict_of_data(data: Any, arrays: Mapping[str, Any], level: int) -> Any:
    of = functools.partial(of_data, arrays=arrays, level=level + 1)
    return {of(key): of(value) for key, value in data["dict"]}


def _quantity_of_data(data: Any, arrays: Mapping[str, Any], level: int) -> Any:
    mantissa = of_data(data["quantity"], arrays, level + 1)
    return saiunit.Quantity(mantissa, unit=unit_of_data(data["unit"]))


_KINDS: dict[str, Callable[[Any, Mapping[str, Any], int], Any]] = {
    "complex": lambda data, *_: complex(*data["complex"]),
    "quantity": _quantity_of_data,
    "array": _array_of_data,
    "tuple": lambda data, arrays, level: tuple(of_data(data["tuple"], arrays, level)),
    "namedtuple": _namedtuple_of_data,
    "dict": _dict_of_data,
}


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
