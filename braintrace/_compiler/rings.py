"""Ring buffers as shift registers: their slots in the order of age.

A step writes the slot of a ring buffer that a counter says, and reads others. In the order of their
ages, the step moves all slots on, and reads the same ones at every step. The order is found by
running the counter for some steps, with NumPy. The core carries such a register outside of its
loops (`_core/registers.py`).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._graph.traced_model import Ring, StateLeaf, TracedModel
from .._jax import Atom, Equation, Var, bind, is_var, trace_to_jaxpr
from .._jax_kernels import mirrored
from .._jaxpr.primitives import (
    NOWHERE,
    READS,
    WRITES,
    elements_of_slices,
    moved_operands,
    run_with_numpy,
    slices_of,
)
from .._jaxpr.program import Program, Rule, evaluate, evaluate_all, program_of
from .canonicalize import with_program

MOST_STEPS = 4096  # a counter may count to more than the number of slots


class _Found(NamedTuple):
    """A ring buffer with the equations that read and write it.

    Attributes
    ----------
    ring, write
        The ring buffer, and the equation that writes a slot.
    times
        The variable of the counter at the time of each of its values, before and after a step.
    reads
        For some equations, by index, the elements of the register that their results always are.
    """

    ring: Ring
    write: Equation
    times: Mapping[Atom, Var]
    reads: Mapping[int, np.ndarray]


def with_registers(traced: TracedModel) -> TracedModel:
    """Return a step whose hidden ring buffers have their slots in the order of age."""
    program = traced.program
    hidden = (place for place, leaf in enumerate(traced.leaves) if leaf.kind == "hidden")
    every = [found for place in hidden if (found := _find_ring(traced, place)) is not None]
    if not every:
        return traced
    owners = {var: found for found in every for var in found.times}

    def run(*values: jax.Array) -> list[Any]:
        inputs = dict(zip(program.in_vars, values, strict=True))

        def in_slots(atom: Atom, value: Any) -> Any:
            found = owners.get(atom) if is_var(atom) else None
            if found is None:
                return value
            (now,) = evaluate(program, [found.times[atom]], inputs)
            return mirrored(value, found.ring.start(now), axis=found.ring.axis)

        def run_in_slots(equation: Equation, operands: list[Any]) -> list[Any]:
            return bind(equation, [*map(in_slots, equation.invars, operands)])

        rules = dict[int, Rule]()
        for found in every:
            uses = (use for var in found.times for use in program.readers.get(var, ()))
            rules |= {index: run_in_slots for index, _ in uses}
        for found in every:
            rules |= {i: functools.partial(_take, places) for i, places in found.reads.items()}
            push = functools.partial(_push, found.ring, in_slots)
            rules[program.producer[found.write.outvars[0]]] = push
        return evaluate(program, program.out_atoms, inputs, rules=rules, effects=True)

    new = program_of(trace_to_jaxpr(run, [var.aval for var in program.in_vars]))
    rings = tuple(found.ring for found in every)
    return dataclasses.replace(with_program(traced, new), rings=rings)


def _find_ring(traced: TracedModel, place: int) -> _Found | None:
    """Return the ring buffer that a State is; ``None``: it is another State."""
    program, leaf = traced.program, traced.leaves[place]
    old, write = leaf.in_var, program.maker(leaf.out_var) if leaf.out_var is not None else None
    if write is None or write.primitive.name not in WRITES or not moved_operands(write):
        return None
    first, pushed = parts = [write.invars[part] for part in moved_operands(write)]
    inputs = program.depends_on(write.outvars, {*filter(is_var, parts)}) & {*program.in_vars}
    counters = [k for k, s in enumerate(traced.leaves) if {s.in_var} == inputs - {old, pushed}]
    is_read_out = sum(atom is old or atom is leaf.out_var for atom in program.out_atoms) > 1
    if first is not old or not is_var(pushed) or not counters or is_read_out:
        return None
    counter, shape = traced.leaves[counters[0]], old.aval.shape
    counts = _counted(program, counter, 1 + 2 * max(shape, default=0))
    axes = [a for a, n in enumerate(shape) if n > 1 and n * pushed.aval.size == old.aval.size]
    for axis in axes if counts.size else ():
        slots = shape[axis]
        written = _slots_written(program, write, axis, counter.in_var, counts[: 2 * slots])
        turn = 1 if (written[1] - written[0]) % slots == 1 else -1
        every = (written[0] + turn * counts) % slots
        is_regular = (np.diff(every) % slots == turn % slots).all()
        if is_regular and np.array_equal(every[: 2 * slots], written):
            ring = Ring(place, counters[0], axis, turn == 1, int(written[0]) - (turn == 1))
            reads = _constant_reads(program, ring, write, counter.in_var, counts)
            times = {old: counter.in_var, leaf.out_var: counter.out_var}
            return _Found(ring, write, times, reads)
    return None


def _counted(program: Program, counter: StateLeaf, steps: int) -> np.ndarray:
    """Return the first values of a counter, from zero; none if it depends on other values."""
    now, new, count = counter.in_var, counter.out_var, max(MOST_STEPS, steps)
    is_counter = jnp.issubdtype(now.aval.dtype, jnp.signedinteger) and not now.aval.shape
    if new is None or not is_counter or program.depends_on([new]) & {*program.in_vars} != {now}:
        return np.zeros(0, int)
    (after,) = _values_at(program, [new], now, np.arange(count))
    counts = [0]
    while len(counts) < count and 0 <= counts[-1] < count:
        counts.append(int(after[counts[-1]]))
    return np.array(counts if len(counts) == count else [], int)


def _values_at(
    program: Program, targets: Sequence[Atom], counter: Var, counts: np.ndarray
) -> list[np.ndarray]:
    """Return variables that depend on a counter alone, for some of its values."""
    run = jax.vmap(lambda now: evaluate(program, targets, {counter: now}))
    counts = counts.astype(counter.aval.dtype)
    jaxpr = trace_to_jaxpr(run, [jax.typeof(counts)])
    with jax.ensure_compile_time_eval():
        return [*map(np.asarray, evaluate_all(jaxpr, [counts], run_with_numpy))]


def _places_at(
    program: Program, equation: Equation, counter: Var, counts: np.ndarray
) -> Iterator[np.ndarray]:
    """Yield the elements that an equation reads or writes, for some values of a counter."""
    indices = [equation.invars[operand] for operand in slices_of(equation).indices]
    for at in zip(*_values_at(program, indices, counter, counts), strict=True):
        is_table = "dimension_numbers" in equation.params
        yield elements_of_slices(equation, [*np.moveaxis(at[0], -1, 0)] if is_table else at)


def _slots_written(
    program: Program, write: Equation, axis: int, counter: Var, counts: np.ndarray
) -> np.ndarray:
    """Return the slot that each step writes, in order; -1: it writes other elements."""
    shape = write.outvars[0].aval.shape
    numbers = np.moveaxis(np.arange(math.prod(shape)).reshape(shape), axis, 0)
    in_slots = numbers.reshape(shape[axis], -1)
    slots = []
    for places in _places_at(program, write, counter, counts):
        slot = int(np.argmax(in_slots[:, 0] == places.flat[0]))
        slots.append(slot if np.array_equal(in_slots[slot], places.ravel()) else -1)
    return np.array(slots)


def _constant_reads(
    program: Program, ring: Ring, write: Equation, counter: Var, counts: np.ndarray
) -> dict[int, np.ndarray]:
    """Return the elements of the register that equations read, if they are the same in all steps.

    The register is that before the step or, for values that the step has written, after it.
    """
    old, (new,) = write.invars[0], write.outvars
    slots, stride = old.aval.shape[ring.axis], math.prod(old.aval.shape[ring.axis + 1 :])

    def in_register(places: np.ndarray, now: int) -> np.ndarray:
        slot = places // stride % slots
        moved = places + ((ring.start(now) - slot) % slots - slot) * stride
        return np.where(places == NOWHERE, NOWHERE, moved)

    found = dict[int, np.ndarray]()
    for var, after in ((old, 0), (new, 1)):
        for index, operand in program.readers.get(var, ()):
            equation = program.equations[index]
            read = program.depends_on(equation.outvars, {old, new}) & {*program.in_vars}
            if equation.primitive.name in READS and not operand and read <= {old, counter}:
                each = _places_at(program, equation, counter, counts[: 2 * slots])
                first, *others = map(in_register, each, counts[after:])
                if NOWHERE not in first and all(np.array_equal(first, own) for own in others):
                    found[index] = first
    return found


def _push(
    ring: Ring, in_slots: Callable[[Atom, Any], Any], write: Equation, operands: list[Any]
) -> list[Any]:
    """Move a register on."""
    line, place = operands[0], moved_operands(write)[1]
    value = in_slots(write.invars[place], operands[place])
    value = value.reshape(*line.shape[: ring.axis], 1, *line.shape[ring.axis + 1 :])
    last = line.shape[ring.axis] - 1
    if ring.newest_first:
        parts = [value, jax.lax.slice_in_dim(line, 0, last, axis=ring.axis)]
    else:
        parts = [jax.lax.slice_in_dim(line, 1, last + 1, axis=ring.axis), value]
    return [jnp.concatenate(parts, ring.axis)]


def _take(places: np.ndarray, read: Equation, operands: list[Any]) -> list[Any]:
    """Return some elements of a register, as a slice where they are one."""
    value = operands[0]
    numbers = np.arange(value.size).reshape(value.shape)
    for axis, place in enumerate(np.unravel_index(places.flat[0], value.shape)):
        if np.array_equal(numbers.take(place, axis).ravel(), places.ravel()):
            taken = jax.lax.index_in_dim(value, int(place), axis, keepdims=False)
            return [taken.reshape(places.shape)]
    return [jnp.take(value.ravel(), places, mode="clip")]
