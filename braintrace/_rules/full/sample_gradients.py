"""Per-sample parameter gradients of one step, for one cotangent of the new state per sample.

The contribution of an ETP operation is an outer product if its traces have the form of its
operands. XLA fuses the outer product into its readers, and its norm is computed from its factors,
so it is never written to memory. Other contributions use the general method of chunks.

With the general method for all of them, a stream with UORO takes 2.4 times as long for one sample
of 256 leaky units, 5.4 times for 32, and 1.5 times for a GRU; the temporary memory is 3 to 16 times
as large (CPU, 2026-11-25).
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from ..._core.flat_state import (
    ByState,
    equation_of,
    flat_state_of,
    inputs_of_step,
    places_of,
    step_vjp,
)
from ..._core.jacobian.jacobians import Inputs
from ..._core.resets import over_first_axis
from ..._core.zero import widened
from ..._etrace_op import (
    ETP_PRIMITIVE_SPECS,
    Arrays,
    accumulate,
    get_primitive_spec,
    squared_norms,
)
from ..._graph import ETraceGraph, ParameterUse, Records, Weights
from ..._jax import Equation, struct_of
from ..._jaxpr import evaluate
from .chunk_vjp import back_to_parameters, of_one_step, operand_vars, parameters_behind

Gradients = dict[str, jax.Array]
"""Gradients by the name of a parameter; per sample, ``(samples, *shape)``."""


@dataclasses.dataclass(frozen=True)
class SampleGradients:
    """Gradients of all parameters that a step reads, for every sample.

    Attributes
    ----------
    outer
        The input and the cotangent of the output, samples first, by the key of the use, if the
        gradient is their outer product.
    general
        Contributions of the other uses of parameters.
    """

    outer: dict[str, tuple[jax.Array, jax.Array]]
    general: Gradients

    def over(self, divisors: jax.Array) -> "SampleGradients":
        """Return the gradients divided by one number per sample.

        XLA computes a quotient once, with everything that it depends on, if it is read for all
        entries of a row. A product would be computed again for each entry.
        """

        def quotient(value: jax.Array) -> jax.Array:
            return value / over_first_axis(divisors, value.ndim)

        outer = {key: (x, quotient(y)) for key, (x, y) in self.outer.items()}
        return SampleGradients(outer, jax.tree.map(quotient, self.general))


jax.tree_util.register_dataclass(SampleGradients)


def of_samples(
    graph: ETraceGraph, weights: Weights, records: Records, cotangents: ByState
) -> SampleGradients:
    """Return the gradient of every parameter that the step reads.

    Parameters
    ----------
    graph, weights, records
        The compiled model, its parameters, and one recorded step.
    cotangents
        Cotangents of the new states, with one leading axis of length 1.
    """
    inputs = inputs_of_step(graph, weights, tuple(leaf[0] for leaf in records.inputs))
    pulled = step_vjp(graph, inputs, cotangents)
    products = {use.key: use for use in flat_state_of(graph).uses if _is_outer(graph, use)}
    outer = {}
    for key, use in products.items():
        (place,) = places_of(graph, use)
        x, y = pulled.x[key], pulled.at[place][0]
        outer[key] = (x, y) if _is_batched(graph, use) else (x[None], y[None])
    others = (use for use in flat_state_of(graph).uses if use.key not in products)
    rest = of_one_step(graph, others, inputs, pulled, cotangents)
    return SampleGradients(outer, {name: of_rows[:, 0] for name, of_rows in rest.items()})


def written(graph: ETraceGraph, inputs: Inputs, gradients: SampleGradients) -> Gradients:
    """Return the gradients as arrays, per sample."""
    result = dict(gradients.general)
    for use, x, y in _outer_products(graph, gradients):
        terms = accumulate(*_operation(graph, use), x, y, _operands(graph, use, inputs))
        lead = (slice(None), None) if _is_batched(graph, use) else (None, None)
        own = [term[lead] for term in _in_order(graph, use, terms)]
        for name, value in back_to_parameters(graph, use, inputs, own).items():
            result[name] = result[name] + value[:, 0] if name in result else value[:, 0]
    return result


def norms_of(graph: ETraceGraph, inputs: Inputs, gradients: SampleGradients) -> jax.Array:
    """Return the norm of all gradients, for every sample."""
    known: Gradients = {}
    for use, x, y in _outer_products(graph, gradients):
        x, y = widened((x, y), jnp.float32)  # squares may overflow in half precision
        result = squared_norms(*_operation(graph, use), x, y, _operands(graph, use, inputs))
        if result is not None and _is_alone(graph, use):
            names, own = parameters_behind(graph, use), _in_order(graph, use, result)
            of_atoms = dict(zip(operand_vars(graph, use), own, strict=True))
            known.update({name: of_atoms[var].reshape(-1) for name, var in names.items()})
    others = written(graph, inputs, gradients).items()
    rest = squares(*(own for name, own in others if name not in known))
    return jnp.sqrt(functools.reduce(jnp.add, known.values(), rest))


def squares(*arrays: jax.Array) -> jax.Array:
    """Return the sum of squares of all entries, for every sample.

    It is a matrix product: not every XLA backend sums the entries of a row at memory bandwidth.
    """
    total: Any = 0.0
    for array in arrays:
        row = widened(array.reshape(len(array), -1), jnp.float32)
        product = jnp.einsum("bn,bn->b", row, row.conj(), precision=jax.lax.Precision.HIGHEST)
        total = total + product.real
    return jnp.asarray(total)


def _outer_products(
    graph: ETraceGraph, gradients: SampleGradients
) -> Iterator[tuple[ParameterUse, jax.Array, jax.Array]]:
    """Yield the uses with outer products, and their factors for one step, time first."""
    for use in flat_state_of(graph).uses:
        if use.key in gradients.outer:
            x, y = gradients.outer[use.key]
            yield (use, x[None], y[None]) if _is_batched(graph, use) else (use, x, y)


def _is_alone(graph: ETraceGraph, use: ParameterUse) -> bool:
    """Test whether the operands are parameters that no other use reads."""
    behind, atoms = parameters_behind(graph, use), operand_vars(graph, use)
    others = [other for other in flat_state_of(graph).uses if other is not use]
    shared = {name for other in others for name in parameters_behind(graph, other)}
    is_plain = len(set(atoms)) == len(atoms) and set(atoms) == set(behind.values())
    return is_plain and not shared & behind.keys()


def _operands(graph: ETraceGraph, use: ParameterUse, inputs: Inputs) -> Arrays:
    positions = _positions(equation_of(graph, use))
    atoms = [equation_of(graph, use).invars[position] for position in positions.values()]
    return dict(zip(positions, evaluate(graph.traced.program, atoms, inputs), strict=True))


def _in_order(graph: ETraceGraph, use: ParameterUse, terms: Arrays) -> list[jax.Array]:
    names = {place: name for name, place in _positions(equation_of(graph, use)).items()}
    return [terms[names[place]] for place in use.operands]


def _is_batched(graph: ETraceGraph, use: ParameterUse) -> bool:
    return get_primitive_spec(equation_of(graph, use).primitive).batched


def _operation(graph: ETraceGraph, use: ParameterUse) -> tuple[Any, dict[str, Any]]:
    equation = equation_of(graph, use)
    return equation.primitive, dict(equation.params)


def _is_outer(graph: ETraceGraph, use: ParameterUse) -> bool:
    """Test whether the traces of an operation have, per sample, the form of its operands."""
    if use.kind != "product" or use.equation is None or use.y_axis not in (None, 0):
        return False
    equation, samples = equation_of(graph, use), flat_state_of(graph).samples
    spec = ETP_PRIMITIVE_SPECS.get(equation.primitive)
    if spec is None or spec.contract is not None:
        return False
    lead = equation.outvars[0].aval.shape[:1] if spec.batched else ()
    if lead != ((samples,) if spec.batched or use.y_axis == 0 else ()):
        return False
    positions = _positions(equation)
    weights = {name: struct_of(equation.invars[p].aval) for name, p in positions.items()}
    x, y = (
        jax.ShapeDtypeStruct((1, *atom.aval.shape), atom.aval.dtype)
        for atom in (equation.invars[use.x or 0], equation.outvars[0])
    )
    operation = equation.primitive, dict(equation.params)
    terms = jax.eval_shape(functools.partial(accumulate, *operation), x, y, weights)
    return all(terms[name].shape == (*lead, *weights[name].shape) for name in positions)


def _positions(equation: Equation) -> dict[str, int]:
    return get_primitive_spec(equation.primitive).resolve_trainable_invars(equation.params)
