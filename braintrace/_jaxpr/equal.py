"""Which variables of a program have the same value.

A step is evaluated more than once (for its outputs, for its Jacobians), and each evaluation
writes its equations anew. XLA merges what is equal within one loop body; what is moved out of
it has to be recognised before.
"""

from collections.abc import Hashable
from typing import Any

import numpy as np

from .._jax import AnyJaxpr, Atom, Equation, Var, call_body, is_var, open_jaxpr
from .program import Program

SAME_VALUE = frozenset({"stop_gradient"})
"""Operations that matter to derivatives alone."""

DRAWS = frozenset({"rng_uniform"})
"""Operations that give something else every time."""


def equal_values(program: Program) -> dict[Var, Var]:
    """Return, for every variable, the first one that is computed in the same way.

    Values are equal, derivatives need not be: a function with a rule of its own is the same as
    another with the same body, and behind a ``stop_gradient`` there is none.

    Examples
    --------
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from braintrace._jaxpr import program_of
    >>> program = program_of(jax.make_jaxpr(lambda x: jnp.sin(x) * jnp.sin(x))(0.0))
    >>> first, second, _ = (equation.outvars[0] for equation in program.equations)
    >>> equal_values(program)[second] is first
    True
    """
    first: dict[Var, Var] = {var: var for var in program.in_vars}
    seen: dict[Hashable, list[Var]] = {}

    def key_of(atom: Atom) -> Hashable:
        return first.setdefault(atom, atom) if is_var(atom) else _literal(atom)

    for equation in program.equations:
        operands = tuple(key_of(atom) for atom in equation.invars)
        if equation.primitive.name in SAME_VALUE and is_var(equation.invars[0]):
            found = [operands[0]]
        elif equation.effects or equation.primitive.name in DRAWS:
            found = equation.outvars
        else:
            found = seen.setdefault((_meaning(equation), operands), equation.outvars)
        first.update(zip(equation.outvars, found, strict=True))
    return first


def _literal(atom: Atom) -> Hashable:
    return "literal", str(atom.aval), np.asarray(atom.val).tobytes()


def _meaning(equation: Equation) -> Hashable:
    """Return what an equation computes from its operands, as something to compare."""
    body = call_body(equation)
    if body is not None:  # its derivative rule is a new function in every evaluation
        return equation.primitive, _body(body)
    return equation.primitive, _comparable(tuple(sorted(equation.params.items())))


def _body(jaxpr: AnyJaxpr) -> Hashable:
    opened, constants = open_jaxpr(jaxpr)
    numbers = {var: i for i, var in enumerate((*opened.constvars, *opened.invars))}

    def key_of(atom: Atom) -> Hashable:
        return numbers[atom] if is_var(atom) else _literal(atom)

    equations = []
    for equation in opened.eqns:
        equations.append((_meaning(equation), tuple(map(key_of, equation.invars))))
        numbers.update((var, len(numbers)) for var in equation.outvars)
    avals = tuple(str(var.aval) for var in opened.invars)
    return avals, tuple(map(id, constants)), tuple(equations), tuple(map(key_of, opened.outvars))


def _comparable(value: Any) -> Hashable:
    if isinstance(value, (tuple, list)):
        return tuple(map(_comparable, value))
    if hasattr(value, "eqns"):
        return _body(value)
    try:
        hash(value)
    except TypeError:
        return id(value)
    return type(value), value
