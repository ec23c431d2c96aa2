"""Diagonals of products: the part of a product that connects a unit with itself.

A walk back from a hidden state ends at ETP operations and is truncated at ordinary products, since
both couple units. SnAp keeps the diagonal of each product. Let element ``u`` of the output reach
unit ``v`` of the new state. The diagonal then pairs ``u`` with the elements ``j`` of the input that
come from unit ``v`` of the old states.
"""

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np

from ..._etrace_op import ETP_PRIMITIVE_SPECS, is_joined
from ..._graph import Diagonal
from ..._graph.hidden_group import NO_ELEMENT
from ..._jax import Equation, Var
from ..._jaxpr import carries_derivative
from ..._jaxpr.dataflow import PRODUCTS
from ..._jaxpr.dataflow.bilinear import NOTHING, joining
from ..core.analysis import Analysis
from ..core.back_through import Ids
from ..core.walk import Walk, walk_back
from .alignment import AlignedStates
from .influence import OutputPath, broadcasts_of, output_paths

Pairs: TypeAlias = tuple[np.ndarray, np.ndarray]
"""``inputs`` and ``outputs`` of a `Diagonal`."""


def diagonals_of(aligned: AlignedStates, walk: Walk, stops: frozenset[Var]) -> tuple[Diagonal, ...]:
    """Return the diagonals of all products between a state and the old states.

    Parameters
    ----------
    aligned
        The aligned states.
    walk, stops
        The walk back from one of them, and the variables at which it stopped.
    """
    diagonals: list[Diagonal] = []
    for equation, operand in products_met(aligned.analysis, walk):
        diagonals += _through(aligned, walk, stops, (equation, operand))
    return tuple(diagonals)


def products_met(analysis: Analysis, walk: Walk) -> list[tuple[int, int]]:
    """Return the products at which a walk ended, with the operand each is linear in."""
    equations = analysis.program.equations
    met = [(cut.equation, cut.operand) for cut in walk.cuts]
    met = [(i, operand) for i, operand in met if equations[i].primitive.name in PRODUCTS]
    for index in walk.weights_met:
        spec = ETP_PRIMITIVE_SPECS.get(equations[index].primitive)
        if spec is not None and spec.x_invar_index is not None:
            met.append((index, spec.x_invar_index))
    return [(i, operand) for i, operand in met if carries_derivative(equations[i].invars[operand])]


def _through(
    aligned: AlignedStates, walk: Walk, stops: frozenset[Var], product: tuple[int, int]
) -> Iterator[Diagonal]:
    """Yield the diagonal of one product, for its output and for each broadcast of it."""
    analysis, (index, operand) = aligned.analysis, product
    equation = analysis.program.equations[index]
    x, (y,) = equation.invars[operand], equation.outvars
    origin = aligned.origin.of(x)
    if origin is None:
        return
    origins, _ = broadcasts_of(analysis, y, walk)
    for path in output_paths(y, 0, walk, origins):
        inputs, outputs = _pairs(equation, operand, origin, path)
        used = np.zeros(origin.size, bool)
        used[inputs[inputs != NO_ELEMENT]] = True
        start = np.where(used.reshape(origin.shape), origin, NO_ELEMENT).astype(np.int32)
        back = walk_back(analysis, {x: start}, stops, aligned.origin, aligned.elsewhere)
        old = [back.ids.get(state.leaf.in_var) for state in aligned.states]
        reads = tuple(c for c, ids in enumerate(old) if ids is not None and np.any(ids >= 0))
        if reads:
            yield Diagonal(index, operand, path.var, outputs, inputs, back.cuts, reads)


def _pairs(equation: Equation, operand: int, origin: Ids, path: OutputPath) -> Pairs:
    """Return the operand elements in the unit that each element of ``path`` reaches."""
    flat = origin.ravel()
    order = np.argsort(flat, kind="stable")
    first = np.searchsorted(flat[order], path.positions, "left")
    last = np.searchsorted(flat[order], path.positions, "right")
    most = int(np.max(last - first, initial=0))
    places = first + np.arange(most)[:, None]
    inputs = np.where(places < last, order[np.minimum(places, flat.size - 1)], NO_ELEMENT)
    outputs = np.broadcast_to(path.sources, inputs.shape)
    there = inputs != NO_ELEMENT
    there[there] = _are_joined(equation, operand, inputs[there], outputs[there])
    # Joined pairs come first: the axis is as long as the longest list.
    inputs = -np.sort(-np.where(there, inputs, NO_ELEMENT), axis=0)
    inputs = inputs[: int(np.max(there.sum(0), initial=0))]
    shape = path.var.aval.shape
    of_var = np.full((len(inputs), path.var.aval.size), NO_ELEMENT, np.int32)
    of_var[:, path.elements] = inputs
    source = np.zeros(path.var.aval.size, np.int32)
    source[path.elements] = path.sources
    return of_var.reshape(len(inputs), *shape), source.reshape(shape)


def _are_joined(
    equation: Equation, operand: int, inputs: np.ndarray, outputs: np.ndarray
) -> np.ndarray:
    """Return which elements of a product may depend on which elements of an operand."""
    spec = ETP_PRIMITIVE_SPECS.get(equation.primitive)
    if spec is None:
        return np.asarray(joining(equation, operand, inputs, outputs) != NOTHING)
    if not spec.batched:
        return is_joined(equation, inputs, outputs)
    x, y = equation.invars[operand].aval, equation.outvars[0].aval
    of_x, of_y = x.size // x.shape[0], y.size // y.shape[0]
    same = inputs // of_x == outputs // of_y
    return np.asarray(same & is_joined(equation, inputs % of_x, outputs % of_y))
