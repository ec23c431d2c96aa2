"""Diagnostics for operations that lost their marks to a map over their weights."""

from collections.abc import Iterator

from ..._etrace_op import lost_mark
from ..._graph.diagnostics import Diagnostic, quoted
from ..._jax import Equation, Var, equations_inside, source_line
from ..groups.grouped_step import GroupedStep

WITHOUT_MARKS = "which leaves an ordinary operation"


def lost_marks(step: GroupedStep) -> Iterator[Diagnostic]:
    """Yield the operations on the way to a hidden state that lost their marks."""
    analysis = step.analysis
    results: dict[tuple[str, str, str], list[Var]] = {}
    for equation in analysis.program.equations:
        for lost in _lost_in(equation):
            results.setdefault(lost, []).extend(equation.outvars)
    marked = {path for operation in step.operations for path in operation.printed_paths}
    new = {var: state.name for state, var in step.new_states}
    every = {var for made in results.values() for var in made}
    for (name, operand, line), made in results.items():
        ancestors = analysis.gradient_ancestors(made, frozenset(every - set(made)))
        weights = [p.name for p in step.traced.parameters if p.in_var in ancestors]
        names = tuple(dict.fromkeys(path for path in weights if path not in marked))
        descendants = analysis.gradient_descendants(made)
        states = [state for var, state in new.items() if var in descendants]
        if names and states:
            yield Diagnostic(
                "warning",
                "not-marked",
                f"A map (`jax.vmap`, or `vmap=True` over samples) maps `{name}` with "
                f"{quoted(names)} over its {operand}, {WITHOUT_MARKS}: an ETP operation has one "
                f"weight. On the way to {quoted(states)} it gets the gradient of the current "
                "step. Use `braintrace.grouped_matmul` or `braintrace.einsum` with the mapped "
                "axis in the weight, call the operation once for each weight, or map over the "
                "inputs alone.",
                (*names, *states),
                line,
            )


def _lost_in(equation: Equation) -> Iterator[tuple[str, str, str]]:
    """Yield name, mapped operand and source line of an equation's lost operations."""
    for inner in (equation, *equations_inside(equation)):
        lost = lost_mark(inner)
        if lost is not None:
            yield *lost, source_line(inner)
