"""Derivatives of equations: linearity of the backward pass, and transposes."""

import functools
from collections.abc import Collection

from ..._jax import OWN_BACKWARD, Equation, equations_inside
from ..._jaxpr import program_of
from ..._jaxpr.dataflow import Kind, Vjp, kinds_of_outputs, vjp_of


class Derivative:
    """The derivative of one equation."""

    def __init__(self, equation: Equation) -> None:
        self._equation = equation  # keeps the equation alive, so that its id stays unique

    @functools.cached_property
    def _vjp(self) -> Vjp:
        return vjp_of(self._equation)

    @functools.cached_property
    def nonlinear(self) -> frozenset[int]:
        """The operands whose cotangent is not linear in those of the outputs.

        A true derivative is always linear. The backward rule of a ``custom_vjp`` may be nonlinear:
        it may clip the cotangent, or add something to it.
        """
        every = (self._equation, *equations_inside(self._equation))
        if not any(inner.primitive.name in OWN_BACKWARD for inner in every):
            return frozenset()
        if self._vjp.jaxpr is None:
            return frozenset()
        kinds = [Kind.FREE] * len(self._equation.invars) + [Kind.LINEAR] * len(self._vjp.outputs)
        pairs = zip(self._vjp.inputs, kinds_of_outputs(self._vjp.jaxpr, kinds), strict=True)
        return frozenset(i for i, kind in pairs if kind not in (Kind.ZERO, Kind.LINEAR))

    def is_the_same_for_all(self, operands: Collection[int]) -> bool:
        """Test whether the cotangents of some operands are independent of their values."""
        if self._vjp.jaxpr is None:
            return False
        program = program_of(self._vjp.jaxpr)
        pairs = zip(self._vjp.inputs, program.out_atoms, strict=True)
        ancestors = program.depends_on([atom for i, atom in pairs if i in operands])
        return ancestors.isdisjoint(program.in_vars[i] for i in operands)
