"""Findings: the parts of the gradient that a rule leaves out, each with its weight and its line.

A path ends where units are coupled, at an ETP operation, and at the new state of another group. The
weights and states behind that place lose it, and are named.
"""

import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from .._checks import path_name, quoted
from .._errors import CompilationError
from .._etrace_op.registry import holds_marked, is_marked
from .._graph.hidden_group import HiddenGroup, HiddenParamOpRelation, Ids
from .._graph.method import FOLLOWS_ALL, Jacobian
from .._graph.report import ApproximationWarning, Diagnostic, DiagnosticKind, Level
from .._graph.traced_model import FILTERS, StateLeaf
from .._jax import Atom, Equation, Var, is_var, source_line
from .._jaxpr.dataflow import BOTTOM, Flow, Labels, everything
from .._jaxpr.primitives import PRODUCTS
from .._jaxpr.program import Program, carries_derivative
from .analysis import (
    BindingTime,
    alike,
    binding_times,
    labels_back,
    nonlinear_uses,
    times_of_inputs,
)
from .hidden_groups import GroupedStep, new_states, seen_by_losses
from .walk import Walk

LOOPS = frozenset({"cond", "scan", "while"})
"""Equations with bodies that run several times, or not at all."""

Relations = Sequence[HiddenParamOpRelation]

NOW = "It gets the gradient of the current step"
NONLINEAR = (
    "`custom_vjp` whose backward rule is not proportional to the incoming gradient (it clips or "
    "adds something). A trace is computed before that gradient is known, so it contains the result "
    "for a gradient of one. Change gradients after `etrace_grad` has returned them instead."
)


def diagnose(
    step: GroupedStep, relations: Relations, carried: Relations, jacobian: Jacobian
) -> Iterator[Diagnostic]:
    """Yield the diagnostics of a model that concern a rule, in a fixed order.

    A full-Jacobian rule follows every path, or refuses the model. A rule without traces leaves out
    every path from earlier steps.

    Parameters
    ----------
    step, relations, carried
        The step, the relations that can learn online in it, and those that learn by the rule.
    jacobian
        The learning rule's treatment of products; see `TraceMethod`.
    """
    used = {leaf.path for leaf in step.traced.parameters}
    for name in (path_name(path) for path in step.traced.parameter_paths if path not in used):
        message = f"Parameter '{name}' is not used by `update`, so its gradient is zero."
        yield Diagnostic("info", "no-trace", message, (name,))
    if jacobian in FOLLOWS_ALL:
        return
    if jacobian == "none":
        yield from _without_trace(step, relations, carried, (), is_past=False)
        return
    pairs = zip(step.groups, step.walks, strict=True)
    yield from (lost := [found for pair in pairs for found in _lost_on_the_way(step, *pair)])
    yield from _into_weights(step, carried)
    named = {path for found in lost if found.level == "warning" for path in found.paths}
    yield from _without_trace(step, relations, carried, named)
    yield from step.traced.unmarked
    yield from _not_marked(step)
    yield from _also_used_unmarked(step, carried)
    yield from _unseen(step, carried)
    yield from untraced_states(step, step.analysis.opaque_outputs)


def publish(diagnostics: Iterable[Diagnostic], strict: bool) -> None:
    """Warn of diagnostics that cost accuracy, or raise an error if ``strict``."""
    costly = [diagnostic for diagnostic in diagnostics if diagnostic.level == "warning"]
    if strict and costly:
        listed = "".join(f"\n- {diagnostic}" for diagnostic in costly)
        raise CompilationError(f"Traces cannot carry parts of the gradient:{listed}")
    for diagnostic in costly:
        warnings.warn(str(diagnostic), ApproximationWarning, stacklevel=3)


# --- on the way into a hidden group


def _lost_on_the_way(
    step: GroupedStep, group: HiddenGroup, walks: Sequence[Walk]
) -> Iterator[Diagnostic]:
    """Yield the paths into a group that the walks from its states have left out."""
    program, names = step.analysis.program, _names(group.hidden_states)
    others = frozenset(var for _, var in step.new_states if var not in group.new_vars)
    # Where an elementwise path into the group ends.
    inside = others | step.analysis.operation_outputs
    has_memory = step.is_remembered(group) and not group.read_by_operations_only

    def behind(operands: Iterable[Atom], ends: frozenset[Var]) -> set[Var]:
        return program.ancestors(filter(carries_derivative, operands), ends)

    def fed_by(variables: set[Var]) -> list[str]:
        """Return the states of other groups that feed the memory of this one."""
        return _names(leaf for leaf, v in step.new_states if v in others & variables and has_memory)

    def states_among(variables: set[Var]) -> list[str]:
        old = _names(leaf for leaf, _ in step.new_states if leaf.in_var in variables)
        return list(dict.fromkeys([*old, *fed_by(variables)]))

    def weights_among(variables: set[Var]) -> list[str]:
        marked = (o.printed_paths for o in step.operations if o.y_var in variables)
        return list(dict.fromkeys(chain(*marked)))

    def lost(
        level: Level, kind: DiagnosticKind, sources: list[str], at: Equation, text: str
    ) -> Iterator[Diagnostic]:
        if sources:
            message = f"{quoted(sources)} reaches {quoted(names)} {text}."
            yield Diagnostic(level, kind, message, (*sources, *names), source_line(at))

    coupled = dict[int, set[Var]]()
    for walk in () if group.read_by_operations_only else walks:
        for use in sorted(walk.cuts):
            operand = program.equations[use.equation].invars[use.operand]
            # A cut loses nothing of the new states that a downstream state reads as an output does.
            coupled.setdefault(use.equation, set()).update(behind([operand], inside | walk.stops))
    for index, variables in coupled.items():
        equation, states = program.equations[index], states_among(variables)
        text = (
            f"through `{equation.primitive.name}`, which couples units. This path counts "
            "within the step only. "
            + ("A recurrent weight needs `braintrace.matmul`" if states else "Apply it after")
            + "; if the path must count in full, use `RTRL`, BPTT or a `window`"
        )
        yield from lost(
            "warning", "truncated", [*states, *weights_among(variables)], equation, text
        )
    for index in sorted({index for walk in walks for index in walk.weights_met}):
        equation = program.equations[index]
        through = f"through the ETP operation `{equation.primitive.name}`. "
        variables = behind(equation.invars, others)
        text = "Its weight learns online; D-RTRL truncates the path from state to state through it"
        yield from lost("info", "truncated", states_among(variables), equation, through + text)
        text = "A trace cannot carry one weight through another: on this path it gets the gradient "
        text += "of the current step. Apply the weight after the other one"
        yield from lost("warning", "no-trace", weights_among(variables), equation, through + text)
    met = {found for walk in walks for found in walk.states_met}
    for index in sorted({index for index, _ in met}):
        text = "but not elementwise: by a broadcast, or by several slices. If this path must count "
        text += "in full, use BPTT or a `window`"
        states = fed_by({var for i, var in met if i == index})
        yield from lost("warning", "truncated", states, program.equations[index], text)
    for equation, before in nonlinear_uses(program, group.new_vars, inside):
        variables, text = behind(before, inside), f"through a {NONLINEAR[:-1]}"
        sources = [*states_among(variables), *weights_among(variables)]
        yield from lost("warning", "nonlinear-gradient", sources, equation, text)


# --- weights


def _into_weights(step: GroupedStep, carried: Relations) -> Iterator[Diagnostic]:
    """Yield the nonlinear backward rules on the way into weights."""
    program, parameters = step.traced.program, {leaf.in_var for leaf in step.traced.parameters}
    for relation in carried:
        for equation, before in nonlinear_uses(program, [*relation.trainable_vars.values()]):
            if not parameters.isdisjoint(program.ancestors(before)):
                names, name = relation.printed_paths, relation.primitive.name
                message = f"{quoted(names)} enters `{name}` through a {NONLINEAR}"
                line = source_line(equation)
                yield Diagnostic("warning", "nonlinear-gradient", message, names, line)


def _without_trace(
    step: GroupedStep,
    relations: Relations,
    carried: Relations,
    named: Collection[str],
    is_past: bool = True,
) -> Iterator[Diagnostic]:
    """Yield the ETP operations without a trace, or of which some outputs have none.

    Parameters
    ----------
    step, relations, carried
        The step, the relations that can learn online in it, and those that learn by the rule.
    named
        Weights that another warning names.
    is_past
        Whether the rule follows any path from earlier steps.
    """
    with_trace = {relation.equation: relation for relation in carried}
    refused = {relation.equation for relation in relations} - with_trace.keys()
    for operation in step.operations:
        relation, names = with_trace.get(operation.equation), operation.printed_paths
        about = f"Weight {quoted(names)} of `{operation.primitive.name}`"
        if relation is None:
            level, reason, states = _reason(step, operation, refused, is_past)
            if level == "info" or not states or not set(names) <= set(named):
                message, paths = f"{about} {reason}. {NOW}.", (*names, *states)
                yield Diagnostic(level, "no-trace", message, paths, operation.source)
        elif partly := [step.groups[i.group] for i in relation.influences if i.mixed]:
            states = _names(leaf for group in partly for leaf in group.hidden_states)
            message = f"{about} has outputs that reach several units at once, other than by a "
            message += "broadcast. They get the gradient of the current step. Let each output "
            message += "reach one unit."
            yield Diagnostic("warning", "truncated", message, (*names, *states), operation.source)
    if is_past:
        for equation in filter(holds_marked, step.analysis.program.equations):
            message = f"The weight of an ETP operation inside `{equation.primitive.name}` has no "
            message += f"trace: the function has a derivative rule of its own. {NOW}. Move the "
            message += "operation out of the function."
            yield Diagnostic("warning", "no-trace", message, (), source_line(equation))


def _reason(
    step: GroupedStep, operation: HiddenParamOpRelation, refused: Collection[int], is_past: bool
) -> tuple[Level, str, list[str]]:
    """Return why an operation has no trace, and the states that it reaches nevertheless."""
    if operation.equation in refused or not is_past:
        return "info", "has no trace under its learning rule", []
    if operation.non_parameters:
        others = ", ".join(operation.non_parameters)
        reason = f"is computed from {others} as well. A trace needs a weight that depends on "
        return "warning", f"{reason}parameters, and on States that `update` does not write", []
    if any(operation.y_var in walk.ids for walks in step.walks for walk in walks):
        reason = (
            "reaches several units of a state, other than by a broadcast. Call it once for each"
        )
        return "warning", reason, []
    if states := _reached(step, [operation.y_var]):
        return "warning", f"reaches {quoted(states)} through other ETP operations only", states
    return "info", "reaches no hidden state that a later step reads", []


def _unseen(step: GroupedStep, carried: Relations) -> Iterator[Diagnostic]:
    """Yield the weights whose every path to a loss crosses two late connections."""
    targets = seen_by_losses(step.traced)
    seen = _seen(step, targets, frozenset())
    late = _seen(step, targets, frozenset(var for _, var in step.new_states))
    for group in step.groups:
        for var, layout, inputs in zip(
            group.new_vars, group.layouts, group.late_inputs, strict=True
        ):
            if _has_any(seen, var, layout):
                late.update(dict.fromkeys(inputs, np.True_))
    for relation in carried:
        reached = [(step.groups[i.group], a) for i in relation.influences for a in i.reached]
        if relation.y_var in seen or any(
            _has_any(seen, group.new_vars[a], group.layouts[a])
            or _has_any(late, group.states[a].in_var, group.old_layouts[a])
            for group, a in reached
        ):
            continue
        names = _names(group.states[a] for group, a in reached)
        message = f"Weight {quoted(relation.printed_paths)} gets no gradient: no output of a step "
        message += f"depends on {quoted(names)} in that step or through one late connection. "
        message += "Use a `window` longer than the delay, or `RTRL`. A loss that reads these "
        message += "states itself does give it a gradient."
        paths = (*relation.printed_paths, *names)
        yield Diagnostic("warning", "truncated", message, paths, relation.source)


def _seen(step: GroupedStep, targets: Sequence[Atom], ends: frozenset[Var]) -> dict[Var, Any]:
    """Return the elements that some targets depend on, by their variables, up to some ends."""
    if all(len(group.hidden_states) == len(group.states) for group in step.groups):
        return dict.fromkeys(step.analysis.program.ancestors(targets, ends), np.True_)
    # Of a State with slots, a loss may see some.
    starts = {atom: np.zeros(atom.aval.shape, np.int32) for atom in targets if is_var(atom)}
    seen, _ = labels_back(step.analysis, starts, ends, _through_weights)
    return {var: f != BOTTOM for var, f in seen.items() if f is not None and np.any(f != BOTTOM)}


def _through_weights(equation: Equation, results: Sequence[Flow]) -> list[Flow] | None:
    return alike(equation, everything(Labels(), results)) if is_marked(equation) else None


def _has_any(seen: Mapping[Var, Any], var: Var, layout: Ids | None) -> bool:
    """Test whether some of the elements of a slot are seen."""
    return var in seen and bool(np.any(seen[var] if layout is None else seen[var] & (layout >= 0)))


def _not_marked(step: GroupedStep) -> Iterator[Diagnostic]:
    """Yield the unmarked parameters on the way to a remembered hidden state.

    If the compiler itself has marked parameters, it reports the unmarked uses.
    """
    unmarked = _outside_of(step, step.operations)
    if step.traced.is_marked_automatically or not unmarked:
        return
    recurrent = _recurrent_uses(step)
    for leaf in unmarked:
        uses = _ordinary_uses(step, leaf, frozenset())
        if not uses:
            continue
        states, at = _reached(step, [leaf.in_var]), recurrent.get(leaf.in_var, uses[0][0])
        level: Level = "warning" if leaf.in_var in recurrent else "info"
        # A readout with a filter has no other memory.
        is_readout = level == "info" and set(states) <= step.traced.readouts.keys()
        kind: DiagnosticKind = "truncated" if is_readout else "not-marked"
        name = at.primitive.name
        operation = {"dot_general": "matmul", "conv_general_dilated": "conv"}.get(name)
        advice = f"`braintrace.{operation or 'element_wise'}`, or compile with `mark='auto'`"
        message = f"Weight '{leaf.name}' reaches {quoted(states)} through `{name}`, an ordinary "
        message += f"operation. {NOW}. Use {advice}."
        yield Diagnostic(level, kind, message, (leaf.name, *states), source_line(at))


def _also_used_unmarked(step: GroupedStep, carried: Relations) -> Iterator[Diagnostic]:
    """Yield the traced weights that also reach a state by ordinary operations."""
    untraced = _outside_of(step, carried)
    for leaf in (leaf for leaf in step.traced.parameters if leaf not in untraced):
        for equation, states in _ordinary_uses(step, leaf, step.analysis.operation_outputs):
            name = equation.primitive.name
            message = f"Weight '{leaf.name}' of an ETP operation also reaches {quoted(states)} "
            message += f"through `{name}`, an ordinary operation. {NOW} on this path. Use an "
            message += "ETP operation there, too."
            paths, line = (leaf.name, *states), source_line(equation)
            yield Diagnostic("warning", "no-trace", message, paths, line)


def _outside_of(step: GroupedStep, operations: Relations) -> list[StateLeaf]:
    """Return the parameters that no operand of some operations depends on."""
    operands = (atom for operation in operations for atom in operation.trainable_vars.values())
    behind = step.analysis.program.ancestors(operands)
    return [leaf for leaf in step.traced.parameters if leaf.in_var not in behind]


def _ordinary_uses(
    step: GroupedStep, leaf: StateLeaf, ends: frozenset[Var]
) -> list[tuple[Equation, list[str]]]:
    """Return the ordinary operations on a parameter, and the states that each of them reaches."""
    program, roles = step.analysis.program, step.analysis.roles
    equations = (program.equations[i] for i in program.uses_of(leaf.in_var) if i not in roles)
    each = ((e, _reached(step, e.outvars, ends)) for e in equations if not holds_marked(e))
    return [(equation, states) for equation, states in each if states]


def _recurrent_uses(step: GroupedStep) -> Mapping[Var, Equation]:
    """Return the parameters that multiply values computed from an old hidden state."""
    analysis, program = step.analysis, step.analysis.program
    parameters = {leaf.in_var for leaf in step.traced.parameters}
    times = binding_times(program, times_of_inputs(step.traced), is_marked)
    old = {state.in_var for state, _ in step.new_states}
    uses: dict[Var, Equation] = {}
    for equation in program.equations:
        operands, name = list(filter(carries_derivative, equation.invars)), equation.primitive.name
        if name not in PRODUCTS | LOOPS | {"mul", "div"}:
            continue
        weights = [var for var in operands if times.get(var) is BindingTime.PARAMETER]
        data = [var for var in operands if times.get(var) is BindingTime.DATA]
        if weights and not old.isdisjoint(analysis.program.ancestors(data)):
            ancestors = analysis.program.ancestors(weights) & parameters
            uses |= {var: equation for var in ancestors if var not in uses}
    return uses


def _reached(step: GroupedStep, starts: Collection[Var], ends: Collection[Var] = ()) -> list[str]:
    """Return the remembered hidden states that depend on some variables by gradient."""
    descendants = step.analysis.program.descendants(starts, ends)
    states = chain(*(new_states(group) for group in step.groups if step.is_remembered(group)))
    return _names(leaf for leaf, var in states if var in descendants)


def _names(leaves: Iterable[StateLeaf]) -> list[str]:
    return list(dict.fromkeys(map(_printed, leaves)))


def _printed(leaf: StateLeaf) -> str:
    """Return the name of a state; a filter has that of its readout."""
    return str(leaf.path[1]) if leaf.path[0] == FILTERS else leaf.name


# --- other States


def untraced_states(step: GroupedStep, ends: frozenset[Var]) -> Iterator[Diagnostic]:
    """Yield the other States that carry a gradient from step to step.

    The variables in ``ends`` are the outputs of the operations at which traces end.
    """
    program, new = step.traced.program, {var: _printed(s) for s, var in step.new_states}
    starts = [state.in_var for state, _ in step.new_states]
    starts += [operation.y_var for operation in step.operations]
    carriers = step.descendants_over_time(starts)
    outputs = program.ancestors(step.traced.output_atoms, ends)
    for leaf in step.traced.leaves:
        if leaf.kind != "other" or not is_var(leaf.out_var) or leaf.out_var not in carriers:
            continue
        directly = program.descendants([leaf.in_var], ends)
        reached = [name for var, name in new.items() if var in directly]
        what = f"State '{leaf.name}' carries values that depend on weights from step to step, and"
        if reached or leaf.in_var in outputs:
            what += f" reaches {quoted(reached) or 'the output of `update`'}. It depends on hidden "
            what += "states by coupled units only, so it has no trace. Write it through "
            what += "`jax.lax.stop_gradient` to exclude it, or use `RTRL`."
            yield Diagnostic("warning", "untraced-state", what, (leaf.name, *reached))
        elif not program.descendants([leaf.in_var]).isdisjoint(new):
            what += " reaches hidden states through ETP operations. Their weights learn online; "
            what += "the rule truncates the path through them."
            yield Diagnostic("info", "truncated", what, (leaf.name,))


def lost_gradients(
    program: Program,
    loss: Atom,
    moving: Collection[Var],
    carried: Sequence[tuple[Var, Atom, bool]],
) -> Iterator[Diagnostic]:
    """Yield the States that a step fills with values of the model, and whose loss reads them.

    No trace follows such a value, so its gradient is the one of a constant.

    Parameters
    ----------
    program, loss
        A step that is differentiated alone, and its loss.
    moving
        Its inputs with a derivative.
    carried
        Old and new values of States, and whether the model has the State.
    """
    read = program.ancestors([loss])
    for old, new, is_of_model in carried:
        is_constant = program.ancestors([new]).isdisjoint(moving)
        if is_of_model or old not in read or not is_var(new) or is_constant:
            continue
        readers = (program.equations[index] for index, _ in program.readers.get(old, ()))
        lines = (source_line(e) for e in readers if not read.isdisjoint(e.outvars))
        message = f"A State of shape {old.aval.shape} that `step_fn` writes carries values that "
        message += "depend on weights to the loss of a later step, where they are constants. "
        message += "Compute the loss in a `window`, with `RTRL`, or write the State through "
        message += "`jax.lax.stop_gradient`; a `brainstate.HiddenState` that `update` writes has a "
        message += "trace."
        # The loss may be the State itself, which no line reads.
        yield Diagnostic("warning", "untraced-state", message, (), next(lines, ""))
