"""Arguments and options of a learner's methods, and cache keys of the user's functions."""

from __future__ import annotations

import dataclasses
import dis
import functools
import itertools
import operator
import types
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from .._checks import common_length, named
from .._errors import DtypeError, ShapeError
from .._graph.graph import ETraceGraph
from .._graph.traced_model import Batch
from .._jax import Var, is_tracer, leaves_of, own_copy, to_array
from .._typing import PyTree

# --- arguments of one step


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SingleStepData:
    """One time step of one input.

    Parameters
    ----------
    data
        A pytree of arrays as ``update`` takes them.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> SingleStepData(jnp.zeros((2, 3))).data.shape
    (2, 3)
    """

    data: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MultiStepData:
    """A sequence of time steps of one input, time first.

    Parameters
    ----------
    data
        A pytree of arrays with a leading time axis.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> MultiStepData(jnp.zeros((7, 2, 3))).data.shape
    (7, 2, 3)
    """

    data: Any


WRAPPERS = SingleStepData, MultiStepData


def unwrap(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the data of the wrappers."""
    return tuple(each.data if isinstance(each, WRAPPERS) else each for each in arguments)


def first_step(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of one step: wrappers removed, sequences cut to their first step."""
    return unwrap(
        tuple(
            jax.tree.map(lambda leaf: leaf[0], each) if isinstance(each, MultiStepData) else each
            for each in arguments
        )
    )


def read_arguments(graph: ETraceGraph, arguments: tuple[Any, ...]) -> dict[Var, Any]:
    """Return the leaves of the arguments of one step, by input variable.

    Raises
    ------
    ShapeError
        If their structure or shapes differ from the compiled ones.
    DtypeError
        If they cannot be converted to the compiled dtype, as floats to integers.
    """
    traced, values = graph.traced, {}
    leaves, tree = jax.tree.flatten(arguments)
    if tree != traced.argument_tree:
        expected = jax.tree.unflatten(traced.argument_tree, [v.aval for v in traced.argument_vars])
        raise ShapeError(
            f"`update` was compiled for {named(traced.argument_roots, expected)}, and is called "
            f"with {named(traced.argument_roots, arguments)}: the structure or the units differ."
        )
    for name, var, leaf in zip(traced.argument_names, traced.argument_vars, leaves, strict=True):
        value, (shape, dtype) = to_array(leaf), (var.aval.shape, var.aval.dtype)
        if value.shape != shape:
            raise ShapeError(
                f"Argument `{name}` of `update` has shape {value.shape}; the model was compiled "
                f"for {tuple(shape)}. In a sequence, time is the first axis and the batch the "
                "second. One sample needs a batch axis (`x[None]`, and `xs[:, None]` of a "
                "sequence), and another batch size needs `reset_state`."
            )
        if value.dtype != dtype:
            casting: Any = "safe" if jnp.issubdtype(dtype, jnp.integer) else "same_kind"
            if not jnp.can_cast(value.dtype, dtype, casting):
                raise DtypeError(
                    f"Argument `{name}` of `update` has dtype {value.dtype}; the model was "
                    f"compiled for {dtype}, which cannot hold it."
                )
            value = value.astype(dtype)
        values[var] = value
    return values


def example_arguments(graph: ETraceGraph, batch_size: int | None = None) -> Any:
    """Return zeros like the arguments of ``update``, possibly for another batch size."""
    traced, samples = graph.traced, graph.batch.samples
    old = samples if traced.batch_size is None else traced.batch_size

    def zeros(var: Var) -> jax.Array:
        shape = list(var.aval.shape)
        if batch_size is not None and old in shape:
            shape[shape.index(old)] = batch_size
        return jnp.zeros(shape, var.aval.dtype)

    return jax.tree.unflatten(traced.argument_tree, list(map(zeros, traced.argument_vars)))


# --- options of a method


class Options(NamedTuple):
    """The options of a call of a method; see `Learner.etrace_grad`."""

    step_fn: Any = None
    optimizer: Any = None
    update_fn: Any = None
    mask: ArrayLike | None = None
    reset: ArrayLike | None = None
    return_value: bool = False
    progress: bool = False
    log_every: int | None = None
    on_log: Callable[[int, dict[str, Any]], Any] | None = None
    every: int = 1
    window: int | None = None
    reduction: str = "mean"
    chunk_size: int | str | None = "auto"
    memory_budget: int | None = None
    checkpoint: bool = False
    nonfinite: str = "skip"
    has_aux: bool = False
    return_outputs: bool = True

    @property
    def updates(self) -> bool:
        """Whether the parameters are updated after every block of steps."""
        return (self.update_fn, self.optimizer) != (None, None)


STATIC = slice(Options._fields.index("every"), None)
"""Options that a program depends on."""


_TYPE, _SHAPE, _DTYPE = map(operator.attrgetter, ("aval", "shape", "dtype"))
_without_time = operator.itemgetter(slice(1, None))


def of_numbers(sequences: PyTree) -> tuple[PyTree, int, tuple[Hashable, ...]]:
    """Return sequences of arrays, the number of their steps, and the types of a step as a key.

    NumPy arrays are copied, see `own_copy`; tables are converted to them.
    """
    leaves, tree = jax.tree_util.tree_flatten(sequences)
    if all(map(isinstance, leaves, itertools.repeat(jax.Array))):
        types = list(map(_TYPE, leaves))
    else:
        leaves = [x if isinstance(x, jax.Array) else own_copy(np.asarray(x)) for x in leaves]
        sequences, types = jax.tree.unflatten(tree, leaves), list(map(jax.typeof, leaves))
    shapes = list(map(_SHAPE, types))
    key = tree, tuple(map(_without_time, shapes)), tuple(map(_DTYPE, types))
    return sequences, common_length(shapes), key


def weights_of(mask: ArrayLike, steps: int) -> jax.Array:
    """Return a mask as weights of the steps' losses.

    Raises
    ------
    ShapeError
        If it does not have one weight per step.
    """
    weights = jnp.asarray(mask, float)
    if weights.shape != (steps,):
        raise ShapeError(
            f"`mask` has shape {weights.shape}; expected one weight per step, ({steps},). Pass "
            "weights of samples as another sequence, and multiply by them in `step_fn`."
        )
    return weights


def check_flags(name: str, value: Any, batch: Batch, steps: int | None = None) -> jax.Array:
    """Return reset flags, one for all samples or one for each, possibly of several steps.

    Parameters
    ----------
    name, value
        The argument of the user.
    steps
        Length of the sequence; ``None`` without a time axis.

    Raises
    ------
    ShapeError
        If the flags are not boolean, or have another shape.
    """
    time, flags = () if steps is None else (steps,), to_array(value)
    count = len(time)
    if flags.dtype != bool or flags.shape[:count] != time or flags.ndim > count + 1:
        raise ShapeError(
            f"`{name}` has shape {flags.shape} and dtype {flags.dtype}; expected booleans of "
            f"shape {time}, or {(*time, batch.samples)} to reset samples one by one."
        )
    if flags.ndim > count:
        batch.check(f"`{name}` has shape {flags.shape}, with one flag per sample", flags.shape[-1])
        return flags[..., 0] if batch.samples == 1 else flags
    return flags


# --- cache keys of the user's functions

BY_VALUE = (bool, int, float, complex, str, bytes, type(None))


CONTAINERS = (types.FunctionType, types.MethodType, functools.partial, tuple)

by_identity = object.__repr__.__get__
"""Returns a bound method: it is equal for the same object only, and holds the object."""


class FunctionKey(NamedTuple):
    """The cache key of a function, and whether it reads tracers, which nothing may keep."""

    parts: tuple[Hashable, ...]
    reads_tracers: bool


def key_of(*functions: Any) -> FunctionKey:
    """Return the cache key of some functions.

    A function is traced once, as by ``jax.jit``. A lambda that is written in a call is another
    object every time, with the same code: its key consists of its code, of the values that it holds
    (defaults, closed-over values, the object of a method), and of the objects that the global names
    in its code are bound to, which a notebook cell may bind again. Numbers, strings and flags are
    compared by value, tracers of an enclosing transformation by shape and dtype, and all other
    objects by identity.
    """
    key, stack, seen, reads_tracers = list[Hashable](), [*functions], dict[int, int](), False
    while stack:
        value = stack.pop()
        if isinstance(value, BY_VALUE):
            key.append((type(value), repr(value)))  # 0.0 is not -0.0, and NaN is NaN
        elif isinstance(value, types.CodeType | types.MethodWrapperType):
            key.append(value)
        elif isinstance(value, CONTAINERS):
            if id(value) not in seen:  # a function may read itself
                seen[id(value)] = len(seen)
                stack += parts_of(value)
            key.append((type(value), seen[id(value)]))
        elif any(map(is_tracer, leaves := leaves_of(value))):
            found = (str(jax.typeof(x)) if is_tracer(x) else by_identity(x) for x in leaves)
            key.append((type(value), *found))
            reads_tracers = True
        else:
            key.append(by_identity(value))
    return FunctionKey(tuple(key), reads_tracers)


def parts_of(value: Any) -> list[Any]:
    """Return what a function, or a tuple, consists of."""
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, functools.partial):
        return [value.func, value.args, *value.keywords, *value.keywords.values()]
    if isinstance(value, tuple):
        return [len(value), *value]
    cells = [cell.cell_contents for cell in value.__closure__ or ()]
    defaults = *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()
    names = map(value.__globals__.get, global_names(value.__code__))
    read = [x if isinstance(x, BY_VALUE) else by_identity(x) for x in names]
    return [value.__code__, *defaults, *cells, *read]


@functools.lru_cache(maxsize=1000)
def global_names(code: types.CodeType) -> tuple[str, ...]:
    """Return the global names that code reads, and the functions written inside it."""
    reads = "LOAD_GLOBAL", "LOAD_NAME"
    names = [each.argval for each in dis.get_instructions(code) if each.opname in reads]
    for each in code.co_consts:
        names += global_names(each) if isinstance(each, types.CodeType) else ()
    return tuple(dict.fromkeys(names))
