"""Rules of linearity: the kind of a result, given the kinds of its operands."""

import enum
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp

from ..._jax import Atom, Equation, bind, is_var, struct_of
from ..._typing import PyTree


class Kind(enum.Enum):
    """The dependence of a variable on the inputs in question."""

    ZERO = "zero, or False, whatever the inputs"
    TRUE = "True, or the number 1 made from it"
    NOT_FINITE = "infinite or NaN, whatever the inputs"
    FREE = "the same for all inputs"
    LINEAR = "proportional to the inputs"
    SIZE = "the absolute value of something proportional"
    OTHER = "anything else"


ZERO, TRUE, NOT_FINITE, FREE, LINEAR, SIZE, OTHER = Kind
INDEPENDENT = frozenset({ZERO, TRUE, NOT_FINITE, FREE})
_FINITE = frozenset({LINEAR, SIZE})

KindRule: TypeAlias = Callable[[Equation, list[Kind]], Kind]
"""``(equation, kinds of its operands) -> kind of its results``."""


def _is_inexact(var: Atom) -> bool:
    return bool(jnp.issubdtype(var.aval.dtype, jnp.inexact))


def unknown(kinds: Iterable[Kind]) -> Kind:
    """Return the kind of an arbitrary function of operands of some kinds."""
    return FREE if INDEPENDENT.issuperset(kinds) else OTHER


def mixed(kinds: Iterable[Kind]) -> Kind:
    """Return the kind of a sum, or of a concatenation of several parts."""
    distinct = set(kinds)
    if len(distinct) == 1:
        return distinct.pop()
    return LINEAR if distinct == {ZERO, LINEAR} else unknown(distinct)


# --- numbers


def told(kind: Kind) -> Kind:
    """Return a kind without the cases that only selections distinguish."""
    return kind if kind in (ZERO, LINEAR) else unknown([kind])


def moved(equation: Equation, kinds: list[Kind]) -> Kind:
    """Return the kind of the elements of all operands, moved."""
    return mixed(kinds)


def moved_by_index(parts: Sequence[int], equation: Equation, kinds: list[Kind]) -> Kind:
    """Return the kind of elements of some operands, moved to positions given by the others."""
    if equation.params.get("update_jaxpr") is not None:  # `.at[...].apply(function)`
        return by_transposition(equation, kinds)
    filled = [FREE] if equation.params.get("fill_value") else []  # a gather out of bounds
    return _of_parts(parts, kinds, *filled)


def added(parts: Sequence[int], equation: Equation, kinds: list[Kind]) -> Kind:
    """Return the kind of a sum of some operands, at positions given by the others."""
    return told(_of_parts(parts, kinds))


def _of_parts(parts: Sequence[int], kinds: list[Kind], *more: Kind) -> Kind:
    is_placed = INDEPENDENT.issuperset(k for i, k in enumerate(kinds) if i not in parts)
    return mixed([*(kinds[i] for i in parts), *more]) if is_placed else OTHER


def nonlinear(_: Equation, kinds: list[Kind]) -> Kind:
    """Return the kind of a function that is linear in none of its operands."""
    return unknown(kinds)


def unchanged(equation: Equation, kinds: list[Kind]) -> Kind:
    """Return the kind of an operand; a number that is rounded to an integer is nonlinear."""
    rounds = not _is_inexact(equation.outvars[0]) and kinds[0] not in INDEPENDENT
    return OTHER if rounds else kinds[0]


def product(equation: Equation, kinds: list[Kind]) -> Kind:
    """Return the kind of a product, or of another bilinear function."""
    if ZERO in kinds:
        return ZERO
    depends = [kind for kind in kinds if kind not in INDEPENDENT]
    return LINEAR if depends == [LINEAR] else unknown(kinds)


def quotient(equation: Equation, kinds: list[Kind]) -> Kind:
    """Return the kind of a quotient."""
    return product(equation, kinds) if kinds[1] in INDEPENDENT - {ZERO} else unknown(kinds)


# --- linearity by JAX's transposition


def by_transposition(equation: Equation, kinds: list[Kind]) -> Kind:
    """Return the kind of the outputs of an operation without a rule.

    JAX can transpose an operation that is linear in some operands with the others fixed. If it can
    transpose with one of those others as well, that one is a summand, and the result is not linear.
    """
    kind = LINEAR if LINEAR in kinds else ZERO
    operands = [i for i, own_kind in enumerate(kinds) if own_kind is kind]
    others = [i for i, own_kind in enumerate(kinds) if own_kind not in (kind, ZERO)]
    if (
        operands
        and INDEPENDENT.issuperset(kinds[i] for i in others)
        and _transposes(equation, operands)
        and not any(_transposes(equation, [*operands, i]) for i in others)
    ):
        return kind
    return unknown(kinds)


def _transposes(equation: Equation, operands: list[int]) -> bool:
    """Test whether JAX can transpose an equation as a function of some operands."""
    if not all(map(_is_inexact, (*equation.outvars, *(equation.invars[i] for i in operands)))):
        return False

    def transposed(*values: jax.Array) -> PyTree:
        def function(*moving: jax.Array) -> list[jax.Array]:
            filled = list(values)
            for index, value in zip(operands, moving, strict=True):
                filled[index] = value
            return bind(equation, filled)

        moving = [values[i] for i in operands]
        results = jax.eval_shape(function, *moving)
        ones = jax.tree.map(lambda result: jnp.ones(result.shape, result.dtype), results)
        return jax.linear_transpose(function, *moving)(ones)

    avals = (atom.aval for atom in equation.invars)
    try:
        jax.eval_shape(transposed, *map(struct_of, avals))
    except Exception:  # a rule that refuses may raise anything; most of them assert
        return False
    return True


# --- truth values, and selections by them


def is_finite(equation: Equation, kinds: list[Kind]) -> Kind:
    """Return the kind of a test, which is true for finite inputs."""
    return TRUE if kinds[0] in _FINITE else unknown(kinds)


def compared(equation: Equation, kinds: list[Kind]) -> Kind:
    """Return the kind of ``a == b``: a finite number equals itself and no infinity."""
    first, second = equation.invars
    is_equal = equation.primitive.name == "eq"
    if is_var(first) and first is second and kinds[0] not in INDEPENDENT:
        return TRUE if is_equal else ZERO
    if NOT_FINITE in kinds and not _FINITE.isdisjoint(kinds):
        return ZERO if is_equal else TRUE
    return unknown(kinds)


def combined(equation: Equation, kinds: list[Kind]) -> Kind:
    """Return the kind of a truth value made from others; bitwise results are unknown."""
    if equation.outvars[0].aval.dtype != bool:
        return unknown(kinds)
    name = equation.primitive.name
    if name == "not":
        return {ZERO: TRUE, TRUE: ZERO}.get(kinds[0], unknown(kinds))
    decisive, other = (ZERO, TRUE) if name in ("and", "reduce_and") else (TRUE, ZERO)
    return decisive if decisive in kinds else other if set(kinds) == {other} else unknown(kinds)


def absolute(equation: Equation, kinds: list[Kind]) -> Kind:
    """Return the kind of an absolute value."""
    return SIZE if kinds[0] in _FINITE else unknown(kinds)


def select(equation: Equation, kinds: list[Kind]) -> Kind:
    """Return the kind of one of several cases."""
    which, *cases = kinds
    if which in (ZERO, TRUE):
        return cases[(ZERO, TRUE).index(which)]
    return mixed(cases) if which in INDEPENDENT else OTHER
