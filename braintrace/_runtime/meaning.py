"""What the entries of traces stand for.

Traces of one shape may stand for other things after a change of the model: another function of a
parameter enters an operation, or the operation reaches other units. Going on with such traces would
give a wrong gradient without an error. Two steps of a model are therefore compared in all that
traces are read with; what a step computes anew, such as decays and inputs, may differ.
"""

import collections
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import jax

from .._graph import ETraceGraph, operand_key
from .._jax import Atom, Equation, is_var
from .digests import digest, digest_of

Digests: TypeAlias = dict[Any, str]


def meaning_of(graph: ETraceGraph, rules: Mapping[int, str]) -> str:
    """Return a digest of what traces of a graph stand for, the same in every process.

    ``rules`` are digests of custom derivatives; see `Fingerprint`.
    """
    digests = _digests(graph, rules)
    flat = graph.flat_state
    if flat is None:
        return digest(*sorted(_of_relations(graph, digests)))
    named = {*graph.trace_specs, *(spec.relation for spec in jax.tree.leaves(graph.trace_specs))}
    entries = []
    for use in flat.uses:
        if not named & {use.key, operand_key(use)}:
            continue  # the traces are derivatives by the parameter itself
        equation = None if use.equation is None else graph.traced.program.equations[use.equation]
        x = None if equation is None or use.x is None else equation.invars[use.x]
        entries.append((use.key, x, equation))
    pattern = "" if flat.structure is None else _of_arrays(flat.structure)
    return digest(*flat.names, pattern, *sorted(_of_operations(entries, digests)))


def _of_relations(graph: ETraceGraph, digests: Digests) -> Iterable[str]:
    equations = graph.traced.program.equations
    relations = graph.hidden_param_op_relations
    entries = [(r.key, r.x_var, equations[r.equation]) for r in relations]
    yield from _of_operations(entries, digests)
    for relation in relations:
        for influence, group in zip(relation.influences, relation.hidden_groups, strict=True):
            states = sorted(state.name for state in group.states)
            yield digest(relation.key, *states, digest_of(influence.positions))


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
        yield digest(key, params, *operands, x_digest if counts[operands] > 1 else "")


def _digests(graph: ETraceGraph, rules: Mapping[int, str]) -> Digests:
    """Return a digest of how each variable of the step is computed from States and arguments."""
    program = graph.traced.program
    result: Digests = {leaf.in_var: leaf.name for leaf in graph.traced.leaves}
    result |= {var: f"argument {n}" for n, var in enumerate(graph.traced.argument_vars)}
    result |= {var: digest_of(value) for var, value in program.constants.items()}
    for index, equation in enumerate(program.equations):
        operands = (_of_atom(atom, result) for atom in equation.invars)
        kind = equation.primitive.name, rules.get(index, "")
        own = digest(*kind, _of_params(equation.params), *operands)
        result |= {var: f"{own} {n}" for n, var in enumerate(equation.outvars)}
    return result


def _of_atom(atom: Atom, digests: Digests) -> str:
    return digests.get(atom, "") if is_var(atom) else digest_of(atom.val)


def _of_arrays(structure: Any) -> str:
    parts = (structure.of_outputs, structure.of_parameters)
    named = ((name, digest_of(array)) for part in parts for name, array in part.items())
    return digest(digest_of(structure.transition), *map(str, sorted(named)))


def _of_params(params: Mapping[str, Any]) -> str:
    return digest_of(tuple(sorted(params.items())))
