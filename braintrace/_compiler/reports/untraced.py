"""Diagnostics for gradient paths without a trace."""

from collections.abc import Iterator, Sequence

from ..._graph import HiddenParamOpRelation, StateLeaf
from ..._graph.diagnostics import Diagnostic, quoted
from ..._jax import Var, is_var, source_line
from ..groups.grouped_step import GroupedStep


def carried_without_a_trace(step: GroupedStep, ends: frozenset[Var]) -> Iterator[Diagnostic]:
    """Yield the other States that carry a gradient from step to step.

    The variables in ``ends`` are the outputs of the operations at which traces end.
    """
    gradients = step.graph.gradients
    output_ancestors = gradients.ancestors(step.traced.output_atoms, ends)
    new = {var: state.name for state, var in step.new_states}
    for leaf in _carriers(step):
        directly = gradients.descendants([leaf.in_var], ends)
        reached = [name for var, name in new.items() if var in directly]
        if reached or leaf.in_var in output_ancestors:
            yield Diagnostic(
                "warning",
                "untraced-state",
                f"State '{leaf.name}' carries values that depend on weights from step to step, "
                f"and reaches {quoted(reached) or 'the output of `update`'}. It is not a "
                "`brainstate.HiddenState`, so it has no trace and this path is truncated. Make "
                "it a `brainstate.HiddenState`, or write it through `jax.lax.stop_gradient` to "
                "exclude it.",
                (leaf.name, *reached),
            )
        elif not gradients.descendants([leaf.in_var]).isdisjoint(new):
            yield Diagnostic(
                "info",
                "untraced-state",
                f"State '{leaf.name}' carries values that depend on weights from step to step, "
                "and reaches the hidden states of the next steps through ETP operations. Their "
                "weights learn online; D-RTRL truncates the path through them.",
                (leaf.name,),
            )


def _carriers(step: GroupedStep) -> list[StateLeaf]:
    """Return the untraced States whose new value depends on hidden states or weights."""
    written = [leaf for leaf in step.traced.leaves if leaf.out_var is not None]
    others = [leaf for leaf in written if leaf.kind == "other" and is_var(leaf.out_var)]
    starts = [state.in_var for state, _ in step.new_states]
    starts += [operation.y_var for operation in step.operations]
    reached = step.graph.gradients.descendants_over_time(starts)
    return [leaf for leaf in others if leaf.out_var in reached]


def also_untagged(
    step: GroupedStep, relations: Sequence[HiddenParamOpRelation]
) -> Iterator[Diagnostic]:
    """Yield the traced weights that also reach a state by ordinary operations."""
    operands = [atom for relation in relations for atom in relation.trainable_vars.values()]
    ancestors = step.graph.gradients.ancestors(operands)
    new = {var: state.name for state, var in step.remembered_states}
    for leaf in step.traced.parameters:
        if leaf.in_var in ancestors:
            yield from _plain_uses(step, leaf, new)


def _plain_uses(step: GroupedStep, leaf: StateLeaf, new: dict[Var, str]) -> Iterator[Diagnostic]:
    graph, roles = step.graph, step.analysis.roles
    for use in graph.gradients.uses_of(leaf.in_var):
        if use.equation in roles:
            continue
        equation = step.traced.program.equations[use.equation]
        reached = graph.gradients.descendants(graph.gradients.sinks(use), graph.operations)
        states = [name for var, name in new.items() if var in reached]
        if states:
            yield Diagnostic(
                "warning",
                "also-untagged",
                f"Weight '{leaf.name}' of an ETP operation also reaches {quoted(states)} through "
                f"`{equation.primitive.name}`. Its trace carries the ETP operation; along the "
                "other path, the weight gets the gradient of the current step. Use an ETP "
                "operation there, too.",
                (leaf.name, *states),
                source_line(equation),
            )


def plain_in_readouts(step: GroupedStep) -> Iterator[Diagnostic]:
    """Yield the parameters that reach the input of a readout by ordinary operations."""
    equations = step.traced.program.equations
    readout_of = {
        path: filtered.state for filtered in step.traced.readouts for path in filtered.filters
    }
    for state, var in step.new_states:
        if state.path not in readout_of:
            continue
        uses = sorted(step.graph.gradients.direct_uses(var), key=lambda use: use.equation)
        first = {use.node: equations[use.equation] for use in reversed(uses)}
        for leaf in step.traced.parameters:
            if leaf.in_var in first:
                equation = first[leaf.in_var]
                readout = readout_of[state.path]
                yield Diagnostic(
                    "warning",
                    "plain-in-readout",
                    f"Parameter '{leaf.name}' enters the input of the readout '{readout}' through "
                    f"`{equation.primitive.name}`, an ordinary operation, so its gradient lacks "
                    "the memory of the readout. Use an ETP operation there, such as "
                    "`braintrace.element_wise`, or `mark='auto'`.",
                    (leaf.name, readout),
                    source_line(equation),
                )
