r"""Diagonal of the Jacobian through one product, added to ``D`` (SnAp-1).

For the product :math:`y = M x` on the path from an old state to a new one, let ``p(u)`` be the
state element that element ``u`` of ``y`` reaches, and ``q(j)`` the one that element ``j`` of ``x``
comes from. The derivative of ``y`` is replaced by

.. math:: dy[u] = \sum_{j: q(j) = p(u)} M[u, j]\, dx[j].

The values do not change. In the path from old states to ``x``, all other products are constant:
paths through two products are truncated.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from ..._errors import PrimitiveError
from ..._etrace_op import (
    ETPPrimitive,
    get_primitive_spec,
    input_derivative,
    is_linear_in_input,
)
from ..._graph import Diagonal, ETraceGraph
from ..._graph.hidden_group import NO_ELEMENT
from ..._jax import Equation, Var, bind, source_line
from ..._jaxpr import Program, Rule
from ..._jaxpr.dataflow.bilinear import joining

Factors: TypeAlias = tuple[jax.Array, tuple[jax.Array, jax.Array] | None]
"""The derivatives ``M[u, j]``. If a complex output is broadcast, also the derivatives of the
broadcast value along the real and along the imaginary unit."""

Passing: TypeAlias = tuple[Diagonal, jax.Array, Factors]
"""A diagonal, its operand, and its factors."""

MOST_SLICES = 8
"""Maximum number of contiguous runs that are sliced; more runs are gathered."""


def check_diagonals(graph: ETraceGraph) -> None:
    """Refuse ETP operations that are not linear in their input.

    Raises
    ------
    PrimitiveError
        Naming the operation and the parameters.
    """
    equations = graph.traced.program.equations
    for group in graph.hidden_groups:
        for diagonal in (d for result in group.diagonals for d in result):
            equation = equations[diagonal.equation]
            if isinstance(equation.primitive, ETPPrimitive) and not is_linear_in_input(equation):
                states = ", ".join(f"'{state.name}'" for state in group.states)
                raise PrimitiveError(
                    f"SnAp keeps the path of each element of {states} to itself through the ETP "
                    f"operation `{equation.primitive}` ({source_line(equation)}), which has to be "
                    "linear in its input or to declare an `input_derivative`. Use `D_RTRL`, "
                    "which truncates this path."
                )


def with_diagonals(
    program: Program,
    overrides: Mapping[Var, Any],
    rules: Mapping[int, Rule],
    passing: Sequence[Passing],
) -> tuple[dict[Var, Any], dict[int, Rule]]:
    """Return the overrides and rules of `evaluate` that add diagonals to the derivative.

    Parameters
    ----------
    program, overrides, rules
        The program, and the arguments of `evaluate` without diagonals.
    passing
        Diagonals, their operands as functions of old states, and their factors.
    """
    values, running = dict(overrides), dict(rules)
    for diagonal, x, factors in passing:
        var = diagonal.var
        if var in values:
            values[var] = _with_derivative(values[var], x, factors, diagonal)
        else:
            index = program.producer[var]
            place = program.equations[index].outvars.index(var)
            running[index] = _rule(running.get(index), place, (diagonal, x, factors))
    return values, running


def _rule(before: Rule | None, place: int, passing: Passing) -> Rule:
    """Return a rule that adds a diagonal to one of the results of another rule."""
    diagonal, x, factors = passing

    def rule(equation: Equation, operands: list[Any]) -> list[Any]:
        result = None if before is None else before(equation, operands)
        results = bind(equation, operands) if result is None else list(result)
        results[place] = _with_derivative(results[place], x, factors, diagonal)
        return results

    return rule


def _with_derivative(
    value: jax.Array, x: jax.Array, factors: Factors, diagonal: Diagonal
) -> jax.Array:
    """Return an unchanged value whose derivative includes a diagonal."""

    def function(value: jax.Array, x: jax.Array, factors: Factors) -> jax.Array:
        return value

    def derivative(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
        (value, _, (products, along)), (changed, dx, _) = primals, tangents
        for factor, inputs in zip(products, diagonal.inputs, strict=True):
            added = factor * taken(dx, inputs)
            if along is not None:
                added = along[0] * jnp.real(added) + along[1] * jnp.imag(added)
            changed = changed + added.astype(value.dtype)
        return value, changed

    through = jax.custom_jvp(function)
    through.defjvp(derivative)
    result: jax.Array = through(value, x, factors)
    return result


def factors_of(diagonal: Diagonal, equation: Equation, operands: Sequence[Any]) -> jax.Array:
    """Return the derivatives ``M[u, j]`` in the shape of a diagonal's ``inputs``.

    Factors that are equal for all samples have a batch axis of length 1.

    Parameters
    ----------
    diagonal, equation
        The diagonal, and its product.
    operands
        Values of the product's operands; the value of the diagonal's operand is not used.
    """
    inputs, outputs = diagonal.inputs, np.broadcast_to(diagonal.outputs, diagonal.inputs.shape)
    there = inputs != NO_ELEMENT
    inputs, outputs = np.where(there, inputs, 0), np.where(there, outputs, 0)
    if isinstance(equation.primitive, ETPPrimitive):
        if get_primitive_spec(equation.primitive).batched:
            x, y = equation.invars[diagonal.operand].aval, equation.outvars[0].aval
            of_x, of_y = x.size // x.shape[0], y.size // y.shape[0]
            inputs, outputs = inputs % of_x, outputs % of_y
        inputs, outputs, there = _of_one_sample(inputs, outputs, there)
        result = input_derivative(equation, operands, inputs, outputs)
    else:
        factor = joining(equation, diagonal.operand, inputs, outputs)
        factor, there = _of_one_sample(factor, there)
        result = operands[1 - diagonal.operand].ravel()[factor]
    return result if there.all() else jnp.where(there, result, jnp.zeros((), result.dtype))


def _of_one_sample(*arrays: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return the first row of arrays ``(ranks, rows, ...)`` if all rows are equal."""
    is_same = arrays[0].ndim > 2 and all(np.all(array == array[:, :1]) for array in arrays)
    return tuple(array[:, :1] for array in arrays) if is_same else arrays


def taken(x: jax.Array, elements: np.ndarray) -> jax.Array:
    """Return elements of an array by their flat indices, zero for `NO_ELEMENT`."""
    rows = x.shape[0] if x.ndim > 1 and elements.shape[:1] == x.shape[:1] else 1
    by_row = elements.reshape(rows, -1)
    width = x.size // rows
    start = width * np.arange(rows)[:, None]
    places = np.where(by_row == NO_ELEMENT, NO_ELEMENT, by_row - start)
    if not np.all(places == places[:1]) or np.any((places < NO_ELEMENT) | (places >= width)):
        places, rows, width = by_row.reshape(1, -1), 1, x.size
    result = _taken_from_rows(x.reshape(rows, width), places[0])
    return result.reshape(elements.shape)


def _taken_from_rows(x: jax.Array, places: np.ndarray) -> jax.Array:
    """Return elements at the same indices of every row."""
    if np.array_equal(places, np.arange(x.shape[1])):
        return x
    is_empty = places == NO_ELEMENT
    goes_on = np.where(is_empty[:-1], is_empty[1:], ~is_empty[1:] & (np.diff(places) == 1))
    runs = np.split(places, np.flatnonzero(~goes_on) + 1)
    if len(runs) <= MOST_SLICES:
        return jnp.concatenate([_run(x, run) for run in runs], axis=1)
    result = jnp.take(x, np.maximum(places, 0), axis=1)
    return jnp.where(places != NO_ELEMENT, result, jnp.zeros((), x.dtype))


def _run(x: jax.Array, run: np.ndarray) -> jax.Array:
    if run[0] == NO_ELEMENT:
        return jnp.zeros((len(x), len(run)), x.dtype)
    return jax.lax.slice_in_dim(x, int(run[0]), int(run[-1]) + 1, axis=1)
