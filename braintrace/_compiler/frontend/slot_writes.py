"""Rewriting of writes at data-dependent indices into selections.

``K.at[i % n].set(k)`` is ``where(arange(n) == i % n, k, K)``: each element of the buffer is kept or
replaced, so every element of the old buffer reaches only itself. A ``scatter`` or
``dynamic_update_slice`` hides this, because the index of the update is unknown to the analysis.

This pass rewrites such a write if it covers few slots, also in branches and scans. The same write
of numbers, which have no derivative, finds the elements to replace. It rewrites
``K.at[i % n].add(k)`` as well, which buffers of delayed spikes use. Writes at constant indices stay
as they are. A sum at several slots also stays, since it would need as many selections as it has
terms.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ..._jax import (
    TRANSPARENT_CALLS,
    AnyJaxpr,
    Atom,
    Equation,
    call_body,
    equations_inside,
)
from ..._jaxpr import (
    PLAIN_MOVES,
    Constants,
    Program,
    Rule,
    carries_derivative,
    evaluate_all,
    loop_of,
    rebuilt,
)
from ..._jaxpr.moves import NOWHERE, chosen_axes, columns_of, elements_of_slices
from .canonicalize import selection
from .rewritten import by_rules

_SLICE = "dynamic_update_slice"
_ADD = "scatter-add"
_WRITES = ("scatter", _ADD, _SLICE)
_LINEAR = ("add", "convert_element_type", "mul", "neg", "sub")
_FINITE = PLAIN_MOVES | TRANSPARENT_CALLS | {*_WRITES, *_LINEAR}
"""Primitives of a branch whose derivatives are finite for finite operands."""


def writes_as_selections(program: Program, wanted: Sequence[Atom], longest: int) -> Program:
    """Rewrite the writes of a program at data-dependent indices into selections.

    Parameters
    ----------
    program
        The step without calls.
    wanted
        Only writes among the ancestors of these results are rewritten.
    longest
        The largest number of slots of a write that is rewritten.
    """
    rules = _rules(Constants(program), wanted, longest)
    return by_rules(program, rules) if rules else program


def _rules(constants: Constants, wanted: Sequence[Atom], longest: int) -> dict[int, Rule]:
    """Return rules for the writes of a program, and for equations that contain some."""
    ancestors = constants.program.depends_on(wanted)
    rules: dict[int, Rule] = {}
    for index, equation in enumerate(constants.program.equations):
        if ancestors.isdisjoint(equation.outvars):
            continue
        if equation.primitive.name in _WRITES:
            rule = _selection_for(constants, equation, longest)
            rules |= {} if rule is None else {index: rule}
            continue
        bodies = {id(jaxpr): body for jaxpr, body in _bodies(constants, equation)}
        inside = {key: _rules(b, b.program.out_atoms, longest) for key, b in bodies.items()}
        if any(inside.values()):
            rules[index] = _rule_inside(bodies, inside, _chooses_writes(equation))
    return rules


def _bodies(constants: Constants, equation: Equation) -> list[tuple[AnyJaxpr, Constants]]:
    """Return the bodies of a branch, a scan or a call."""
    name, atoms = equation.primitive.name, equation.invars
    if name == "cond":
        return [(b, constants.body(b, atoms[1:])) for b in equation.params["branches"]]
    if name == "scan":
        loop = loop_of(equation, atoms)
        return [(loop.body, constants.body(loop.body, loop.fixed))]
    if name in TRANSPARENT_CALLS:
        return [(call_body(equation), constants.body(call_body(equation), atoms))]
    return []


def _chooses_writes(equation: Equation) -> bool:
    """Test whether an equation is a branch of writes with finite derivatives.

    All cases of a selection are differentiated, including those that are not selected.
    """
    return equation.primitive.name == "cond" and all(
        inner.primitive.name in _FINITE or not any(map(carries_derivative, inner.outvars))
        for inner in equations_inside(equation)
    )


def _rule_inside(
    bodies: Mapping[int, Constants], rules: Mapping[int, Mapping[int, Rule]], chooses: bool
) -> Rule:
    """Return the rule for an equation, given the rules for its bodies.

    A branch of writes becomes a selection, so that its broadcasts are equations of the program.
    """

    def run(body: AnyJaxpr, values: list[ArrayLike]) -> list[ArrayLike]:
        return evaluate_all(bodies[id(body)].program.jaxpr, values, rules[id(body)])

    if chooses:
        return lambda equation, operands: selection(equation, operands, run)
    return lambda equation, operands: rebuilt(equation, operands, run)


def _selection_for(constants: Constants, equation: Equation, longest: int) -> Rule | None:
    """Return the rule that runs a write as selections; ``None``: it stays as it is.

    Updates that reach the same element, each at another index, have different *slots*.
    """
    shape, columns = equation.invars[0].aval.shape, columns_of(equation, constants)
    chosen = chosen_axes(equation, columns)
    if not chosen or not carries_derivative(equation.outvars[0]):
        return None
    targets = elements_of_slices(equation, columns)
    kept = tuple(1 if axis in chosen else size for axis, size in enumerate(shape))
    (inside,) = np.nonzero(targets.ravel() != NOWHERE)
    at = zip(np.unravel_index(targets.ravel()[inside], shape), kept, strict=True)
    places = np.ravel_multi_index([np.minimum(axis, size - 1) for axis, size in at], kept)
    slots = _counted(places)
    count, is_sum = 1 + slots.max(initial=-1), equation.primitive.name == _ADD
    if count > (1 if is_sum else longest):
        return None
    updates = np.full((count, math.prod(kept)), targets.size)
    updates[slots, places] = inside
    slot_of_update = np.full(targets.size, NOWHERE, np.int32)
    slot_of_update[inside] = slots
    return _Selection(slot_of_update.reshape(targets.shape), updates, kept, is_sum).run


def _counted(places: np.ndarray) -> np.ndarray:
    """Return for each place how often it occurs before."""
    order, counts = np.argsort(places, kind="stable"), np.empty_like(places)
    in_order = places[order]
    counts[order] = np.arange(places.size) - np.searchsorted(in_order, in_order)
    return counts


@dataclasses.dataclass(frozen=True, eq=False)
class _Selection:
    """A write of updates, slot by slot.

    Attributes
    ----------
    slots
        The slot of each update; -1: it is outside of the buffer.
    updates
        For each slot, the updates that it has for all elements with the same indices, flattened;
        their number: none.
    shape
        The shape of these elements: that of the buffer, with size one where data choose the index.
    is_sum
        Whether updates are added to the buffer.
    """

    slots: np.ndarray
    updates: np.ndarray
    shape: tuple[int, ...]
    is_sum: bool

    def run(self, equation: Equation, operands: list[ArrayLike]) -> list[ArrayLike]:
        """Return the buffer after the write."""
        buffer, *others = map(jnp.asarray, operands)
        empty, params = jnp.full(buffer.shape, NOWHERE, jnp.int32), equation.params
        if equation.primitive.name == _SLICE:
            values, *indices = others
            slots = jax.lax.dynamic_update_slice(empty, self.slots, indices)
        else:
            indices, values = others
            kept = "indices_are_sorted", "unique_indices", "mode"
            options = {name: params[name] for name in kept}
            numbers = params["dimension_numbers"]
            slots = jax.lax.scatter(empty, indices, self.slots, numbers, **options)
        for slot, chosen in enumerate(self.updates):
            value = _picked(values.ravel(), chosen).reshape(self.shape)
            value = jnp.broadcast_to(value, buffer.shape)
            value = jax.lax.add(buffer, value) if self.is_sum else value
            buffer = jax.lax.select_n(slots == slot, buffer, value)
        return [buffer]


def _picked(values: jax.Array, elements: np.ndarray) -> jax.Array:
    """Return some elements, by a slice if that is possible; zeros where there is none."""
    first, last = elements[0], elements[-1]
    if last < values.size and np.array_equal(elements, np.arange(first, last + 1)):
        return jax.lax.slice_in_dim(values, first, last + 1)
    return values.at[elements].get(mode="fill", fill_value=0)
