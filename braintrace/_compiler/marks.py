"""Automatic marks: ordinary uses of parameters become ETP operations.

Uses of parameters on the way to a hidden state are marked in the program of the step. All later
passes see the same program as after marking by hand.

- A product of data with a parameter-derived weight becomes the product's ETP operation.
- Any other parameter-derived variable that meets data gets an elementwise mark.
- A loop or branch that reads parameters is unrolled, or lowered to a selection, so that its
  products meet the data of each step.
- Some uses cannot be marked: an operation through which no element can be followed (a lookup, a
  call whose own derivative couples elements), and a product in a loop that cannot be unrolled.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import brainstate
import jax

from .._checks import path_filter, path_name, quoted, shown
from .._errors import OptionError
from .._etrace_op.conv import conv
from .._etrace_op.einsum import in_matrices
from .._etrace_op.elemwise import etp_elemwise_p
from .._etrace_op.mark import SCOPE
from .._etrace_op.registry import holds_marked, is_marked
from .._graph.report import Diagnostic
from .._graph.traced_model import TracedModel
from .._jax import (
    OWN_DERIVATIVE,
    Atom,
    Equation,
    Var,
    bind,
    equations_inside,
    is_var,
    scopes_of,
    source_line,
    trace_to_jaxpr,
)
from .._jaxpr.primitives import ELEMENTWISE, IN_ORDER, Constants, letters_of
from .._jaxpr.program import (
    STOPS_GRADIENT,
    Program,
    Rule,
    carries_derivative,
    evaluate,
    evaluate_all,
    inlined,
    program_of,
)
from .._typing import Path
from .analysis import BindingTime, binding_times, couples, times_of_inputs
from .canonicalize import (
    LONGEST_UNROLLED,
    by_rules,
    selected,
    spell_out_broadcasts,
    unrolled,
    with_program,
)

Use: TypeAlias = tuple[int, tuple[int, ...]]
"""The index of an equation, and the indices of its parameter-derived operands."""


Wants: TypeAlias = Callable[[Path], bool]
"""Tells from the path of a parameter whether it is marked."""


def wanted_marks(model: brainstate.nn.Module, mark: Any) -> Wants | None:
    """Return the parameters to mark; ``None``: only those in regions of `braintrace.mark`.

    Raises
    ------
    OptionError
        If ``mark`` fits no parameter of the model.
    """
    if mark == "explicit":
        return None
    if mark is None or mark == "auto":
        return lambda path: True
    wants = path_filter(mark)
    paths = [tuple(path) for path in model.states(brainstate.ParamState)]
    if not any(map(wants, paths)):
        raise OptionError(
            f"`mark` is {shown(mark)}, which matches no parameter of `{type(model).__name__}`; "
            f"its parameters are {quoted(list(map(path_name, paths)))}."
        )
    return wants


def with_marks(traced: TracedModel, wants: Wants | None, is_default: bool) -> TracedModel:
    """Mark the regions of `braintrace.mark` in a step, and then some parameters.

    By default, a model with its own marks on the way to a hidden state gets no other marks.
    """
    if any(map(reaches_region, traced.program.equations)):
        traced = _marked(traced, lambda path: True, in_region=True)
    if wants is None or (is_default and _has_own_marks(traced)):
        return traced
    return dataclasses.replace(
        _marked(traced, wants, in_region=False), is_marked_automatically=True
    )


def reaches_region(equation: Equation) -> bool:
    """Test whether an equation, or one in its bodies, is in a region of `braintrace.mark`."""
    return any(SCOPE in scopes_of(inner) for inner in (equation, *equations_inside(equation)))


def _has_own_marks(traced: TracedModel) -> bool:
    """Test whether an ETP operation with a parameter reaches a hidden state.

    An operation in a branch, a loop or a function with a custom derivative counts as well.
    """
    holding = [e for e in traced.program.equations if is_marked(e) or holds_marked(e)]
    hidden = [leaf.out_var for leaf in traced.written if leaf.kind == "hidden"]
    reached = traced.program.ancestors(hidden) if holding else set()
    parameters = {leaf.in_var for leaf in traced.parameters}
    return any(
        not reached.isdisjoint(equation.outvars)
        and not parameters.isdisjoint(traced.program.ancestors(equation.invars))
        for equation in holding
    )


def _marked(traced: TracedModel, wants: Wants, in_region: bool) -> TracedModel:
    """Return a step with the marks of some parameters."""
    inputs = times_of_inputs(traced)
    for place, leaf in enumerate(traced.leaves, len(traced.argument_vars)):
        if leaf.kind == "parameter" and not wants(leaf.path):
            inputs[place] = BindingTime.CONSTANT
    wanted = [False] * len(traced.output_atoms)
    wanted += [leaf.kind == "hidden" for leaf in traced.written]
    program = traced.program
    while True:
        uses = ParametricUses(program, inputs, wanted, in_region)
        each = ((index, _expansion(program.equations[index])) for index, _ in uses)
        expansions = {index: rule for index, rule in each if rule is not None}
        if not expansions:
            break
        program = program_of(inlined(by_rules(program, expansions).jaxpr, spell_out_broadcasts))

    rules: dict[int, Rule] = {}
    unmarked = []
    for use in uses:
        rule, reasons = _rule_for(uses, use)
        rules.update({use[0]: rule} if rule is not None else {})
        unmarked += [_diagnostic(traced, uses, use[0], *reason) for reason in reasons]
    program = program_of(inlined(uses.run(rules, wanted), spell_out_broadcasts))
    marked = with_program(traced, program)
    return dataclasses.replace(marked, unmarked=(*traced.unmarked, *unmarked))


def _expansion(equation: Equation) -> Rule | None:
    """Return the rule that expands a loop or branch; ``None``: it stays as it is."""
    if equation.primitive.name == "cond":
        return selected
    is_scan = equation.primitive.name == "scan"
    return unrolled if is_scan and equation.params["length"] <= LONGEST_UNROLLED else None


# --- uses of parameters

_MOVES = (IN_ORDER - STOPS_GRADIENT) | {"broadcast_in_dim", "tile", "rev", "transpose"}


class ParametricUses:
    """The uses of parameter-derived variables together with data in one program.

    Parameters
    ----------
    program
        The program.
    inputs
        Binding times of its inputs.
    wanted
        Whether each of its results counts.
    in_region
        Whether only the uses in regions of `braintrace.mark` count.

    Attributes
    ----------
    results
        The wanted results that are parameter-derived.
    """

    def __init__(
        self,
        program: Program,
        inputs: Sequence[BindingTime],
        wanted: Sequence[bool],
        in_region: bool,
    ) -> None:
        self.program, self.constants, self._in_region = program, Constants(program), in_region
        self.times = binding_times(program, inputs, is_marked)
        targets = [atom for atom, counts in zip(program.out_atoms, wanted, strict=True) if counts]
        self._ancestors = program.ancestors(targets)
        self.results = () if in_region else tuple(filter(self.is_parametric, targets))

    def __iter__(self) -> Iterator[Use]:
        """Yield the uses in program order, without those of ETP operations."""
        for index in self.program.making(self._ancestors):
            equation = self.program.equations[index]
            operands = tuple(i for i, a in enumerate(equation.invars) if self.is_parametric(a))
            results = (var for var in equation.outvars if var in self._ancestors)
            is_data = any(self.times[var] is BindingTime.DATA for var in results)
            is_inside = not self._in_region or reaches_region(equation)
            if operands and is_data and is_inside and not is_marked(equation):
                yield index, operands

    def is_parametric(self, atom: Atom) -> bool:
        """Test whether an operand is parameter-derived and has a derivative."""
        return carries_derivative(atom) and self.times.get(atom) is BindingTime.PARAMETER

    def is_data(self, atom: Atom) -> bool:
        """Test whether an operand is data."""
        return is_var(atom) and self.times.get(atom) is BindingTime.DATA

    def source(self, var: Var) -> Var:
        """Return the variable at which the elementwise mark of another is placed.

        Copies and elementwise functions stay after the mark: the broadcast of a bias over the
        samples, a decay and one minus the decay, which share a mark.
        """
        while (equation := self.program.maker(var)) is not None:
            operands = {atom for atom in equation.invars if self.is_parametric(atom)}
            if len(operands) != 1:
                break
            (before,), name = operands, equation.primitive.name
            is_alike = name in ELEMENTWISE and before.aval.shape == var.aval.shape
            if not is_alike and not (name in _MOVES and len(equation.invars) == 1):
                break
            var = before
        return var

    def run(self, rules: dict[int, Rule], wanted: Sequence[bool]) -> Any:
        """Trace the program with rules for the uses; a wanted result may be parameter-derived."""
        program = self.program

        def run(*values: jax.Array) -> list[Any]:
            self._inputs = dict(zip(program.in_vars, values, strict=True))
            self._marked = dict[Var, Any]()
            results = evaluate_all(program.jaxpr, values, rules)
            each = zip(results, program.out_atoms, wanted, strict=True)
            return [
                self.marked(atom) if counts and atom in self.results else result
                for result, atom, counts in each
            ]

        return trace_to_jaxpr(run, [var.aval for var in program.in_vars])

    def marked(self, var: Var) -> Any:
        """Return the value of a parameter-derived variable after its mark, during a `run`."""
        program, source = self.program, self.source(var)
        if source not in self._marked:
            (value,) = evaluate(program, [source], self._inputs)
            self._marked[source] = etp_elemwise_p.bind(value)
        (self._marked[var],) = evaluate(program, [var], self._inputs, self._marked)
        return self._marked[var]


# --- marks


def _rule_for(
    uses: ParametricUses, use: Use
) -> tuple[Rule | None, list[tuple[tuple[int, ...], str]]]:
    """Return the rule that marks a use, and the operands without a mark, with the reason."""
    (index, operands), constants = use, uses.constants
    equation = uses.program.equations[index]
    if len(operands) == 1 and any(map(uses.is_data, equation.invars)):
        product = _product_of(equation, *operands)
        if isinstance(product, str):
            return None, [(operands, product)]
        if product is not None:
            return product, []
    passing = {i for i in operands if not couples(constants, equation, i)}
    others = tuple(i for i in operands if i not in passing)

    def rule(equation: Equation, values: list[Any]) -> list[Any]:
        atoms = enumerate(zip(equation.invars, values, strict=True))
        return bind(equation, [uses.marked(a) if i in passing else v for i, (a, v) in atoms])

    return rule, [(others, _why_unmarked(equation))] if others else []


def _why_unmarked(equation: Equation) -> str:
    name = equation.primitive.name
    if name == "scan":
        return (
            f"the loop of {equation.params['length']} steps, each of which couples elements, is "
            f"longer than {LONGEST_UNROLLED}, so it is not unrolled; make the inner steps steps "
            "of the model, or split the loop"
        )
    if name == "while":
        return "it is the weight of a product in a loop with an unknown number of steps"
    if name in OWN_DERIVATIVE:
        return "it has a derivative rule of its own. Write it with ETP operations"
    return (
        "the compiler cannot follow single elements through it. Write it with ETP operations, "
        "such as `braintrace.sparse_matmul` for a sparse matrix"
    )


def _diagnostic(
    traced: TracedModel, uses: ParametricUses, index: int, operands: Sequence[int], reason: str
) -> Diagnostic:
    program, equation = uses.program, uses.program.equations[index]
    atoms = [equation.invars[operand] for operand in operands]
    ancestors = program.ancestors(atoms)
    inputs = zip(program.in_vars[len(traced.argument_vars) :], traced.leaves, strict=True)
    leaves = (leaf for var, leaf in inputs if var in ancestors)
    paths = (path_name(leaf.path) for leaf in leaves if leaf.kind == "parameter")
    names = tuple(dict.fromkeys(paths))
    return Diagnostic(
        "warning",
        "not-marked",
        f"{quoted(names)} enters `{equation.primitive.name}` on the way to a hidden state "
        f"without a mark: {reason}. It gets the gradient of the current step.",
        names,
        source_line(equation),
    )


# --- products of data with a weight
#
# A `dot_general` is an einsum, whose axes have letters; it is marked as one matrix product, or as a
# batch of them.

_FORMATS = ("bcoo_", "bcsr_", "coo_", "csr_")
"""Prefixes of the names of products with a matrix in a sparse format."""


def _product_of(equation: Equation, weight: int) -> Rule | str | None:
    """Return the rule that runs a product of data with a weight as a marked product.

    A string is the reason why a product cannot be marked; ``None``: it is no product with a weight.
    """
    name, params = equation.primitive.name, equation.params
    if name == "dot_general" and params["dimension_numbers"][0][0]:
        return _unlike_default(params["precision"]) or functools.partial(_dot, weight)
    if name == "conv_general_dilated" and weight == 1 and params["batch_group_count"] == 1:
        return _unlike_default(params["precision"]) or _convolution
    if weight == 0 and name in ("gather", "dynamic_slice"):
        return "data select its entries. Call `braintrace.embedding`"
    if weight == 0 and name.startswith(_FORMATS):
        return "it holds the entries of a sparse matrix. Call `braintrace.sparse_matmul`"
    return None


def _dot(weight: int, equation: Equation, operands: list[Any]) -> list[Any]:
    letters, dtype = letters_of(equation), equation.outvars[0].aval.dtype
    x, w = operands[1 - weight].astype(dtype), operands[weight].astype(dtype)
    return [in_matrices(x, w, letters[1 - weight], letters[weight], letters[2])]


def _convolution(equation: Equation, operands: list[Any]) -> list[Any]:
    params, dtype = equation.params, equation.outvars[0].aval.dtype
    same = "padding", "lhs_dilation", "rhs_dilation", "dimension_numbers", "feature_group_count"
    options = {name: params[name] for name in same}
    x, kernel = (operand.astype(dtype) for operand in operands)
    return [conv(x, kernel, strides=params["window_strides"], **options)]


def _unlike_default(precision: Any) -> str | None:
    """Return the reason if a product asks for a precision that ETP operations lack."""
    asked = {*precision} if isinstance(precision, tuple) else {precision}
    if asked <= {None, jax.lax.Precision.DEFAULT} or jax.config.jax_default_matmul_precision:
        return None
    return (
        f"it has `precision={precision}`, and an ETP operation has the precision of "
        "`jax.default_matmul_precision`: set that instead"
    )
