"""What the entries of traces stand for.

Traces of one shape may stand for other things after a change of the model: another function of a
parameter enters an operation, or the operation reaches other units. Going on with such traces would
give a wrong gradient without an error. Two steps of a model are therefore compared in all that
traces are read with; what a step computes anew, such as decays and inputs, may differ.
"""

import collections
import re
from collections.abc import Hashable, Iterable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from .._graph import ETraceGraph, operand_key
from .._jax import Atom, Equation, is_tracer, is_var

Digests: TypeAlias = dict[Any, Hashable]


def meaning_of(graph: ETraceGraph) -> Hashable:
    """Return what traces of a graph stand for, as a value to compare in one process."""
    digests = _digests(graph)
    flat = graph.flat_state
    if flat is None:
        return frozenset(_of_relations(graph, digests))
    named = {*graph.trace_specs, *(spec.relation for spec in jax.tree.leaves(graph.trace_specs))}
    entries = []
    for use in flat.uses:
        if not named & {use.key, operand_key(use)}:
            continue  # the traces are derivatives by the parameter itself
        equation = None if use.equation is None else graph.traced.program.equations[use.equation]
        x = None if equation is None or use.x is None else equation.invars[use.x]
        entries.append((use.key, x, equation))
    pattern = () if flat.structure is None else _of_arrays(flat.structure)
    return flat.names, pattern, frozenset(_of_operations(entries, digests))


def _of_relations(graph: ETraceGraph, digests: Digests) -> Iterable[Hashable]:
    equations = graph.traced.program.equations
    relations = graph.hidden_param_op_relations
    entries = [(r.key, r.x_var, equations[r.equation]) for r in relations]
    yield from _of_operations(entries, digests)
    for relation in relations:
        for influence, group in zip(relation.influences, relation.hidden_groups, strict=True):
            states = frozenset(state.name for state in group.states)
            yield relation.key, states, _of_array(influence.positions)


def _of_operations(
    entries: Iterable[tuple[str, Atom | None, Equation | None]], digests: Digests
) -> Iterable[Hashable]:
    """Yield the operations, with all operands but the input; of alike ones, with that too."""
    found = []
    for key, x, equation in entries:
        atoms = () if equation is None else equation.invars
        operands = tuple(_of_atom(atom, digests) for atom in atoms if atom is not x)
        params = None if equation is None else _of_params(equation.params)
        found.append((key, params, operands, None if x is None else _of_atom(x, digests)))
    counts = collections.Counter(operands for _, _, operands, _ in found)
    for key, params, operands, x_digest in found:
        yield key, params, operands, x_digest if counts[operands] > 1 else None


def _digests(graph: ETraceGraph) -> Digests:
    """Return a digest of how each variable of the step is computed from States and arguments."""
    program = graph.traced.program
    result: Digests = {leaf.in_var: leaf.name for leaf in graph.traced.leaves}
    result |= {var: ("argument", n) for n, var in enumerate(graph.traced.argument_vars)}
    result |= {var: _of_array(value) for var, value in program.constants.items()}
    for equation in program.equations:
        operands = tuple(_of_atom(atom, result) for atom in equation.invars)
        own = hash((equation.primitive.name, _of_params(equation.params), operands))
        result |= {var: (own, n) for n, var in enumerate(equation.outvars)}
    return result


def _of_atom(atom: Atom, digests: Digests) -> Hashable:
    return digests.get(atom) if is_var(atom) else _of_array(atom.val)


def _of_arrays(structure: Any) -> Hashable:
    parts = (structure.of_outputs, structure.of_parameters)
    named = ((name, _of_array(array)) for part in parts for name, array in part.items())
    return _of_array(structure.transition), tuple(sorted(named))


def _of_array(value: Any) -> Hashable:
    """Return the contents of an array, or its identity where they cannot be read."""
    if is_tracer(value) or jnp.issubdtype(jnp.result_type(value), jax.dtypes.extended):
        return id(value)
    array = np.asarray(value)
    return array.shape, str(array.dtype), array.tobytes()


def _of_params(params: Mapping[str, Any]) -> Hashable:
    return tuple((name, _of_value(value)) for name, value in sorted(params.items()))


def _of_value(value: Any) -> Hashable:
    """Return a value that equals itself alone, or its code or printed form where that is unknown.

    Addresses are left out: they differ from trace to trace.
    """
    found: Hashable = getattr(value, "__code__", None)
    if found is not None:
        return found
    is_comparable = any("__eq__" in vars(c) for c in type(value).__mro__[:-1])
    if is_comparable and isinstance(value, Hashable) and not isinstance(value, tuple | frozenset):
        found = value
        return found
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))
