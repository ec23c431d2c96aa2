"""Contributions of a chunk to the influence matrix, per sample and parameter.

A use of parameters is either a product, for which the inputs and cotangents of all steps are
multiplied at once, or it is accumulated step by step (see `ParameterUse`). Operations between the
parameters and the operands of the use (a mask, a transpose) are the same in all steps, and are
pulled back through once; at every step, if they read a value of the step (a time step).
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._core.flat_state import (
    ByState,
    Place,
    StepVJP,
    equation_of,
    flat_state_of,
    inputs_of_step,
    places_of,
    step_vjp,
    to_rows,
    unit_rows,
)
from .._core.gradient import Inputs
from .._core.sites import flags_along
from .._core.step_program import scan_records
from .._graph.flat_state import FlatState, ParameterUse
from .._graph.graph import ETraceGraph
from .._graph.method import Chunk
from .._jax import Var, bind
from .._jaxpr.program import evaluate

Sums = dict[str, list[jax.Array]]
"""For every use that is not a product, an array for each of its operands."""


def chunk_vjp(chunk: Chunk, cotangents: ByState) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Pull cotangents of the states after a recorded chunk back through its steps.

    Parameters
    ----------
    chunk, cotangents
        Cotangents of the states after the chunk, with one leading axis: the rows.

    Returns
    -------
    before
        Cotangents of the states before the chunk, ``(rows, samples, n)``.
    of_parameters
        Contributions of the chunk's steps to the derivatives ``(samples, rows, *shape)`` with
        respect to parameters, by name.
    """
    graph, weights, records = chunk
    before, of_parameters, sums, at, x = _through_steps(chunk, cotangents)
    flat = flat_state_of(graph)
    fixed = inputs_of_step(graph, weights, [leaf[0] for leaf in records.inputs])
    for use in flat.uses:
        if use.varies:
            continue
        if use.kind == "product":
            (place,) = places_of(graph, use)
            operands = of_product(graph, use, fixed, x[use.key], at[place])
        else:
            operands = _of_sums(use, sums[use.key], flat.samples)
        of_parameters = _added(of_parameters, back_to_parameters(graph, use, fixed, operands))
    return to_rows(flat, before), of_parameters


def _added(first: dict[str, jax.Array], second: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return first | {k: first[k] + v if k in first else v for k, v in second.items()}


def jacobians(chunk: Chunk) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return the derivatives of the states after a recorded chunk, samples first.

    The first array ``(samples, n, n)`` is by the states before it, the others ``(samples, n,
    *shape)`` are by parameters in its steps.
    """
    rows, of_parameters = chunk_vjp(chunk, unit_rows(flat_state_of(chunk.graph)))
    return jnp.moveaxis(rows, 1, 0), of_parameters


def _through_steps(
    chunk: Chunk, cotangents: ByState
) -> tuple[ByState, dict[str, jax.Array], Sums, dict[Place, jax.Array], dict[str, jax.Array]]:
    """Return cotangents before the chunk, by parameters of varying uses, and of the others.

    The latter are the sums, and cotangents and inputs of products.
    """
    graph, weights, records = chunk
    flat = flat_state_of(graph)
    varying = [use for use in flat.uses if use.varies]
    products = [use for use in flat.uses if use.kind == "product" and not use.varies]
    places = [place for use in products for place in places_of(graph, use)]

    def one_step(carry: Any, now: Any) -> Any:
        cotangents, sums, total, alive = carry
        recorded, reset = now
        inputs = inputs_of_step(graph, weights, recorded)
        vjp = _selected(graph, step_vjp(graph, inputs, cotangents), alive)
        added = {
            use.key: _of_step(graph, use, inputs, vjp, cotangents, alive)
            for use in flat.uses
            if use.kind != "product"
        }
        for use in varying:
            if use.kind == "product":
                (place,) = places_of(graph, use)
                x, at = vjp.x[use.key][None], vjp.at[place][None]
                operands = of_product(graph, use, inputs, x, at)
            else:
                operands = _of_sums(use, added.pop(use.key), flat.samples)
            total = _added(total, back_to_parameters(graph, use, inputs, operands))
        before = vjp.old
        if reset is not None:
            before = _where_alive(flat, ~reset, before)
            alive = alive & ~reset
        carry = before, jax.tree.map(jnp.add, sums, added), total, alive
        return carry, ([vjp.at[p] for p in places], {use.key: vjp.x[use.key] for use in products})

    alive = None if records.reset is None else jnp.ones(records.reset.shape[1:], bool)
    rows = len(cotangents[0])
    behind = {n: v.aval for use in varying for n, v in parameters_behind(graph, use).items()}
    zeros = {n: jnp.zeros((flat.samples, rows, *a.shape), a.dtype) for n, a in behind.items()}
    start = (cotangents, _zero_sums(graph, rows), zeros, alive)
    over_time = (records.inputs, records.reset)
    steps = records.steps
    carry, stacked = scan_records(one_step, start, over_time, steps, reverse=True)
    before, sums, total, _ = carry
    return before, total, sums, dict(zip(places, stacked[0], strict=True)), stacked[1]


def _zero_sums(graph: ETraceGraph, rows: int) -> Sums:
    """Return zeros like the results of `_of_step`."""
    flat, result = flat_state_of(graph), {}
    for use in flat.uses:
        if use.kind != "product" and not use.varies:
            lead = (flat.samples, rows) if use.kind == "any" else (rows,)
            avals = (var.aval for var in flat.operands(graph.traced.program, use))
            result[use.key] = [jnp.zeros((*lead, *a.shape), a.dtype) for a in avals]
    return result


def parameters_behind(graph: ETraceGraph, use: ParameterUse) -> dict[str, Var]:
    """Return the parameters that a use depends on, by name."""
    program = graph.traced.program
    behind = program.depends_on(flat_state_of(graph).operands(program, use))
    return {leaf.name: leaf.in_var for leaf in graph.traced.parameters if leaf.in_var in behind}


# --- samples that are reset


def _where_alive(flat: FlatState, flags: jax.Array, values: ByState) -> ByState:
    """Return rows of cotangents with zeros where flags (one for all samples or each) are unset."""
    return [_where_row(flags, a, value) for a, value in zip(flat.axes, values, strict=True)]


def _where_row(flags: jax.Array, axis: int | None, value: jax.Array) -> jax.Array:
    return jnp.where(flags_along(axis, flags, value.ndim - 1), value, 0)


def _selected(graph: ETraceGraph, found: StepVJP, alive: jax.Array | None) -> StepVJP:
    """Set the values of samples that are reset later in the chunk to zero: they may be NaN."""
    if alive is None:
        return found
    old, at, x = _where_alive(flat_state_of(graph), alive, found.old), dict(found.at), {}
    for use in flat_state_of(graph).uses:
        if use.kind == "product":
            (place,) = places_of(graph, use)
            at[place] = _where_row(alive, use.y_axis, at[place])
            x[use.key] = _where_row(alive, use.x_axis, found.x[use.key][None])[0]
        elif use.equation is not None:
            for place, samples in zip(places_of(graph, use), use.samples, strict=True):
                flags = alive if alive.ndim == 0 else alive[np.maximum(samples, 0) % alive.size]
                at[place] = jnp.where(flags, at[place], 0)
    return StepVJP(old, at, x)


# --- uses of parameters


def _of_step(
    graph: ETraceGraph,
    use: ParameterUse,
    inputs: Inputs,
    found: StepVJP,
    cotangents: ByState,
    alive: jax.Array | None,
) -> list[jax.Array]:
    """Return the contribution of one step to the operands of a use that is not a product."""
    if use.equation is None:
        number = use.operands[0]
        axis, value = flat_state_of(graph).axes[number], cotangents[number]
        return [value if alive is None else _where_row(alive, axis, value)]
    at = [found.at[place] for place in places_of(graph, use)]
    if use.kind == "elementwise":
        return at
    equation = equation_of(graph, use)
    values = evaluate(graph.traced.program, equation.invars, inputs)

    def run(operands: list[jax.Array]) -> list[jax.Array]:
        all_operands = list(values)
        for index, operand in zip(use.operands, operands, strict=True):
            all_operands[index] = operand
        return [y for y in bind(equation, all_operands) if jnp.issubdtype(y.dtype, jnp.inexact)]

    _, pull = jax.vjp(run, [values[index] for index in use.operands])

    def of_sample(sample: jax.Array) -> list[jax.Array]:
        own = [jnp.where(s == sample, y, 0) for s, y in zip(use.samples, at, strict=True)]
        return list(jax.vmap(pull)(own)[0])

    return list(jax.vmap(of_sample)(jnp.arange(flat_state_of(graph).samples)))


def of_product(
    graph: ETraceGraph, use: ParameterUse, fixed: Inputs, x: jax.Array, at: jax.Array
) -> list[jax.Array]:
    """Return ``sum_s x^s (x) c^s`` for each operand, ``(samples, rows, *shape)``.

    ``x`` is ``(time, *shape)`` and ``at`` is ``(time, rows, *shape)``.
    """
    program = graph.traced.program
    equation, place = equation_of(graph, use), use.x
    others = [i for i in range(len(equation.invars)) if i != place]
    values = dict(
        zip(others, evaluate(program, [equation.invars[i] for i in others], fixed), strict=True)
    )

    def of_sample(x: jax.Array, at: jax.Array) -> list[jax.Array]:
        if use.x_axis is not None and use.y_axis is not None:
            x, at = jnp.expand_dims(x, use.x_axis + 1), jnp.expand_dims(at, use.y_axis + 2)

        def run(operands: list[jax.Array]) -> jax.Array:
            all_operands = {**values, **dict(zip(use.operands, operands, strict=True))}

            def of_step(now: jax.Array) -> jax.Array:
                indices = range(len(equation.invars))
                (y,) = bind(equation, [all_operands.get(i, now) for i in indices])
                return y

            return jax.vmap(of_step)(x)

        _, pull = jax.vjp(run, [values[i] for i in use.operands])
        return list(jax.vmap(lambda row: pull(row)[0], in_axes=1)(at))

    if use.x_axis is None or use.y_axis is None:
        return [result[None] for result in of_sample(x, at)]
    axes = (use.x_axis + 1, use.y_axis + 2)
    return list(jax.vmap(of_sample, in_axes=axes)(x, at))


def _of_sums(use: ParameterUse, sums: list[jax.Array], samples: int) -> list[jax.Array]:
    """Return the accumulated contributions to each operand, ``(samples, rows, *shape)``."""
    if use.kind == "any":
        return sums
    number = np.arange(samples)
    return [
        jnp.where(of_operand == number.reshape(-1, *(1,) * total.ndim), total, 0)
        for of_operand, total in zip(use.samples, sums, strict=True)
    ]


def back_to_parameters(
    graph: ETraceGraph, use: ParameterUse, fixed: Inputs, operands: list[jax.Array]
) -> dict[str, jax.Array]:
    """Pull the derivatives of a use's operands back to the parameters that they depend on."""
    program, behind = graph.traced.program, parameters_behind(graph, use)
    atoms = flat_state_of(graph).operands(program, use)

    def run(parameters: dict[str, jax.Array]) -> list[Any]:
        now = {behind[name]: value for name, value in parameters.items()}
        return evaluate(program, atoms, {**fixed, **now})

    _, pull = jax.vjp(run, {name: fixed[var] for name, var in behind.items()})
    # Half precision is accumulated in float32, but JAX's cotangents need the operands' dtypes.
    own = [value.astype(atom.aval.dtype) for value, atom in zip(operands, atoms, strict=True)]
    return jax.vmap(jax.vmap(pull))(own)[0]
