"""Position ids through an equation that has a derivative of its own.

What counts for ``D`` and ``Df`` is the derivative, not the value: a surrogate gradient may
carry one where the value carries none, and a custom rule may mix positions where the value does
not. So the vector-Jacobian product of the equation is traced, and every element of the pulled
back cotangent is followed to the element of the output's cotangent that it is made from.
"""

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from .._jax import (
    OWN_BACKWARD,
    AnyJaxpr,
    Equation,
    bind,
    equations_inside,
    is_var,
    trace_to_jaxpr,
)
from .._jaxpr import Kind, inlined, kinds_of_outputs, program_of
from .canonicalize import spell_out_broadcasts
from .constants import Constants
from .origin_position import pure_origin
from .transfer import CUT, NONE, Contribution, Ids, carries_derivative, join


class Derivatives:
    """What the derivatives of equations move where; each is traced once."""

    def __init__(self) -> None:
        self._pulled: dict[int, tuple[Equation, _PullBack]] = {}
        self._sources: dict[int, _Sources | None] = {}
        self._bent: dict[int, frozenset[int]] = {}

    def back(self, equation: Equation, out_ids: Sequence[Ids | None]) -> list[Contribution]:
        """Return what every operand receives; see `transfer`."""
        outputs = [k for k, ids in enumerate(out_ids) if ids is not None]
        sources = self._of(equation)
        if sources is None:  # No derivative rule: nothing can be said about positions.
            return [CUT] * len(equation.invars)
        contributions: list[Contribution] = [None] * len(equation.invars)
        for (operand, output), origin in sources.items():
            if output in outputs:
                found = _received(origin, out_ids[output])
                contributions[operand] = join(contributions[operand], found)
        return contributions

    def connects(self, equation: Equation, operand: int, output: int) -> bool:
        """Tell whether a derivative leads from an output to an operand."""
        return (operand, output) in (self._of(equation) or {})

    def origin(self, equation: Equation, operand: int, output: int) -> Ids | None:
        """Return which element of an operand each element of an output depends on.

        ``None`` where one depends on several, or an operand's element has several uses.
        """
        source = (self._of(equation) or {}).get((operand, output))
        if source is None:
            return None
        used = source != NONE
        size = equation.outvars[output].aval.size
        origin = np.full(size, NONE, np.int32)
        origin[source[used]] = np.flatnonzero(used)
        if np.any(origin[source[used]] != np.flatnonzero(used)):
            return None
        return origin.reshape(equation.outvars[output].aval.shape)

    def bent(self, equation: Equation) -> frozenset[int]:
        """Return the operands whose cotangent is not proportional to those of the outputs.

        Of a derivative every one is. The backward rule of a ``custom_vjp`` need not be one: it
        may clip what it is given, or add something to it.
        """
        if not _holds_own_backward(equation):
            return frozenset()
        pulled = self._pull_back(equation)
        if id(equation) not in self._bent:
            self._bent[id(equation)] = _bent(equation, pulled)
        return self._bent[id(equation)]

    def _of(self, equation: Equation) -> "_Sources | None":
        pulled = self._pull_back(equation)
        if id(equation) not in self._sources:
            self._sources[id(equation)] = _sources(equation, pulled)
        return self._sources[id(equation)]

    def _pull_back(self, equation: Equation) -> "_PullBack":
        if id(equation) not in self._pulled:
            # The equation is kept so that its id stays its own.
            self._pulled[id(equation)] = equation, _pull_back(equation)
        return self._pulled[id(equation)][1]


@dataclasses.dataclass(frozen=True)
class _PullBack:
    """The vector-Jacobian product of an equation.

    Attributes
    ----------
    inputs, outputs
        Which operands and which outputs carry a derivative.
    closed
        The jaxpr of ``(operands, cotangents of outputs) -> cotangents of inputs``, its calls
        inlined; ``None`` where there is no derivative rule.
    """

    inputs: Sequence[int]
    outputs: Sequence[int]
    closed: AnyJaxpr | None


_Sources = dict[tuple[int, int], Ids | None]
"""By operand and output: the element of the output's cotangent behind each of the operand's."""


def _sources(equation: Equation, pulled: _PullBack) -> _Sources | None:
    inputs, outputs = pulled.inputs, pulled.outputs
    if not inputs or not outputs:
        return {}
    if pulled.closed is None:
        return None
    program = program_of(pulled.closed)
    constants = Constants(program)
    cotangents = program.in_vars[len(equation.invars) :]
    found: _Sources = {}
    for cotangent, output in zip(cotangents, outputs, strict=True):
        origin = pure_origin(program, cotangent, constants)
        reached = program.dependents_of([cotangent])
        for operand, atom in zip(inputs, program.out_atoms, strict=True):
            if is_var(atom) and atom in reached:
                found[operand, output] = origin.get(atom)
    return found


def _bent(equation: Equation, pulled: _PullBack) -> frozenset[int]:
    if pulled.closed is None:
        return frozenset()
    kinds = [Kind.FREE] * len(equation.invars) + [Kind.LINEAR] * len(pulled.outputs)
    found = zip(pulled.inputs, kinds_of_outputs(pulled.closed, kinds), strict=True)
    return frozenset(i for i, kind in found if kind not in (Kind.ZERO, Kind.LINEAR))


def _received(origin: Ids | None, ids: Ids | None) -> Contribution:
    if origin is None or ids is None:
        return CUT
    taken = ids.ravel()[np.maximum(origin, 0)]
    return np.where(origin == NONE, NONE, taken).astype(np.int32)


def _holds_own_backward(equation: Equation) -> bool:
    """Tell whether an equation, or one in a body of it, has a backward pass of the user's."""
    every = (equation, *equations_inside(equation))
    return any(inner.primitive.name in OWN_BACKWARD for inner in every)


def _pull_back(equation: Equation) -> _PullBack:
    inputs = [i for i, atom in enumerate(equation.invars) if carries_derivative(atom)]
    outputs = [k for k, var in enumerate(equation.outvars) if carries_derivative(var)]
    count = len(equation.invars)

    def pulled(*values: Any) -> list[Any]:
        def function(*changed: Any) -> list[Any]:
            operands = list(values[:count])
            for index, value in zip(inputs, changed, strict=True):
                operands[index] = value
            results = bind(equation, operands)
            return [results[k] for k in outputs]

        _, pull = jax.vjp(function, *(values[i] for i in inputs))
        return list(pull(list(values[count:])))

    avals = [atom.aval for atom in equation.invars]
    avals += [equation.outvars[k].aval for k in outputs]
    flat = None
    if inputs and outputs:
        # Without a derivative rule the path is reported instead of guessed at.
        with contextlib.suppress(NotImplementedError, TypeError, ValueError):
            flat = inlined(trace_to_jaxpr(pulled, avals), spell_out_broadcasts)
    return _PullBack(inputs, outputs, flat)
