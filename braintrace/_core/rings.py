"""Ring buffers: the ages of their values, found by running the counter that says where they are."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._etrace_op.registry import role
from .._graph.hidden_group import HiddenGroup
from .._graph.traced_model import StateLeaf, TracedModel
from .._jax import Equation, Var, is_var
from .._jaxpr.evaluate import evaluate
from .._jaxpr.primitives import WRITES, moved_operands
from .._jaxpr.program import Program


class Ring(NamedTuple):
    """A ring buffer, of which each step writes the next slot.

    Attributes
    ----------
    states
        Its slots, which are states of a group.
    pushed, pointer
        The variable that a step writes, and the value of a counter before the step.
    layout
        The unit of each element of ``pushed``; ``None``: in order.
    slots
        The slot that a step writes, by the value of the counter modulo the number of slots.
    turn
        The difference of the slots of successive steps: 1, or one less than their number.
    """

    states: tuple[int, ...]
    pushed: Var
    pointer: Var
    layout: np.ndarray | None
    slots: np.ndarray
    turn: int


MOST_STEPS = 4096  # a counter may count to more than the number of slots


def find_rings(traced: TracedModel, group: HiddenGroup) -> Iterator[Ring]:
    """Yield the ring buffers of a group that are written where one counter is."""
    program, units = traced.program, group.num_positions
    writes = [e for e in program.equations if e.primitive.name in WRITES and moved_operands(e)]
    opaque = {var for e in program.equations if role(e) == "opaque" for var in e.outvars}
    for write in (equation for equation in writes if equation.outvars[0] in group.new_vars):
        old, pushed = parts = [write.invars[part] for part in moved_operands(write)]
        states = tuple(a for a, var in enumerate(group.new_vars) if var is write.outvars[0])
        layouts = [own.ravel() for a in states if (own := group.layouts[a]) is not None]
        sizes = {pushed.aval.size, *(int(np.sum(own >= 0)) for own in layouts)}
        is_whole = sizes == {units} and len(layouts) == len(states) > 1 and is_var(pushed)
        is_own = {group.states[a].in_var for a in states} == {old}
        inputs = program.depends_on(write.outvars, parts) & {*program.in_vars} - {old, pushed}
        counter = [leaf for leaf in traced.written if {leaf.in_var} == inputs]
        if is_whole and is_own and counter and old not in program.depends_on([pushed], opaque):
            elements = np.stack([np.argsort(own)[-units:] for own in layouts])
            for found in _rotations(program, write, counter[0], elements):
                yield Ring(states, pushed, counter[0].in_var, *found)


def _rotations(
    program: Program, write: Equation, counter: StateLeaf, elements: np.ndarray
) -> Iterator[tuple[np.ndarray | None, np.ndarray, int]]:
    """Yield how slots with some elements, for each unit, are written, if a counter says it."""
    (slots, units), pointer, new = elements.shape, counter.in_var, counter.out_var
    old, pushed = (write.invars[part] for part in moved_operands(write))
    shapes = old.aval.shape, pushed.aval.shape
    marks = {old: np.full(shapes[0], -1), pushed: np.arange(units).reshape(shapes[1])}
    is_counter = jnp.issubdtype(pointer.aval.dtype, jnp.integer) and not pointer.aval.shape
    if new is None or not is_counter or program.depends_on([new]) & {*program.in_vars} - {pointer}:
        return

    def step(now: Any, _: None) -> tuple[Any, Any]:
        return evaluate(program, [new], {pointer: now})[0], now

    def of_step(now: Any) -> tuple[jax.Array, ...]:
        (ring,) = evaluate(program, write.outvars, {pointer: now}, marks)
        found = jnp.ravel(ring)[elements]
        newest = jnp.argmax(found[:, 0])
        return newest, found[newest], jnp.sum(found >= 0)

    with jax.ensure_compile_time_eval():
        start, steps = np.zeros((), pointer.aval.dtype), max(MOST_STEPS, 2 * slots)
        every = np.asarray(jax.lax.scan(step, start, None, steps)[1])
        newest, moved, count = map(np.asarray, jax.lax.map(of_step, every[: 2 * slots]))
    table, turn = np.zeros(slots, int), int(newest[1] - newest[0]) % slots
    table[every[:slots] % slots] = newest[:slots]
    written, is_whole = table[every % slots], {*moved[0]} == {*range(units)}
    is_known = (written[: 2 * slots] == newest).all() and (count == units).all()
    is_regular = (np.diff(written) % slots == turn).all() and (moved == moved[0]).all()
    if is_whole and is_known and is_regular and turn in (1, slots - 1):
        is_in_order = (np.diff(moved[0]) == 1).all()
        yield None if is_in_order else np.argsort(moved[0]).reshape(shapes[1]), table, turn
