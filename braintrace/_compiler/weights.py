"""Weights without a trace, and the reason of each."""

from collections.abc import Collection, Iterator, Sequence

from .._etrace_op import lost_mark
from .._etrace_op.registry import holds_marked, is_marked
from .._graph import HiddenParamOpRelation
from .._graph.diagnostics import Diagnostic, DiagnosticKind, Level, quoted
from .._jax import Equation, Var, equations_inside, source_line
from .._jaxpr import (
    PRODUCTS,
    BindingTime,
    carries_derivative,
    flows_of_variables,
    question_of_taint,
)
from .._typing import path_name
from .analysis import nonlinear_uses, time_of_leaf
from .grouped_step import GroupedStep, seen_by_losses
from .parametric_uses import LOOPS
from .truncated import NONLINEAR

_STEP = "It gets the gradient of the current step"
_OPERATIONS = {"dot_general": "matmul", "conv_general_dilated": "conv"}


def without_trace(
    step: GroupedStep,
    relations: Sequence[HiddenParamOpRelation],
    carried: Sequence[HiddenParamOpRelation],
    named: Collection[str],
    is_past: bool = True,
) -> Iterator[Diagnostic]:
    """Yield the ETP operations without a trace.

    Parameters
    ----------
    step, relations, carried
        The step, the relations that can learn online in it, and those that learn by the rule.
    named
        Weights that another warning names.
    is_past
        Whether the rule follows any path from earlier steps.
    """
    with_trace = {relation.equation for relation in carried}
    refused = {relation.equation for relation in relations} - with_trace
    memory, walks = _memory(step), [walk for walks in step.walks for walk in walks]
    for operation in step.operations:
        level: Level = "warning"
        names, states = operation.printed_paths, list[str]()
        if operation.equation in with_trace:
            continue
        if operation.equation in refused or not is_past:
            level, reason = "info", "has no trace under its learning rule"
        elif operation.non_parameters:
            reason = (
                f"is computed from {', '.join(operation.non_parameters)} as well. A trace needs a "
                "weight that depends on parameters, and on States that `update` does not write"
            )
        elif any(operation.y_var in walk.ids for walk in walks):
            reason = "reaches several units of a hidden state, other than by a broadcast"
        elif states := _reached(step, [operation.y_var], memory):
            if set(names) <= set(named):
                continue
            reason = f"reaches {quoted(states)} through other ETP operations only"
        else:
            level, reason = "info", "reaches no hidden state that a later step reads"
        equation = step.analysis.program.equations[operation.equation]
        message = f"Weight {quoted(names)} of `{equation.primitive.name}` {reason}. {_STEP}."
        yield Diagnostic(level, "no-trace", message, (*names, *states), source_line(equation))


def inside_rules(step: GroupedStep) -> Iterator[Diagnostic]:
    """Yield the functions with a custom derivative that contain ETP operations."""
    for equation in step.analysis.program.equations:
        if holds_marked(equation):
            yield Diagnostic(
                "warning",
                "no-trace",
                f"The weight of an ETP operation inside `{equation.primitive.name}` has no trace, "
                f"because the function has a derivative rule of its own. {_STEP}. Move the "
                "operation out of the function.",
                (),
                source_line(equation),
            )


def also_untagged(
    step: GroupedStep, relations: Sequence[HiddenParamOpRelation]
) -> Iterator[Diagnostic]:
    """Yield the traced weights that also reach a state by ordinary operations."""
    gradients, equations = step.graph.gradients, step.traced.program.equations
    operands = [atom for relation in relations for atom in relation.trainable_vars.values()]
    ancestors, memory = gradients.ancestors(operands), _memory(step)
    for leaf in (leaf for leaf in step.traced.parameters if leaf.in_var in ancestors):
        for use in gradients.uses_of(leaf.in_var):
            states = _reached(step, gradients.sinks(use), memory, step.graph.operations)
            if use.equation not in step.analysis.roles and states:
                name = equations[use.equation].primitive.name
                yield Diagnostic(
                    "warning",
                    "no-trace",
                    f"Weight '{leaf.name}' of an ETP operation also reaches {quoted(states)} "
                    f"through `{name}`, an ordinary operation. {_STEP} on this path. Use an ETP "
                    "operation there, too.",
                    (leaf.name, *states),
                    source_line(equations[use.equation]),
                )


def unseen(step: GroupedStep, carried: Sequence[HiddenParamOpRelation]) -> Iterator[Diagnostic]:
    """Yield the weights whose every path to a loss crosses two late connections."""
    gradients, targets = step.graph.gradients, seen_by_losses(step.traced, step.outputs)
    seen = gradients.ancestors(targets)
    late = gradients.ancestors(targets, {var for _, var in step.new_states})
    for group in step.groups:
        pairs = zip(group.new_vars, group.late_inputs, strict=True)
        late.update(*(inputs for var, inputs in pairs if var in seen))
    for relation in carried:
        groups = [(step.groups[i.group], i.reached) for i in relation.influences]
        states = [(g.states[a], g.new_vars[a]) for g, reached in groups for a in reached]
        if relation.y_var in seen or any(new in seen or s.in_var in late for s, new in states):
            continue
        names = list(dict.fromkeys(state.name for state, _ in states))
        yield Diagnostic(
            "warning",
            "truncated",
            f"Weight {quoted(relation.printed_paths)} gets no gradient: no loss of a step depends "
            f"on {quoted(names)} in that step or through one late connection. Use a `window` "
            "longer than the delay, or `RTRL`.",
            (*relation.printed_paths, *names),
            relation.source,
        )


def nonlinear_weights(
    step: GroupedStep, relations: Sequence[HiddenParamOpRelation]
) -> Iterator[Diagnostic]:
    """Yield the nonlinear backward rules between parameters and ETP weights."""
    parameters = {leaf.in_var for leaf in step.traced.parameters}
    for relation in relations:
        operands = list(relation.trainable_vars.values())
        for equation, before in nonlinear_uses(step.analysis, operands):
            if not parameters.isdisjoint(step.analysis.gradient_ancestors(before)):
                yield Diagnostic(
                    "warning",
                    "nonlinear-gradient",
                    f"{quoted(relation.printed_paths)} enters `{relation.primitive.name}` through "
                    f"a {NONLINEAR}",
                    relation.printed_paths,
                    source_line(equation),
                )


def unused(step: GroupedStep) -> Iterator[Diagnostic]:
    """Yield the parameters that `update` does not use."""
    used = {leaf.path for leaf in step.traced.parameters}
    for name in (path_name(path) for path in step.traced.parameter_paths if path not in used):
        message = f"Parameter '{name}' is not used by `update`, so its gradient is zero."
        yield Diagnostic("info", "no-trace", message, (name,))


def not_marked(step: GroupedStep) -> Iterator[Diagnostic]:
    """Yield the unmarked parameters on the way to a remembered hidden state.

    If the compiler itself has marked parameters, it reports the unmarked uses. The operations that
    lost their marks to a map over their weights are reported in any case.
    """
    gradients, memory = step.graph.gradients, _memory(step)
    equations = step.traced.program.equations
    operands = [atom for operation in step.operations for atom in operation.operands.values()]
    marked = gradients.ancestors(operands)
    leaves = [leaf for leaf in step.traced.parameters if leaf.in_var not in marked]
    lost = _lost_uses(step) if leaves else {}
    readouts = {readout.state for readout in step.traced.readouts}
    recurrent = {} if step.traced.has_found_marks or not leaves else _recurrent_uses(step)
    for leaf in leaves:
        var, states = leaf.in_var, _reached(step, [leaf.in_var], memory)
        uses = [
            equations[use.equation]
            for use in gradients.uses_of(var)
            if _reached(step, gradients.sinks(use), memory)
        ]
        uses = [equation for equation in uses if not holds_marked(equation)]
        if not uses or (step.traced.has_found_marks and var not in lost):
            continue
        level: Level = "warning" if var in lost or var in recurrent else "info"
        # A readout with a filter has no other memory.
        is_readout = level == "info" and set(states) <= readouts
        kind: DiagnosticKind = "truncated" if is_readout else "not-marked"
        equation = recurrent.get(var, uses[0])
        if var in lost:
            equation, name, operand = lost[var]
            how = (
                f"`{name}`, which a map (`jax.vmap`, or `vmap=True` over samples) has mapped over "
                f"its {operand}: an ordinary operation. {_STEP}. Map over inputs alone, or use "
                "`braintrace.grouped_matmul` or `einsum` with the mapped axis in the weight"
            )
        else:
            name = equation.primitive.name
            acts = " that acts on the memory of hidden states" if var in recurrent else ""
            how = (
                f"`{name}`, an ordinary operation{acts}. {_STEP}. Use "
                f"`braintrace.{_OPERATIONS.get(name, 'element_wise')}`, or compile with "
                "`mark='auto'`"
            )
        message = f"Weight '{leaf.name}' reaches {quoted(states)} through {how}."
        yield Diagnostic(level, kind, message, (leaf.name, *states), source_line(equation))


def _memory(step: GroupedStep) -> dict[Var, str]:
    """Return the names of the remembered hidden states, by the variables of their new values."""
    readouts = {path: r.state for r in step.traced.readouts for path in r.filters}
    return {var: readouts.get(leaf.path, leaf.name) for leaf, var in step.remembered_states}


def _reached(
    step: GroupedStep, starts: Collection[Var], memory: dict[Var, str], ends: Collection[Var] = ()
) -> list[str]:
    """Return the remembered hidden states that depend on some variables by gradient."""
    descendants = step.graph.gradients.descendants(starts, ends)
    return list(dict.fromkeys(name for var, name in memory.items() if var in descendants))


def _lost_uses(step: GroupedStep) -> dict[Var, tuple[Equation, str, str]]:
    """Return the operations that lost their marks, by each of their parameters."""
    parameters = {leaf.in_var for leaf in step.traced.parameters}
    uses: dict[Var, tuple[Equation, str, str]] = {}
    for equation in step.analysis.program.equations:
        for inner in (equation, *equations_inside(equation)):
            lost = lost_mark(inner)
            if lost is not None:
                ancestors = step.analysis.gradient_ancestors(equation.outvars) & parameters
                uses |= {var: (inner, *lost) for var in ancestors if var not in uses}
    return uses


def _recurrent_uses(step: GroupedStep) -> dict[Var, Equation]:
    """Return the parameters that multiply values computed from an old hidden state."""
    analysis, program = step.analysis, step.analysis.program
    leaves = {leaf.in_var: leaf for leaf in step.traced.leaves}
    parameters = {leaf.in_var for leaf in step.traced.parameters}
    inputs = [time_of_leaf(leaves.get(var)) for var in program.in_vars]
    times = flows_of_variables(question_of_taint(is_marked), analysis.constants, inputs)
    old = {state.in_var for state, _ in step.new_states}
    uses: dict[Var, Equation] = {}
    for equation in program.equations:
        if equation.primitive.name not in PRODUCTS | LOOPS | {"mul", "div"}:
            continue
        operands = list(filter(carries_derivative, equation.invars))
        weights = [var for var in operands if times.get(var) is BindingTime.PARAMETER]
        data = [var for var in operands if times.get(var) is BindingTime.DATA]
        if weights and not old.isdisjoint(analysis.gradient_ancestors(data)):
            ancestors = analysis.gradient_ancestors(weights) & parameters
            uses |= {var: equation for var in ancestors if var not in uses}
    return uses
