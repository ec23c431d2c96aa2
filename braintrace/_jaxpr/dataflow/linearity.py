"""Linearity analysis: which results of a jaxpr are linear in some of its inputs.

Every variable has one `Kind`, which the dataflow engine carries through calls, loops and branches.
The result of an equation is linear only if a rule here proves it, or if JAX can transpose the
equation. Adding a value that does not depend on the inputs is not linear, adding zero is.

The analysis assumes finite inputs: a function that replaces NaN or infinity by zero counts as
linear.
"""

import enum
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ..._jax import AnyJaxpr, Atom, Equation, bind, is_tracer, is_var, open_jaxpr, struct_of
from ..._typing import PyTree
from ..data_movement import is_data_movement, moved_operands
from ..program import program_of
from .constants import Constants
from .flow import Question, flows_of_outputs, flows_of_results
from .lattices import PerVariable


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
_INDEPENDENT = frozenset({ZERO, TRUE, NOT_FINITE, FREE})
_FINITE = frozenset({LINEAR, SIZE})


class Kinds(PerVariable):
    """Dependence on the inputs as a lattice: `ZERO` below all others, `OTHER` above."""

    def of_value(self, value: ArrayLike) -> Kind:
        return _of_value(value)

    def join(self, first: Kind, second: Kind) -> Kind:
        return _mixed((first, second))

    def through(self, equation: Equation, operands: Sequence[Kind]) -> list[Kind]:
        if equation.primitive.name == "optimization_barrier":
            return [*operands]
        return [_of_result(equation, [*operands])] * len(equation.outvars)

    def decided(self, choice: Kind) -> Kind | None:
        return None if choice in _INDEPENDENT else OTHER

    def branch(self, choice: Kind) -> int | None:
        return (ZERO, TRUE).index(choice) if choice in (ZERO, TRUE) else None


_QUESTION = Question(Kinds())

_SUMS = {"add": (0, 1), "add_any": (0, 1), "sub": (0, 1), "complex": (0, 1), "scatter-add": (0, 2)}
"""Sums, and the operands that are added; the others are indices."""

_LINEAR = frozenset({"neg", "reduce_sum", "cumsum", "real", "imag", "conj", "reduce_precision"})
_UNCHANGED = frozenset(
    {"braintrace_undivided", "convert_element_type", "copy", "copy_p", "name", "stop_gradient"}
)
_PRODUCTS = frozenset({"mul", "dot_general", "conv_general_dilated"})


def kinds_of(function: Callable[..., PyTree], argument: PyTree, *others: PyTree) -> list[Kind]:
    """Return how the leaves of a function's result depend on its first argument.

    Arguments are pytrees of arrays or of ``jax.ShapeDtypeStruct``; nothing is computed.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from braintrace._jaxpr.dataflow import kinds_of
    >>> x = jnp.ones(2)
    >>> [kind.name for kind in kinds_of(lambda x, c: (c * x[0], x + c, x * x), x, x)]
    ['LINEAR', 'OTHER', 'OTHER']
    """
    closed = jax.make_jaxpr(function)(argument, *others)
    count = len(jax.tree.leaves(argument))
    free = len(open_jaxpr(closed)[0].invars) - count
    return kinds_of_outputs(closed, [LINEAR] * count + [FREE] * free)


def kinds_of_outputs(jaxpr: AnyJaxpr, kinds: Sequence[Kind]) -> list[Kind]:
    """Return the kinds of a jaxpr's outputs: `ZERO`, `FREE`, `LINEAR` or `OTHER`.

    Parameters
    ----------
    jaxpr
        A closed jaxpr, or an open one without constants.
    kinds
        The kinds of its inputs.
    """
    results = flows_of_outputs(_QUESTION, Constants(program_of(jaxpr)), kinds)
    return [*map(_told, results)]


def kinds_of_results(equation: Equation, kinds: Sequence[Kind], constants: Constants) -> list[Kind]:
    """Return the kinds of an equation's outputs, given the kinds of its operands.

    Parameters
    ----------
    equation
        The equation.
    kinds
        The kinds of the operands. A literal has the kind of its value, unless it is given as zero.
    constants
        Constants of the program of the equation.
    """
    pairs = zip(equation.invars, kinds, strict=True)
    known = [k if is_var(a) or k is ZERO else _of_value(a.val) for a, k in pairs]
    return [*map(_told, flows_of_results(_QUESTION, constants, equation, known))]


def _told(kind: Kind) -> Kind:
    return kind if kind in (ZERO, LINEAR) else _unknown([kind])


def _of_value(value: ArrayLike) -> Kind:
    dtype = jnp.result_type(value)
    if is_tracer(value) or jnp.issubdtype(dtype, jax.dtypes.extended):
        return FREE
    array = np.asarray(value)
    if not array.any():
        return ZERO
    if array.dtype.kind == "b" and array.all():
        return TRUE
    is_number = jnp.issubdtype(dtype, jnp.inexact)
    return NOT_FINITE if is_number and not np.isfinite(array).any() else FREE


def _of_result(equation: Equation, kinds: list[Kind]) -> Kind:
    predicate = _PREDICATES.get(equation.primitive.name)
    return _of_numbers(equation, kinds) if predicate is None else predicate(equation, kinds)


def _of_numbers(equation: Equation, kinds: list[Kind]) -> Kind:
    """Return the kind of the result of a single numeric operation."""
    name = equation.primitive.name
    if is_data_movement(equation) or name in _SUMS:
        parts = moved_operands(equation) if is_data_movement(equation) else _SUMS[name]
        where = {kinds[i] for i in range(len(kinds)) if i not in parts}
        filled = [FREE] if equation.params.get("fill_value") else []  # a gather out of bounds
        kind = _mixed([*(kinds[i] for i in parts), *filled]) if where <= _INDEPENDENT else OTHER
        is_kept = is_data_movement(equation) or kind in (ZERO, LINEAR)
        return kind if is_kept else _unknown([kind])
    if name in _UNCHANGED:
        rounds = not _is_inexact(equation.outvars[0]) and kinds[0] not in _INDEPENDENT
        return OTHER if rounds else kinds[0]
    if name in _LINEAR:
        return kinds[0] if kinds[0] in (ZERO, LINEAR) else _unknown(kinds)
    if name in _PRODUCTS:
        return _product(kinds)
    if name == "div":
        return _product(kinds) if kinds[1] in _INDEPENDENT - {ZERO} else _unknown(kinds)
    return _asked(equation, kinds)


def _is_inexact(var: Atom) -> bool:
    return bool(jnp.issubdtype(var.aval.dtype, jnp.inexact))


def _unknown(kinds: Iterable[Kind]) -> Kind:
    return FREE if _INDEPENDENT.issuperset(kinds) else OTHER


def _mixed(kinds: Iterable[Kind]) -> Kind:
    """Return the kind of a sum, or of a concatenation of several parts."""
    distinct = set(kinds)
    if len(distinct) == 1:
        return distinct.pop()
    return LINEAR if distinct == {ZERO, LINEAR} else _unknown(distinct)


def _product(kinds: list[Kind]) -> Kind:
    if ZERO in kinds:
        return ZERO
    depends = [kind for kind in kinds if kind not in _INDEPENDENT]
    return LINEAR if depends == [LINEAR] else _unknown(kinds)


# --- linearity by JAX's transposition


def _asked(equation: Equation, kinds: list[Kind]) -> Kind:
    """Return the kind of the outputs of an operation without a rule.

    JAX can transpose an operation that is linear in some operands with the others fixed. If it can
    transpose with one of those others as well, that one is a summand, and the result is not linear.
    """
    kind = LINEAR if LINEAR in kinds else ZERO
    operands = [i for i, own_kind in enumerate(kinds) if own_kind is kind]
    others = [i for i, own_kind in enumerate(kinds) if own_kind not in (kind, ZERO)]
    if (
        operands
        and _INDEPENDENT.issuperset(kinds[i] for i in others)
        and _transposes(equation, operands)
        and not any(_transposes(equation, [*operands, i]) for i in others)
    ):
        return kind
    return _unknown(kinds)


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


def _is_finite(equation: Equation, kinds: list[Kind]) -> Kind:
    return TRUE if kinds[0] in _FINITE else _unknown(kinds)


def _compared(equation: Equation, kinds: list[Kind]) -> Kind:
    """Return the kind of ``a == b``: a finite number equals itself and no infinity."""
    first, second = equation.invars
    is_equal = equation.primitive.name == "eq"
    if is_var(first) and first is second and kinds[0] not in _INDEPENDENT:
        return TRUE if is_equal else ZERO
    if NOT_FINITE in kinds and not _FINITE.isdisjoint(kinds):
        return ZERO if is_equal else TRUE
    return _unknown(kinds)


def _combined(equation: Equation, kinds: list[Kind]) -> Kind:
    """Return the kind of a truth value made from others; bitwise results are unknown."""
    if equation.outvars[0].aval.dtype != bool:
        return _unknown(kinds)
    name = equation.primitive.name
    if name == "not":
        return {ZERO: TRUE, TRUE: ZERO}.get(kinds[0], _unknown(kinds))
    decisive, other = (ZERO, TRUE) if name in ("and", "reduce_and") else (TRUE, ZERO)
    return decisive if decisive in kinds else other if set(kinds) == {other} else _unknown(kinds)


def _abs(equation: Equation, kinds: list[Kind]) -> Kind:
    return SIZE if kinds[0] in _FINITE else _unknown(kinds)


def _select(equation: Equation, kinds: list[Kind]) -> Kind:
    which, *cases = kinds
    if which in (ZERO, TRUE):
        return cases[(ZERO, TRUE).index(which)]
    return _mixed(cases) if which in _INDEPENDENT else OTHER


_PREDICATES: dict[str, Callable[[Equation, list[Kind]], Kind]] = {
    "is_finite": _is_finite,
    "eq": _compared,
    "ne": _compared,
    "not": _combined,
    "and": _combined,
    "or": _combined,
    "reduce_and": _combined,
    "reduce_or": _combined,
    "abs": _abs,
    "select_n": _select,
}
