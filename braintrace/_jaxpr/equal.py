"""Common subexpressions: variables of a program that have the same value.

A step is evaluated more than once (for its outputs, for its Jacobians), and each evaluation repeats
its equations. XLA merges equal values within one loop body. Values that are hoisted out of the loop
have to be recognised before.
"""

import dataclasses
from collections.abc import Collection, Hashable, Mapping
from typing import Any

import numpy as np

from .._jax import Atom, Equation, Var, call_body, is_var, open_jaxpr, sub_jaxprs
from .primitives import DRAWS, MOVES, names_in
from .program import STOPS_GRADIENT, Program

# Operations that map zeros to zeros; the index of a `select_n` is arbitrary.
KEEPS_ZERO = MOVES.keys() | names_in(
    """
    abs add add_any conj convert_element_type copy copy_p cumsum dot_general imag mul name neg real
    reduce_precision reduce_sum scatter-add select_n sub
    """
)

# Operations that only affect derivatives.
SAME_VALUE = STOPS_GRADIENT | {"with_derivative_of"}


def equal_values(
    program: Program, zeros: Collection[Var] = (), with_derivatives: bool = False
) -> dict[Var, Var]:
    """Return, for every variable, the first one that is computed in the same way.

    Parameters
    ----------
    program
        The program.
    zeros
        Inputs that are zero: adding one changes nothing.
    with_derivatives
        Whether their derivatives are equal as well. If not, a function with a custom derivative
        equals another function with the same body, and a ``stop_gradient`` equals its operand.

    Examples
    --------
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from braintrace._jaxpr.program import program_of
    >>> program = program_of(jax.make_jaxpr(lambda x: jnp.sin(x) * jnp.sin(x))(0.0))
    >>> first, second, _ = (equation.outvars[0] for equation in program.equations)
    >>> equal_values(program)[second] is first
    True
    """
    first: dict[Var, Var] = {var: var for var in (*program.in_vars, *program.constants)}
    seen, zeros = dict[Hashable, list[Var]](), set(zeros)
    for equation in program.equations:
        same = None if with_derivatives else _unchanged(equation, zeros)
        # An equation with bodies may have any custom derivative.
        is_opaque = with_derivatives and any(sub_jaxprs(equation))
        equal = equation.outvars
        if same is not None:
            equal = [first[same]]
        elif not (is_opaque or equation.effects or equation.primitive.name in DRAWS):
            operands = tuple(first[a] if is_var(a) else _literal(a) for a in equation.invars)
            equal = seen.setdefault((_meaning(equation), operands), equal)
        first.update(zip(equation.outvars, equal, strict=True))
    return first


def _unchanged(equation: Equation, zeros: set[Var]) -> Var | None:
    """Return the operand that a result equals; add zero results to ``zeros``."""
    name, operands = equation.primitive.name, equation.invars
    is_zero = [atom in zeros if is_var(atom) else not np.any(atom.val) for atom in operands]
    read = is_zero[1:] if name == "select_n" else is_zero
    if all(read) and name in KEEPS_ZERO | SAME_VALUE:
        zeros.update(equation.outvars)
    if name in SAME_VALUE:
        return operands[0] if is_var(operands[0]) else None
    if name in ("add", "add_any") and zeros.intersection(filter(is_var, operands)):
        other, result = operands[is_zero.index(True) - 1], equation.outvars[0]
        is_same = (other.aval.shape, other.aval.dtype) == (result.aval.shape, result.aval.dtype)
        return other if is_var(other) and is_same else None
    return None


def merged(program: Program, equal: Mapping[Var, Var]) -> Program:
    """Return a program that computes equal values once.

    Parameters
    ----------
    program
        The program.
    equal
        For each variable the first one with the same value; see `equal_values`.
    """

    def first(atom: Atom) -> Atom:
        return equal.get(atom, atom) if is_var(atom) else atom

    equations = tuple(e.replace(invars=[*map(first, e.invars)]) for e in program.equations)
    outputs = tuple(map(first, program.out_atoms))
    return dataclasses.replace(program, out_atoms=outputs, equations=equations)


def _literal(atom: Atom) -> Hashable:
    return "literal", str(atom.aval), np.asarray(atom.val).tobytes()


def _meaning(equation: Equation) -> Hashable:
    """Return a key of what an equation computes."""
    # Each evaluation makes a new function for a derivative rule, so bodies alone are compared.
    body = call_body(equation)
    meaning = tuple(sorted(equation.params.items())) if body is None else body
    return equation.primitive, _comparable(meaning)


def _comparable(value: Any) -> Hashable:
    if isinstance(value, (tuple, list)):
        return type(value), *map(_comparable, value)
    if hasattr(value, "eqns"):
        opened, constants = open_jaxpr(value)
        return str(opened), tuple(map(id, constants))
    try:
        hash(value)
    except TypeError:
        return id(value)
    return type(value), value
