"""Turn what the walks found into diagnostics."""

from collections.abc import Iterator, Sequence
from typing import Any

from .._jax import Var, is_var, source_line
from .._typing import path_name
from .diagnostics import Diagnostic
from .hidden_groups import HiddenGroup
from .marked import holds_marked
from .positions import Cut, Walk
from .relations import HiddenParamOpRelation, MarkedOperation
from .trace import TracedModel
from .transfer import CONSTANT


def diagnose(
    traced: TracedModel,
    operations: Sequence[MarkedOperation],
    groups: Sequence[HiddenGroup],
    walks: Sequence[Sequence[Walk]],
    relations: Sequence[HiddenParamOpRelation],
) -> Iterator[Diagnostic]:
    """Yield every diagnostic of a model, in a fixed order."""
    reader = _Upstream(traced, operations, groups)
    for group, group_walks in zip(groups, walks, strict=True):
        for equation in dict.fromkeys(c.equation for w in group_walks for c in w.cuts):
            cuts = [c for w in group_walks for c in w.cuts if c.equation == equation]
            yield from _cut(reader, group, equation, cuts)
        for equation in sorted({i for walk in group_walks for i in walk.passed}):
            yield from _passed(reader, group, equation)
    yield from _without_relation(traced, operations, walks, relations)
    yield from _hidden_in_rules(traced)
    yield from _partly_mixed(groups, relations)
    yield from _old_states_in_output(traced, groups, relations)
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


def _old_states_in_output(
    traced: TracedModel,
    groups: Sequence[HiddenGroup],
    relations: Sequence[HiddenParamOpRelation],
) -> Iterator[Diagnostic]:
    written = [leaf for leaf in traced.leaves if leaf.joined_var is not None]
    new = frozenset(var for group in groups for var in group.new_vars)
    new |= frozenset(leaf.joined_var for leaf in written)
    behind = traced.program.depends_on(traced.output_atoms, new, CONSTANT)
    reached = {reach.group for relation in relations for reach in relation.reaches}
    states = [s for group in groups if group.index in reached for s in group.states]
    read = [state.name for state in states if state.in_var in behind]
    if read:
        yield Diagnostic(
            "warning",
            "old-state-in-output",
            f"The output of `update` reads hidden state {_quoted(read)} as it was before the step. "
            "The learning signal is taken at the new states, so that what the loss depends on "
            "through the old value is left out of the gradient. Read the state after it has "
            "been updated.",
            tuple(read),
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
        self._new = frozenset(var for group in groups for var in group.new_vars)
        self._old = {state.in_var: state.name for group in groups for state in group.states}

    def states_and_operations(
        self, atom: Any, group: HiddenGroup
    ) -> tuple[list[str], list[MarkedOperation]]:
        """Return the old states and the marked operations that ``atom`` depends on."""
        if not is_var(atom):
            return [], []
        stops = frozenset(self._by_output) | (self._new - frozenset(group.new_vars))
        behind: set[Var] = self.traced.program.depends_on([atom], stops)
        states = [name for var, name in self._old.items() if var in behind]
        marked = [operation for var, operation in self._by_output.items() if var in behind]
        return states, marked


def _names(group: HiddenGroup) -> str:
    return ", ".join(f"'{state.name}'" for state in group.states)


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)


def _cut(
    reader: _Upstream, group: HiddenGroup, index: int, cuts: Sequence[Cut]
) -> Iterator[Diagnostic]:
    equation = reader.traced.program.equations[index]
    states: dict[str, None] = {}
    marked: dict[str, None] = {}
    for cut in cuts:
        found, operations = reader.states_and_operations(equation.invars[cut.operand], group)
        states.update(dict.fromkeys(found))
        marked.update(dict.fromkeys(p for o in operations for p in o.printed_paths))
    name = equation.primitive.name
    if states:
        yield Diagnostic(
            "warning",
            "plain-mixing",
            f"Hidden state {_quoted(list(states))} reaches {_names(group)} through `{name}`, "
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
            f"Weight {_quoted(list(marked))} reaches {_names(group)} through `{name}`, which "
            "mixes positions. A trace cannot carry this path: it is held constant where the "
            "weight also reaches the state position by position, and otherwise the weight gets "
            "the gradient of the current step along it.",
            (*marked, *(state.name for state in group.states)),
            source_line(equation),
        )


def _passed(reader: _Upstream, group: HiddenGroup, index: int) -> Iterator[Diagnostic]:
    equation = reader.traced.program.equations[index]
    states: dict[str, None] = {}
    marked: dict[str, None] = {}
    for atom in equation.invars:
        found, operations = reader.states_and_operations(atom, group)
        states.update(dict.fromkeys(found))
        marked.update(dict.fromkeys(p for o in operations for p in o.printed_paths))
    name = equation.primitive.name
    if states:
        yield Diagnostic(
            "info",
            "recurrent-mixing",
            f"Hidden state {_quoted(list(states))} reaches {_names(group)} through the marked "
            f"operation `{name}`. Its weight learns online; the path from state to state "
            "through it is what D-RTRL leaves out.",
            (*states, *(state.name for state in group.states)),
            source_line(equation),
        )
    if marked:
        yield Diagnostic(
            "warning",
            "weight-behind-weight",
            f"Weight {_quoted(list(marked))} reaches {_names(group)} through another marked "
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
        weights = _quoted(operation.printed_paths)
        if operation.foreign:
            message = (
                f"The weight of `{equation.primitive.name}` is computed from {weights} and from "
                f"{', '.join(operation.foreign)}. A trace needs a weight that depends on "
                "parameters only; it gets the gradient of the current step."
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
                "position by position; it gets the gradient of the current step.",
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
        for reach in relation.reaches:
            if reach.mixed:
                yield Diagnostic(
                    "warning",
                    "partly-mixed",
                    f"Some outputs of the operation of "
                    f"{_quoted([path_name(p) for p in relation.parameter_paths])} reach several "
                    f"positions of {_names(groups[reach.group])} at once, other than by a "
                    "broadcast; their influence is held constant.",
                    tuple(path_name(path) for path in relation.parameter_paths),
                    relation.source,
                )
