"""Diagnostics for parameters that reach hidden states unmarked."""

from collections.abc import Iterator, Sequence

from ..._etrace_op.marked import holds_marked, is_marked
from ..._graph.diagnostics import Diagnostic, quoted
from ..._graph.traced_model import FILTERS, StateLeaf
from ..._jax import Equation, Var, source_line
from ..._jaxpr import carries_derivative
from ..._jaxpr.dataflow import PRODUCTS, BindingTime, flows_of_variables, question_of_taint
from ..core.binding_times import time_of_leaf
from ..groups.grouped_step import GroupedStep
from ..marking.parametric_uses import LOOPS

_MEETS = PRODUCTS | LOOPS | {"mul", "div"}
"""Equations in which a weight may be a factor."""


def not_marked(step: GroupedStep, reported: Sequence[str]) -> Iterator[Diagnostic]:
    """Yield the unmarked parameters on the way to a remembered hidden state.

    Parameters
    ----------
    step
        The step. If the compiler itself has marked parameters, it reports the unmarked uses.
    reported
        Names of parameters that another diagnostic reports as unmarked.
    """
    if step.traced.has_found_marks:
        return
    graph = step.graph
    operands = [atom for operation in step.operations for atom in operation.operands.values()]
    marked = graph.gradients.ancestors(operands)
    # `plain-in-readout` covers parameters that reach the filter of a readout alone.
    new = {var: state.name for state, var in step.remembered_states if state.path[0] != FILTERS}
    leaves = [
        leaf
        for leaf in step.traced.parameters
        if leaf.in_var not in marked and leaf.name not in reported
    ]
    recurrent = _recurrent_uses(step) if leaves else {}
    for leaf in leaves:
        yield from _about(step, leaf, new, recurrent)


def _about(
    step: GroupedStep, leaf: StateLeaf, new: dict[Var, str], recurrent: dict[Var, Equation]
) -> Iterator[Diagnostic]:
    graph, equations = step.graph, step.traced.program.equations
    uses = [
        (equations[use.equation], graph.gradients.descendants(graph.gradients.sinks(use)))
        for use in graph.gradients.uses_of(leaf.in_var)
        if not holds_marked(equations[use.equation])
    ]
    reached = {var for _, descendants in uses for var in descendants}
    states = list(dict.fromkeys(name for var, name in new.items() if var in reached))
    if not states:
        return
    recurrent_use = recurrent.get(leaf.in_var)
    equation = recurrent_use or next(
        e for e, descendants in uses if not descendants.isdisjoint(new)
    )
    name = equation.primitive.name
    if recurrent_use is None:
        how = f"Parameter '{leaf.name}' reaches hidden state {quoted(states)} through"
        how += " ordinary operations"
    else:
        how = f"Weight '{leaf.name}' acts on the memory of hidden states, on the way to "
        how += f"{quoted(states)}, through `{name}`, an ordinary operation"
    yield Diagnostic(
        "info" if recurrent_use is None else "warning",
        "not-marked",
        f"{how} without a mark. It gets the gradient of the current step, without its influence "
        "on later steps through the state. Use "
        f"`braintrace.{_OPERATIONS.get(name, 'element_wise')}`, or compile with `mark='auto'`.",
        (leaf.name, *states),
        source_line(equation),
    )


_OPERATIONS = {"dot_general": "matmul", "conv_general_dilated": "conv"}


def _recurrent_uses(step: GroupedStep) -> dict[Var, Equation]:
    """Return the parameters that multiply values computed from an old hidden state.

    Each comes with one equation in which it is a factor.
    """
    analysis = step.analysis
    program = analysis.program
    leaves = {leaf.in_var: leaf for leaf in step.traced.leaves}
    parameters = {leaf.in_var for leaf in step.traced.parameters}
    inputs = [time_of_leaf(leaves.get(var)) for var in program.in_vars]
    times = flows_of_variables(question_of_taint(is_marked), analysis.constants, inputs)
    old = {state.in_var for state, _ in step.new_states}
    uses: dict[Var, Equation] = {}
    for equation in program.equations:
        if equation.primitive.name not in _MEETS:
            continue
        operands = list(filter(carries_derivative, equation.invars))
        weights = [var for var in operands if times.get(var) is BindingTime.PARAMETER]
        data = [var for var in operands if times.get(var) is BindingTime.DATA]
        if weights and not old.isdisjoint(analysis.gradient_ancestors(data)):
            ancestors = analysis.gradient_ancestors(weights) & parameters
            uses |= {var: equation for var in ancestors if var not in uses}
    return uses
