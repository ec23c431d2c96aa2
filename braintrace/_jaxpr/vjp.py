"""Backward dataflow through an equation: forward through its vjp.

JAX derives the vector-Jacobian product of the equation as a program that computes the cotangents of
operands from the cotangents of results. No second table for the backward direction is needed. The
most frequent equations need no program: the cotangent of an elementwise equation is elementwise.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from .._jax import AnyJaxpr, Atom, Equation, bind, trace_to_jaxpr
from .constants import Constants
from .dataflow import Question, flows_of_outputs
from .lattices import Flow, Lattice
from .primitives import CONSTANT, ELEMENTWISE
from .program import carries_derivative, program_of


@dataclasses.dataclass(frozen=True, eq=False)
class Vjp:
    """The vector-Jacobian product of an equation.

    Attributes
    ----------
    jaxpr
        Maps ``(*operands, *cotangents of some results)`` to cotangents of some operands; ``None``
        without a derivative rule.
    operands
        Number of operands.
    inputs, outputs
        The operands and results that have derivatives.
    """

    jaxpr: AnyJaxpr | None
    operands: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    def flows(
        self,
        lattice: Lattice,
        constants: Constants | None,
        atoms: Sequence[Atom],
        cotangents: Sequence[Flow],
    ) -> list[Flow] | None:
        """Return the flows of the operands' cotangents, given the results' cotangents.

        Parameters
        ----------
        lattice
            The lattice.
        constants
            Constants of the program that contains the equation; ``None``: unknown.
        atoms
            The operands, as atoms of that program.
        cotangents
            One flow for each result.

        Returns
        -------
        list or None
            One flow for each operand; ``None`` without a derivative rule.
        """
        flows: list[Flow] = [None] * self.operands
        inputs = [*flows, *(cotangents[k] for k in self.outputs)]
        if not self.inputs or all(flow is None for flow in inputs):
            return flows
        if self.jaxpr is None:
            return None
        if constants is None:
            inside = Constants(program_of(self.jaxpr))
        else:
            inside = constants.body(self.jaxpr, atoms)
        results = flows_of_outputs(Question(lattice), inside, inputs)
        for operand, flow in zip(self.inputs, results, strict=True):
            flows[operand] = flow
        return flows


def vjp_of(equation: Equation) -> Vjp:
    """Return the vjp of an equation; equal equations share one."""
    params = tuple(equation.params.items())
    operands = tuple((atom.aval, carries_derivative(atom)) for atom in equation.invars)
    results = tuple(var.aval for var in equation.outvars)
    key = _Alike(equation.primitive, params, operands, results, equation)
    try:
        hash(key)
    except TypeError:  # parameters of a foreign operation that cannot be compared
        return _vjp_of_alike.__wrapped__(key)
    return _vjp_of_alike(key)


@dataclasses.dataclass(frozen=True)
class _Alike:
    """Cache key of a vjp: equal for equations with the same vjp."""

    primitive: Any
    params: tuple[tuple[str, Any], ...]
    operands: tuple[tuple[Any, bool], ...]
    results: tuple[Any, ...]
    equation: Equation = dataclasses.field(compare=False)


@functools.lru_cache(maxsize=256)
def _vjp_of_alike(key: _Alike) -> Vjp:
    equation, count = key.equation, len(key.equation.invars)
    inputs = tuple(i for i, atom in enumerate(equation.invars) if carries_derivative(atom))
    outputs = tuple(k for k, atom in enumerate(equation.outvars) if carries_derivative(atom))

    def pulled(*values: Any) -> list[jax.Array]:
        def function(*changed: Any) -> list[jax.Array]:
            every = list(values[:count])
            for index, value in zip(inputs, changed, strict=True):
                every[index] = value
            results = bind(equation, every)
            return [results[k] for k in outputs]

        _, pull = jax.vjp(function, *(values[i] for i in inputs))
        return list(pull(list(values[count:])))

    avals = [atom.aval for atom in (*equation.invars, *(equation.outvars[k] for k in outputs))]
    jaxpr = None
    if inputs and outputs:
        # Without a derivative rule, the path is reported, not guessed.
        with contextlib.suppress(NotImplementedError, TypeError, ValueError):
            jaxpr = trace_to_jaxpr(pulled, avals)
    return Vjp(jaxpr, count, inputs, outputs)


def flows_back(
    lattice: Lattice, constants: Constants, equation: Equation, cotangents: Sequence[Flow]
) -> list[Flow] | None:
    """Return the flows of the cotangents of an equation's operands.

    Parameters
    ----------
    lattice
        The lattice.
    constants
        Constants of the program that contains the equation.
    equation
        The equation.
    cotangents
        The flow of the cotangent of each result.

    Returns
    -------
    list or None
        One flow for each operand; ``None`` without a derivative rule.
    """
    name = equation.primitive.name
    if name in CONSTANT:
        return [None] * len(equation.invars)
    if name == "optimization_barrier":  # operand by operand
        return list(cotangents)
    if name not in ELEMENTWISE:
        return vjp_of(equation).flows(lattice, constants, equation.invars, cotangents)
    (flow,) = cotangents
    assert flow is not None
    return [
        _narrowed(lattice, flow, atom.aval.shape) if carries_derivative(atom) else None
        for atom in equation.invars
    ]


def _narrowed(lattice: Lattice, flow: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """Return the cotangent flow of an operand that the equation itself broadcasts."""
    whole = flow.shape[: flow.ndim - lattice.rank]
    if whole == tuple(shape):
        return flow
    added = len(whole) - len(shape)
    axes = [*range(added), *(added + i for i, n in enumerate(shape) if n < whole[added + i])]
    return lattice.over(flow, axes).reshape((*shape, *flow.shape[len(whole) :]))
