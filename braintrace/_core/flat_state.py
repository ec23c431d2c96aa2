r"""Flattened state of a sample, and cotangents of it pulled back through steps.

With :math:`S` the state of one sample, :math:`J^s = \partial S^s / \partial S^{s-1}` and :math:`F^s
= \partial S^s / \partial y^s` for the output of an equation that combines parameters with an input
:math:`x`, cotangents :math:`c^K` of the last state are pulled back as

.. math:: c^{s-1} = c^s J^s, \qquad
    (\partial (c^K S^K)) / \partial w = c^0 \partial S^0 / \partial w
    + \sum_s x^s \otimes (c^s F^s).

Neither Jacobian is built: each step is one vector-Jacobian product for every row of :math:`c`, for
all samples at once, and the sum is one product over time. The gradients of samples are separate.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from .._graph.flat_state import FlatState, ParameterUse
from .._graph.graph import ETraceGraph
from .._graph.method import Weights
from .._jax import Atom, Equation, Var, bind
from .._jaxpr.program import Rule, evaluate
from .gradient import Inputs, finish

Place: TypeAlias = tuple[int, str, int]
"""``(index of an equation, 'in' or 'out', index of its operand or result)``."""

ByState = list[jax.Array]
"""An array for every state, in its layout after leading axes."""


# --- layouts


def to_rows(flat: FlatState, values: ByState) -> jax.Array:
    """Concatenate arrays ``(*lead, *state shape)`` to one ``(*lead, samples, n)``."""
    parts = []
    for leaf, axis, size, value in zip(flat.leaves, flat.axes, flat.sizes, values, strict=True):
        lead = value.ndim - len(leaf.shape)
        moved = value if axis is None else jnp.moveaxis(value, lead + axis, lead)
        parts.append(moved.reshape(*value.shape[:lead], flat.samples, size))
    return jnp.concatenate(parts, axis=-1)


def from_rows(flat: FlatState, rows: jax.Array) -> ByState:
    """Split an array ``(*lead, samples, n)`` into one ``(*lead, *state shape)`` for each state."""
    values, lead = [], rows.ndim - 2
    parts = jnp.split(rows, np.cumsum(flat.sizes)[:-1], axis=-1)
    for leaf, axis, part in zip(flat.leaves, flat.axes, parts, strict=True):
        if axis is None:
            value = part.reshape(*part.shape[:lead], *leaf.shape)
        else:
            rest = (*leaf.shape[:axis], *leaf.shape[axis + 1 :])
            value = part.reshape(*part.shape[: lead + 1], *rest)
            value = jnp.moveaxis(value, lead, lead + axis)
        values.append(value.astype(leaf.dtype))
    return values


def row_dtype(flat: FlatState) -> Any:
    """Return the common dtype of all states."""
    return jnp.result_type(*(leaf.dtype for leaf in flat.leaves))


def unit_rows(flat: FlatState) -> ByState:
    """Return ``n`` unit cotangents: one for each state scalar, for all samples at once."""
    shape = (flat.size, flat.samples, flat.size)
    ones = jnp.broadcast_to(jnp.eye(flat.size, dtype=row_dtype(flat))[:, None], shape)
    return from_rows(flat, ones)


# --- one step


def flat_state_of(graph: ETraceGraph) -> FlatState:
    """Return the flattened state of a graph that was compiled with one."""
    assert graph.flat_state is not None
    return graph.flat_state


def inputs_of_step(
    graph: ETraceGraph, weights: Weights, recorded: Sequence[jax.Array]
) -> dict[Var, Any]:
    """Return the inputs of a step, from its residuals and the parameters."""
    parameters = {leaf.in_var: weights[leaf.name]["value"] for leaf in graph.traced.parameters}
    return {**dict(zip(graph.recorded_inputs, recorded, strict=True)), **parameters}


def step_of_layers(graph: ETraceGraph, inputs: Inputs) -> tuple[list[Any], dict[Var, Any]]:
    """Run a step in which layers have no memory of each other.

    Returns
    -------
    outputs, new_states
        See `probed_step`. Within the step the outputs depend on all layers. The new states of a
        layer depend on its old states; the values of other layers are constant.
    """
    carried, seen = _through_layers(graph, inputs, {})
    outputs, new_states = finish(graph.traced, inputs, seen)
    return outputs, {**new_states, **carried}


def _through_layers(
    graph: ETraceGraph, inputs: Inputs, at: Mapping[Place, jax.Array]
) -> tuple[dict[Var, Any], dict[Var, Any]]:
    """Return the new states by their old ones, each of its layer alone, and what a loss sees."""
    flat, program = flat_state_of(graph), graph.traced.program
    seen: dict[Var, Any] = {}
    carried: dict[Var, Any] = {}
    layers = flat.layers or [tuple((leaf, None) for leaf in flat.leaves)]
    for layer in layers:
        members, new_vars = zip(*layer, strict=True)
        own = [leaf for leaf in flat.leaves if leaf in members]
        of_others = {leaf.in_var for other in layers if other is not layer for leaf, _ in other}
        now = {v: jax.lax.stop_gradient(x) if v in of_others else x for v, x in inputs.items()}
        new: list[Atom] = [leaf.out_var for leaf in own if leaf.out_var is not None]
        held = {var: jax.lax.stop_gradient(value) for var, value in seen.items()}
        values = evaluate(program, new, now, held, with_probes(at))
        carried.update({leaf.in_var: value for leaf, value in zip(own, values, strict=True)})
        read = [var for var in new_vars if var is not None]
        seen.update(zip(read, evaluate(program, read, now, seen), strict=True))
    return carried, seen


class StepVJP(NamedTuple):
    """Cotangents of a step's new states, pulled back through the step.

    Attributes
    ----------
    old
        Cotangents of the states before the step.
    at
        Cotangents at the uses of parameters.
    x
        The other operand of every product, by the key of the use.
    """

    old: ByState
    at: dict[Place, jax.Array]
    x: dict[str, jax.Array]


def step_vjp(graph: ETraceGraph, inputs: Inputs, cotangents: ByState) -> StepVJP:
    """Pull cotangents of the new states, with one leading axis, back through one step."""
    flat, program = flat_state_of(graph), graph.traced.program
    places = [place for use in flat.uses for place in places_of(graph, use)]
    products = [use for use in flat.uses if use.kind == "product"]
    x_atoms = [equation_of(graph, use).invars[use.x or 0] for use in products]

    def states(old: ByState, probes: list[jax.Array]) -> tuple[ByState, list[jax.Array]]:
        now = {leaf.in_var: value for leaf, value in zip(flat.leaves, old, strict=True)}
        at = dict(zip(places, probes, strict=True))
        carried, _ = _through_layers(graph, {**inputs, **now}, at)
        return [carried[leaf.in_var] for leaf in flat.leaves], evaluate(program, x_atoms, inputs)

    zeros = [jnp.zeros(atom.aval.shape, atom.aval.dtype) for atom in _atoms(graph, places)]
    old = [inputs[leaf.in_var] for leaf in flat.leaves]
    _, pull, xs = jax.vjp(states, old, zeros, has_aux=True)
    before, vjps = jax.vmap(pull)(cotangents)
    x = {use.key: value for use, value in zip(products, xs, strict=True)}
    return StepVJP(before, dict(zip(places, vjps, strict=True)), x)


def step_jvp(graph: ETraceGraph, inputs: Inputs, tangents: ByState) -> ByState:
    """Push tangents of the states before a step forward to the new states.

    It is the transpose of pulling back, so it also works for operations with only a backward rule.
    """
    flat = flat_state_of(graph)

    def pulled(cotangents: ByState) -> ByState:
        return [value[0] for value in step_vjp(graph, inputs, cotangents).old]

    zeros = [jnp.zeros((1, *leaf.shape), leaf.dtype) for leaf in flat.leaves]
    (pushed,) = jax.vjp(pulled, zeros)[1](tangents)
    return [value[0] for value in pushed]


def with_probes(probes: Mapping[Place, Any]) -> dict[int, Rule]:
    """Return rules that add a value to operands and results of some equations."""

    def added(index: int, side: str, values: Sequence[Any]) -> list[Any]:
        places = [(index, side, number) for number in range(len(values))]
        pairs = zip(values, places, strict=True)
        return [v + probes[place] if place in probes else v for v, place in pairs]

    def rule_for(index: int) -> Rule:
        return lambda equation, values: added(
            index, "out", bind(equation, added(index, "in", values))
        )

    return {index: rule_for(index) for index, _, _ in probes}


def places_of(graph: ETraceGraph, use: ParameterUse) -> Iterator[Place]:
    """Yield the places of a use at which cotangents are taken."""
    if use.equation is None:
        return
    if use.kind == "elementwise":
        yield from ((use.equation, "in", index) for index in use.operands)
    else:
        for index, var in enumerate(equation_of(graph, use).outvars):
            if jnp.issubdtype(var.aval.dtype, jnp.inexact):
                yield use.equation, "out", index


def equation_of(graph: ETraceGraph, use: ParameterUse) -> Equation:
    """Return the equation that uses the parameters."""
    assert use.equation is not None
    return graph.traced.program.equations[use.equation]


def _atoms(graph: ETraceGraph, places: list[Place]) -> Iterator[Atom]:
    for index, side, number in places:
        equation = graph.traced.program.equations[index]
        yield (equation.invars if side == "in" else equation.outvars)[number]
