"""Interface to JAX: the only file with its internals, besides `_jax_kernels`.

JAX keeps its jaxpr classes, its interpreters and a few helpers in modules whose contents change
between releases. The library imports all of them from this file, so a new release of JAX needs
changes here only. Tried with jax 0.8.0, 0.10.2 and 0.12.0.1.
"""

import contextlib
import importlib
import importlib.util
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.core import trace_ctx as _trace_context  # which transformations are active
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr as ClosedJaxpr
from jax.extend.core import Jaxpr, JaxprEqn
from jax.extend.core import Literal as Literal
from jax.extend.core import Primitive as Primitive
from jax.extend.core import Var as Var

try:
    from jax.extend.core import get_opaque_trace_state
except ImportError:  # jax 0.8.0
    from jax.core import get_opaque_trace_state

# Source lines point to user code: exclude the frames of these libraries.
for _package in ("braintrace", "brainstate", "saiunit"):
    _found = importlib.util.find_spec(_package)
    if _found is not None and _found.origin is not None:
        source_info_util.register_exclusion(str(pathlib.Path(_found.origin).parent))

Equation: TypeAlias = JaxprEqn
"""One operation of a jaxpr."""

Atom: TypeAlias = Var | Literal
"""Operand of an equation."""

Aval: TypeAlias = jax.core.ShapedArray | jax.ShapeDtypeStruct
"""Shape and dtype of an array."""

AnyJaxpr: TypeAlias = Jaxpr | ClosedJaxpr
"""Open or closed jaxpr. They are one class from jax 0.11 on; before, a closed one wraps an open
one."""

# --- reading jaxprs


def open_jaxpr(jaxpr: AnyJaxpr) -> tuple[Any, tuple[Any, ...]]:
    """Return the open jaxpr, which has the equations, and its constants."""
    return getattr(jaxpr, "jaxpr", jaxpr), tuple(getattr(jaxpr, "consts", None) or ())


def is_var(atom: Atom) -> bool:
    """Test whether an operand is a variable (and not a literal)."""
    return not isinstance(atom, Literal)


def is_tracer(value: Any) -> bool:
    """Test whether ``value`` is abstract: an array inside a JAX transformation."""
    return isinstance(value, jax.core.Tracer)


def leaves_of(value: Any) -> list[Any]:
    """Return the leaves of a value, or the value itself if it has keys that cannot be sorted."""
    try:
        return list(jax.tree.leaves(value))
    except (TypeError, ValueError):
        return [value]


MOST_COPIED = 2**24
"""Size limit in bytes of arrays that are copied before a program reads them. Samples of a stream
are smaller, and larger data are not written again at each step."""


def own_copy(leaf: Any) -> Any:
    """Return a copy of a NumPy array; all other values unchanged.

    JAX may read a NumPy array after the call has returned. A stream that uses one array for all
    samples would have overwritten it by then.
    """
    is_small = isinstance(leaf, np.ndarray) and leaf.nbytes <= MOST_COPIED
    return leaf.copy() if is_small else leaf


def on_host(array: Any) -> np.ndarray:
    """Return an array as a full NumPy array, gathered from all processes if necessary."""
    if is_whole(array) or array.is_fully_replicated:
        return np.asarray(array)
    from jax.experimental import multihost_utils  # most programs have one process

    return multihost_utils.process_allgather(array, tiled=True)


def is_whole(leaf: Any) -> bool:
    """Test whether this process has all of an array."""
    return not isinstance(leaf, jax.Array) or leaf.is_fully_addressable


def to_array(value: Any) -> jax.Array:
    """Return ``jnp.asarray(value)``, without its 10 µs if the value is an array already.

    If 64-bit types are disabled, 64-bit values are converted to 32 bits.
    """
    if isinstance(value, jax.Array) and (jax.config.jax_enable_x64 or value.dtype.itemsize <= 4):
        return value
    return jnp.asarray(own_copy(value))


def strongly_typed(value: Any) -> Any:
    """Return a pytree of arrays without weak types.

    A weak type alone makes JAX compile a program again, so initial states need the types that a
    step returns.
    """
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.result_type(leaf)), value)


def trace_state() -> Any:
    """Return a value that is equal only within one trace of JAX, or outside of all traces."""
    return get_opaque_trace_state(convention="braintrace")


_TOP_LEVEL = _trace_context.trace


def is_transforming() -> bool:
    """Test whether the caller runs inside a transformation of JAX."""
    return _trace_context.trace is not _TOP_LEVEL


def is_in_body() -> bool:
    """Test whether the caller is traced inside a ``scan``, ``while_loop``, ``cond`` or similar."""
    trace: Any = _trace_context.trace
    while trace is not None:
        frame = getattr(trace, "frame", None)
        if frame is not None and frame.debug_info.traced_for != "jit":
            return True
        trace = getattr(trace, "parent_trace", None)
    return False


_BODY_PARAMS = {
    "jit": "jaxpr",
    "closed_call": "call_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}
TRANSPARENT_CALLS = frozenset({"jit", "closed_call", "remat2", "checkpoint"})
"""Calls that equal their body in values and derivatives."""

OWN_BACKWARD = frozenset({"custom_vjp_call"})
"""Calls with a user-defined backward pass. JAX derives one from a forward rule only if that is
linear."""


OWN_DERIVATIVE = OWN_BACKWARD | {"custom_jvp_call"}
"""Calls whose derivative may differ from the derivative of their body."""


def call_body(equation: Equation) -> AnyJaxpr | None:
    """Return the jaxpr that a call-like equation runs on its operands, or ``None``."""
    name = _BODY_PARAMS.get(equation.primitive.name)
    return None if name is None else equation.params[name]


def sub_jaxprs(equation: Equation) -> Iterator[AnyJaxpr]:
    """Yield every jaxpr among an equation's parameters (bodies of calls, loops, branches)."""
    for value in equation.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if hasattr(item, "eqns"):
                yield item


def equations_inside(equation: Equation) -> Iterator[Equation]:
    """Yield the equations in the bodies of an equation, recursively."""
    for body in sub_jaxprs(equation):
        for inner in open_jaxpr(body)[0].eqns:
            yield inner
            yield from equations_inside(inner)


def scan_counts(equation: Equation) -> tuple[int, int]:
    """Return the numbers of constants and of carried values of a ``scan`` equation."""
    params = equation.params
    if "ft_in" in params:  # jax >= 0.11
        constants, carry, _ = params["ft_in"].unpack()
        return len(constants), len(carry)
    return params["num_consts"], params["num_carry"]


def calls_back(jaxpr: AnyJaxpr) -> bool:
    """Test whether a program calls Python while it runs, which may raise any exception."""
    every = every_equation(jaxpr)
    return any(inner.effects or "callback" in inner.primitive.name for inner in every)


def every_equation(jaxpr: AnyJaxpr) -> Iterator[Equation]:
    """Yield the equations of a program, and those inside of them."""
    body, _ = open_jaxpr(jaxpr)
    return (inner for outer in body.eqns for inner in (outer, *equations_inside(outer)))


# --- running equations


def bind(equation: Equation, values: Sequence[Any]) -> list[Any]:
    """Evaluate one equation on ``values``, with the user's source line."""
    arguments = equation.primitive.get_bind_params(equation.params)
    with at_source_of(equation):
        if isinstance(arguments, tuple):  # jax < 0.9: (functions to call, params)
            functions, params = arguments
            results = equation.primitive.bind(*functions, *values, **params)
        else:
            results = equation.primitive.bind(*values, **arguments)
    return list(results) if equation.primitive.multiple_results else [results]


@contextlib.contextmanager
def at_source_of(equation: Equation) -> Iterator[None]:
    """Attribute the operations bound inside to the user's line and scopes of ``equation``."""
    source = equation.source_info
    scopes = source_info_util.current_name_stack() + source.name_stack
    with source_info_util.user_context(source.traceback, name_stack=scopes):
        yield


_JAX_HOME = str(pathlib.Path(jax.__file__).parent)


def runs_library_code(equation: Equation) -> bool:
    """Test whether a call runs a function of JAX, whose lines are not user code."""
    body, _ = open_jaxpr(call_body(equation))
    return _JAX_HOME in str(getattr(body.debug_info, "func_src_info", ""))


def source_line(equation: Equation) -> str:
    """Return ``file:line (function)`` of the user code that an equation comes from."""
    return str(source_info_util.summarize(equation.source_info))


def scopes_of(equation: Equation) -> str:
    """Return the names of the scopes (`jax.named_scope`) that an equation was bound in."""
    return str(equation.source_info.name_stack)


def struct_of(array: Any) -> jax.ShapeDtypeStruct:
    """Return only the shape and dtype of an array, or of the type of a variable."""
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def trace_to_jaxpr(fun: Callable[..., Any], avals: Sequence[Aval]) -> ClosedJaxpr:
    """Return the closed jaxpr of ``fun`` on arguments described by ``avals``."""
    structs = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=getattr(a, "weak_type", False))
        for a in avals
    ]
    return jax.make_jaxpr(fun)(*structs)
