"""Linearity analysis: which results of a jaxpr are linear in some of its inputs.

Every variable has one `Kind`, which the dataflow engine carries through calls, loops and branches.
The result of an equation is linear only if a rule proves it (`kinds.py`), or if JAX can transpose
the equation. Adding a value that does not depend on the inputs is not linear, adding zero is.

The analysis assumes finite inputs: a function that replaces NaN or infinity by zero counts as
linear.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ..._jax import AnyJaxpr, Equation, is_tracer, is_var, open_jaxpr
from ..._typing import PyTree
from ..program import program_of
from .constants import Constants
from .flow import Question, flows_of_outputs, flows_of_results
from .kinds import FREE, INDEPENDENT, LINEAR, NOT_FINITE, OTHER, TRUE, ZERO, Kind, mixed, told
from .lattices import PerVariable
from .primitives import entry_of


class Kinds(PerVariable):
    """Dependence on the inputs as a lattice: `ZERO` below all others, `OTHER` above."""

    def of_value(self, value: ArrayLike) -> Kind:
        return _of_value(value)

    def join(self, first: Kind, second: Kind) -> Kind:
        return mixed((first, second))

    def through(self, equation: Equation, operands: Sequence[Kind]) -> list[Kind]:
        return [entry_of(equation).kind(equation, [*operands])] * len(equation.outvars)

    def decided(self, choice: Kind) -> Kind | None:
        return None if choice in INDEPENDENT else OTHER

    def branch(self, choice: Kind) -> int | None:
        return (ZERO, TRUE).index(choice) if choice in (ZERO, TRUE) else None


_QUESTION = Question(Kinds())


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
    return [*map(told, results)]


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
    return [*map(told, flows_of_results(_QUESTION, constants, equation, known))]


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
