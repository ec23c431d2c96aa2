"""Whether a function is linear in an argument, decided from its jaxpr alone.

Every value is one of four kinds. What an equation makes of them is JAX's to say: an equation is
linear in some operands if `jax.linear_transpose` accepts it as a function of these. It accepts
``x + c`` as well; but there it would also accept a function of both, which it does not where the
other operand is a factor.
"""

import enum
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._jax import bind, call_body, is_var, open_jaxpr, scan_counts


class Kind(enum.Enum):
    """How a value depends on the argument."""

    ZERO = "zero"
    FREE = "does not depend on it"
    LINEAR = "linear"
    OTHER = "anything else"


_JOINED = {
    frozenset({Kind.ZERO, Kind.FREE}): Kind.FREE,
    frozenset({Kind.ZERO, Kind.LINEAR}): Kind.LINEAR,
}

Kinds = list[Kind]

KEEP_INTEGER_ZEROS = frozenset({"convert_element_type", "broadcast_in_dim"})
"""Equations on the way from a zero that is written as an integer; those have no transpose."""


def kinds_of(function: Callable[..., Any], argument: Any, *others: Any) -> Kinds:
    """Return how the leaves of a function's result depend on its first argument.

    Arguments are arrays or ``jax.ShapeDtypeStruct``; nothing is computed.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> x = jnp.ones(2)
    >>> [kind.name for kind in kinds_of(lambda x, c: (c * x[0], x + c, x * x), x, x)]
    ['LINEAR', 'OTHER', 'OTHER']
    """
    jaxpr = jax.make_jaxpr(function)(argument, *others)
    count = len(jax.tree.leaves(argument))
    rest = len(jaxpr.in_avals) - count
    return _of_jaxpr(jaxpr, [Kind.LINEAR] * count + [Kind.FREE] * rest)


def _of_jaxpr(jaxpr: Any, arguments: Sequence[Kind]) -> Kinds:
    body, constants = open_jaxpr(jaxpr)
    variables = [*body.constvars, *body.invars]
    known = [*map(_of_constant, constants), *arguments]
    found = dict(zip(variables, known, strict=True))

    def kind(atom: Any) -> Kind:
        return found[atom] if is_var(atom) else _of_constant(atom.val)

    for equation in body.eqns:
        kinds = _of_equation(equation, [kind(atom) for atom in equation.invars])
        found.update(zip(equation.outvars, kinds, strict=True))
    return [kind(atom) for atom in body.outvars]


def _of_constant(value: Any) -> Kind:
    is_zero = np.ndim(value) == 0 and value == 0
    return Kind.ZERO if is_zero else Kind.FREE


def _of_equation(equation: Any, kinds: Kinds) -> Kinds:
    outputs = len(equation.outvars)
    if Kind.OTHER in kinds:
        return [Kind.OTHER] * outputs
    body = call_body(equation)
    if body is not None:
        return _of_jaxpr(body, kinds)
    if equation.primitive.name in _LOOPS_AND_BRANCHES:
        return _LOOPS_AND_BRANCHES[equation.primitive.name](equation, kinds)
    return [_of_results(equation, kinds)] * outputs


def _of_results(equation: Any, kinds: Kinds) -> Kind:
    numbers = [jnp.issubdtype(atom.aval.dtype, jnp.inexact) for atom in equation.invars]

    def places(wanted: Kind) -> list[int]:
        pairs = enumerate(zip(kinds, numbers, strict=True))
        return [i for i, (kind, is_number) in pairs if kind is wanted and is_number]

    linear, zero, free = map(places, (Kind.LINEAR, Kind.ZERO, Kind.FREE))

    def vanishes_with(some: list[int]) -> bool:
        """Tell whether results are linear in operands, and nothing else is added to them."""
        is_shifted = bool(free) and _is_linear_in(equation, some + free)
        return _is_linear_in(equation, some) and not is_shifted

    if kinds[:1] == [Kind.ZERO] and equation.primitive.name in KEEP_INTEGER_ZEROS:
        return Kind.ZERO
    if Kind.LINEAR in kinds:
        return Kind.LINEAR if vanishes_with(linear) else Kind.OTHER
    return Kind.ZERO if zero and vanishes_with(zero) else Kind.FREE


def _is_linear_in(equation: Any, places: Sequence[int]) -> bool:
    """Tell whether JAX can transpose an equation as a function of some of its operands."""
    results = [var.aval for var in equation.outvars]
    if not all(jnp.issubdtype(aval.dtype, jnp.inexact) for aval in results):
        return False
    structs = [jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype) for a in equation.invars]

    def transposed(operands: list[Any], cotangents: list[Any]) -> Any:
        def of_some(*some: Any) -> list[Any]:
            values = list(operands)
            for place, value in zip(places, some, strict=True):
                values[place] = value
            return bind(equation, values)

        return jax.linear_transpose(of_some, *(structs[i] for i in places))(cotangents)

    try:
        jax.eval_shape(
            transposed, structs, [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in results]
        )
    except Exception:  # JAX has no one error for what is not linear
        return False
    return True


def _of_scan(equation: Any, kinds: Kinds) -> Kinds:
    constants, carried = scan_counts(equation)
    held, rest = kinds[:constants], kinds[constants + carried :]
    carry = kinds[constants : constants + carried]
    while True:
        results = _of_jaxpr(equation.params["jaxpr"], [*held, *carry, *rest])
        after = list(map(_join, carry, results[:carried]))
        if after == carry:
            return [*after, *results[carried:]]
        carry = after


def _of_cond(equation: Any, kinds: Kinds) -> Kinds:
    if kinds[0] is Kind.LINEAR:
        return [Kind.OTHER] * len(equation.outvars)
    branches = [_of_jaxpr(branch, kinds[1:]) for branch in equation.params["branches"]]
    return [functools.reduce(_join, results) for results in zip(*branches, strict=True)]


def _of_while(equation: Any, kinds: Kinds) -> Kinds:
    kind = Kind.OTHER if Kind.LINEAR in kinds else Kind.FREE
    return [kind] * len(equation.outvars)


def _join(left: Kind, right: Kind) -> Kind:
    if left is right:
        return left
    return _JOINED.get(frozenset({left, right}), Kind.OTHER)


_LOOPS_AND_BRANCHES: dict[str, Callable[[Any, Kinds], Kinds]] = {
    "scan": _of_scan,
    "cond": _of_cond,
    "while": _of_while,
}
