"""Position ids through an equation that has a derivative of its own.

What counts for ``D`` and ``Df`` is the derivative, not the value: a surrogate gradient may
carry one where the value carries none, and a custom rule may mix positions where the value does
not. So the vector-Jacobian product of the equation is traced, and every element of the pulled
back cotangent is followed to the element of the output's cotangent that it is made from.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from .._jax import bind, is_var, trace_to_jaxpr
from .._jaxpr import Program, evaluate_inlined, program_of
from .canonicalize import spell_out_broadcasts
from .home import Constants, pure_origin
from .transfer import CUT, NONE, Contribution, Ids, carries_derivative, join


class Derivatives:
    """What the derivatives of equations move where; each is traced once."""

    def __init__(self) -> None:
        self._sources: dict[int, tuple[Any, _Sources | None]] = {}

    def back(self, equation: Any, out_ids: Sequence[Ids | None]) -> list[Contribution]:
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

    def connects(self, equation: Any, operand: int, output: int) -> bool:
        """Tell whether a derivative leads from an output to an operand."""
        return (operand, output) in (self._of(equation) or {})

    def origin(self, equation: Any, operand: int, output: int) -> Ids | None:
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

    def _of(self, equation: Any) -> "_Sources | None":
        if id(equation) not in self._sources:
            # The equation is kept so that its id stays its own.
            self._sources[id(equation)] = equation, _sources(equation)
        return self._sources[id(equation)][1]


_Sources = dict[tuple[int, int], Ids | None]
"""By operand and output: the element of the output's cotangent behind each of the operand's."""


def _sources(equation: Any) -> _Sources | None:
    inputs, outputs = _differentiable(equation)
    if not inputs or not outputs:
        return {}
    program = _pull_back(equation, inputs, outputs)
    if program is None:
        return None
    constant = Constants(program)
    cotangents = program.in_vars[len(equation.invars) :]
    found: _Sources = {}
    for cotangent, output in zip(cotangents, outputs, strict=True):
        origin = pure_origin(program, cotangent, constant)
        reached = program.dependents_of([cotangent])
        for operand, atom in zip(inputs, program.out_atoms, strict=True):
            if is_var(atom) and atom in reached:
                found[operand, output] = origin.get(atom)
    return found


def _received(origin: Ids | None, ids: Ids | None) -> Contribution:
    if origin is None or ids is None:
        return CUT
    taken = ids.ravel()[np.maximum(origin, 0)]
    return np.where(origin == NONE, NONE, taken).astype(np.int32)


def _differentiable(equation: Any) -> tuple[list[int], list[int]]:
    """Return which operands and which outputs of an equation carry a derivative."""
    inputs = [i for i, atom in enumerate(equation.invars) if carries_derivative(atom)]
    return inputs, [k for k, var in enumerate(equation.outvars) if carries_derivative(var)]


def _pull_back(equation: Any, inputs: Sequence[int], outputs: Sequence[int]) -> Program | None:
    """Return ``(operands, cotangents of outputs) -> cotangents of inputs`` as a program.

    ``None`` where there is no derivative rule: the path is reported instead of guessed at.
    """
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
    try:
        nested = trace_to_jaxpr(pulled, avals)
        flat = trace_to_jaxpr(lambda *v: evaluate_inlined(nested, v, spell_out_broadcasts), avals)
    except (NotImplementedError, TypeError, ValueError):  # no derivative rule
        return None
    return program_of(flat)


NOT_LINEAR = frozenset(
    {
        "abs",
        "clamp",
        "exp",
        "floor",
        "integer_pow",
        "log",
        "logistic",
        "max",
        "min",
        "pow",
        "reduce_max",
        "reduce_min",
        "round",
        "rsqrt",
        "sign",
        "sqrt",
        "square",
        "tanh",
    }
)
PRODUCTS = frozenset({"mul", "dot_general", "conv_general_dilated"})


def is_linear(equation: Any) -> bool:
    """Tell whether what an equation pulls back is proportional to the cotangent it is given.

    Every derivative is. The backward rule of a ``custom_vjp`` need not be: one that clips is not.
    """
    inputs, outputs = _differentiable(equation)
    if not equation.primitive.name.startswith("custom_vjp") or not inputs or not outputs:
        return True
    program = _pull_back(equation, inputs, outputs)
    if program is None:
        return True
    moving = program.dependents_of(program.in_vars[len(equation.invars) :])
    return all(_keeps_linear(inner, moving) for inner in program.equations)


def _keeps_linear(equation: Any, moving: set[Any]) -> bool:
    name = equation.primitive.name
    dependent = [i for i, atom in enumerate(equation.invars) if is_var(atom) and atom in moving]
    if name in PRODUCTS:
        return len(dependent) <= 1
    if name in ("div", "select_n"):
        constant = 1 if name == "div" else 0
        return constant not in dependent
    return not dependent or name not in NOT_LINEAR
