"""Jacobian sparsity: what the new state of a sample depends on, element by element.

Sets of numbers flow forward through the program of a step, with ETP operations replaced by their
implementations (`_jaxpr.dataflow`). They number elements of the first sample's old state, or
entries of a parameter. Where the new state lacks a number, its derivative is zero.

Sets do not pass constant zeros that a value is multiplied by, like those in the mask of a weight,
nor the terms of a product that have such a weight.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from .._graph.flat_state import FlatState, Structure
from .._graph.traced_model import StateLeaf, TracedModel
from .._jax import OWN_DERIVATIVE, Equation, Var, bind, is_var, trace_to_jaxpr
from .._jaxpr.dataflow import Question, flows_from
from .._jaxpr.evaluate import Constants, evaluate, inlined
from .._jaxpr.lattices import Flow, Sets, filled, joined, spread
from .._jaxpr.primitives import IN_ORDER, PLAIN_MOVES
from .._jaxpr.program import program_of
from .analysis import Analysis, through_derivative
from .batch import laid_out
from .flat_state import new_vars

Masks: TypeAlias = dict[Var, np.ndarray]
"""Flags of the elements of variables that are not zero in every step."""

MOST_FLAGS = 2**26
"""Largest number of flags of one variable; numbers that would have more flow part by part."""


def structure_of(traced: TracedModel, analysis: Analysis, flat: FlatState) -> Structure:
    """Return the sparsity pattern of a sample's new state."""
    constants = _plain_step(analysis, flat)
    masks = _masks_of(constants)
    axes = zip(flat.leaves, flat.axes, strict=True)
    samples = (laid_out(leaf.shape, axis, flat.samples) for leaf, axis in axes)
    firsts = [np.flatnonzero(own == 0) for own in samples]
    largest = max((v.aval.size for e in constants.program.equations for v in e.outvars), default=1)
    inputs = dict(zip(analysis.program.in_vars, constants.program.in_vars, strict=True))

    def reached_from(leaf: StateLeaf, elements: np.ndarray) -> np.ndarray:
        parts = np.array_split(elements, -(-elements.size * largest // MOST_FLAGS))
        var = inputs[leaf.in_var]
        every = [_dependence(constants, masks, var, part) for part in parts if part.size]
        of_first = [
            np.concatenate([rows[first] for rows, first in zip(part, firsts, strict=True)])
            for part in every
        ]
        return np.concatenate(of_first, axis=1)

    old = zip(flat.leaves, firsts, strict=True)
    transition = [reached_from(leaf, first) for leaf, first in old]
    of_parameters = {
        leaf.name: reached_from(leaf, np.arange(leaf.in_var.aval.size))
        for leaf in traced.parameters
        if leaf.name in flat.reached
    }
    return Structure(np.concatenate(transition, axis=1), of_parameters)


def _plain_step(analysis: Analysis, flat: FlatState) -> Constants:
    """Return the program from the inputs of a step to its new states, without ETP operations."""
    program, new = analysis.program, new_vars(flat.leaves)
    rules = dict.fromkeys(analysis.roles, _run_plainly)

    def run(*values: Any) -> list[Any]:
        inputs = dict(zip(program.in_vars, values, strict=True))
        return evaluate(program, new, inputs, rules=rules)

    jaxpr = trace_to_jaxpr(run, [var.aval for var in program.in_vars])
    return Constants(program_of(inlined(jaxpr)))


def _run_plainly(equation: Equation, operands: list[Any]) -> list[Any]:
    return [equation.primitive.implementation(*operands, **equation.params)]


def _dependence(
    constants: Constants, masks: Masks, start: Var, elements: np.ndarray
) -> list[np.ndarray]:
    """Return the dependence of each output's elements on some elements of one input."""
    lattice, aval = Sets(len(elements)), start.aval
    numbered = np.zeros((aval.size, len(elements)), bool)
    numbered[elements, np.arange(len(elements))] = True

    def special(equation: Equation, operands: Sequence[Flow]) -> list[Flow] | None:
        if equation.primitive.name in OWN_DERIVATIVE:
            return through_derivative(lattice, equation, operands)
        return _through_mask(lattice, masks, equation, operands)

    starts = {start: numbered.reshape(*aval.shape, -1)}
    flows: Any = flows_from(Question(lattice, True, special), constants, starts)
    atoms = constants.program.out_atoms
    outputs = (filled(lattice, flows.get(a) if is_var(a) else None, a.aval.shape) for a in atoms)
    return [flow.reshape(-1, len(elements)) for flow in outputs]


def _masks_of(constants: Constants) -> Masks:
    """Return where values may be other than zero, of products with constants and their moves."""
    masks: Masks = {}
    for equation in constants.program.equations:
        name, var = equation.primitive.name, equation.outvars[0]
        if name == "mul":
            for atom in equation.invars:
                value = constants.value(atom)
                mask = masks.get(atom) if value is None else value != 0
                if mask is not None and not mask.all():
                    masks[var] = np.broadcast_to(masks.get(var, True) & mask, var.aval.shape)
        elif name in PLAIN_MOVES | IN_ORDER:
            known = [masks.get(atom) for atom in equation.invars if is_var(atom)]
            if len(equation.invars) == len(known) == 1 and known[0] is not None:
                with jax.ensure_compile_time_eval():
                    (moved,) = bind(equation, [known[0].astype(var.aval.dtype)])
                masks[var] = np.asarray(moved) != 0
    return masks


def _through_mask(
    lattice: Sets, masks: Masks, equation: Equation, operands: Sequence[Flow]
) -> list[Flow] | None:
    """Follow a product with known zeros; ``None`` for any other equation."""
    name, var = equation.primitive.name, equation.outvars[0]
    followed = [(index, flow) for index, flow in enumerate(operands) if flow is not None]
    if name == "mul" and var in masks:
        flow = joined(lattice, [spread(lattice, flow, var.aval.shape) for _, flow in followed])
        return [None if flow is None else flow & masks[var][..., None]]
    if name != "dot_general" or len(followed) != 1:
        return None
    ((index, flow),) = followed
    other = equation.invars[1 - index]
    if not is_var(other) or other not in masks:
        return None

    def terms(numbers: jax.Array) -> jax.Array:
        operands = [masks[other], numbers] if index else [numbers, masks[other]]
        pairs = zip(operands, equation.invars, strict=True)
        return bind(equation, [jnp.asarray(v, atom.aval.dtype) for v, atom in pairs])[0]

    with jax.ensure_compile_time_eval():
        return [np.asarray(jax.vmap(terms, -1, -1)(flow)) > 0]
