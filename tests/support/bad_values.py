"""Values that an argument seldom expects, by name: each is made anew for every call."""

import collections
import datetime
import fractions
import functools
import math
import pathlib

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import saiunit as u
from wrong_calls import Frame, deleted, escaped

Pair = collections.namedtuple("Pair", "left right")


def cyclic_list():
    tree = [1.0]
    tree.append(tree)
    return tree


def cyclic_dict():
    tree = {"a": jnp.ones(2)}
    tree["b"] = [tree]
    return tree


def deep():
    tree = []
    for _ in range(5000):
        tree = [tree]
    return tree


def array(shape=(2, 3), dtype=jnp.float32):
    return jnp.ones(shape, dtype)


PLAIN = {
    "None": lambda: None,
    "True": lambda: True,
    "zero": lambda: 0,
    "one": lambda: 1,
    "negative": lambda: -1,
    "half": lambda: 0.5,
    "minus a half": lambda: -0.5,
    "NaN": lambda: math.nan,
    "infinite": lambda: -math.inf,
    "huge": lambda: 2**62,
    "beyond 64 bits": lambda: -(2**70),
    "beyond a float": lambda: 10**400,
    "of 5,000 digits": lambda: 10**5000,
    "complex": lambda: 1j,
    "fraction": lambda: fractions.Fraction(1, 3),
    "NumPy number": lambda: np.float64(0.5),
    "NumPy integer": lambda: np.int8(-3),
    "string": lambda: "abc",
    "empty string": lambda: "",
    "long string": lambda: "x" * 10_000,
    "surrogate": lambda: "a\ud800",
    "bytes": lambda: b"abc",
    "date": lambda: datetime.date(2020, 1, 1),
    "path": lambda: pathlib.Path("nowhere/at/all"),
    "Ellipsis": lambda: ...,
    "slice": lambda: slice(1, 3),
    "object": object,
    "module": lambda: math,
}
CONTAINERS = {
    "list": list,
    "tuple": tuple,
    "dict": dict,
    "set": lambda: {1.0, 2.0},
    "range": lambda: range(3),
    "iterator": lambda: iter([1.0, 2.0]),
    "numbers": lambda: [1.0, 2.0, 3.0],
    "sizes": lambda: (2, -3),
    "large sizes": lambda: (2**40, 2**40),
    "ragged": lambda: [[1.0, 2.0], [3.0]],
    "mixed": lambda: (1, "a", None, jnp.ones(2)),
    "keys of two kinds": lambda: {1: jnp.ones(2), "a": jnp.ones(2)},
    "named tuple": lambda: Pair(jnp.ones(2), "b"),
    "nested": lambda: {"w": {"w": [jnp.ones((2, 3))]}},
    "cyclic list": cyclic_list,
    "cyclic dict": cyclic_dict,
    "deep": deep,
    "frame": Frame,
}
CALLABLES = {
    "class": lambda: int,
    "exception": lambda: ValueError,
    "module class": lambda: brainstate.nn.Module,
    "of none": lambda: lambda: None,
    "of one": lambda: lambda x: x,
    "of any": lambda: lambda *arguments, **options: None,
    "of any, a string": lambda: lambda *arguments, **options: "abc",
    "of any, an array": lambda: lambda *arguments, **options: jnp.ones((7, 5)),
    "partial": lambda: functools.partial(jnp.add, 1.0),
    "jitted": lambda: jax.jit(jnp.sin),
    "built in": lambda: len,
}
ARRAYS = {
    "scalar": lambda: array(()),
    "vector": lambda: array(3),
    "matrix": array,
    "three axes": lambda: array((4, 2, 3)),
    "many axes": lambda: array((1,) * 20),
    "empty": lambda: array((0, 3)),
    "long": lambda: array((4, 2, 5)),
    "of NaN": lambda: jnp.full((4, 2, 3), jnp.nan),
    "half precision": lambda: array((4, 2, 3), jnp.float16),
    "integers": lambda: array((4,), int),
    "booleans": lambda: array((4,), bool),
    "four": lambda: array((4,)),
    "of complex numbers": lambda: array((4, 2, 3), jnp.complex64),
    "float64": lambda: np.ones((4, 2, 3)),
    "large": lambda: np.full((4, 2, 3), 1e300),
    "other byte order": lambda: np.ones((2, 3), ">f4"),
    "of objects": lambda: np.array([[object(), 1], [None, 3]], dtype=object),
    "of strings": lambda: np.array(["a", "b"]),
    "of dates": lambda: np.array(["2020-01-01"], "datetime64[D]"),
    "of records": lambda: np.zeros(4, [("a", "f4"), ("b", "i4")]),
    "masked": lambda: np.ma.masked_array(np.ones((2, 3)), mask=np.eye(2, 3)),
    "NumPy matrix": lambda: np.ones((2, 3)).view(np.matrix),
    "keys": lambda: jax.random.split(jax.random.key(0), 2),
    "shape": lambda: jax.ShapeDtypeStruct((2, 3), jnp.float32),
    "dtype": lambda: np.dtype("int8"),
    "deleted": lambda: deleted(array()),
    "deleted in a list": lambda: [array(), deleted(array())],
    "escaped tracer": lambda: escaped(array()),
    "quantity": lambda: array((4, 2, 3)) * u.mV,
    "number with a unit": lambda: 2.0 * u.ms,
    "deleted quantity": lambda: u.Quantity(deleted(array()), unit=u.mV),
    "unit": lambda: u.mV,
    "State": lambda: brainstate.ParamState(array()),
    "hidden State": lambda: brainstate.HiddenState(array((2, 4))),
    "State of a string": lambda: brainstate.State("abc"),
    "module object": lambda: brainstate.nn.Linear(3, 4),
}
TRACED = {
    "tracer": lambda: array(),
    "tracer of a number": lambda: array(()),
    "tracer of integers": lambda: array((4,), int),
    "tracer of a sequence": lambda: array((4, 2, 3)),
}
"""Given to a call that is made inside `jax.jit`, as arguments of the transformed function."""

VALUES = {**PLAIN, **CONTAINERS, **CALLABLES, **ARRAYS}
NAMES = [*VALUES, *TRACED]
assert len(NAMES) == sum(map(len, (PLAIN, CONTAINERS, CALLABLES, ARRAYS, TRACED)))
