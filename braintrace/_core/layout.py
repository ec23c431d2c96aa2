"""Conversions between the layouts of states, of group elements and of an operation's output.

Every function accepts arrays with additional leading axes.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._etrace_op import ETPPrimitive, get_primitive_spec
from .._graph import (
    ETraceGraph,
    HiddenGroup,
    HiddenParamOpRelation,
    InfluenceMap,
    Tap,
)
from .._jax import Var, is_var
from .._jaxpr import Program
from .._typing import PyTree

SUMS = ("add", "add_any")
"""Names of the primitives that add two arrays."""


def x_key(graph: ETraceGraph, relation: HiddenParamOpRelation) -> str:
    """Return the name of an operation's input; operations that share their input share it."""
    x = relation.x_var
    program = graph.traced.program
    is_named = is_var(x) and x not in program.constants
    return names_of(program, [x])[0] if is_named else relation.key


def names_of(program: Program, variables: Sequence[Var]) -> list[str]:
    """Return a name for each variable, equal in every process."""
    inputs = {var: f"in {index}" for index, var in enumerate(program.in_vars)}

    def name(var: Var) -> str:
        if var in inputs:
            return inputs[var]
        index = program.producer[var]
        return f"{index}.{program.equations[index].outvars.index(var)}"

    return list(map(name, variables))


def filter_key(graph: ETraceGraph, relation: HiddenParamOpRelation) -> str:
    """Return the name of an operation's input filter; operations with equal filters share it."""
    own = _looked_up_rows(relation)
    return next(
        other.key
        for other in graph.hidden_param_op_relations
        if other.x_var is relation.x_var and _looked_up_rows(other) == own
    )


def _looked_up_rows(relation: HiddenParamOpRelation) -> int | None:
    return relation.params["rows"] if get_primitive_spec(relation.primitive).looks_up else None


def row_name(graph: ETraceGraph, site: "TraceSite") -> str:
    """Return the name of an operation's row of ``Df``.

    Operations whose outputs are only added, such as the input and the recurrent weight of a cell,
    share it: the first of them names it.
    """
    return _row_names(graph)[site.first_key]


@functools.lru_cache(maxsize=64)
def _row_names(graph: ETraceGraph) -> dict[str, str]:
    first: dict[tuple[int, Var], str] = {}
    return {
        site.first_key: first.setdefault(
            (site.group.index, sum_of(graph, site.relation.y_var)), site.first_key
        )
        for site in trace_sites(graph)
    }


def sum_of(graph: ETraceGraph, y: Var, counts: Callable[[Var], bool] = lambda total: True) -> Var:
    """Return the sum that is the only reader of a variable, or the variable itself.

    A sum that is a hidden state counts as read: its trace is carried as well.

    Parameters
    ----------
    graph, y
        The compiled model, and a variable of its step.
    counts
        Tests whether a sum may stand for its terms.
    """
    program = graph.traced.program
    states = {var for group in graph.hidden_groups for var in group.new_vars}
    while y not in states and len(program.readers.get(y, ())) == 1:
        equation = program.equations[program.readers[y][0][0]]
        (total, *_) = equation.outvars
        same = (total.aval.shape, total.aval.dtype) == (y.aval.shape, y.aval.dtype)
        if equation.primitive.name not in SUMS or not same or not counts(total):
            break
        y = total
    return y


def new_state_to_elements(group: HiddenGroup, state: int, value: jax.Array) -> jax.Array:
    """Convert an array in the layout of a state's new variable to the group's elements.

    It is zero at elements without this state.
    """
    return _to_elements(group, group.layouts[state], group.new_vars[state].aval.shape, value)


def old_state_to_elements(group: HiddenGroup, state: int, value: jax.Array) -> jax.Array:
    """Convert an array in the layout of a state's old value to the group's elements.

    It is zero at elements without this state.
    """
    return _to_elements(group, group.old_layouts[state], group.states[state].shape, value)


def _to_elements(
    group: HiddenGroup, layout: np.ndarray | None, shape: tuple[int, ...], value: jax.Array
) -> jax.Array:
    lead = value.shape[: value.ndim - len(shape)]
    if layout is None:
        return value.reshape(*lead, *group.shape)
    box = _box(layout, group.shape)
    if box is not None:
        edges = [*((0, 0, 0) for _ in lead), *box]
        return jax.lax.pad(value, jnp.zeros((), value.dtype), edges)
    element = np.full(group.num_positions, -1, np.int32)
    element[layout.ravel()] = np.arange(layout.size)
    taken = value.reshape(*lead, -1)[..., np.maximum(element, 0)]
    if layout.size < group.num_positions:
        taken = jnp.where(element >= 0, taken, jnp.zeros((), value.dtype))
    return taken.reshape(*lead, *group.shape)


def _box(layout: np.ndarray, shape: tuple[int, ...]) -> list[tuple[int, int, int]] | None:
    """Return the padding ``(before, after, between)`` of every axis that places a slice.

    ``None``: the layout is not a slice of the elements. Padding keeps the axis of the samples,
    which may be sharded: a gather from all elements needs two all-gathers on a mesh.
    """
    if layout.ndim != len(shape):
        return None
    corner = np.unravel_index(layout.flat[0], shape)
    box = []
    places = []
    for axis, (first, once, size) in enumerate(zip(corner, layout.shape, shape, strict=True)):
        second = layout.take(1, axis).flat[0] if once > 1 else layout.flat[0]
        stride = int(np.unravel_index(second, shape)[axis] - first) if once > 1 else 1
        last = int(first) + stride * (once - 1)
        if stride < 1 or last >= size:
            return None
        box.append((int(first), size - 1 - last, stride - 1))
        places.append(first + stride * np.arange(once))
    inside = np.ravel_multi_index(np.ix_(*places), shape)
    return box if np.array_equal(inside, layout) else None


def elements_to_outputs(influence: InfluenceMap, value: jax.Array, group: HiddenGroup) -> jax.Array:
    """Give every element of ``y`` the value at the state element that it reaches."""
    lead = value.shape[: value.ndim - len(group.shape)]
    if influence.kind == "tiled":
        assert influence.tile is not None
        once, split = influence.tile
        value = _repeated(value.reshape(*lead, *once), (*lead, *split))
    elif influence.kind == "gather":
        flat = value.reshape(*lead, -1)
        taken = jnp.take(flat, np.maximum(influence.positions, 0).ravel(), axis=-1)
        value = jnp.where(influence.positions.ravel() >= 0, taken, jnp.zeros((), taken.dtype))
    return value.reshape(*lead, *influence.output_shape)


MOST_COPIES = 8
MOST_COPIED_ELEMENTS = 2**18


def _repeated(value: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Broadcast an array to a shape with the same number of axes.

    A few copies of one step's values are concatenated: XLA would fuse a broadcast into the product
    with every weight's trace, and compute the source index of each element for each of them. An
    additional column, which is sliced off, prevents XLA from detecting that the parts are equal.
    With a broadcast, a stream of one sample through an LSTM takes 3.6 times as long (CPU,
    2026-11-26).
    """
    is_small = math.prod(shape) <= MOST_COPIED_ELEMENTS
    for axis, (once, size) in enumerate(zip(value.shape, shape, strict=True)):
        if is_small and once < size <= MOST_COPIES:
            # Samples and steps stay separate axes: samples may be sharded over devices.
            rows = value.reshape(*value.shape[:axis], math.prod(value.shape[axis:]))
            column = jnp.zeros((*value.shape[:axis], 1), value.dtype)
            copies = jnp.concatenate([*[rows] * size, column], axis=-1)[..., :-1]
            value = copies.reshape(*value.shape[:axis], size, *value.shape[axis + 1 :])
    return jnp.broadcast_to(value, shape)


def tap_to_outputs(influence: InfluenceMap, point: Tap, value: jax.Array) -> jax.Array:
    """Scatter the elements of a tap's variable to the output elements."""
    if point.outputs is None:
        return value.reshape(influence.output_shape)
    size = influence.positions.size
    used = point.outputs >= 0
    if point.outputs.size == size and (~used | (point.outputs == np.arange(size))).all():
        # Elements that do not reach this state have a zero derivative.
        return value.reshape(influence.output_shape)
    outputs = np.where(used, point.outputs, size)
    at_outputs = jnp.zeros(size, value.dtype).at[outputs].add(value.ravel(), mode="drop")
    return at_outputs.reshape(influence.output_shape)


@dataclasses.dataclass(frozen=True, eq=False)
class TraceSite:
    """A relation and one hidden group that it reaches.

    Attributes
    ----------
    relation, influence, group
        The ETP operation, the map from its output to the group, and the group.
    """

    relation: HiddenParamOpRelation
    influence: InfluenceMap
    group: HiddenGroup

    def key(self, state: int) -> str:
        """Return the name of the trace for one state of the group, equal in every process."""
        return f"{self.relation.key}>{self.group.states[state].name}"

    @property
    def first_key(self) -> str:
        """The name of its first trace."""
        return self.key(self.influence.reached[0])

    @property
    def operation(self) -> tuple[ETPPrimitive, dict[str, Any]]:
        """The primitive and its parameters, as arguments of its rules."""
        return self.relation.primitive, dict(self.relation.params)

    @property
    def has_fan_out(self) -> bool:
        """Whether one element of ``y`` reaches several state elements."""
        return self.influence.fan_out > 1

    def to_outputs(self, value: jax.Array) -> jax.Array:
        """Convert a value per state element to the layout of ``y``."""
        return elements_to_outputs(self.influence, value, self.group)

    def each_layer(self, function: Callable[..., PyTree], *arrays: PyTree) -> PyTree:
        """Apply a function of y-shaped arrays to each layer of a fan-out.

        Without a fan-out, the function is applied directly; with one, its results have the fan-out
        as their first axis.
        """
        return jax.vmap(function)(*arrays) if self.has_fan_out else function(*arrays)


def trace_sites(graph: ETraceGraph, group: HiddenGroup | None = None) -> list[TraceSite]:
    """Return every pair of a relation and a group that it reaches, or the pairs of one group."""
    return [
        TraceSite(relation, influence, reached)
        for relation in graph.hidden_param_op_relations
        for influence, reached in zip(relation.influences, relation.hidden_groups, strict=True)
        if group is None or reached is group
    ]
