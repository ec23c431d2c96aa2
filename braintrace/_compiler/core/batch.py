"""Batch axes of States, from ``init_state`` or from the rows of ETP operations.

The batch axis of a State is the axis that follows the ``batch_size`` of ``init_state``. One trace
of ``init_state`` with a size that no other axis has finds it. If ``init_state`` follows no size
(States made in a constructor, a fixed batch), the rows of the ETP operations are the samples. An
axis of a state is then the batch axis if different rows reach each of its indices.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np

from ..._brainstate import trace_stateful, unnoticed_states
from ..._etrace_op import ETP_PRIMITIVE_SPECS, inline
from ..._function_model import FunctionModel
from ..._graph import HiddenGroup, HiddenParamOpRelation, StateLeaf, TracedModel
from ..._graph.batch import Axes, Batch
from ..._jax import Atom, Var, trace_to_jaxpr
from ..._jaxpr import Program, evaluate, inlined, program_of
from ..._jaxpr.dataflow import BOTTOM, Constants, Flow, Labels, Question, flows_to
from ..._typing import Path
from .analysis import Analysis

Shape = tuple[int, ...]
Shapes = Mapping[Path, Sequence[Shape]]
"""Shapes of the leaves of States, by path."""

ALL = "all"
"""Used instead of an axis: all rows reach each element of the state, so it has no batch axis."""

Evidence = Mapping[Path, Mapping[int, int | str]]
"""The batch axis of leaves of a State according to rows of operations, or `ALL`."""


def batch_of(
    model: brainstate.nn.Module,
    mapped: int | None,
    batch_size: int | None,
    relations: Callable[[], Iterable[HiddenParamOpRelation]],
) -> Batch:
    """Return the number of samples of a model, and the batch axes of its States.

    Parameters
    ----------
    model
        The model, its States initialised.
    mapped
        Batch size if a model for one sample is vmapped; ``None``: it is not.
    batch_size
        The size that the user has passed to ``init_state``; ``None``: unknown.
    relations
        Returns the relations of the step; called only if they are needed.
    """
    states = {tuple(p): s for p, s in model.states(brainstate.ShortTermState).items()}
    now = {path: _shapes(state.value) for path, state in states.items()}
    if mapped is not None:
        return Batch(mapped, MappingProxyType({p: (0,) * len(s) for p, s in now.items()}))
    if (fixed := _of_fixed_batch(model, batch_size, now)) is not None:
        return fixed
    made = _made_with(model, size := _unlike_any(now, batch_size or 1))
    if made is None or made[0].keys() != now.keys() or made[0] == now:
        return _by_evidence(_by_rows(relations()), batch_size, now)
    declared = _declared(now, made[0], size)
    if declared.samples in (None, 1):  # a State of a single sample is shared by all samples
        return declared
    static = [path for path in now if made[0][path] == now[path]]
    suspects = [p for p in static if any(declared.samples in shape for shape in now[p])]
    if not suspects:
        return declared
    return _without(declared, {p: now[p] for p in suspects}, made[1], _by_rows(relations()))


def _shapes(value: object) -> list[Shape]:
    return [tuple(jnp.shape(leaf)) for leaf in jax.tree.leaves(value)]


# --- what `init_state` declares


def _of_fixed_batch(
    model: brainstate.nn.Module, batch_size: int | None, now: Shapes
) -> Batch | None:
    """Return the batch of a pure function with fixed state: first axes of its arrays."""
    if batch_size is None or not (isinstance(model, FunctionModel) and model.has_fixed_state):
        return None
    axes = {
        p: tuple(0 if s[:1] == (batch_size,) else None for s in leaves) for p, leaves in now.items()
    }
    return Batch(batch_size, MappingProxyType(axes))


def _declared(now: Shapes, made: Shapes, size: int) -> Batch:
    """Return the axes that follow ``batch_size``, given shapes for two sizes."""
    axes: dict[Path, Axes] = {}
    unclear: dict[Path, str] = {}
    for path, shapes in now.items():
        pairs = list(zip(shapes, made[path], strict=True))
        axes[path] = tuple(_following(before, after, size) for before, after in pairs)
        for axis, (before, after) in zip(axes[path], pairs, strict=True):
            if axis is None and before != after and len(before) == len(after):
                unclear[path] = (
                    f"its shape is {before}, and {after} with `batch_size={size}`, so no axis has "
                    "the size of the batch"
                )
    return _agreed(_sizes(now, axes), now, axes, unclear)


def _sizes(now: Shapes, axes: Mapping[Path, Axes]) -> list[int]:
    """Return the sizes of the batch axes."""
    pairs = (
        (now[path][i], axis) for path, leaf_axes in axes.items() for i, axis in enumerate(leaf_axes)
    )
    return [shape[axis] for shape, axis in pairs if axis is not None]


def _agreed(
    sizes: Sequence[int], now: Shapes, axes: dict[Path, Axes], unclear: dict[Path, str]
) -> Batch:
    """Return a batch; States of different sizes make every batch axis unclear."""
    if len(set(sizes)) > 1:
        listed = " and ".join(map(str, dict.fromkeys(sizes)))
        unclear = dict.fromkeys(now, f"the States have batches of {listed}")
    elif sizes and sizes[0] == 1:  # a State of a single sample is shared by all samples
        unclear = {}
    samples = sizes[0] if sizes else None
    return Batch(samples, MappingProxyType(axes), MappingProxyType(unclear))


def _without(
    declared: Batch, suspects: Shapes, not_recreated: Iterable[Path], rows: Evidence
) -> Batch:
    """Resolve each State that follows no size: batch axis, shared, or unclear.

    ``not_recreated`` are the States that ``init_state`` does not recreate. One of these has a batch
    axis if the rows of operations reach one of its indices for each sample. A State that
    ``init_state`` makes with the same shape for every size is shared by all samples; it is unclear
    if rows reach it in that way.
    """
    axes, unclear = dict(declared.axes), dict(declared.unclear)
    for path, shapes in suspects.items():
        axes_by_rows = [rows.get(path, {}).get(index, "") for index in range(len(shapes))]
        pairs = zip(axes_by_rows, shapes, strict=True)
        batch_axes = tuple(
            a if isinstance(a, int) and s[a] == declared.samples else None for a, s in pairs
        )
        if path in not_recreated:
            axes[path] = batch_axes
            if any(
                a is None and rows != ALL for a, rows in zip(batch_axes, axes_by_rows, strict=True)
            ):
                unclear[path] = "`init_state` does not create it"
        elif any(axis is not None for axis in batch_axes):
            unclear[path] = (
                "`init_state` gives it the same shape for every batch size, but the rows of an "
                "operation reach it in order, as samples do"
            )
    return Batch(declared.samples, MappingProxyType(axes), MappingProxyType(unclear))


def _following(before: Shape, after: Shape, size: int) -> int | None:
    """Return the one axis in which two shapes differ, if it has the new size."""
    if len(before) != len(after):
        return None
    axes = [axis for axis, pair in enumerate(zip(before, after, strict=True)) if len(set(pair)) > 1]
    return axes[0] if len(axes) == 1 and after[axes[0]] == size else None


def _unlike_any(now: Shapes, batch_size: int) -> int:
    """Return a multiple of a batch size that no axis of the States has."""
    taken = {
        batch_size,
        *itertools.chain.from_iterable(itertools.chain.from_iterable(now.values())),
    }
    return next(batch_size * k for k in itertools.count(2) if batch_size * k not in taken)


def _made_with(model: brainstate.nn.Module, size: int) -> tuple[Shapes, list[Path]] | None:
    """Make States for another batch size: their shapes, and those not recreated.

    ``None`` if ``init_state`` raises an error with this size.
    """
    not_recreated: list[Path] = []

    def values() -> dict[Path, object]:
        twin = brainstate.graph.clone(model)
        before = {tuple(p): s for p, s in twin.states(brainstate.ShortTermState).items()}
        brainstate.nn.init_all_states(twin, batch_size=size)
        after = {tuple(p): s for p, s in twin.states(brainstate.ShortTermState).items()}
        not_recreated.extend(path for path, state in after.items() if before.get(path) is state)
        return {path: state.value for path, state in after.items()}

    try:
        with unnoticed_states():
            recreated, _ = trace_stateful(values).result_shapes
    except Exception:  # `init_state` may fail in any way with another size
        return None
    return {path: _shapes(value) for path, value in recreated.items()}, not_recreated


# --- what rows of operations show


def _by_rows(relations: Iterable[HiddenParamOpRelation]) -> Evidence:
    """Return the axes of states along which rows of operations follow each other."""
    axes: dict[Path, dict[int, int | str]] = {}
    for relation in relations:
        spec = ETP_PRIMITIVE_SPECS.get(relation.primitive)
        if spec is None or not spec.batched:
            continue
        for influence, group in zip(relation.influences, relation.hidden_groups, strict=True):
            for state, first_and_last in _of_group(influence.positions, group):
                axis = _axis_of_rows(first_and_last, influence.positions.shape[1])
                leaves = axes.setdefault(state.path, {})
                if leaves.setdefault(state.leaf, axis) != axis:
                    leaves[state.leaf] = ""
    return axes


def _of_group(
    positions: np.ndarray, group: HiddenGroup
) -> Iterable[tuple[StateLeaf, tuple[np.ndarray, np.ndarray]]]:
    """Yield the states of a group, with the first and last row that reach an element."""
    rows = np.arange(positions.shape[1]).reshape(1, -1, *[1] * (positions.ndim - 2))
    rows = np.broadcast_to(rows, positions.shape)[positions >= 0]
    reached = positions[positions >= 0]
    first = np.full(group.num_positions, positions.shape[1])
    last = np.full(group.num_positions, -1)
    np.minimum.at(first, reached, rows)
    np.maximum.at(last, reached, rows)
    for state, layout in zip(group.states, group.old_layouts, strict=True):
        ids = np.arange(group.num_positions).reshape(state.shape) if layout is None else layout
        yield state, (first[ids], last[ids])


def _axis_of_rows(rows: tuple[np.ndarray, np.ndarray], count: int) -> int | str:
    """Return the axis of a state that follows rows, `ALL`, or ``""`` if unclear."""
    first, last = rows
    reached = last >= 0
    for axis, size in enumerate(first.shape):
        if size and count % size == 0:
            index = np.arange(size).reshape([-1 if a == axis else 1 for a in range(first.ndim)])
            both = (first // (count // size) == index) & (last // (count // size) == index)
            if reached.any() and both[reached].all():
                return axis
    return ALL if np.all((first == 0) & (last == count - 1)) else ""


def _by_evidence(rows: Evidence, batch_size: int | None, now: Shapes) -> Batch:
    """Return the batch of a model whose ``init_state`` follows no size."""
    axes: dict[Path, Axes] = {}
    unclear: dict[Path, str] = {}
    for path, shapes in now.items():
        axes_by_rows = [rows.get(path, {}).get(index, "") for index in range(len(shapes))]
        axes[path] = tuple(axis if isinstance(axis, int) else None for axis in axes_by_rows)
        if any(axis == "" and shape for axis, shape in zip(axes_by_rows, shapes, strict=True)):
            unclear[path] = (
                f"`init_state` gives it the shape {', '.join(map(str, shapes))} for every batch "
                "size, and no operation's rows reach it in order, as samples do"
            )
    sizes = _sizes(now, axes)
    if not sizes and batch_size is None:
        return Batch(None, MappingProxyType(axes))
    return _agreed([*sizes, *([] if batch_size is None else [batch_size])], now, axes, unclear)


# --- filters that the compiler adds


def axes_of_filters(traced: TracedModel, analysis: Analysis, batch: Batch) -> dict[Path, int]:
    """Return the batch axes of the filters of readouts that have one.

    A filter has the samples of its readout. A flow of labels between the two finds its axis.
    """
    leaves = {leaf.path: leaf for leaf in traced.leaves}
    axes: dict[Path, int] = {}
    for readout in traced.readouts:
        (end,) = (leaf for leaf in traced.leaves if leaf.name == readout.state)
        axis = batch.axis(end)
        if axis is None or batch.samples is None or end.out_var is None:
            continue
        expected = laid_out(end.shape, axis, batch.samples)
        for leaf in (leaves[path] for path in readout.filters):
            for place in (a for a, size in enumerate(leaf.shape) if size == batch.samples):
                start = {leaf.in_var: laid_out(leaf.shape, place, batch.samples)}
                (flow,) = flows_to(Question(Labels()), analysis.constants, start, [end.out_var])
                if flow is not None and follow(flow, expected):
                    axes.setdefault(leaf.path, place)
    return axes


def with_axes(batch: Batch, axes: Mapping[Path, int]) -> Batch:
    """Add the batch axes of States of one leaf."""
    every = {**batch.axes, **{path: (axis,) for path, axis in axes.items()}}
    return dataclasses.replace(batch, axes=MappingProxyType(every))


# --- arguments of the step


def axes_of_arguments(traced: TracedModel, batch: Batch, count: int | None) -> list[int | None]:
    """Return the batch axis of each argument of a step; ``None``: it has none.

    Parameters
    ----------
    traced
        The step.
    batch
        The batch axes of its States.
    count
        Number of samples.

    Notes
    -----
    Each index of a batch axis reaches only elements of the same sample in the new states. If
    samples are coupled, no axis does, and the first axis of that size counts.
    """
    ends = [
        (leaf.out_var, laid_out(leaf.shape, axis, count))
        for leaf in traced.leaves
        if leaf.out_var is not None
        and (axis := batch.axis(leaf)) is not None
        and leaf.shape[axis] == count
    ]
    constants = Constants(_without_operations(traced.program, [end for end, _ in ends]))
    inputs = dict(zip(traced.program.in_vars, constants.program.in_vars, strict=True))

    def is_batch(var: Var, axis: int, count: int) -> bool:
        start = {inputs[var]: laid_out(var.aval.shape, axis, count)}
        flows = flows_to(Question(Labels()), constants, start, constants.program.out_atoms)
        return all(follow(flow, own) for flow, (_, own) in zip(flows, ends, strict=True))

    found: list[int | None] = []
    likely: list[int | None] = []
    for var in traced.argument_vars:
        axes = [axis for axis, size in enumerate(var.aval.shape) if size == count]
        likely.append(next(iter(axes), None))
        found.append(next((a for a in axes if is_batch(var, a, var.aval.shape[a])), None))
    return likely if set(found) == {None} else found


def _without_operations(program: Program, targets: Sequence[Atom]) -> Program:
    """Return a program of some results, without ETP operations and calls."""

    def run(*values: Any) -> list[Any]:
        return evaluate(program, targets, dict(zip(program.in_vars, values, strict=True)))

    avals = [var.aval for var in program.in_vars]
    return program_of(inlined(trace_to_jaxpr(inline(run), avals)))


def follow(samples: Flow, expected: np.ndarray) -> bool:
    """Test whether elements depend on the expected samples alone, or on none."""
    return samples is None or not np.any((samples != BOTTOM) & (samples != expected))


def laid_out(shape: Sequence[int], axis: int | None, count: int) -> np.ndarray:
    """Return the sample of every element of an array, given the axis of samples."""
    if axis is None:
        return np.zeros(shape, np.int32)
    assert shape[axis] == count
    index = [1] * len(shape)
    index[axis] = count
    numbers = np.arange(count, dtype=np.int32).reshape(index)
    return np.array(np.broadcast_to(numbers, shape))
