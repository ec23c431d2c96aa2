r"""Sites of traces: an operation and a group; layouts of states, of units and of outputs.

Every conversion accepts arrays with additional leading axes.

A reset state does not depend on earlier values: its row of ``D`` is zero, :math:`D^t[v, a, c] = 0`
if ``v`` belongs to a reset sample. Traces and adjoints then follow the recursions of separate
sequences. ``reset`` is a boolean for all samples, or one for each. A state without a batch axis is
shared by all samples, and is reset if all of them are.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._errors import OptionError
from .._etrace_op.primitive import ETPPrimitive
from .._etrace_op.registry import get_primitive_spec
from .._graph.flat_state import FlatState
from .._graph.graph import ETraceGraph
from .._graph.hidden_group import HiddenGroup, HiddenParamOpRelation, InfluenceMap, Tap
from .._graph.method import Adjoints, Signal
from .._graph.traced_model import StateLeaf
from .._jax import Var, is_var, struct_of
from .._jaxpr.program import Program, reached
from .._typing import PyTree

SUMS = ("add", "add_any")
"""Names of the primitives that add two arrays."""


def x_key(graph: ETraceGraph, relation: HiddenParamOpRelation) -> str:
    """Return the name of an operation's input; operations that share their input share it."""
    x, program = relation.x_var, graph.traced.program
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
    own = _encoding(relation)
    return next(
        other.key
        for other in graph.hidden_param_op_relations
        if other.x_var is relation.x_var and _encoding(other) == own
    )


def _encoding(relation: HiddenParamOpRelation) -> Any:
    encode = get_primitive_spec(relation.primitive).linear_in_input
    return (encode, dict(relation.params)) if callable(encode) else None


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


def new_slots_to_elements(
    group: HiddenGroup, states: tuple[int, ...], value: jax.Array
) -> dict[int, jax.Array]:
    """Convert the new value of a State to the group's elements, for each of its slots.

    One `split` makes the derivative one concatenation, where many slices would be added up.
    """
    axis = _axis_of_slots(group, states)
    if axis is None:
        return {a: new_state_to_elements(group, a, value) for a in states}
    parts = jax.lax.split(value, [1] * len(states), axis)
    return {a: part.reshape(group.shape) for a, part in zip(states, parts, strict=True)}


@functools.lru_cache(maxsize=64)
def _axis_of_slots(group: HiddenGroup, states: tuple[int, ...]) -> int | None:
    """Return the axis of a State along which its slots are, in order; ``None``: no axis."""
    layouts = [layout for a in states if (layout := group.layouts[a]) is not None]
    if len(layouts) < max(2, len(states)):
        return None
    every = np.arange(group.num_positions)
    for axis, size in enumerate(layouts[0].shape):
        taken = (layout.take(slot, axis).ravel() for slot, layout in enumerate(layouts))
        if size == len(states) and all(np.array_equal(units, every) for units in taken):
            return axis
    return None


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
    part = _part(layout)
    if part is not None:
        value, layout = value[(..., *part)], layout[part]
        if np.array_equal(layout.ravel(), np.arange(group.num_positions)):
            return value.reshape(*lead, *group.shape)
    element = np.full(group.num_positions, -1, np.int32)
    (inside,) = np.nonzero(layout.ravel() >= 0)
    element[layout.ravel()[inside]] = inside
    taken = value.reshape(*lead, -1)[..., np.maximum(element, 0)]
    if inside.size < group.num_positions:
        taken = jnp.where(element >= 0, taken, jnp.zeros((), value.dtype))
    return taken.reshape(*lead, *group.shape)


def _part(layout: np.ndarray) -> tuple[slice, ...] | None:
    """Return the slices of an array that have all elements of a slot, and no others."""
    inside = layout >= 0
    if inside.all() or not inside.any():
        return None
    part = tuple(slice(int(axis.min()), int(axis.max()) + 1) for axis in np.nonzero(inside))
    return part if inside[part].all() else None


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
        return f"{self.relation.key}>{self.group.names[state]}"

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


Probes = dict[str, jax.Array]
"""One array per traced hidden state, by name, in the layout of its new variable. States whose old
value a loss sees have a second array (see `pre_step_probe`) in the layout of the old value."""


def pre_step_probe(state: StateLeaf) -> str:
    """Return the name of the perturbation of a state's value before the step."""
    return f"{state.name} before"


def probe_shapes(graph: ETraceGraph) -> Probes:
    """Return the shapes of the perturbations of traced states and of old values that are read."""
    shapes = {group.probes[a]: struct_of(var.aval) for group, a, var in graph.new_hidden_vars}
    if graph.flat_state is not None:
        shapes = {state.name: struct_of(state) for state in graph.flat_state.leaves}
    return shapes | {pre_step_probe(s): struct_of(s) for s in graph.read_late}


def probes_of_past(graph: ETraceGraph) -> Probes:
    """Return the shapes of perturbations of the traced states before a step or window."""
    return {pre_step_probe(state): struct_of(state) for state in graph.traced_states}


def signals(group: HiddenGroup, signal: Probes) -> dict[int, jax.Array]:
    """Return the learning signals of a group's states, per element; missing ones are zero.

    The next step's signal for a state before it is included: the signal of an output that reads the
    old state, or of a window that starts there.
    """
    result: dict[int, jax.Array] = {}
    for a, (state, probe) in enumerate(zip(group.states, group.probes, strict=True)):
        if probe in signal:
            result[a] = new_state_to_elements(group, a, signal[probe])
        if (name := pre_step_probe(state)) in signal:
            pre_step = old_state_to_elements(group, a, signal[name])
            later = jnp.concatenate([pre_step[1:], jnp.zeros_like(pre_step[:1])])
            result[a] = result[a] + later if a in result else later
    return result


def flat_signals(flat: FlatState, signal: Probes) -> dict[str, jax.Array]:
    """Return the same for the states of a flattened state, by name and in their layouts."""
    result = {leaf.name: signal[leaf.name] for leaf in flat.leaves if leaf.name in signal}
    for leaf in flat.leaves:
        if (name := pre_step_probe(leaf)) in signal:
            later = jnp.concatenate([signal[name][1:], jnp.zeros_like(signal[name][:1])])
            result[leaf.name] = result.get(leaf.name, 0) + later
    return result


def of_past(graph: ETraceGraph, signal: Probes) -> Signal:
    """Return the signals of a chunk's first step for the states before it, by name."""
    probes = {state.name: pre_step_probe(state) for state in graph.traced_states}
    return {name: signal[probe][0] for name, probe in probes.items() if probe in signal}


def at_entry(graph: ETraceGraph, mu: Signal) -> Adjoints:
    """Return the adjoints of the states before a window, per element of their groups."""
    return {
        group.index: {
            a: old_state_to_elements(group, a, mu[state.name])
            for a, state in enumerate(group.states)
            if state.name in mu
        }
        for group in graph.traced_groups
    }


def reachable_blocks(group: HiddenGroup, rows: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return the blocks ``(i, j)`` of products of ``D`` that can be nonzero."""

    def read(new: int) -> list[int]:
        return [old for state, old in group.transition if state == new]

    return sorted((row, old) for row in rows for old in reached([row], read))


# --- resets


def over_first_axis(value: jax.Array, ndim: int) -> jax.Array:
    """Append axes of size 1 to an array, up to ``ndim`` axes."""
    return value.reshape(*value.shape, *(1,) * (ndim - value.ndim))


def where_flagged(flags: jax.Array, value: jax.Array) -> jax.Array:
    """Select zeros where flags of the first axes are not set."""
    return jnp.where(over_first_axis(flags, value.ndim), value, 0)


def flags_along(axis: int | None, flags: Any, ndim: int) -> Any:
    """Reshape flags, one for all samples or one for each, to the batch axis of an array.

    An array without a batch axis is shared by all samples, and is reset if all of them are.
    """
    if flags.ndim == 0:
        return flags
    if axis is None:
        return flags.all(-1)
    return flags.reshape([-1 if a == axis else 1 for a in range(ndim)])


def at_elements(graph: ETraceGraph, group: HiddenGroup, flags: jax.Array) -> jax.Array:
    """Broadcast flags, one for all samples or one for each, to the elements of a group.

    Raises
    ------
    OptionError
        If flags are per sample, and only some states of an element have a batch axis.
    """
    axes = {state.name: graph.batch.axis(state) for state in group.states}
    if flags.ndim == 0 or set(axes.values()) == {None}:
        return jnp.broadcast_to(flags_along(None, flags, len(group.shape)), group.shape)
    for name, axis in axes.items():
        if axis is None:
            raise OptionError(
                f"All samples share State '{name}', which is coupled elementwise to "
                f"{', '.join(map(repr, axes))}, so single samples cannot be reset. Give one flag "
                "for all samples."
            )
    if (shared := graph.batch_axis(group)) is not None:
        return jnp.broadcast_to(flags_along(shared, flags, len(group.shape)), group.shape)
    sample = np.zeros(group.num_positions, np.int32)
    for state, layout in zip(group.states, group.old_layouts, strict=True):
        numbers = np.arange(group.num_positions) if layout is None else layout
        along = flags_along(axes[state.name], np.arange(flags.size), len(state.shape))
        along = np.broadcast_to(along, state.shape).reshape(numbers.shape)
        sample[numbers[numbers >= 0]] = along[numbers >= 0]
    return flags[sample].reshape(group.shape)


def probes_after_reset(graph: ETraceGraph, probes: Probes, reset: jax.Array) -> Probes:
    """Return probes without those of old values that have been reset."""
    after = dict(probes)
    for state in graph.traced_states:
        if (name := pre_step_probe(state)) in probes:
            is_new = flags_along(graph.batch.axis(state), reset, probes[name].ndim)
            after[name] = jnp.where(is_new, 0, probes[name])
    return after
