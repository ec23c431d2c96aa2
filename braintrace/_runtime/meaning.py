"""What the entries of traces stand for.

Traces of one shape may stand for other things after a change of the model: another function of a
parameter enters an operation, or the operation reaches other units. Going on with such traces would
give a wrong gradient without an error. Two steps of a model are therefore compared in all that
traces are read with; what a step computes anew, such as decays and inputs, may differ.
"""

import collections
import dataclasses
import functools
import hashlib
import inspect
import re
import types
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from .._graph import ETraceGraph, operand_key
from .._jax import Atom, Equation, is_tracer, is_var, open_jaxpr

Digests: TypeAlias = dict[Any, str]


def meaning_of(graph: ETraceGraph) -> str:
    """Return a digest of what traces of a graph stand for, the same in every process."""
    digests = _digests(graph)
    flat = graph.flat_state
    if flat is None:
        return _digest(*sorted(_of_relations(graph, digests)))
    named = {*graph.trace_specs, *(spec.relation for spec in jax.tree.leaves(graph.trace_specs))}
    entries = []
    for use in flat.uses:
        if not named & {use.key, operand_key(use)}:
            continue  # the traces are derivatives by the parameter itself
        equation = None if use.equation is None else graph.traced.program.equations[use.equation]
        x = None if equation is None or use.x is None else equation.invars[use.x]
        entries.append((use.key, x, equation))
    pattern = "" if flat.structure is None else _of_arrays(flat.structure)
    return _digest(*flat.names, pattern, *sorted(_of_operations(entries, digests)))


def _of_relations(graph: ETraceGraph, digests: Digests) -> Iterable[str]:
    equations = graph.traced.program.equations
    relations = graph.hidden_param_op_relations
    entries = [(r.key, r.x_var, equations[r.equation]) for r in relations]
    yield from _of_operations(entries, digests)
    for relation in relations:
        for influence, group in zip(relation.influences, relation.hidden_groups, strict=True):
            states = sorted(state.name for state in group.states)
            yield _digest(relation.key, *states, _of_value(influence.positions))


def _of_operations(
    entries: Iterable[tuple[str, Atom | None, Equation | None]], digests: Digests
) -> Iterable[str]:
    """Yield the operations, with all operands but the input; of alike ones, with that too."""
    found = []
    for key, x, equation in entries:
        atoms = () if equation is None else equation.invars
        operands = tuple(_of_atom(atom, digests) for atom in atoms if atom is not x)
        params = "" if equation is None else _of_params(equation.params)
        found.append((key, params, operands, "" if x is None else _of_atom(x, digests)))
    counts = collections.Counter(operands for _, _, operands, _ in found)
    for key, params, operands, x_digest in found:
        yield _digest(key, params, *operands, x_digest if counts[operands] > 1 else "")


def _digests(graph: ETraceGraph) -> Digests:
    """Return a digest of how each variable of the step is computed from States and arguments."""
    program = graph.traced.program
    result: Digests = {leaf.in_var: leaf.name for leaf in graph.traced.leaves}
    result |= {var: f"argument {n}" for n, var in enumerate(graph.traced.argument_vars)}
    result |= {var: _of_value(value) for var, value in program.constants.items()}
    for equation in program.equations:
        operands = (_of_atom(atom, result) for atom in equation.invars)
        own = _digest(equation.primitive.name, _of_params(equation.params), *operands)
        result |= {var: f"{own} {n}" for n, var in enumerate(equation.outvars)}
    return result


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _of_atom(atom: Atom, digests: Digests) -> str:
    return digests.get(atom, "") if is_var(atom) else _of_value(atom.val)


def _of_arrays(structure: Any) -> str:
    parts = (structure.of_outputs, structure.of_parameters)
    named = ((name, _of_value(array)) for part in parts for name, array in part.items())
    return _digest(_of_value(structure.transition), *map(str, sorted(named)))


def _of_params(params: Mapping[str, Any]) -> str:
    return _of_value(tuple(sorted(params.items())))


def _of_value(value: Any) -> str:
    """Return a digest of a value: of its contents, its code, or its printed form.

    Addresses are left out: they differ from trace to trace.
    """
    if isinstance(value, (np.ndarray, np.generic, jax.Array)):
        return _of_array(value)
    if isinstance(value, (tuple, list)):
        return _digest(type(value).__name__, *map(_of_value, value))
    if isinstance(value, frozenset):  # its order differs from process to process
        return _digest(*sorted(map(_of_value, value)))
    if isinstance(value, functools.partial):
        return _of_value((value.func, value.args, sorted(value.keywords.items())))
    if isinstance(value, types.CodeType):
        return _digest(value.co_code.hex(), str(value.co_names), _of_value(value.co_consts))
    if isinstance(function := inspect.unwrap(value), types.FunctionType):
        return _of_function(function)
    if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
        opened, constants = open_jaxpr(value)
        return _digest(_printed(opened), *map(_of_value, constants))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]
        return _digest(type(value).__qualname__, _of_value(fields))
    return _printed(value)


def _of_function(function: types.FunctionType) -> str:
    """Return a digest of a function: of its code, and of other values than functions in it."""
    within = [*(function.__defaults__ or ()), *inspect.getclosurevars(function).nonlocals.values()]
    values = [value for value in within if not callable(value)]
    return _of_value((function.__code__, values))


def _of_array(value: Any) -> str:
    """Return a digest of the contents of an array, or its type where they cannot be read."""
    if is_tracer(value) or jnp.issubdtype(jnp.result_type(value), jax.dtypes.extended):
        return str(jax.typeof(value))
    array = np.asarray(value)
    return hashlib.sha256(f"{array.shape} {array.dtype}".encode() + array.tobytes()).hexdigest()


def _printed(value: Any) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))
