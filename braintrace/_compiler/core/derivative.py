"""Derivatives of equations: linearity of the backward pass, and transposes."""

import contextlib
import functools
from collections.abc import Collection, Sequence
from typing import Any

import jax

from ..._jax import OWN_BACKWARD, AnyJaxpr, Equation, equations_inside, struct_of, trace_to_jaxpr
from ..._jaxpr import evaluate_all, program_of
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

    def along(self, operands: Sequence[int]) -> AnyJaxpr | None:
        """Return the forward derivative with respect to some operands, as a jaxpr.

        The jaxpr maps ``(operands, tangents of some operands)`` to tangents of the outputs. It is
        the transpose of the backward pass. ``None`` if that pass is nonlinear or cannot be
        transposed.
        """
        pulled, outputs = self._vjp.jaxpr, self._vjp.outputs
        if pulled is None or self.nonlinear:
            return None
        count = len(self._equation.invars)
        places = [self._vjp.inputs.index(operand) for operand in operands]

        def changes(*values: Any) -> list[jax.Array]:
            def pull(*cotangents: Any) -> list[jax.Array]:
                results = evaluate_all(pulled, [*values[:count], *cotangents], {})
                return [results[place] for place in places]

            structs = [struct_of(self._equation.outvars[k].aval) for k in outputs]
            return list(jax.linear_transpose(pull, *structs)(list(values[count:])))

        avals = [atom.aval for atom in self._equation.invars]
        avals += [avals[operand] for operand in operands]
        with contextlib.suppress(Exception):  # a rule that refuses may raise anything
            return trace_to_jaxpr(changes, avals)
        return None
