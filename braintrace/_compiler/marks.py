"""Automatic marking: bind ETP operations in a model that has none.

This is the default for a model whose own ETP operations reach no hidden state (`own_marks`).

Products and other uses of parameters that reach a hidden state become ETP operations in the program
of the step. All later passes see the same program as after marking by hand.

A weight of a product inside a loop or branch meets different data in each step or case. Such a loop
is unrolled, and such a branch is lowered to a selection, as for an ETP operation. The same holds if
the steps broadcast parameters that differ from step to step. Other loops and branches stay, and
their inputs are marked before them.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import brainstate
import jax

from .._checks import path_filter, shown
from .._errors import OptionError
from .._etrace_op import ETP_PRIMITIVE_SPECS, etp_elemwise_p, lost_mark, reaches_region
from .._etrace_op.registry import is_marked
from .._graph.diagnostics import Diagnostic, quoted
from .._jax import (
    Atom,
    ClosedJaxpr,
    Equation,
    Var,
    bind,
    equations_inside,
    is_var,
    source_line,
    trace_to_jaxpr,
)
from .._jaxpr import BindingTime, Program, Rule, carries_derivative, evaluate, inlined, program_of
from .._typing import Path, path_name
from .analysis import Analysis, time_of
from .canonicalize import by_rules, selected, unrolled
from .mark_plan import MarkPlan, Unmarked, is_spelled_out, mark_plan
from .parametric_uses import ParametricUses
from .products import Product, is_sum_with_weights, sum_with_weights
from .state_arrays import StateArray


@dataclasses.dataclass(frozen=True)
class Marking:
    """The parameters to mark, and how.

    Attributes
    ----------
    wants
        Tells from the path of a parameter whether it is marked.
    unroll_limit
        Longest scan that is unrolled.
    spells_out
        Whether loops are unrolled and branches lowered for a mark.
    is_default
        Whether a model with its own marks on the way to a hidden state gets no other marks.
    in_region
        Whether only the uses in regions of `braintrace.mark` are marked.
    """

    wants: Callable[[Path], bool]
    unroll_limit: int
    spells_out: bool
    is_default: bool = False
    in_region: bool = False


def marking_of(
    model: brainstate.nn.Module, mark: Any, unroll_limit: int, needs_marks: bool
) -> Marking | None:
    """Return the parameters to mark, by the option; ``None``: mark nothing.

    Parameters
    ----------
    model, mark, unroll_limit
        See `compile_etrace_graph`.
    needs_marks
        Whether the learning rule follows marked weights only.

    Raises
    ------
    OptionError
        If ``mark`` fits no parameter of the model.
    """
    if mark == "explicit" or (mark is None and not needs_marks):
        return None
    if mark is None or mark == "auto":
        return Marking(lambda path: True, unroll_limit, needs_marks, is_default=mark is None)
    wants = path_filter(mark)
    paths = [tuple(path) for path in model.states(brainstate.ParamState)]
    if not any(map(wants, paths)):
        raise OptionError(
            f"`mark` is {shown(mark)}, which matches no parameter of `{type(model).__name__}`; "
            f"its parameters are {quoted(list(map(path_name, paths)))}."
        )
    return Marking(wants, unroll_limit, needs_marks)


def with_marked_regions(
    program: Program,
    arrays: Sequence[StateArray],
    arguments: int,
    is_mapped: bool,
    unroll_limit: int,
) -> tuple[Program, tuple[Diagnostic, ...]]:
    """Mark the regions of `braintrace.mark` in a step, as `with_marks` does."""
    if not any(map(reaches_region, program.equations)):
        return program, ()
    marking = Marking(lambda path: True, unroll_limit, spells_out=True, in_region=True)
    return with_marks(program, arrays, arguments, is_mapped, marking)


def with_marks(
    program: Program,
    arrays: Sequence[StateArray],
    arguments: int,
    is_mapped: bool,
    marking: Marking,
) -> tuple[Program, tuple[Diagnostic, ...]]:
    """Mark a step, and return diagnostics for the uses that stay unmarked.

    Parameters
    ----------
    program
        The step without calls: ``(arguments, leaves) -> (results, leaves that it writes)``.
    arrays, arguments
        The State leaves, and the number of arguments.
    is_mapped
        Whether the step is written for one sample and will be vmapped over a batch.
    marking
        The parameters to mark.
    """
    inputs = [BindingTime.DATA] * arguments
    inputs += [_time_of(array, is_mapped, marking) for array in arrays]
    written = [array.kind == "hidden" for array in arrays if array.written]
    wanted = [False] * (len(program.out_atoms) - len(written)) + written
    program = _spelled_out(program, inputs, wanted, marking)
    uses = ParametricUses(program, inputs, wanted, marking.in_region)
    plan = mark_plan(uses, marking.unroll_limit)
    by_var = dict(zip(program.in_vars[arguments:], arrays, strict=True))
    findings = [_diagnostic(uses, unmarked, by_var) for unmarked in plan.unmarked]
    return program_of(_marked(uses, plan, wanted)), tuple(findings)


def has_own_marks(program: Program, arrays: Sequence[StateArray]) -> bool:
    """Test whether an ETP operation with a parameter reaches a hidden state.

    An operation in a branch, a loop or a function with a custom derivative counts as well. So does
    an operation that lost its mark to a map over its weights; another diagnostic reports that.

    Parameters
    ----------
    program
        The step without calls: ``(arguments, leaves) -> (results, leaves that it writes)``.
    arrays
        The State leaves.
    """
    holding = list(filter(_holds_own_mark, program.equations))
    if not holding:
        return False
    written = [array for array in arrays if array.written]
    new = program.out_atoms[len(program.out_atoms) - len(written) :]
    hidden = [atom for atom, array in zip(new, written, strict=True) if array.kind == "hidden"]
    analysis = Analysis(program)
    ancestors = analysis.gradient_ancestors(hidden)
    before = program.in_vars[len(program.in_vars) - len(arrays) :]
    parameters = {v for v, a in zip(before, arrays, strict=True) if a.kind == "parameter"}
    return any(
        not ancestors.isdisjoint(equation.outvars)
        and not parameters.isdisjoint(analysis.gradient_ancestors(_weights(equation)))
        for equation in holding
    )


def _holds_own_mark(equation: Equation) -> bool:
    every = (equation, *equations_inside(equation))
    return any(is_marked(inner) or lost_mark(inner) is not None for inner in every)


def _weights(equation: Equation) -> list[Atom]:
    """Return the operands of an equation that may be weights of an ETP operation."""
    spec = ETP_PRIMITIVE_SPECS.get(equation.primitive)
    if spec is None:
        return list(filter(carries_derivative, equation.invars))
    places = spec.resolve_trainable_invars(equation.params).values()
    return [equation.invars[place] for place in places]


def _time_of(array: StateArray, is_mapped: bool, marking: Marking) -> BindingTime:
    """Return the binding time of a State's leaf; unmarked parameters are constants."""
    time = time_of(array.kind, array.written or (is_mapped and array.per_sample))
    is_unwanted = time is BindingTime.PARAMETER and not marking.wants(array.path)
    return BindingTime.CONSTANT if is_unwanted else time


def _spelled_out(
    program: Program, inputs: Sequence[BindingTime], wanted: Sequence[bool], marking: Marking
) -> Program:
    """Inline calls, unroll loops and lower branches that use parameters."""
    while True:
        uses = ParametricUses(program, inputs, wanted, marking.in_region)
        every_rule = {index: _rule_for(uses, index, operands, marking) for index, operands in uses}
        rules = {index: rule for index, rule in every_rule.items() if rule is not None}
        if not rules:
            return program
        program = program_of(inlined(by_rules(program, rules).jaxpr))


def _rule_for(
    uses: ParametricUses, index: int, operands: Sequence[int], marking: Marking
) -> Rule | None:
    """Return the rule that expands an equation; ``None``: it stays as it is."""
    equation = uses.program.equations[index]
    if not marking.spells_out or not is_spelled_out(uses, index, operands):
        return None
    if equation.primitive.name == "cond":
        return selected
    is_scan = equation.primitive.name == "scan"
    return unrolled if is_scan and equation.params["length"] <= marking.unroll_limit else None


def _marked(uses: ParametricUses, plan: MarkPlan, wanted: Sequence[bool]) -> ClosedJaxpr:
    """Return a program with the marks of a plan."""
    program, own = uses.program, set(uses.results)

    def run(*values: jax.Array) -> list[Any]:
        marks = _Marks(uses, plan, dict(zip(program.in_vars, values, strict=True)))
        results = evaluate(
            program, program.out_atoms, marks.inputs, marks.fixed, marks.rules, effects=True
        )
        # A state may be parameter-derived.
        return [
            marks.of(atom) if counts and is_var(atom) and atom in own else value
            for value, atom, counts in zip(results, program.out_atoms, wanted, strict=True)
        ]

    return trace_to_jaxpr(run, [var.aval for var in program.in_vars])


class _Marks:
    """The marks of a program while it is traced.

    Parameters
    ----------
    uses, plan
        The uses of parameters in the program, and the plan of its marks.
    inputs
        Values of its inputs.

    Attributes
    ----------
    fixed
        Values of the variables that do not depend on data.
    """

    def __init__(
        self, uses: ParametricUses, plan: MarkPlan, inputs: Mapping[Var, jax.Array]
    ) -> None:
        self._uses, self._plan, self.inputs = uses, plan, inputs
        made = (var for equation in uses.program.equations for var in equation.outvars)
        fixed = [var for var in made if uses.times[var] is not BindingTime.DATA]
        self.fixed = dict(zip(fixed, evaluate(uses.program, fixed, inputs), strict=True))
        self._known: dict[Var, Any] = {**inputs, **self.fixed}
        self._marked: dict[Var, Any] = {}

    @property
    def rules(self) -> dict[int, Rule]:
        """The rules that run the equations, by index."""
        plan = self._plan
        rules: dict[int, Rule] = {
            index: self._elementwise(operands) for index, operands in plan.elementwise.items()
        }
        rules.update({index: _product(product) for index, product in plan.products.items()})
        return rules

    def of(self, var: Var) -> jax.Array:
        """Return the value of a parameter-derived variable after its elementwise mark."""
        source, sources = self._plan.sources[var], self._plan.sources
        if var not in self._marked:
            constant = {v: x for v, x in self.fixed.items() if not self._uses.is_parametric(v)}
            known = {**constant, source: etp_elemwise_p.bind(self._known[source])}
            alike = [other for other in sources if sources[other] is source]
            after = evaluate(self._uses.program, alike, self.inputs, known)
            self._marked.update(zip(alike, after, strict=True))
        return self._marked[var]

    def _elementwise(self, marked: Sequence[int]) -> Rule:
        def rule(equation: Equation, operands: list[Any]) -> list[Any]:
            atoms = equation.invars
            operands = [
                self.of(atoms[i]) if i in marked else value for i, value in enumerate(operands)
            ]
            if is_sum_with_weights(equation, marked):
                return [sum_with_weights(equation, operands, marked[0])]
            return bind(equation, operands)

        return rule


def _product(product: Product) -> Rule:
    return lambda _, operands: [product(operands)]


def _diagnostic(
    uses: ParametricUses, unmarked: Unmarked, by_var: dict[Var, StateArray]
) -> Diagnostic:
    atoms = [unmarked.equation.invars[i] for i in unmarked.operands]
    ancestors = uses.program.depends_on(atoms, through=carries_derivative)
    arrays = [array for var, array in by_var.items() if var in ancestors]
    paths = [path_name(array.path) for array in arrays if array.kind == "parameter"]
    names = tuple(dict.fromkeys(paths))
    return Diagnostic(
        "warning",
        "not-marked",
        f"{quoted(names)} enters `{unmarked.equation.primitive.name}` on the way to a hidden state "
        f"without a mark: {unmarked.reason}. It gets the gradient of the current step.",
        names,
        source_line(unmarked.equation),
    )
