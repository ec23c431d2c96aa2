"""Rewriting of writes at data-dependent indices into selections.

``K.at[i % n].set(k)`` is ``where(arange(n) == i % n, k, K)``: each element of the buffer is kept or
replaced, so every element of the old buffer reaches only itself. A ``scatter`` or
``dynamic_update_slice`` hides this, because the index of the update is unknown to the analysis.

This pass rewrites such a write if it covers few slots, also in branches and scans. It rewrites
``K.at[i % n].add(k)`` as well, which buffers of delayed spikes use. Writes at constant indices stay
as they are. A sum at several slots also stays, since it would need as many selections as it has
terms.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

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
    Program,
    Rule,
    carries_derivative,
    evaluate_all,
    loop_of,
    rebuilt,
)
from ..._jaxpr.dataflow import PLAIN_MOVES, Constants
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
            write = _write_of(constants, equation)
            if write is not None and write.count <= (1 if write.adds else longest):
                rules[index] = write.run
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


@dataclasses.dataclass(frozen=True)
class _Axis:
    """An axis of the buffer.

    Attributes
    ----------
    source
        The axis of the updates along it; ``None``: the updates have one slot there.
    width
        The number of slots that an update covers.
    column
        The column of indices that contains the first slot.
    start
        The first slot, without such a column.
    """

    source: int | None
    width: int
    column: int | None = None
    start: int = 0


@dataclasses.dataclass(frozen=True)
class _Write:
    """A write of several updates, one after the other.

    Attributes
    ----------
    axes
        The axes of the buffer.
    slots
        Axes of the updates that count the updates, and their sizes.
    along
        For every axis of the indices, the axis of the buffer, or of `slots`, that it corresponds
        to.
    clips
        Whether updates outside of the buffer are moved to its border.
    adds
        Whether updates are added to the buffer.
    """

    axes: tuple[_Axis, ...]
    slots: tuple[tuple[int, int], ...]
    along: tuple[tuple[str, int], ...]
    clips: bool
    adds: bool = False

    @property
    def count(self) -> int:
        """The number of selections."""
        widths = [axis.width for axis in self.axes if axis.column is not None]
        return math.prod([*widths, *(size for _, size in self.slots)])

    def run(self, equation: Equation, operands: list[ArrayLike]) -> list[ArrayLike]:
        """Return the buffer after the write."""
        if equation.primitive.name == _SLICE:
            buffer, updates, *starts = map(jnp.asarray, operands)
            columns = starts
        else:
            buffer, indices, updates = map(jnp.asarray, operands)
            columns = [indices[..., i] for i in range(indices.shape[-1])]
        laid_out = self._updates(updates)
        placed = {
            axis: self._starts(columns[buffer_axis.column], buffer, axis)
            for axis, buffer_axis in enumerate(self.axes)
            if buffer_axis.column is not None
        }
        for slot in itertools.product(*(range(size) for _, size in self.slots)):
            starts_of_slot = {axis: start[slot] for axis, start in placed.items()}
            buffer = self._written(buffer, laid_out[slot], starts_of_slot)
        return [buffer]

    def _updates(self, updates: jax.Array) -> jax.Array:
        """Return the updates with the axes of `slots` first, then the axes of the buffer."""
        sources = [axis.source for axis in self.axes]
        order = [*(axis for axis, _ in self.slots), *(s for s in sources if s is not None)]
        moved = jnp.transpose(updates, order)
        first = len(self.slots)
        return jnp.expand_dims(moved, [first + i for i, s in enumerate(sources) if s is None])

    def _starts(self, column: jax.Array, buffer: jax.Array, axis: int) -> jax.Array:
        """Return the first slots of the updates along an axis, shaped like the updates."""
        last = buffer.shape[axis] - self.axes[axis].width
        if self.clips:
            column = jnp.clip(column, 0, last)
        column = column.astype(jnp.int64 if column.dtype.itemsize > 4 else jnp.int32)
        shape = [size for _, size in self.slots] + [1] * buffer.ndim
        places = [a if kind == "slot" else len(self.slots) + a for kind, a in self.along]
        for place, size in zip(places, column.shape, strict=True):
            shape[place] = size
        return jnp.transpose(column, sorted(range(len(places)), key=places.__getitem__)).reshape(
            shape
        )

    def _written(
        self, buffer: jax.Array, update: jax.Array, starts: dict[int, jax.Array]
    ) -> jax.Array:
        """Return the buffer after one update."""
        shape = buffer.shape
        fixed = [
            (0, 0, 0)
            if axis.column is not None or axis.width in (size, 1)
            else (axis.start, size - axis.start - axis.width, 0)
            for axis, size in zip(self.axes, shape, strict=True)
        ]
        update = jax.lax.pad(update, jnp.zeros((), update.dtype), fixed)
        inside = jnp.ones([1] * len(shape), bool)
        for axis, buffer_axis in enumerate(self.axes):
            if buffer_axis.column is not None and not self.clips:
                last = shape[axis] - buffer_axis.width
                inside &= (starts[axis] >= 0) & (starts[axis] <= last)
            elif buffer_axis.column is None and buffer_axis.width < shape[axis]:
                number = jax.lax.broadcasted_iota(jnp.int32, shape, axis)
                inside &= (number >= buffer_axis.start) & (
                    number < buffer_axis.start + buffer_axis.width
                )
        widths = [range(self.axes[axis].width) for axis in starts]
        for offsets in itertools.product(*widths):
            here, piece = inside, update
            for (axis, start), offset in zip(starts.items(), offsets, strict=True):
                number = jax.lax.broadcasted_iota(start.dtype, shape, axis)
                here &= number == start + offset
                piece = jax.lax.slice_in_dim(piece, offset, offset + 1, axis=axis)
            here, value = jnp.broadcast_to(here, shape), jnp.broadcast_to(piece, shape)
            if self.adds:
                value = jax.lax.add(buffer, value)
            buffer = jax.lax.select_n(here, buffer, value)
        return buffer


def _write_of(constants: Constants, equation: Equation) -> _Write | None:
    """Return the write of an equation; ``None`` if its indices are constant."""
    name, invars = equation.primitive.name, equation.invars
    indices = invars[2:] if name == _SLICE else invars[1:2]
    if not carries_derivative(equation.outvars[0]) or all(map(constants.has, indices)):
        return None
    return _slice(constants, equation) if name == _SLICE else _scatter(constants, equation)


def _slice(constants: Constants, equation: Equation) -> _Write:
    buffer, update, *starts = equation.invars
    axes = []
    for axis, (size, width) in enumerate(zip(buffer.aval.shape, update.aval.shape, strict=True)):
        start = constants.value(starts[axis]) if width < size else np.zeros((), int)
        if start is None:
            axes.append(_Axis(axis, width, column=axis))
        else:
            axes.append(_Axis(axis, width, start=int(np.clip(start, 0, size - width))))
    return _Write(tuple(axes), (), (), clips=True)


def _scatter(constants: Constants, equation: Equation) -> _Write:
    buffer, indices, updates = (atom.aval for atom in equation.invars)
    numbers = equation.params["dimension_numbers"]
    window = list(map(int, numbers.update_window_dims))
    outer = [axis for axis in range(len(updates.shape)) if axis not in window]
    aligned = dict(
        zip(
            map(int, numbers.scatter_indices_batching_dims),
            map(int, numbers.operand_batching_dims),
            strict=True,
        )
    )
    inserted = set(map(int, numbers.inserted_window_dims))
    columns = {int(axis): c for c, axis in enumerate(numbers.scatter_dims_to_operand_dims)}
    for axis in inserted & columns.keys():
        along = _counts_along(constants, equation.invars[1], columns[axis])
        if (
            along is not None
            and along not in aligned
            and (indices.shape[along] == buffer.shape[axis])
        ):
            aligned[along] = axis
            del columns[axis]
    of_axis = {axis: outer[along] for along, axis in aligned.items()}
    axes, windows = [], iter(window)
    for axis, size in enumerate(buffer.shape):
        if axis in of_axis:
            axes.append(_Axis(of_axis[axis], size))
            continue
        source = None if axis in inserted else next(windows)
        width = 1 if source is None else updates.shape[source]
        axes.append(_Axis(source, width, columns.get(axis)))
    free = [along for along in range(len(outer)) if along not in aligned]
    return _Write(
        tuple(axes),
        tuple((outer[along], updates.shape[outer[along]]) for along in free),
        tuple(
            ("axis", aligned[along]) if along in aligned else ("slot", free.index(along))
            for along in range(len(outer))
        ),
        clips=equation.params["mode"] == jax.lax.GatherScatterMode.CLIP,
        adds=equation.primitive.name == _ADD,
    )


def _counts_along(constants: Constants, indices: Atom, column: int) -> int | None:
    """Return the axis along which a column of indices counts 0, 1, 2, … for all data."""
    atom: Any = indices
    program = constants.program
    value = constants.value(atom)
    if value is not None:
        value = value[..., column]
    elif atom in program.producer:
        equation = program.equations[program.producer[atom]]
        last = len(atom.aval.shape) - 1
        if equation.primitive.name != "concatenate" or equation.params["dimension"] != last:
            return None
        first = 0
        for part in equation.invars:
            width = part.aval.shape[last]
            if first <= column < first + width:
                known = constants.value(part)
                value = None if known is None else known[..., column - first]
            first += width
    if value is None:
        return None
    for axis, size in enumerate(value.shape):
        shape = [size if i == axis else 1 for i in range(value.ndim)]
        if np.array_equal(value, np.broadcast_to(np.arange(size).reshape(shape), value.shape)):
            return axis
    return None
