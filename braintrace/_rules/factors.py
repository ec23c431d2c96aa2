"""Factors of the last steps of a group before a delay line: ``D``, ``Df`` and ``x`` by name."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from .._core.lines import Line
from .._core.local_step import blocks, read_vars, values_of
from .._core.sites import (
    TraceSite,
    at_elements,
    filter_key,
    names_of,
    over_first_axis,
    row_name,
    trace_sites,
    x_key,
)
from .._graph.graph import ETraceGraph, Role, TraceSpec
from .._graph.method import Records
from .filters import rows_of_samples

Factors = dict[str, jax.Array]
"""``D`` as ``"D 0 1"``, ``Df`` and ``x`` of steps by name, time first."""

AT = "at"
"""Name of the place of the oldest factors, which the next step overwrites."""


def factors_of(line: Line, records: Records) -> Factors:
    """Return the factors of the steps of a chunk."""
    core, group = line.core, line.core_group
    names = names_of(core.traced.program, read_vars(core))
    values = {name: records.values[name] for name in names if name in records.values}

    def of_step(values: dict[str, jax.Array]) -> Factors:
        D, Df = blocks(core, group, values_of(core, values))
        keys = [site.key(a) for site in rows_of(line).values() for a in site.influence.states]
        named = {f"D {a} {c}": block for (a, c), block in D.items()}
        return named | {f"Df {key}": Df[key] for key in keys}

    varying = {name for name, value in values.items() if value.shape[0] == records.steps > 1}
    axes = {name: 0 if name in varying else None for name in values}
    given = {name: value if name in varying else value[0] for name, value in values.items()}
    if varying:
        factors: Factors = jax.vmap(of_step, in_axes=(axes,))(given)
    else:
        once = of_step(given)
        factors = {k: jnp.broadcast_to(v, (records.steps, *v.shape)) for k, v in once.items()}
    if records.reset is not None:
        is_new = jax.vmap(functools.partial(at_elements, core, group))(records.reset)
        for name in factors:
            if name.startswith("D "):
                factors[name] = jnp.where(is_new, 0, factors[name])
    return factors | {f"x {key}": records.x[key] for key in _inputs(core)}


def rows_of(line: Line) -> dict[str, TraceSite]:
    """Return the first operation of each row of ``Df``, by `row_name`."""
    sites = reversed(trace_sites(line.core, line.core_group))
    return {row_name(line.core, site): site for site in sites}


def _inputs(core: ETraceGraph) -> dict[str, Any]:
    """Return the relations with an input, by its name in records."""
    relations = core.hidden_param_op_relations
    return {x_key(core, r): r for r in reversed(relations) if r.x_var is not None}


def specs_of_factors(line: Line) -> dict[str, TraceSpec]:
    """Return the specifications of the factors of the last steps; a reset makes them zero."""
    core, steps = line.core, line.steps
    read = read_vars(core)
    values = dict(zip(names_of(core.traced.program, read), map(_one_step, read), strict=True))
    x = {key: _one_step(relation.x_var) for key, relation in _inputs(core).items()}
    given = Records(x, values=values)
    every: Role = "entry"

    def spec(name: str, shape: jax.ShapeDtypeStruct) -> TraceSpec:
        def samples(flags: jax.Array) -> jax.Array:
            return entries_of_samples(line, name, flags)[None]

        axes, state = (every,) * shape.ndim, f"last {steps} steps"
        own = TraceSpec((steps, *shape.shape[1:]), shape.dtype, axes, None, state, name)
        return dataclasses.replace(own, takes_trace_dtype=False, samples=samples)

    shapes = jax.eval_shape(functools.partial(factors_of, line), given)
    at = TraceSpec((), jnp.int32, (), operand=AT, samples=lambda flags: jnp.zeros((), bool))
    return {name: spec(name, shape) for name, shape in shapes.items()} | {AT: at}


def _one_step(var: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((1, *var.aval.shape), var.aval.dtype)


def entries_of_samples(line: Line, name: str, flags: jax.Array) -> jax.Array:
    """Return the entries of a factor of one step that belong to flagged samples."""
    kind, key = name.split(" ", 1)
    if kind == "x":
        relation = _inputs(line.core)[key]
        rows = rows_of_samples(line.core, filter_key(line.core, relation), flags)
        return over_first_axis(rows, len(relation.x_var.aval.shape))
    elements = at_elements(line.core, line.core_group, flags)
    if kind == "D":
        return elements
    sites = trace_sites(line.core)
    return next(s for s in sites for a in s.influence.states if s.key(a) == key).to_outputs(
        elements
    )


def first_steps(past: Factors, count: int) -> Factors:
    """Return the factors of the first of the last steps, without the place of the oldest."""
    read = jax.lax.dynamic_index_in_dim
    own = {name: value for name, value in past.items() if name != AT}
    if count == len(next(iter(own.values()))):
        return {name: jnp.roll(value, -past[AT], 0) for name, value in own.items()}
    places = [(past[AT] + step) % len(next(iter(own.values()))) for step in range(count)]
    return {n: jnp.stack([read(v, at, keepdims=False) for at in places]) for n, v in own.items()}


def slice_steps(factors: Factors, start: int, stop: int) -> Factors:
    return {name: factor[start:stop] for name, factor in factors.items()}


def records_of(factors: Factors) -> Records:
    x = {name[2:]: value for name, value in factors.items() if name.startswith("x ")}
    return Records(x, steps=len(next(iter(factors.values()))))
