"""Positions of what comes out of a function with a derivative of its own, a loop or a branch."""

import functools
from collections.abc import Sequence

import numpy as np

from .._jax import Equation
from .derivative import Derivatives
from .origin_position import OpaqueRule
from .transfer import MIXED, NONE, Ids, merge

_OPAQUE = ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "cond", "scan", "while")


def opaque_where_differentiated(derivatives: Derivatives) -> OpaqueRule:
    """Follow elements through functions with a custom forward derivative."""

    def opaque_rule(equation: Equation, known: Sequence[Ids | None]) -> list[Ids | None]:
        if equation.primitive.name != "custom_jvp_call":
            return [None] * len(equation.outvars)
        return [_origin(derivatives, equation, known, k) for k in range(len(equation.outvars))]

    return opaque_rule


def _origin(
    derivatives: Derivatives, equation: Equation, known: Sequence[Ids | None], output: int
) -> Ids | None:
    found = []
    for operand, ids in enumerate(known):
        if ids is not None and derivatives.connects(equation, operand, output):
            origin = derivatives.origin(equation, operand, output)
            if origin is None:
                return None
            found.append(np.where(origin == NONE, NONE, ids.ravel()[np.maximum(origin, 0)]))
    return _combined(found)


def opaque_where_shaped_alike(equation: Equation, known: Sequence[Ids | None]) -> list[Ids | None]:
    """Take an output to be at the positions of the operands of its shape.

    A guess, good enough to tell which of two uses of a variable moves an old state: what is
    kept is checked again at the old state itself.
    """
    if equation.primitive.name not in _OPAQUE:
        return [None] * len(equation.outvars)
    return [
        _combined([ids for ids in known if ids is not None and ids.shape == var.aval.shape])
        for var in equation.outvars
    ]


def _combined(found: Sequence[Ids]) -> Ids | None:
    if not found:
        return None
    combined = functools.reduce(merge, found)
    return np.where(combined == MIXED, NONE, combined).astype(np.int32)
