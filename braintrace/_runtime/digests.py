"""Digests of values, which are the same in every process."""

import dataclasses
import functools
import hashlib
import inspect
import re
import types
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._jax import AnyJaxpr, is_tracer, open_jaxpr, sub_jaxprs


def digest(*parts: str) -> str:
    """Return a digest of several strings."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def digest_of(value: Any) -> str:
    """Return a digest of a value: of its contents, its code, or its printed form.

    Addresses are left out: they differ from trace to trace.
    """
    if isinstance(value, (np.ndarray, np.generic, jax.Array)):
        return _of_array(value)
    if isinstance(value, (tuple, list)):
        return digest(type(value).__name__, *map(digest_of, value))
    if isinstance(value, frozenset):  # its order differs from process to process
        return digest(*sorted(map(digest_of, value)))
    if isinstance(value, functools.partial):
        return digest_of((value.func, value.args, sorted(value.keywords.items())))
    if isinstance(value, types.CodeType):
        return digest(value.co_code.hex(), str(value.co_names), digest_of(value.co_consts))
    if isinstance(function := inspect.unwrap(value), types.FunctionType):
        return _of_function(function)
    if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
        return digest(_printed(open_jaxpr(value)[0]), *map(digest_of, _constants(value)))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]
        return digest(type(value).__qualname__, digest_of(fields))
    return _printed(value)


def _of_function(function: types.FunctionType) -> str:
    """Return a digest of a function: of its code, and of other values than functions in it."""
    within = [*(function.__defaults__ or ()), *inspect.getclosurevars(function).nonlocals.values()]
    values = [value for value in within if not callable(value)]
    return digest_of((function.__code__, values))


def _constants(jaxpr: AnyJaxpr) -> Iterator[Any]:
    """Yield the constants of a program, and of the bodies of its equations."""
    opened, constants = open_jaxpr(jaxpr)
    yield from constants
    for equation in opened.eqns:
        for body in sub_jaxprs(equation):
            yield from _constants(body)


def _of_array(value: Any) -> str:
    """Return a digest of the contents of an array, or its type where they cannot be read."""
    if is_tracer(value) or jnp.issubdtype(jnp.result_type(value), jax.dtypes.extended):
        return str(jax.typeof(value))
    array = np.asarray(value)
    return hashlib.sha256(f"{array.shape} {array.dtype}".encode() + array.tobytes()).hexdigest()


def _printed(value: Any) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))
