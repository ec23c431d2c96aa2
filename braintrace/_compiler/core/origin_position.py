"""Where the elements of a variable come from, carried forward through the program."""

import functools
from collections.abc import Mapping, Sequence

import numpy as np

from ..._jax import Equation, Var, is_var
from ..._jaxpr import Program
from ..._jaxpr.data_movement import NOWHERE, is_data_movement, moved, moved_operands
from ..._jaxpr.dataflow import ELEMENTWISE, MIXED, NONE, Constants, merge
from .back_through import Ids


def origin_positions(
    program: Program,
    starts: Mapping[Var, Ids],
    constants: Constants,
    last: int,
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
        Index of the last equation that is looked at.

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
        else:
            found = zip(equation.outvars, _where_shaped_alike(equation, known), strict=True)
            origin.update((var, ids) for var, ids in found if ids is not None)
    return origin


def _origin_of_elementwise(
    equation: Equation, known: Sequence[Ids | None], origin: dict[Var, Ids]
) -> None:
    (out,) = equation.outvars
    full = [ids for ids in known if ids is not None and ids.shape == out.aval.shape]
    if full:
        origin[out] = _agreed(full)


def _agreed(found: Sequence[Ids]) -> Ids:
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
    last: int,
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
                _agreed([origin[var] for var in full if moves[var] == level])
                for level in sorted({moves[var] for var in full})
            ]
            if levels:
                origin[out] = functools.reduce(lambda a, b: np.where(a == NONE, b, a), levels)
        else:
            found = zip(equation.outvars, _where_shaped_alike(equation, known), strict=True)
            origin.update((var, ids) for var, ids in found if ids is not None)
        moves.update((var, count) for var in equation.outvars if var in origin)
    return origin


_OPAQUE = ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "cond", "scan", "while")


def _where_shaped_alike(equation: Equation, known: Sequence[Ids | None]) -> list[Ids | None]:
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
    return [_agreed(alike) if alike else None for alike in found]
