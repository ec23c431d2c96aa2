"""Ring buffers: which writes are read in later steps only.

The places that a ring writes and reads are a fixed distance apart, and depend on counters, and on
tables of delays. A step with all counters at zero shows whether they meet.
"""

import jax.numpy as jnp
import numpy as np

from .._graph.traced_model import TracedModel
from .._jax import Equation, Var, is_var
from .._jaxpr.evaluate import evaluate
from .._jaxpr.primitives import READS, WRITES, moved_operands


def writes_for_later(traced: TracedModel) -> set[Var]:
    """Return the results of writes of which no equation of the step reads what is new."""
    program, found = traced.program, set()
    for equation in program.equations:
        if equation.primitive.name in WRITES:
            uses = program.readers.get(equation.outvars[0], ())
            reads = [program.equations[reader] for reader, _ in uses]
            is_read_alone = all(e.primitive.name in READS for e in reads)
            if reads and is_read_alone and _are_apart(traced, equation, reads):
                found.add(equation.outvars[0])
    return found


def _are_apart(traced: TracedModel, write: Equation, reads: list[Equation]) -> bool:
    """Test whether some equations read no element that another one has just written."""
    results = [read.outvars[0] for read in reads]
    ring, pushed = parts = [write.invars[part] for part in moved_operands(write)]
    if not all(map(is_var, parts)):
        return False
    counters = {s.in_var: 0 for s in traced.written if jnp.issubdtype(s.dtype, jnp.integer)}
    tables = {s.in_var: s.table for s in traced.leaves if s.table is not None}
    given = (counters | tables).items()
    known = {var: jnp.full(var.aval.shape, value, var.aval.dtype) for var, value in given}
    needed = traced.program.depends_on(results, frozenset(parts))
    if not needed & {*traced.program.in_vars} <= known.keys() | {*parts}:
        return False
    marks = {ring: jnp.zeros_like(ring.aval), pushed: jnp.ones_like(pushed.aval)}
    return not any(map(np.any, evaluate(traced.program, results, known, marks)))
