"""Parameter uses: the equations where parameter-derived values meet data.

Only equations on the way to certain results of a program count.
"""

import functools
import operator
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np

from .._etrace_op import is_in_region, reaches_region
from .._etrace_op.registry import is_marked
from .._jax import Atom, Equation, Var, is_var
from .._jaxpr import (
    CONSTANT,
    BindingTime,
    Program,
    bound,
    carries_derivative,
    fixpoint,
    flows_into_bodies,
    flows_of_variables,
    inlined,
    loop_of,
    program_of,
    question_of_taint,
    times_of_operands,
)
from .analysis import Analysis
from .back_through import BROADCAST, numbered
from .products import is_product
from .walk import walk_back

LOOPS = frozenset({"cond", "scan", "while"})
"""Equations with bodies that run several times, or not at all."""

_QUESTION = question_of_taint(is_marked)

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
    """

    def __init__(
        self,
        program: Program,
        inputs: Sequence[BindingTime],
        wanted: Sequence[bool],
        in_region: bool = False,
    ) -> None:
        self.program = program
        self.analysis = Analysis(program)
        times = [bound(var, time) for var, time in zip(program.in_vars, inputs, strict=True)]
        self.times = flows_of_variables(_QUESTION, self.analysis.constants, times)
        self._wanted = wanted
        self._in_region = in_region
        self._ancestors = _ancestors(program, wanted)

    def __iter__(self) -> Iterator[Use]:
        """Yield the uses in program order."""
        for index, equation in enumerate(self.program.equations):
            if not any(self.is_wanted(var) for var in equation.outvars):
                continue
            if self._in_region and not reaches_region(equation):
                continue
            positions = tuple(i for i, a in enumerate(equation.invars) if self.is_parametric(a))
            if positions:
                yield index, positions

    @property
    def wanted(self) -> list[Var]:
        """The results that count and are not literals."""
        pairs = zip(self.program.out_atoms, self._wanted, strict=True)
        return [atom for atom, counts in pairs if counts and is_var(atom)]

    @property
    def results(self) -> list[Var]:
        """The wanted results that are parameter-derived."""
        return [] if self._in_region else [var for var in self.wanted if self.is_parametric(var)]

    @functools.cached_property
    def broadcast(self) -> frozenset[Var]:
        """The variables whose elements reach several elements of a result by a broadcast.

        A walk cannot tell the summands of such a variable apart. The sum may therefore be the
        output of a product.
        """
        walks = (walk_back(self.analysis, {var: numbered(var)}) for var in self.wanted)
        every = (pair for walk in walks for pair in walk.ids.items())
        return frozenset(var for var, ids in every if np.any(ids == BROADCAST))

    def is_parametric(self, atom: Atom) -> bool:
        """Test whether an operand is parameter-derived and has a derivative."""
        return carries_derivative(atom) and self.times.get(atom) is BindingTime.PARAMETER

    def is_wanted(self, var: Var) -> bool:
        """Test whether a variable is data and passes a derivative to a wanted result."""
        return var in self._ancestors and self.times[var] is BindingTime.DATA

    def holds_product(self, index: int) -> bool:
        """Test whether a loop or branch contains a weight product or an ETP operation."""
        equation = self.program.equations[index]
        if equation.primitive.name not in LOOPS:
            return False
        constants, operands = self.analysis.constants, times_of_operands(equation, self.times)
        bodies = flows_into_bodies(_QUESTION, constants, equation, operands)
        wanted = [self.is_wanted(var) for var in equation.outvars]
        in_region = self._in_region and not is_in_region(equation)
        return any(_has_product(equation, *body, wanted, in_region) for body in bodies)


def _ancestors(program: Program, wanted: Sequence[bool]) -> set[Var]:
    """Return the variables that pass a derivative to results that count."""
    targets = [atom for atom, counts in zip(program.out_atoms, wanted, strict=True) if counts]
    return program.depends_on(targets, frozenset(), CONSTANT, carries_derivative)


def _has_product(
    equation: Equation,
    body: object,
    inputs: list[BindingTime],
    wanted: Sequence[bool],
    in_region: bool,
) -> bool:
    program = program_of(inlined(body))
    uses = ParametricUses(program, inputs, _wanted_inside(equation, program, wanted), in_region)
    return any(
        is_marked(program.equations[index])
        or is_product(program.equations[index], positions, uses.times)
        or uses.holds_product(index)
        for index, positions in uses
    )


def _wanted_inside(equation: Equation, program: Program, wanted: Sequence[bool]) -> list[bool]:
    """Return which results of a body count, at any step of a loop."""
    if equation.primitive.name == "cond":
        return [*wanted]
    loop = loop_of(equation, equation.invars)
    first, count = len(loop.fixed), len(loop.carried)

    def one_step_before(now: Sequence[bool]) -> list[bool]:
        ancestors = _ancestors(program, [*now, *wanted[count:]])
        return [var in ancestors for var in program.in_vars[first : first + count]]

    return [*fixpoint(operator.or_, one_step_before, wanted[:count]), *wanted[count:]]
