"""Paths that a walk back from a hidden group has left out, and nonlinear ones that it has kept."""

from collections.abc import Collection, Iterable, Iterator, Sequence

from .._graph import Cut, HiddenGroup, HiddenParamOpRelation
from .._graph.diagnostics import Diagnostic, DiagnosticKind, Level, quoted
from .._jax import Atom, Var, source_line
from .._jaxpr import carries_derivative
from .analysis import nonlinear_uses
from .grouped_step import GroupedStep
from .walk import Walk

NONLINEAR = (
    "`custom_vjp` whose backward rule is not proportional to the incoming gradient (it clips or "
    "adds something). A trace is computed before that gradient is known, so it contains the result "
    "for a gradient of one. Change gradients after `etrace_grad` has returned them instead."
)


def truncated_paths(
    step: GroupedStep, group: HiddenGroup, walks: Sequence[Walk]
) -> Iterator[Diagnostic]:
    """Yield the paths into a hidden group that a rule by units does not follow."""
    others = frozenset(var for _, var in step.new_states if var not in group.new_vars)
    search = _Search(step, group, others | step.graph.operations)
    every_cut = [cut for walk in walks for cut in walk.cuts if not group.delay_line]
    for index in dict.fromkeys(cut.equation for cut in every_cut):
        yield from _about_cuts(search, [cut for cut in every_cut if cut.equation == index])
    # Through ETP operations, the search continues to the first weight and state.
    search = _Search(step, group, others)
    for index in sorted({index for walk in walks for index in walk.weights_met}):
        yield from _about_operation(search, index)
    states_met = [met for walk in walks for met in walk.states_met]
    for index in sorted({index for index, _ in states_met}):
        states = search.fed_by({var for i, var in states_met if i == index})
        if states:
            yield search.diagnostic(
                "truncated",
                states,
                index,
                "but not elementwise: by a broadcast, or by several slices. The memory of the "
                "group is truncated on this path. If it must count in full, use BPTT or a `window`",
            )


def nonlinear_paths(step: GroupedStep, group: HiddenGroup) -> Iterator[Diagnostic]:
    """Yield the nonlinear backward rules on the way into a group."""
    others = frozenset(var for _, var in step.new_states if var not in group.new_vars)
    ends = others | step.graph.operations
    search, analysis = _Search(step, group, ends), step.analysis
    for equation, operands in nonlinear_uses(analysis, group.new_vars, ends):
        sources = [*search.states(operands), *search.weights(operands)]
        if sources:
            yield Diagnostic(
                "warning",
                "nonlinear-gradient",
                f"{quoted(sources)} reaches {search.target} through a {NONLINEAR}",
                (*sources, *search.names),
                source_line(equation),
            )


def partly_truncated(
    step: GroupedStep, relations: Iterable[HiddenParamOpRelation]
) -> Iterator[Diagnostic]:
    """Yield the operations of which some outputs reach several units of a group."""
    for relation in relations:
        for influence in relation.influences:
            if influence.mixed:
                names = [state.name for state in step.groups[influence.group].leaves]
                yield Diagnostic(
                    "warning",
                    "truncated",
                    f"Some outputs of the operation of {quoted(relation.printed_paths)} reach "
                    f"several units of {quoted(names)} at once, other than by a broadcast. Their "
                    "influence is held constant. Let each output reach one unit, or broadcast it.",
                    (*relation.printed_paths, *names),
                    relation.source,
                )


class _Search:
    """Search for the states and weights that reach a group, up to some variables."""

    def __init__(self, step: GroupedStep, group: HiddenGroup, ends: frozenset[Var]) -> None:
        self.step, self.group, self._ends = step, group, ends
        self.names = [state.name for state in group.leaves]
        self.target = quoted(self.names)

    def states(self, operands: Iterable[Atom]) -> list[str]:
        """Return states before the step, and states of other groups that feed a memory."""
        ancestors = self._ancestors(operands)
        old = [state.name for state, _ in self.step.new_states if state.in_var in ancestors]
        return list(dict.fromkeys([*old, *self.fed_by(ancestors)]))

    def fed_by(self, ancestors: Collection[Var]) -> list[str]:
        """Return the states of other groups among some variables, if the group has a memory."""
        if not self.step.is_remembered(self.group) or self.group.delay_line:
            return []
        pairs = self.step.new_states
        return [s.name for s, v in pairs if v in ancestors and v not in self.group.new_vars]

    def weights(self, operands: Iterable[Atom]) -> list[str]:
        """Return the weights of the ETP operations."""
        ancestors = self._ancestors(operands)
        marked = (o.printed_paths for o in self.step.operations if o.y_var in ancestors)
        return list(dict.fromkeys(path for paths in marked for path in paths))

    def diagnostic(
        self,
        kind: DiagnosticKind,
        sources: Sequence[str],
        index: int,
        text: str,
        level: Level = "warning",
    ) -> Diagnostic:
        equation = self.step.analysis.program.equations[index]
        message = f"{quoted(sources)} reaches {self.target} {text}."
        return Diagnostic(level, kind, message, (*sources, *self.names), source_line(equation))

    def _ancestors(self, operands: Iterable[Atom]) -> set[Var]:
        return self.step.graph.gradients.ancestors(filter(carries_derivative, operands), self._ends)


def _about_cuts(search: _Search, cuts: Sequence[Cut]) -> Iterator[Diagnostic]:
    index = cuts[0].equation
    equation = search.step.analysis.program.equations[index]
    operands = [equation.invars[cut.operand] for cut in cuts]
    states, weights = search.states(operands), search.weights(operands)
    if states or weights:
        advice = (
            "If it is a recurrent weight, use `braintrace.matmul`"
            if states
            else "Apply the weight after it"
        )
        yield search.diagnostic(
            "truncated",
            [*states, *weights],
            index,
            f"through `{equation.primitive.name}`, which couples units. This path counts within "
            f"the step only. {advice}; if it must count in full, use `RTRL`, BPTT or a `window`",
        )


def _about_operation(search: _Search, index: int) -> Iterator[Diagnostic]:
    equation = search.step.analysis.program.equations[index]
    through = f"through the ETP operation `{equation.primitive.name}`"
    states, weights = search.states(equation.invars), search.weights(equation.invars)
    if states:
        yield search.diagnostic(
            "truncated",
            states,
            index,
            f"{through}. Its weight learns online; D-RTRL truncates the path from state to state "
            "through it",
            "info",
        )
    if weights:
        yield search.diagnostic(
            "no-trace",
            weights,
            index,
            f"{through}. A trace cannot carry one weight through another: on this path it gets the "
            "gradient of the current step, without its influence on later steps. If the model "
            "allows it, apply the weight after the other one",
        )
