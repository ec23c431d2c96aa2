"""Where the elements of a variable come from, carried forward through the program."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from .._jax import Equation, Var, is_var
from .._jaxpr import Program
from .._jaxpr.data_movement import NOWHERE, is_data_movement, moved, moved_operands
from .._jaxpr.dataflow import ELEMENTWISE, MIXED, NONE, Constants, merge
from .transfer import Ids

OpaqueRule: TypeAlias = Callable[[Equation, Sequence[Ids | None]], Sequence[Ids | None]]
"""``(equation, numbers of its operands) -> numbers of its outputs``, ``None`` where unknown."""


def origin_positions(
    program: Program,
    starts: Mapping[Var, Ids],
    constants: Constants,
    last: int | None = None,
    opaque_rule: OpaqueRule | None = None,
) -> dict[Var, Ids]:
    """Carry numbers of elements forward through element-wise equations and data movement.

    Parameters
    ----------
    program
        The program.
    starts
        Variables, and the numbers of their elements.
    constants
        Those of the program.
    last
        Index of the last equation that is looked at; ``None``: all are.
    opaque_rule
        Says it for equations of other kinds.

    Returns
    -------
    dict
        For every variable with elements that come from one number each: those numbers,
        ``NONE`` for the other elements.
    """
    origin: dict[Var, Ids] = dict(starts)
    for index in program.forward(starts, origin, last):
        equation = program.equations[index]
        known = [origin.get(atom) if is_var(atom) else None for atom in equation.invars]
        if equation.primitive.name in ELEMENTWISE and len(equation.outvars) == 1:
            _origin_of_elementwise(equation, known, origin)
        elif is_data_movement(equation):
            _origin_of_movement(equation, known, origin, constants)
        elif opaque_rule is not None:
            found = zip(equation.outvars, opaque_rule(equation, known), strict=True)
            origin.update((var, ids) for var, ids in found if ids is not None)
    return origin


def _origin_of_elementwise(
    equation: Equation, known: Sequence[Ids | None], origin: dict[Var, Ids]
) -> None:
    (out,) = equation.outvars
    full = [ids for ids in known if ids is not None and ids.shape == out.aval.shape]
    if full:
        origin[out] = agreed(full)


def agreed(found: Sequence[Ids]) -> Ids:
    """Return the numbers that operands have in common, or that only some of them have."""
    combined = functools.reduce(merge, found)
    return np.where(combined == MIXED, NONE, combined) if len(found) > 1 else combined


def _origin_of_movement(
    equation: Equation,
    known: Sequence[Ids | None],
    origin: dict[Var, Ids],
    constants: Constants,
) -> None:
    carried = [
        np.full(equation.invars[operand].aval.shape, NONE, np.int32)
        if known[operand] is None
        else np.asarray(known[operand])
        for operand in moved_operands(equation)
    ]
    found = moved(equation, carried)
    if found is not None:
        origin.update(zip(equation.outvars, found, strict=True))
        return
    sources = constants.sources(equation)
    if sources is None:
        return
    elements = np.concatenate([*(ids.ravel() for ids in carried), np.full(1, NONE, np.int32)])
    for out, source in zip(equation.outvars, sources, strict=True):
        origin[out] = elements[np.where(source == NOWHERE, len(elements) - 1, source)]


def least_moved_positions(
    program: Program,
    starts: Mapping[Var, Ids],
    constants: Constants,
    last: int | None,
    opaque_rule: OpaqueRule,
) -> dict[Var, Ids]:
    """Carry numbers of elements forward; of operands that disagree, the least moved one counts.

    In ``v + 0.1 * jnp.roll(v, 1)`` it is ``v``. The arguments are those of `origin_positions`.
    """
    origin: dict[Var, Ids] = dict(starts)
    moves = dict.fromkeys(starts, 0)
    for index in program.forward(starts, origin, last):
        equation = program.equations[index]
        behind = [atom for atom in equation.invars if is_var(atom) and atom in origin]
        count = min((moves[var] for var in behind), default=0)
        known = [origin.get(atom) if is_var(atom) else None for atom in equation.invars]
        if is_data_movement(equation):
            _origin_of_movement(equation, known, origin, constants)
            count += 1
        elif equation.primitive.name in ELEMENTWISE and len(equation.outvars) == 1:
            (out,) = equation.outvars
            full = [var for var in behind if origin[var].shape == out.aval.shape]
            levels = [
                agreed([origin[var] for var in full if moves[var] == level])
                for level in sorted({moves[var] for var in full})
            ]
            if levels:
                origin[out] = functools.reduce(lambda a, b: np.where(a == NONE, b, a), levels)
        else:
            found = zip(equation.outvars, opaque_rule(equation, known), strict=True)
            origin.update((var, ids) for var, ids in found if ids is not None)
        moves.update((var, count) for var in equation.outvars if var in origin)
    return origin


_OPAQUE = ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "cond", "scan", "while")


def opaque_where_shaped_alike(equation: Equation, known: Sequence[Ids | None]) -> list[Ids | None]:
    """Take an output to be at the positions of the operands of its shape.

    A guess, good enough to tell which of two uses of a variable moves an old state: what is
    kept is checked again at the old state itself.
    """
    if equation.primitive.name not in _OPAQUE:
        return [None] * len(equation.outvars)
    found = [
        [ids for ids in known if ids is not None and ids.shape == var.aval.shape]
        for var in equation.outvars
    ]
    return [agreed(alike) if alike else None for alike in found]


def pure_origin(
    program: Program,
    start: Var,
    constants: Constants,
    last: int | None = None,
    opaque_rule: OpaqueRule | None = None,
) -> dict[Var, Ids]:
    """Return the element of ``start`` behind the elements of what is made from it.

    Only variables that are made from it by element-wise operations and data movement (and what
    ``opaque_rule`` allows) are in the result; one that depends on it in any other way as well is
    left out.
    """
    numbers = np.arange(start.aval.size, dtype=np.int32).reshape(start.aval.shape)
    origin = origin_positions(program, {start: numbers}, constants, last, opaque_rule)
    impure: set[Var] = set()
    reached = {start}
    for index in program.forward([start], reached, last):
        equation = program.equations[index]
        spoilt = any(is_var(atom) and atom in impure for atom in equation.invars)
        impure.update(var for var in equation.outvars if spoilt or var not in origin)
        reached.update(equation.outvars)
    return {var: ids for var, ids in origin.items() if var not in impure}
