"""Turn what the walks found into diagnostics."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from .._graph.diagnostics import Diagnostic, quoted
from .._graph.hidden_group import Cut, HiddenGroup
from .._graph.marked import holds_marked
from .._graph.relation import HiddenParamOpRelation
from .._graph.traced_model import TracedModel
from .._jax import Atom, Var, source_line
from .._typing import path_name
from .backward import bent_uses
from .derivative import Derivatives
from .positions import Walk
from .relations import MarkedOperation
from .transfer import CONSTANT, carries_derivative
from .untraced import also_plain, carried_without_a_trace, is_remembered, new_vars


def diagnose(
    traced: TracedModel,
    operations: Sequence[MarkedOperation],
    groups: Sequence[HiddenGroup],
    walks: Sequence[Sequence[Walk]],
    relations: Sequence[HiddenParamOpRelation],
    derivatives: Derivatives,
) -> Iterator[Diagnostic]:
    """Yield every diagnostic of a model, in a fixed order."""
    reader = _Upstream(traced, operations, groups)
    for group, group_walks in zip(groups, walks, strict=True):
        every_cut = [cut for walk in group_walks for cut in walk.cuts if not group.delay_line]
        for equation in dict.fromkeys(cut.equation for cut in every_cut):
            cuts = [cut for cut in every_cut if cut.equation == equation]
            yield from _cut(reader, group, equation, cuts)
        for equation in sorted({i for walk in group_walks for i in walk.weights_met}):
            yield from _passed(reader, group, equation)
        yield from _met(reader, group, group_walks)
        yield from _bent_on_the_way(reader, group, derivatives)
    yield from _bent_before(traced, relations, derivatives)
    yield from _without_relation(traced, operations, walks, relations)
    yield from _hidden_in_rules(traced)
    yield from _partly_mixed(groups, relations)
    yield from also_plain(traced, groups, relations)
    yield from carried_without_a_trace(traced, operations, groups)
    used = {leaf.path for leaf in traced.leaves if leaf.kind == "parameter"}
    for path in traced.parameter_paths:
        if path not in used:
            yield Diagnostic(
                "info",
                "unused-parameter",
                f"Parameter '{path_name(path)}' is not used by `update`; its gradient is zero "
                "unless the loss reads it.",
                (path_name(path),),
            )


class _Upstream:
    """Looks behind an operand, up to marked operations and new hidden states."""

    def __init__(
        self,
        traced: TracedModel,
        operations: Sequence[MarkedOperation],
        groups: Sequence[HiddenGroup],
    ) -> None:
        self.traced = traced
        self._by_output = {operation.y_var: operation for operation in operations}
        self._old = {state.in_var: state.name for group in groups for state in group.states}
        self._new = {var: state.name for group in groups for state, var in new_vars(group)}

    def remembered(self, group: HiddenGroup) -> bool:
        """Tell whether a later step reads a group, not by marked operations alone."""
        return is_remembered(self.traced.program, group) and not group.delay_line

    def of_others(self, behind: Iterable[Var], group: HiddenGroup) -> list[str]:
        """Return the states of other groups whose new values are among ``behind``."""
        if not self.remembered(group):
            return []
        found = set(behind).difference(group.new_vars)
        return [name for var, name in self._new.items() if var in found]

    def ends(self, group: HiddenGroup) -> frozenset[Var]:
        """Return where a look behind a group's states ends."""
        return frozenset(self._by_output) | (frozenset(self._new) - frozenset(group.new_vars))

    def behind(
        self, atom: Any, group: HiddenGroup
    ) -> tuple[list[str], list[str], list[MarkedOperation]]:
        """Return what a gradient reaches through ``atom``.

        Old states, new states of other groups, and marked operations.
        """
        if not carries_derivative(atom):
            return [], [], []
        stops = self.ends(group)
        behind = self.traced.program.depends_on([atom], stops, CONSTANT, carries_derivative)
        states = [name for var, name in self._old.items() if var in behind]
        marked = [operation for var, operation in self._by_output.items() if var in behind]
        return states, self.of_others(behind, group), marked


def _names(group: HiddenGroup) -> str:
    return ", ".join(f"'{state.name}'" for state in group.states)


def _cut(
    reader: _Upstream, group: HiddenGroup, index: int, cuts: Sequence[Cut]
) -> Iterator[Diagnostic]:
    equation = reader.traced.program.equations[index]
    states: dict[str, None] = {}
    marked: dict[str, None] = {}
    for cut in cuts:
        old, new, operations = reader.behind(equation.invars[cut.operand], group)
        states.update(dict.fromkeys([*old, *new]))
        marked.update(dict.fromkeys(p for o in operations for p in o.printed_paths))
    name = equation.primitive.name
    if states:
        yield Diagnostic(
            "warning",
            "plain-mixing",
            f"Hidden state {quoted(list(states))} reaches {_names(group)} through `{name}`, "
            "which mixes positions. Traces carry what happens position by position only, so "
            "this path into the next step is left out of the gradient of every weight. If it "
            "is a recurrent weight, use `braintrace.matmul` so that the weight itself learns "
            "online; "
            "if it must count in full, use BPTT or `vjp_method='multi-step'`.",
            (*states, *(state.name for state in group.states)),
            source_line(equation),
        )
    if marked:
        yield Diagnostic(
            "warning",
            "mixed-positions",
            f"Weight {quoted(list(marked))} reaches {_names(group)} through `{name}`, which "
            "mixes positions. A trace cannot carry this path: it is held constant where the "
            "weight also reaches the state position by position, and otherwise the weight gets "
            "the gradient of the current step along it.",
            (*marked, *(state.name for state in group.states)),
            source_line(equation),
        )


def _met(reader: _Upstream, group: HiddenGroup, walks: Sequence[Walk]) -> Iterator[Diagnostic]:
    """Yield the states of other groups that reach a group without mixing or a marked weight."""
    for index in sorted({index for walk in walks for index, _ in walk.states_met}):
        variables = [var for walk in walks for i, var in walk.states_met if i == index]
        states = reader.of_others(variables, group)
        if states:
            yield Diagnostic(
                "warning",
                "plain-mixing",
                f"Hidden state {quoted(states)} reaches {_names(group)}, but not one position "
                "each: by a broadcast, or by several slices. The learning signal of a step goes "
                f"back on this path; what {_names(group)} remembers of earlier steps is left out "
                "of the gradient of every weight before it. If it must count in full, use BPTT or "
                "`vjp_method='multi-step'`.",
                (*states, *(state.name for state in group.states)),
                source_line(reader.traced.program.equations[index]),
            )


def _bent_on_the_way(
    reader: _Upstream, group: HiddenGroup, derivatives: Derivatives
) -> Iterator[Diagnostic]:
    """Yield the custom backward rules on the way into a group that bend a gradient."""
    program = reader.traced.program
    for equation, operands in bent_uses(program, derivatives, group.new_vars, reader.ends(group)):
        states, others, marked = _behind_operands(reader, group, operands)
        names = [*states, *others, *marked]
        if names:
            yield Diagnostic(
                "warning",
                "backward-not-linear",
                f"{quoted(names)} reaches {_names(group)} through a {_BENT} A trace goes forward "
                "and does not know that gradient: it takes the rule's answer to a gradient of one. "
                f"{_CHANGE_AFTERWARDS}",
                (*names, *(state.name for state in group.states)),
                source_line(equation),
            )


def _bent_before(
    traced: TracedModel, relations: Sequence[HiddenParamOpRelation], derivatives: Derivatives
) -> Iterator[Diagnostic]:
    """Yield the custom backward rules between parameters and the weights of marked operations."""
    parameters = {leaf.in_var for leaf in traced.leaves if leaf.kind == "parameter"}
    for relation in relations:
        weights = list(relation.trainable_vars.values())
        for equation, operands in bent_uses(traced.program, derivatives, weights):
            behind = traced.program.depends_on(operands, frozenset(), CONSTANT, carries_derivative)
            if not parameters.isdisjoint(behind):
                names = tuple(path_name(path) for path in relation.parameter_paths)
                yield Diagnostic(
                    "warning",
                    "backward-not-linear",
                    f"{quoted(names)} enters `{relation.primitive.name}` through a {_BENT} What "
                    "comes back to the weight is the sum over all steps, and the rule is given "
                    f"that sum instead of the gradient of every step. {_CHANGE_AFTERWARDS}",
                    names,
                    source_line(equation),
                )


_BENT = (
    "`custom_vjp` whose backward rule is not proportional to the gradient that it is given (one "
    "that clips, or adds something, for example)."
)
_CHANGE_AFTERWARDS = "Change gradients after `etrace_grad` has returned them instead."


def _behind_operands(
    reader: _Upstream, group: HiddenGroup, operands: Iterable[Atom]
) -> tuple[list[str], list[str], list[str]]:
    """Return the names of old states, other groups' new states and weights behind operands."""
    found: tuple[dict[str, None], ...] = ({}, {}, {})
    for atom in operands:
        old, new, operations = reader.behind(atom, group)
        weights = [path for operation in operations for path in operation.printed_paths]
        for names, kept in zip((old, new, weights), found, strict=True):
            kept.update(dict.fromkeys(names))
    states, others, marked = map(list, found)
    return states, others, marked


def _passed(reader: _Upstream, group: HiddenGroup, index: int) -> Iterator[Diagnostic]:
    equation = reader.traced.program.equations[index]
    states, others, marked = _behind_operands(reader, group, equation.invars)
    name = equation.primitive.name
    if states:
        yield Diagnostic(
            "info",
            "recurrent-mixing",
            f"Hidden state {quoted(states)} reaches {_names(group)} through the marked "
            f"operation `{name}`. Its weight learns online; the path from state to state "
            "through it is what D-RTRL leaves out.",
            (*states, *(state.name for state in group.states)),
            source_line(equation),
        )
    if others:
        yield Diagnostic(
            "info",
            "layer-to-layer",
            f"Hidden state {quoted(others)} feeds {_names(group)} through the marked "
            f"operation `{name}`. The learning signal of a step goes back through it; what "
            f"{_names(group)} remembers of earlier steps is what D-RTRL leaves out on this path.",
            (*others, *(state.name for state in group.states)),
            source_line(equation),
        )
    if marked:
        yield Diagnostic(
            "warning",
            "weight-behind-weight",
            f"Weight {quoted(marked)} reaches {_names(group)} through another marked "
            f"operation, `{name}`. A trace cannot carry a weight behind a weight: along this "
            "path it gets the gradient of the current step only. Where the model allows it, "
            "move the weight behind the other one (a GRU whose reset gate acts after the "
            "recurrent product has a trace for all weights).",
            (*marked, *(state.name for state in group.states)),
            source_line(equation),
        )


def _without_relation(
    traced: TracedModel,
    operations: Sequence[MarkedOperation],
    walks: Sequence[Sequence[Walk]],
    relations: Sequence[HiddenParamOpRelation],
) -> Iterator[Diagnostic]:
    related = {relation.equation for relation in relations}
    for operation in operations:
        if operation.equation in related:
            continue
        equation = traced.program.equations[operation.equation]
        weights = quoted(operation.printed_paths)
        if operation.non_parameters:
            message = (
                f"The weight of `{equation.primitive.name}` is computed from {weights} and from "
                f"{', '.join(operation.non_parameters)}. A trace needs a weight that depends on "
                "parameters, and on States that `update` does not write; it gets the gradient of "
                "the current step."
            )
            yield Diagnostic(
                "warning",
                "operand-not-parameters",
                message,
                operation.printed_paths,
                source_line(equation),
            )
        elif any(operation.y_var in walk.ids for found in walks for walk in found):
            yield Diagnostic(
                "warning",
                "partly-mixed",
                f"The outputs of `{equation.primitive.name}` with weight {weights} reach several "
                "positions of a hidden state at once, other than by a broadcast. A trace cannot "
                "carry that; the weight gets the gradient of the current step.",
                operation.printed_paths,
                source_line(equation),
            )
        else:
            yield Diagnostic(
                "info",
                "no-hidden-state",
                f"Weight {weights} of `{equation.primitive.name}` reaches no hidden state "
                "with a trace position by position; it gets the gradient of the current step.",
                operation.printed_paths,
                source_line(equation),
            )


def _hidden_in_rules(traced: TracedModel) -> Iterator[Diagnostic]:
    for equation in traced.program.equations:
        if holds_marked(equation):
            yield Diagnostic(
                "warning",
                "inside-custom-rule",
                f"A marked operation inside the body of `{equation.primitive.name}` cannot have a "
                "trace: the function's own derivative rule decides what is differentiated. Its "
                "weight gets the gradient of the current step. Move the operation out of the "
                "function with the custom derivative.",
                (),
                source_line(equation),
            )


def _partly_mixed(
    groups: Sequence[HiddenGroup], relations: Sequence[HiddenParamOpRelation]
) -> Iterator[Diagnostic]:
    for relation in relations:
        for influence in relation.influences:
            if influence.mixed:
                yield Diagnostic(
                    "warning",
                    "partly-mixed",
                    f"Some outputs of the operation of "
                    f"{quoted([path_name(p) for p in relation.parameter_paths])} reach several "
                    f"positions of {_names(groups[influence.group])} at once, other than by a "
                    "broadcast; their influence is held constant.",
                    tuple(path_name(path) for path in relation.parameter_paths),
                    relation.source,
                )
