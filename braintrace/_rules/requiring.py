"""Rules of `D_RTRL` that refuse some models: with other feedback, or with recurrent products."""

import dataclasses
from collections.abc import Iterator

from .._compiler.core.analysis import Analysis
from .._errors import CompilationError
from .._etrace_op import feedback_primitives
from .._graph import ETraceGraph
from .._graph.diagnostics import quoted
from .._jax import Atom, Equation, Var, source_line
from .._jaxpr.dataflow import PRODUCTS
from .d_rtrl import ParameterTraces


@dataclasses.dataclass(frozen=True)
class RandomFeedback(ParameterTraces):
    """A rule of models whose readout has its own feedback; ``rule`` is its name for messages."""

    rule: str

    def check(self, graph: ETraceGraph) -> None:
        """Refuse a model whose output is not computed by a `feedback_matmul`."""
        if _has_feedback(graph):
            return
        states = quoted([s.name for group in graph.hidden_groups for s in group.model_states])
        raise CompilationError(
            f"`{self.rule}` sends errors back through the feedback of the readout, but no "
            f"`feedback_matmul` connects the hidden states {states} to the output of `update`. "
            "Compute the output with `braintrace.nn.FeedbackLinear` or "
            "`braintrace.feedback_matmul`, or use `D_RTRL`, which sends errors back through the "
            "weight of the readout."
        )


@dataclasses.dataclass(frozen=True)
class SymmetricFeedback(ParameterTraces):
    """A rule of models whose readout sends errors back through its weight."""

    def check(self, graph: ETraceGraph) -> None:
        """Refuse a model whose output is computed by a `feedback_matmul`."""
        if _has_feedback(graph):
            raise CompilationError(
                "`feedback` is 'symmetric', but a `feedback_matmul` computes the output of "
                "`update`. Use `braintrace.nn.Linear` or `braintrace.matmul` there, or "
                "`feedback='random'`."
            )


@dataclasses.dataclass(frozen=True)
class NoRecurrence(ParameterTraces):
    """A rule of models whose units do not read the past of others."""

    def check(self, graph: ETraceGraph) -> None:
        """Refuse a model in which a state reaches the next step through a product."""
        for states, reached, where in _products_over_time(graph):
            raise CompilationError(
                "`OSTLFeedforward` needs layers without recurrent connections, but the previous "
                f"hidden state {quoted(states)} reaches {quoted(reached)} through {where}, which "
                "couples units. Use `OSTLRecurrent`, or `D_RTRL`, which truncates this path."
            )


def _has_feedback(graph: ETraceGraph) -> bool:
    """Test whether a `feedback_matmul` leads from hidden states to the output of a model."""
    leaky = {name for readout in graph.traced.readouts for name in readout.operations}
    if not leaky.isdisjoint(primitive.name for primitive in feedback_primitives()):
        return True
    return any(_is_readout(graph, equation) for equation in graph.traced.program.equations)


def _is_readout(graph: ETraceGraph, equation: Equation) -> bool:
    """Test whether an equation is the last product between hidden states and the output.

    A separate state may follow it (a leaky readout), but not a state that the equation reads.
    """
    if equation.primitive not in feedback_primitives():
        return False
    program, outputs = graph.traced.program, graph.traced.output_atoms
    new = {
        state.in_var: var
        for group in graph.hidden_groups
        for state, var in zip(group.states, group.new_vars, strict=True)
    }
    ends = frozenset(new.values())
    x, y = equation.invars[0], equation.outvars[0]
    read = program.depends_on([x], stops=ends)
    products = PRODUCTS | {
        program.equations[index].primitive.name for index in graph.opaque_equations
    }
    if read.isdisjoint([*new, *ends]) or y not in program.depends_on(outputs, blocked=products):
        return False
    is_output = y in program.depends_on(outputs, stops=ends, blocked=products)
    own = [after for before, after in new.items() if before in read]
    return is_output or y not in program.depends_on(own)


def _products_over_time(graph: ETraceGraph) -> Iterator[tuple[list[str], list[str], str]]:
    """Yield the operations that couple units on a path from one step to the next.

    Each result contains the states that the operation reads from the step before, the states that
    it reaches, and its source.
    """
    analysis, equations = Analysis(graph.traced.program), graph.traced.program.equations
    new = frozenset(var for group in graph.hidden_groups for var in group.new_vars)
    old = _carriers(graph, analysis, new)
    for group in graph.hidden_groups:
        ends = new.difference(group.new_vars)
        behind = analysis.gradient_ancestors(group.new_vars, ends)
        met: dict[int, list[Atom]] = {
            index: equations[index].invars
            for index in graph.opaque_equations
            if not behind.isdisjoint(equations[index].outvars)
        }
        for cut in [cut for cuts in group.cuts for cut in cuts if not group.delay_line]:
            met.setdefault(cut.equation, []).append(equations[cut.equation].invars[cut.operand])
        for index, operands in sorted(met.items()):
            found = analysis.gradient_ancestors(operands, ends)
            states = [name for var, name in old.items() if var in found]
            if states:
                where = f"`{equations[index].primitive.name}` [{source_line(equations[index])}]"
                yield states, [state.name for state in group.model_states], where


def _carriers(graph: ETraceGraph, analysis: Analysis, new: frozenset[Var]) -> dict[Var, str]:
    """Return the States that carry a dependence on weights over time: name by old value."""
    leaves = graph.traced.leaves
    learnt = new | {leaf.in_var for leaf in leaves if leaf.kind == "parameter"}
    return {
        leaf.in_var: leaf.name
        for leaf in leaves
        if leaf.kind in ("hidden", "other")
        and leaf.out_var is not None
        and not learnt.isdisjoint(analysis.gradient_ancestors([leaf.out_var]))
    }
