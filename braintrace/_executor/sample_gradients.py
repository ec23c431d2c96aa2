"""One cotangent of every sample's new state, pulled back through a step to the parameters.

Samples are kept apart. What a marked operation adds is an outer product, which XLA fuses into
whatever reads it, where its traces have the form of its operands; the rest takes the general way of
chunks.
"""

import dataclasses
import functools

import jax
import numpy as np

from .._etrace_op import ETP_PRIMITIVE_SPECS, accumulate, get_primitive_spec
from .._graph import ETraceGraph, ParameterUse, Records, Weights
from .._jax import Equation, struct_of
from .._jaxpr import evaluate
from .jacobians import Inputs
from .whole_chunk import back_to_parameters, pulled_through
from .whole_state import (
    ByState,
    PulledStep,
    equation_of,
    inputs_of_step,
    places_of,
    pulled_back,
    whole_of,
)


def of_samples(
    graph: ETraceGraph, weights: Weights, records: Records, cotangents: ByState
) -> dict[str, jax.Array]:
    """Return the gradient ``(samples, *shape)`` of every parameter that the step reads.

    Parameters
    ----------
    graph, weights, records
        The compiled model, its parameters, and one recorded step.
    cotangents
        Of the new states, with one leading axis of length 1.
    """
    whole = whole_of(graph)
    outer = [use for use in whole.uses if _is_outer(graph, use)]
    others = tuple(use for use in whole.uses if use not in outer)
    gradients: dict[str, jax.Array] = {}
    if others:
        rest = dataclasses.replace(graph, whole=dataclasses.replace(whole, uses=others))
        first = dict.fromkeys(whole.reached, np.zeros(1, int))
        found = pulled_through(rest, weights, records, cotangents, first)
        gradients = {name: of_rows[:, 0] for name, of_rows in found.of_parameters.items()}
    inputs = inputs_of_step(graph, weights, tuple(leaf[0] for leaf in records.inputs))
    pulled = pulled_back(graph, inputs, cotangents)
    for use in outer:
        terms = _outer(graph, use, inputs, pulled)
        for name, term in back_to_parameters(graph, use, inputs, terms).items():
            own = term[:, 0]
            gradients[name] = gradients[name] + own if name in gradients else own
    return gradients


def _outer(
    graph: ETraceGraph, use: ParameterUse, inputs: Inputs, pulled: PulledStep
) -> list[jax.Array]:
    """Return what an operation adds for each of its operands, ``(samples, 1, *shape)``."""
    equation, (place,) = equation_of(graph, use), places_of(graph, use)
    positions = _positions(equation)
    atoms = [equation.invars[position] for position in positions.values()]
    values = evaluate(graph.traced.program, atoms, inputs)
    weights = dict(zip(positions, values, strict=True))
    operation = equation.primitive, dict(equation.params)
    terms = accumulate(*operation, pulled.x[use.key][None], pulled.at[place], weights)
    names = {position: name for name, position in positions.items()}
    own = [terms[names[position]] for position in use.operands]
    return [term[None, None] if use.y_axis is None else term[:, None] for term in own]


def _is_outer(graph: ETraceGraph, use: ParameterUse) -> bool:
    """Tell whether the traces of an operation have, for each sample, the form of its operands."""
    if use.kind != "product" or use.equation is None or use.y_axis not in (None, 0):
        return False
    equation = equation_of(graph, use)
    spec = ETP_PRIMITIVE_SPECS.get(equation.primitive)
    if spec is None or spec.contract is not None or spec.batched != (use.y_axis == 0):
        return False
    positions = _positions(equation)
    weights = {name: struct_of(equation.invars[p].aval) for name, p in positions.items()}
    x, y = (
        jax.ShapeDtypeStruct((1, *atom.aval.shape), atom.aval.dtype)
        for atom in (equation.invars[use.x or 0], equation.outvars[0])
    )
    operation = equation.primitive, dict(equation.params)
    terms = jax.eval_shape(functools.partial(accumulate, *operation), x, y, weights)
    lead = () if use.y_axis is None else (whole_of(graph).samples,)
    return all(terms[name].shape == (*lead, *weights[name].shape) for name in positions)


def _positions(equation: Equation) -> dict[str, int]:
    return get_primitive_spec(equation.primitive).resolve_trainable_invars(equation.params)
