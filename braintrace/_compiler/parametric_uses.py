"""Parameter uses: the equations where parameter-derived values meet data.

Only equations on the way to certain results of a program count.
"""

from collections.abc import Iterator, Sequence
from typing import TypeAlias

from .._etrace_op.mark import reaches_region
from .._etrace_op.registry import is_marked
from .._jax import Atom, Var, is_var
from .._jaxpr.dataflow import BindingTime, binding_times
from .._jaxpr.evaluate import Constants
from .._jaxpr.primitives import CONSTANT, ELEMENTWISE, IN_ORDER
from .._jaxpr.program import Program, carries_derivative

LOOPS = frozenset({"cond", "scan", "while"})
"""Equations with bodies that run several times, or not at all."""

_MOVES = (IN_ORDER - CONSTANT) | {"broadcast_in_dim", "tile", "rev", "transpose"}

Use: TypeAlias = tuple[int, tuple[int, ...]]
"""The index of an equation, and the indices of its parameter-derived operands."""


class ParametricUses:
    """The uses of parameter-derived variables together with data in one program.

    Parameters
    ----------
    program
        The program.
    inputs
        Binding times of its inputs.
    wanted
        Whether each of its results counts.
    in_region
        Whether only the uses in regions of `braintrace.mark` count.

    Attributes
    ----------
    results
        The wanted results that are parameter-derived.
    """

    def __init__(
        self,
        program: Program,
        inputs: Sequence[BindingTime],
        wanted: Sequence[bool],
        in_region: bool,
    ) -> None:
        self.program, self.constants, self._in_region = program, Constants(program), in_region
        self.times = binding_times(program, inputs, is_marked)
        targets = [atom for atom, counts in zip(program.out_atoms, wanted, strict=True) if counts]
        self._ancestors = program.depends_on(targets, (), CONSTANT, carries_derivative)
        self.results = () if in_region else tuple(filter(self.is_parametric, targets))

    def __iter__(self) -> Iterator[Use]:
        """Yield the uses in program order, without those of ETP operations."""
        for index in self.program.making(self._ancestors):
            equation = self.program.equations[index]
            operands = tuple(i for i, a in enumerate(equation.invars) if self.is_parametric(a))
            results = (var for var in equation.outvars if var in self._ancestors)
            is_data = any(self.times[var] is BindingTime.DATA for var in results)
            is_inside = not self._in_region or reaches_region(equation)
            if operands and is_data and is_inside and not is_marked(equation):
                yield index, operands

    def is_parametric(self, atom: Atom) -> bool:
        """Test whether an operand is parameter-derived and has a derivative."""
        return carries_derivative(atom) and self.times.get(atom) is BindingTime.PARAMETER

    def source(self, var: Var) -> Var:
        """Return the variable at which the elementwise mark of another is placed.

        Copies and elementwise functions stay after the mark: the broadcast of a bias over the
        samples, a decay and one minus the decay, which share a mark.
        """
        while (equation := self.program.maker(var)) is not None:
            operands = {atom for atom in equation.invars if self.is_parametric(atom)}
            if len(operands) != 1:
                break
            (before,), name = operands, equation.primitive.name
            is_alike = name in ELEMENTWISE and before.aval.shape == var.aval.shape
            if not is_alike and not (name in _MOVES and len(equation.invars) == 1):
                break
            var = before
        return var


def is_data(uses: ParametricUses, atom: Atom) -> bool:
    """Test whether an operand is data."""
    return is_var(atom) and uses.times.get(atom) is BindingTime.DATA
