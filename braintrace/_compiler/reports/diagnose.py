"""Diagnostics: report the approximations that the passes found."""

from collections.abc import Collection, Iterator, Sequence

from ..._etrace_op.marked import holds_marked
from ..._graph import FOLLOWS_ALL, HiddenParamOpRelation, Jacobian, StateLeaf
from ..._graph.diagnostics import Diagnostic, DiagnosticKind, Level, quoted
from ..._jax import source_line
from ..._typing import path_name
from ..core.backward_rules import nonlinear_uses
from ..groups.grouped_step import GroupedStep
from ..groups.marked_operations import MarkedOperation
from .ancestors import AncestorSearch
from .diagnose_groups import (
    CHANGE_AFTERWARDS,
    NONLINEAR,
    OF_CURRENT_STEP,
    about_group,
    names_of,
)
from .lost_marks import lost_marks
from .not_marked import not_marked
from .untraced import also_untagged, carried_without_a_trace, plain_in_readouts

LOSES_MEMORY = ("nested-weights", "mixed-positions")
"""Kinds of warnings for a weight without a trace on its way to a hidden state."""


def diagnose(
    step: GroupedStep,
    every_relation: Sequence[HiddenParamOpRelation],
    relations: Sequence[HiddenParamOpRelation],
    jacobian: Jacobian,
) -> Iterator[Diagnostic]:
    """Yield every diagnostic of a model, in a fixed order.

    This includes diagnostics that do not concern the rule; `reported` removes them.

    Parameters
    ----------
    step, every_relation
        The step, and the relations that can learn online in it.
    relations
        The relations that learn by the rule.
    jacobian
        The learning rule's treatment of products; see `TraceMethod`.
    """
    follows_all = jacobian in FOLLOWS_ALL
    search = AncestorSearch(step, jacobian)
    about_groups = [
        diagnostic
        for group, walks in zip(step.groups, step.walks, strict=True)
        for diagnostic in about_group(search, group, walks)
    ]
    yield from about_groups
    yield from _nonlinear_weights(step, relations)
    named = {path for d in about_groups if d.kind in LOSES_MEMORY for path in d.paths}
    yield from _without_relation(step, every_relation, named, jacobian)
    yield from _no_trace(every_relation, relations)
    yield from _inside_rules(step)
    yield from step.traced.unmarked
    lost = list(lost_marks(step))
    yield from lost
    yield from not_marked(step, [path for diagnostic in lost for path in diagnostic.paths])
    yield from _partly_coupled(step, relations)
    yield from also_untagged(step, relations)
    yield from plain_in_readouts(step)
    yield from carried_without_a_trace(step, frozenset() if follows_all else step.graph.opaque)
    yield from _unused(step)
    yield from _about_outputs([leaf for leaf in step.outputs if leaf not in step.traced.filtered])


def _nonlinear_weights(
    step: GroupedStep, relations: Sequence[HiddenParamOpRelation]
) -> Iterator[Diagnostic]:
    """Yield the nonlinear backward rules between parameters and ETP weights."""
    analysis = step.analysis
    parameters = {leaf.in_var for leaf in step.traced.parameters}
    for relation in relations:
        for equation, operands in nonlinear_uses(analysis, list(relation.trainable_vars.values())):
            if not parameters.isdisjoint(analysis.gradient_ancestors(operands)):
                names = relation.printed_paths
                yield Diagnostic(
                    "warning",
                    "backward-not-linear",
                    f"{quoted(names)} enters `{relation.primitive.name}` through a {NONLINEAR} It "
                    "gets the gradient of all steps together, as their sum, instead of the "
                    f"gradient of each step. {CHANGE_AFTERWARDS}",
                    names,
                    source_line(equation),
                )


def _without_relation(
    step: GroupedStep,
    relations: Sequence[HiddenParamOpRelation],
    named: Collection[str],
    jacobian: Jacobian,
) -> Iterator[Diagnostic]:
    """Yield why operations have no trace, unless another warning names their weights."""
    related = {relation.equation for relation in relations}
    for operation in step.operations:
        if operation.equation not in related:
            equation = step.analysis.program.equations[operation.equation]
            states = [] if jacobian == "none" else _states_reached(step, operation)
            name = equation.primitive.name
            level, kind, message = _why_no_trace(step, operation, name, states)
            if kind != "nested-weights" or not set(operation.printed_paths) <= set(named):
                paths = (*operation.printed_paths, *states)
                yield Diagnostic(level, kind, message, paths, source_line(equation))


def _states_reached(step: GroupedStep, operation: MarkedOperation) -> list[str]:
    """Return the remembered hidden states that depend on an operation by gradient."""
    descendants = step.graph.gradients.descendants([operation.y_var])
    return [state.name for state, var in step.remembered_states if var in descendants]


def _why_no_trace(
    step: GroupedStep, operation: MarkedOperation, name: str, states: Sequence[str]
) -> tuple[Level, DiagnosticKind, str]:
    weights = quoted(operation.printed_paths)
    if operation.non_parameters:
        message = (
            f"The weight of `{name}` is computed from {weights} and from "
            f"{', '.join(operation.non_parameters)}. A trace needs a weight that depends on "
            "parameters, and on States that `update` does not write; it gets the gradient of "
            "the current step."
        )
        return "warning", "operand-not-parameters", message
    if any(operation.y_var in walk.ids for walks in step.walks for walk in walks):
        message = (
            f"The outputs of `{name}` with weight {weights} reach several "
            "elements of a hidden state, other than by a broadcast. A trace cannot carry "
            "this; the weight gets the gradient of the current step."
        )
        return "warning", "partly-coupled", message
    if states:
        message = (
            f"Weight {weights} of `{name}` reaches {quoted(states)} through other ETP "
            f"operations only. {OF_CURRENT_STEP}"
        )
        return "warning", "nested-weights", message
    message = (
        f"Weight {weights} of `{name}` reaches no hidden state "
        "with a trace elementwise; it gets the gradient of the current step."
    )
    return "info", "no-hidden-state", message


def _no_trace(
    every_relation: Sequence[HiddenParamOpRelation], relations: Sequence[HiddenParamOpRelation]
) -> Iterator[Diagnostic]:
    carried = {relation.key for relation in relations}
    for relation in every_relation:
        if relation.key not in carried:
            names = relation.printed_paths
            yield Diagnostic(
                "info",
                "no-trace",
                f"{quoted(names)} of `{relation.primitive.name}` has no trace under its learning "
                "rule; it gets the gradient of the current step.",
                names,
                relation.source,
            )


def _inside_rules(step: GroupedStep) -> Iterator[Diagnostic]:
    for equation in step.analysis.program.equations:
        if holds_marked(equation):
            yield Diagnostic(
                "warning",
                "inside-custom-rule",
                f"An ETP operation inside the body of `{equation.primitive.name}` cannot have a "
                "trace, because the function has a custom derivative rule. Its weight gets the "
                "gradient of the current step. Move the operation out of this function.",
                (),
                source_line(equation),
            )


def _partly_coupled(
    step: GroupedStep, relations: Sequence[HiddenParamOpRelation]
) -> Iterator[Diagnostic]:
    for relation in relations:
        paths = relation.printed_paths
        for influence in relation.influences:
            if influence.mixed:
                yield Diagnostic(
                    "warning",
                    "partly-coupled",
                    f"Some outputs of the operation of {quoted(paths)} reach several elements of "
                    f"{names_of(step.groups[influence.group])} at once, other than by a "
                    "broadcast; their influence is held constant.",
                    paths,
                    relation.source,
                )


def _unused(step: GroupedStep) -> Iterator[Diagnostic]:
    used = {leaf.path for leaf in step.traced.parameters}
    for path in step.traced.parameter_paths:
        if path not in used:
            yield Diagnostic(
                "info",
                "unused-parameter",
                f"Parameter '{path_name(path)}' is not used by `update`; its gradient is zero "
                "unless the loss reads it.",
                (path_name(path),),
            )


def _about_outputs(states: Sequence[StateLeaf]) -> Iterator[Diagnostic]:
    """Yield a diagnostic for each state of `states_as_outputs`."""
    for state in states:
        yield Diagnostic(
            "info",
            "backward-not-linear",
            f"Hidden state '{state.name}' follows a `custom_vjp` whose backward rule is not "
            "proportional to the incoming gradient. No later step reads the state, so it needs "
            "no trace: the weights before it get the gradient of the current step.",
            (state.name,),
        )
