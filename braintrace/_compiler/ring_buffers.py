"""Ring buffers: which writes are read in later steps only.

The place that a ring writes, and those that it reads, depend on counters: integer States that
depend on no data. Counters are run from zero, until each place has been written twice.
"""

import jax
import jax.numpy as jnp
import numpy as np

from .._graph.traced_model import TracedModel
from .._jax import Equation, Var, is_var
from .._jaxpr.evaluate import evaluate
from .._jaxpr.primitives import READS, WRITES, moved_operands, slices_of


def writes_for_later(traced: TracedModel) -> set[Var]:
    """Return the results of writes of which no equation of the step reads what is new."""
    program, counters = traced.program, _counters(traced)
    found = set()
    for equation in program.equations:
        if equation.primitive.name in WRITES:
            uses = program.readers.get(equation.outvars[0], ())
            reads = [program.equations[reader] for reader, _ in uses]
            is_read_alone = all(e.primitive.name in READS for e in reads)
            if reads and is_read_alone and _are_apart(traced, counters, equation, reads):
                found.add(equation.outvars[0])
    return found


def _counters(traced: TracedModel) -> dict[Var, Var]:
    """Return the integer States that depend on each other alone: their values around a step."""
    written = [leaf for leaf in traced.leaves if leaf.out_var is not None and is_var(leaf.out_var)]
    integers = [leaf for leaf in written if jnp.issubdtype(leaf.in_var.aval.dtype, jnp.integer)]
    counters = {leaf.in_var: leaf.out_var for leaf in integers}
    inputs = {old: _inputs(traced, [new]) for old, new in counters.items()}
    while others := [old for old in counters if not inputs[old] <= counters.keys()]:
        for old in others:
            del counters[old]
    return counters


def _inputs(
    traced: TracedModel, targets: list[Var], stops: frozenset[Var] = frozenset()
) -> set[Var]:
    return traced.program.depends_on(targets, stops) & {*traced.program.in_vars}


def _are_apart(
    traced: TracedModel, counters: dict[Var, Var], write: Equation, reads: list[Equation]
) -> bool:
    """Test whether some equations read no element that another one has just written."""
    program, slices = traced.program, slices_of(write)
    ring, pushed = (write.invars[part] for part in moved_operands(write))
    results = [read.outvars[0] for read in reads]
    if not (is_var(ring) and is_var(pushed)):
        return False
    marks = {
        ring: jnp.zeros(ring.aval.shape, ring.aval.dtype),
        pushed: jnp.ones(pushed.aval.shape, pushed.aval.dtype),
    }
    if not _inputs(traced, results, frozenset(marks)) <= counters.keys() | marks.keys():
        return False

    def step(now: list[jax.Array], _: None) -> tuple[list[jax.Array], jax.Array]:
        targets, given = [*counters.values(), *results], dict(zip(counters, now, strict=True))
        values = evaluate(program, targets, given, marks)
        is_new = [jnp.any(value != 0) for value in values[len(now) :]]
        return values[: len(now)], jnp.stack(is_new)

    start = [jnp.zeros(var.aval.shape, var.aval.dtype) for var in counters]
    sizes = (size for axis, size in enumerate(ring.aval.shape) if slices.widths.get(axis, 1) < size)
    _, is_new = jax.lax.scan(step, start, None, 2 * max(sizes, default=1))
    return not np.any(is_new)
