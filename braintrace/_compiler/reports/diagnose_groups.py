"""Diagnostics for truncated or nonlinear paths into a hidden group."""

from collections.abc import Iterator, Mapping, Sequence

from ..._graph import Cut, HiddenGroup, Jacobian
from ..._graph.diagnostics import Diagnostic, quoted
from ..._jax import Equation, source_line
from ..._jaxpr.dataflow import PRODUCTS
from ..core.backward_rules import nonlinear_uses
from ..core.walk import Walk
from ..groups.diagonals import products_met
from .ancestors import AncestorSearch

NONLINEAR = (
    "`custom_vjp` whose backward rule is not proportional to the incoming gradient (for example, "
    "it clips or adds something)."
)
OF_CURRENT_STEP = (
    "A trace cannot carry one weight through another: along this path it gets the gradient of "
    "the current step only, and its influence on later steps through the state is lost."
)
CHANGE_AFTERWARDS = "Change gradients after `etrace_grad` has returned them instead."


def about_group(
    search: AncestorSearch, group: HiddenGroup, walks: Sequence[Walk]
) -> Iterator[Diagnostic]:
    """Yield the paths that the walks back from the states of a group have left out."""
    every_cut = [cut for walk in walks for cut in walk.cuts if not group.delay_line]
    for equation in dict.fromkeys(cut.equation for cut in every_cut):
        cuts = [cut for cut in every_cut if cut.equation == equation]
        yield from _about_cuts(search, group, equation, cuts)
    for equation in sorted({index for walk in walks for index in walk.weights_met}):
        yield from _about_weight_met(search, group, equation)
    if search.jacobian == "diagonal":
        yield from _about_two_products(search, group, walks)
    yield from _about_states_met(search, group, walks)
    yield from _about_nonlinear_uses(search, group)


def names_of(group: HiddenGroup) -> str:
    """Print the states of a group, each in quotes."""
    return quoted(_names(group))


def _names(group: HiddenGroup) -> list[str]:
    return [state.name for state in group.states]


def _about_cuts(
    search: AncestorSearch, group: HiddenGroup, index: int, cuts: Sequence[Cut]
) -> Iterator[Diagnostic]:
    equation = search.step.analysis.program.equations[index]
    ancestors = [search.ancestors([equation.invars[cut.operand]], group) for cut in cuts]
    states = list(dict.fromkeys(n for b in ancestors for n in (*b.old_states, *b.new_states)))
    weights = list(dict.fromkeys(name for b in ancestors for name in b.weights))
    name = equation.primitive.name
    if states:
        yield Diagnostic(
            "warning",
            "plain-mixing",
            f"Hidden state {quoted(states)} reaches {names_of(group)} through `{name}`, which "
            f"couples elements. {_what_is_carried(group, index)} If it is a recurrent weight, use "
            "`braintrace.matmul`: the weight then learns online. If the path must count in full, "
            "use BPTT or a `window`.",
            (*states, *_names(group)),
            source_line(equation),
        )
    if weights:
        yield Diagnostic(
            "warning",
            "mixed-positions",
            f"Weight {quoted(weights)} reaches {names_of(group)} through `{name}`, which couples "
            "elements. Traces cannot carry this path. It is held constant if the weight also "
            "reaches the state elementwise; otherwise the weight gets the gradient of the "
            "current step along it.",
            (*weights, *_names(group)),
            source_line(equation),
        )


def _about_weight_met(
    search: AncestorSearch, group: HiddenGroup, index: int
) -> Iterator[Diagnostic]:
    """Yield the ancestors of an ETP operation at which a walk ended."""
    equation = search.step.analysis.program.equations[index]
    ancestors, name = search.ancestors(equation.invars, group), equation.primitive.name
    rule = _RULES[search.jacobian]
    if ancestors.old_states:
        yield Diagnostic(
            "info",
            "recurrent-mixing",
            f"Hidden state {quoted(ancestors.old_states)} reaches {names_of(group)} through the "
            f"ETP operation `{name}`. Its weight learns online; "
            f"{_left_out(rule, group, index)}",
            (*ancestors.old_states, *_names(group)),
            source_line(equation),
        )
    if search.jacobian != "diagonal":  # that rule has another diagnostic
        yield from _about_two_operations(search, group, equation)
    if ancestors.new_states:
        yield Diagnostic(
            "info",
            "layer-to-layer",
            f"Hidden state {quoted(ancestors.new_states)} feeds {names_of(group)} through the ETP "
            f"operation `{name}`. The learning signal of a step passes through it; {rule} "
            f"truncates the memory of {names_of(group)} on this path.",
            (*ancestors.new_states, *_names(group)),
            source_line(equation),
        )
    if ancestors.weights:
        yield Diagnostic(
            "warning",
            "nested-weights",
            f"Weight {quoted(ancestors.weights)} reaches {names_of(group)} through another ETP "
            f"operation, `{name}`. {OF_CURRENT_STEP} If the model allows it, apply the weight "
            "after the other one (a GRU with the reset gate after the recurrent product has a "
            "trace for all weights).",
            (*ancestors.weights, *_names(group)),
            source_line(equation),
        )


def _about_two_operations(
    search: AncestorSearch, group: HiddenGroup, last: Equation
) -> Iterator[Diagnostic]:
    """Yield the ETP operations between an old hidden state and another ETP operation."""
    step, rule = search.step, _RULES[search.jacobian]
    place = f" ({line})" if (line := source_line(last)) else ""
    for first, old_states in search.before(last.invars, group):
        equation = step.analysis.program.equations[first.equation]
        yield Diagnostic(
            "info",
            "recurrent-mixing",
            f"Hidden state {quoted(old_states)} reaches {names_of(group)} through the ETP "
            f"operation `{equation.primitive.name}`, and then through "
            f"`{last.primitive.name}`{place}. {rule} truncates the path from state to state "
            f"through both, and {quoted(first.printed_paths)} has no trace there.",
            (*old_states, *_names(group)),
            source_line(equation),
        )


def _what_is_carried(group: HiddenGroup, equation: int) -> str:
    if _is_kept(group, equation):
        return (
            "Traces carry the path of each element to itself; the rest of this path to the next "
            "step is truncated in the gradient of every weight."
        )
    return (
        "Traces are elementwise, so this path to the next step is truncated in the gradient of "
        "every weight."
    )


def _left_out(rule: str, group: HiddenGroup, equation: int) -> str:
    if _is_kept(group, equation):
        return (
            f"{rule} keeps the path of each element to itself through it, and truncates the rest."
        )
    return f"{rule} truncates the path from state to state through it."


def _is_kept(group: HiddenGroup, equation: int) -> bool:
    return any(d.equation == equation for diagonals in group.diagonals for d in diagonals)


_RULES: Mapping[Jacobian, str] = {
    "none": "a rule without traces",
    "elementwise": "D-RTRL",
    "diagonal": "SnAp-1",
    "sparse": "SnAp",
    "layered": "OSTL",
    "full": "RTRL",
}


def _about_two_products(
    search: AncestorSearch, group: HiddenGroup, walks: Sequence[Walk]
) -> Iterator[Diagnostic]:
    """Yield pairs of consecutive products between two values of a state."""
    analysis = search.step.analysis
    equations, marked = analysis.program.equations, analysis.opaque
    for last, operand in sorted({met for walk in walks for met in products_met(analysis, walk)}):
        x = equations[last].invars[operand]
        for first in analysis.program.making(analysis.gradient_ancestors([x], search.ends(group))):
            if first not in marked and equations[first].primitive.name not in PRODUCTS:
                continue
            old = search.ancestors(equations[first].invars, group).old_states
            states = [name for name in old if name in _names(group)]
            if states:
                yield Diagnostic(
                    "info",
                    "recurrent-mixing",
                    f"Hidden state {quoted(states)} reaches {names_of(group)} through "
                    f"`{equations[first].primitive.name}`, and then through "
                    f"`{equations[last].primitive.name}` ({source_line(equations[last])}). SnAp-1 "
                    "follows one product: it truncates this path, also from an element to itself.",
                    (*states, *_names(group)),
                    source_line(equations[first]),
                )


def _about_states_met(
    search: AncestorSearch, group: HiddenGroup, walks: Sequence[Walk]
) -> Iterator[Diagnostic]:
    """Yield the states of other groups that reach a group without coupling or a mark."""
    for index in sorted({index for walk in walks for index, _ in walk.states_met}):
        variables = [var for walk in walks for i, var in walk.states_met if i == index]
        states = search.of_others(variables, group)
        if states:
            yield Diagnostic(
                "warning",
                "plain-mixing",
                f"Hidden state {quoted(states)} reaches {names_of(group)}, but not elementwise: "
                "by a broadcast, or by several slices. The learning signal of a step passes "
                f"through this path; the memory of {names_of(group)} is truncated in the gradient "
                "of every weight before it. If it must count in full, use BPTT or a `window`.",
                (*states, *_names(group)),
                source_line(search.step.analysis.program.equations[index]),
            )


def _about_nonlinear_uses(search: AncestorSearch, group: HiddenGroup) -> Iterator[Diagnostic]:
    """Yield the nonlinear custom backward rules on the way into a group."""
    analysis, ends = search.step.analysis, search.ends(group)
    kept_uses = {(d.equation, d.operand) for diagonals in group.diagonals for d in diagonals}
    passed = [
        analysis.program.equations[index].invars[operand] for index, operand in sorted(kept_uses)
    ]
    for equation, operands in nonlinear_uses(analysis, [*group.new_vars, *passed], ends):
        names = search.ancestors(operands, group).names
        if names:
            yield Diagnostic(
                "warning",
                "backward-not-linear",
                f"{quoted(names)} reaches {names_of(group)} through a {NONLINEAR} "
                "A trace is computed before that gradient is known, so it uses the result for a "
                f"gradient of one. {CHANGE_AFTERWARDS}",
                (*names, *_names(group)),
                source_line(equation),
            )
