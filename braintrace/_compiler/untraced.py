"""Paths of a gradient that no trace follows: through other States, and by ordinary operations."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .._graph.diagnostics import Diagnostic, quoted
from .._graph.hidden_group import HiddenGroup
from .._graph.marked import is_marked, role
from .._graph.relation import HiddenParamOpRelation
from .._graph.traced_model import StateLeaf, TracedModel
from .._jax import Var, is_var, source_line
from .._jaxpr import Program
from .relations import MarkedOperation
from .transfer import CONSTANT, carries_derivative


def carried_without_a_trace(
    traced: TracedModel, operations: Sequence[MarkedOperation], groups: Sequence[HiddenGroup]
) -> Iterator[Diagnostic]:
    """Yield the states that carry a gradient from step to step and are no hidden states."""
    program = traced.program
    outputs = [atom for atom in traced.output_atoms if is_var(atom)]
    new = [var for group in groups for var in group.new_vars]
    for leaf in _carriers(traced, operations, groups):
        directly = connected_by_gradients(program, [leaf.in_var], _is_opaque)
        if not directly.isdisjoint([*new, *outputs]):
            reached = [f"'{s.name}'" for g in groups for s, var in new_vars(g) if var in directly]
            yield Diagnostic(
                "warning",
                "untraced-state",
                f"State '{leaf.name}' carries what depends on the weights from step to step, and "
                f"reaches {', '.join(reached) or 'the output of `update`'}. It is no "
                "`brainstate.HiddenState`, so that no trace follows it and this path is left out "
                "of the gradient. Make it a `brainstate.HiddenState`, or write it through "
                "`jax.lax.stop_gradient` if it should not count.",
                (leaf.name,),
            )
        elif not connected_by_gradients(program, [leaf.in_var]).isdisjoint(new):
            yield Diagnostic(
                "info",
                "untraced-state",
                f"State '{leaf.name}' carries what depends on the weights from step to step, and "
                "reaches the hidden states of the next steps through marked operations. Their "
                "weights learn online; the path through them is what D-RTRL leaves out.",
                (leaf.name,),
            )


def also_plain(
    traced: TracedModel,
    groups: Sequence[HiddenGroup],
    relations: Sequence[HiddenParamOpRelation],
) -> Iterator[Diagnostic]:
    """Yield the weights with a trace that reach a state by ordinary operations as well."""
    program = traced.program
    operands = [atom for relation in relations for atom in relation.trainable_vars.values()]
    behind = program.depends_on(operands, frozenset(), CONSTANT, carries_derivative)
    new = {
        var: state.name for g in groups if is_remembered(program, g) for state, var in new_vars(g)
    }
    for leaf in traced.leaves:
        if leaf.kind != "parameter" or leaf.in_var not in behind:
            continue
        for index, _ in program.readers.get(leaf.in_var, ()):
            equation = program.equations[index]
            is_plain = not is_marked(equation) and equation.primitive.name not in CONSTANT
            plain = equation.outvars if is_plain else []
            reached = connected_by_gradients(program, plain, is_marked)
            states = [name for var, name in new.items() if var in reached]
            if states:
                yield Diagnostic(
                    "warning",
                    "also-plain",
                    f"Weight '{leaf.name}' of a marked operation reaches {quoted(states)} through "
                    f"`{equation.primitive.name}` as well. Its trace carries the marked operation; "
                    "on the other way the weight gets the gradient of the current step. Use a "
                    "marked operation there, too.",
                    (leaf.name, *states),
                    source_line(equation),
                )


def _carriers(
    traced: TracedModel, operations: Sequence[MarkedOperation], groups: Sequence[HiddenGroup]
) -> list[StateLeaf]:
    """Return the untraced states whose new value depends on hidden states or marked weights."""
    others = [leaf for leaf in traced.leaves if leaf.kind == "other" and leaf.out_var is not None]
    starts = [state.in_var for group in groups for state in group.states]
    starts += [operation.y_var for operation in operations]
    found: list[StateLeaf] = []
    while True:
        reached = connected_by_gradients(
            traced.program, [*starts, *(leaf.in_var for leaf in found)]
        )
        later = [leaf for leaf in others if is_var(leaf.out_var) and leaf.out_var in reached]
        if len(later) == len(found):
            return found
        found = later


def connected_by_gradients(
    program: Program, starts: Sequence[Var], ends: Callable[[Any], bool] = lambda _: False
) -> set[Var]:
    """Return what a gradient connects to ``starts``, short of the equations where it ends."""
    reached = {var for var in starts if carries_derivative(var)}
    for index in program.forward(reached.copy(), reached):
        equation = program.equations[index]
        stopped = equation.primitive.name in CONSTANT
        if not stopped and not ends(equation):
            reached.update(var for var in equation.outvars if carries_derivative(var))
    return reached


def _is_opaque(equation: Any) -> bool:
    return role(equation) == "opaque"


def is_remembered(program: Program, group: HiddenGroup) -> bool:
    """Tell whether a later step reads the states of a group."""
    return any(state.in_var in program.readers for state in group.states)


def new_vars(group: HiddenGroup) -> Iterator[tuple[StateLeaf, Var]]:
    """Yield the states of a group with the variables of their new values."""
    return zip(group.states, group.new_vars, strict=True)
