"""Position ids through an equation that has a derivative of its own.

What counts for ``D`` and ``Df`` is the derivative, not the value: a surrogate gradient may
carry one where the value carries none, and a custom rule may mix positions where the value does
not. So the vector-Jacobian product of the equation is traced, and every element of the pulled
back cotangent is followed to the element of the output's cotangent that it is made from.
"""

import contextlib
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ..._jax import (
    OWN_BACKWARD,
    AnyJaxpr,
    Equation,
    bind,
    equations_inside,
    struct_of,
    trace_to_jaxpr,
)
from ..._jaxpr import carries_derivative, evaluate_all, inlined, program_of
from ..._jaxpr.dataflow import (
    MIXED,
    NONE,
    Constants,
    Flow,
    Kind,
    Labels,
    Lattice,
    Question,
    everything,
    flows_to,
    joined,
    kinds_of_outputs,
    spread,
)
from ..frontend.canonicalize import spell_out_broadcasts
from .transfer import CUT, Contribution, Ids, join


class Derivatives:
    """The derivatives of equations, each traced once."""

    def __init__(self) -> None:
        self._known: dict[int, Derivative] = {}

    def of(self, equation: Equation) -> "Derivative":
        """Return the derivative of an equation."""
        if id(equation) not in self._known:
            self._known[id(equation)] = Derivative(equation)
        return self._known[id(equation)]


class Derivative:
    """What the derivative of one equation moves where."""

    def __init__(self, equation: Equation) -> None:
        self._equation = equation  # kept, so that its id stays its own

    def back(self, out_ids: Sequence[Ids | None]) -> list[Contribution]:
        """Return what every operand receives; see `transfer`."""
        operands = len(self._equation.invars)
        if self._sources is None:  # nothing can be said about positions
            return [CUT] * operands
        contributions: list[Contribution] = [None] * operands
        for (operand, output), origin in self._sources.items():
            ids = out_ids[output]
            if ids is not None:
                found = CUT if origin is None else _taken(ids, origin)
                contributions[operand] = join(contributions[operand], found)
        return contributions

    def through(self, lattice: Lattice, operands: Sequence[Flow]) -> list[Flow]:
        """Return the flows of the outputs: from the elements that have a derivative there."""
        return [self._of_output(lattice, operands, i) for i in range(len(self._equation.outvars))]

    def _of_output(self, lattice: Lattice, operands: Sequence[Flow], output: int) -> Flow:
        made = self._equation.outvars[output].aval
        numbers = np.arange(made.size, dtype=np.int32).reshape(made.shape)
        given = [numbers if i == output else None for i in range(len(self._equation.outvars))]
        found: list[Flow] = []
        for flow, reached in zip(operands, self.back(given), strict=True):
            if flow is None or reached is None:
                continue
            if isinstance(reached, np.ndarray):
                found.append(lattice.put(lattice.empty(made.shape), reached, flow))
            else:
                one = everything(lattice, [flow])
                found.append(one if one is None else spread(lattice, one, made.shape))
        return joined(lattice, found)

    @functools.cached_property
    def bent(self) -> frozenset[int]:
        """The operands whose cotangent is not proportional to those of the outputs.

        Of a derivative every one is. The backward rule of a ``custom_vjp`` need not be one: it
        may clip what it is given, or add something to it.
        """
        every = (self._equation, *equations_inside(self._equation))
        if not any(inner.primitive.name in OWN_BACKWARD for inner in every) or self._pulled is None:
            return frozenset()
        kinds = [Kind.FREE] * len(self._equation.invars) + [Kind.LINEAR] * len(self._outputs)
        found = zip(self._inputs, kinds_of_outputs(self._pulled, kinds), strict=True)
        return frozenset(i for i, kind in found if kind not in (Kind.ZERO, Kind.LINEAR))

    def is_the_same_for_all(self, operands: Collection[int]) -> bool:
        """Tell whether the cotangents of some operands do not depend on what these hold."""
        if self._pulled is None:
            return False
        program = program_of(self._pulled)
        found = zip(self._inputs, program.out_atoms, strict=True)
        behind = program.depends_on([atom for i, atom in found if i in operands])
        return behind.isdisjoint(program.in_vars[i] for i in operands)

    def along(self, operands: Sequence[int]) -> AnyJaxpr | None:
        """Return the jaxpr of ``(operands, directions of some) -> changes of outputs``, if any.

        It is the transpose of the backward pass, which there is none of where that is bent.
        """
        pulled, outputs = self._pulled, self._outputs
        if pulled is None or self.bent:
            return None
        count = len(self._equation.invars)
        places = [self._inputs.index(operand) for operand in operands]

        def changes(*values: Any) -> list[jax.Array]:
            def pull(*cotangents: Any) -> list[jax.Array]:
                found = evaluate_all(pulled, [*values[:count], *cotangents], {})
                return [found[place] for place in places]

            structs = [struct_of(self._equation.outvars[k].aval) for k in outputs]
            return list(jax.linear_transpose(pull, *structs)(list(values[count:])))

        avals = [atom.aval for atom in self._equation.invars]
        avals += [avals[operand] for operand in operands]
        with contextlib.suppress(Exception):  # a rule that refuses may raise anything
            return trace_to_jaxpr(changes, avals)
        return None

    @functools.cached_property
    def _inputs(self) -> list[int]:
        return [i for i, atom in enumerate(self._equation.invars) if carries_derivative(atom)]

    @functools.cached_property
    def _outputs(self) -> list[int]:
        return [k for k, var in enumerate(self._equation.outvars) if carries_derivative(var)]

    @functools.cached_property
    def _sources(self) -> Mapping[tuple[int, int], Ids | None] | None:
        """By operand and output: the element of its cotangent behind each of the operand's.

        ``None`` where there is no derivative rule.
        """
        if not self._inputs or not self._outputs:
            return {}
        if self._pulled is None:
            return None
        constants = Constants(program_of(self._pulled))
        targets = constants.program.out_atoms
        cotangents = constants.program.in_vars[len(self._equation.invars) :]
        found: dict[tuple[int, int], Ids | None] = {}
        for cotangent, output in zip(cotangents, self._outputs, strict=True):
            numbers = np.arange(cotangent.aval.size, dtype=np.int32).reshape(cotangent.aval.shape)
            every = flows_to(Question(Labels()), constants, {cotangent: numbers}, targets)
            for operand, labels in zip(self._inputs, every, strict=True):
                if labels is not None:
                    found[operand, output] = None if np.any(labels == MIXED) else labels
        return found

    @functools.cached_property
    def _pulled(self) -> AnyJaxpr | None:
        """The jaxpr of ``(operands, cotangents of outputs) -> cotangents of inputs``, if any."""
        equation, inputs, outputs = self._equation, self._inputs, self._outputs
        if not inputs or not outputs:
            return None
        count = len(equation.invars)

        def pulled(*values: Any) -> list[jax.Array]:
            def function(*changed: Any) -> list[jax.Array]:
                operands = list(values[:count])
                for index, value in zip(inputs, changed, strict=True):
                    operands[index] = value
                results = bind(equation, operands)
                return [results[k] for k in outputs]

            _, pull = jax.vjp(function, *(values[i] for i in inputs))
            return list(pull(list(values[count:])))

        avals = [atom.aval for atom in equation.invars]
        avals += [equation.outvars[k].aval for k in outputs]
        # Without a derivative rule the path is reported instead of guessed at.
        with contextlib.suppress(NotImplementedError, TypeError, ValueError):
            return inlined(trace_to_jaxpr(pulled, avals), spell_out_broadcasts)
        return None


def _taken(values: Ids, elements: Ids) -> Ids:
    """Return the values of some elements; ``NONE`` where there is no element."""
    taken = values.ravel()[np.maximum(elements, 0)]
    return np.where(elements == NONE, NONE, taken).astype(np.int32)
