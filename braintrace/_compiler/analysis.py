"""Cached facts about one program, shared by the passes of the compiler.

The last form of a step has one `Analysis`; `with_memories` needs another, of an earlier form.
Further facts: which values depend on data, and the nonlinear ``custom_vjp`` rules on the way to a
hidden state. A trace is computed forward in time, before the learning signal is known. It contains
the result of a backward rule for a cotangent of one, which is multiplied by the learning signal
later. This is exact only if the backward rule is linear in the cotangent.
"""

import enum
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from .._etrace_op.registry import MarkedRole, is_marked, role
from .._graph.hidden_group import Ids
from .._graph.traced_model import TracedModel
from .._jax import OWN_BACKWARD, Atom, Equation, Var, equations_inside, is_var
from .._jaxpr.dataflow import TOP, Dataflow, Flow, Labels, Lattice, everything, joined, spread
from .._jaxpr.primitives import DRAWS, Constants
from .._jaxpr.program import STOPS_GRADIENT, Program, carries_derivative
from .._jaxpr.vjp import flows_back, flows_by_vjp, nonlinear_operands


class Analysis:
    """Cached facts about one program.

    Parameters
    ----------
    program
        The program.

    Attributes
    ----------
    program
        The program, with the equations that write and read each variable.
    constants
        Values that depend on no input.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.constants = Constants(program)
        self._elements: dict[Var, Mapping[Var, Ids]] = {}

    @functools.cached_property
    def roles(self) -> Mapping[int, MarkedRole]:
        """The role of each ETP operation in a walk, by the index of its equation."""
        pairs = ((index, role(equation)) for index, equation in enumerate(self.program.equations))
        return MappingProxyType({index: what for index, what in pairs if what is not None})

    @functools.cached_property
    def operation_outputs(self) -> frozenset[Var]:
        """The outputs of ETP operations."""
        return self.program.made_by(self.roles)

    @functools.cached_property
    def opaque_outputs(self) -> frozenset[Var]:
        """The outputs of the ETP operations that end a walk."""
        return self.program.made_by(i for i, what in self.roles.items() if what == "opaque")

    def elements_of(self, start: Var) -> Mapping[Var, Ids]:
        """Return the one element of ``start`` that each element of a variable depends on.

        A variable is left out if one of its elements depends on several.
        """
        if start not in self._elements:  # an operation reaches several states
            flows = sources(self.constants).flows_from({start: numbered(start)}).items()
            one = {var: flow for var, flow in flows if not np.any(flow == TOP)}
            self._elements[start] = one
        return self._elements[start]


def labels_back(
    analysis: Analysis,
    starts: Mapping[Var, Flow],
    ends: Collection[Var] = (),
    special: Callable[[Equation, Sequence[Flow]], list[Flow] | None] = lambda *_: None,
) -> tuple[dict[Var, Flow], dict[tuple[int, int], Flow]]:
    """Let labels flow back through a step, by the derivatives of its equations.

    Parameters
    ----------
    analysis, starts
        The step, and the labels of some variables.
    ends
        Variables at which labels end.
    special
        A rule that is tried first for every equation.

    Returns
    -------
    reached
        The label that each element of a variable reaches.
    through
        The same by a single use, by the indices of the equation and of the operand.
    """
    reached, through = dict(starts), dict[tuple[int, int], Flow]()
    for index in analysis.program.backward(starts, reached):
        equation = analysis.program.equations[index]
        results = [None if var in ends else reached.get(var) for var in equation.outvars]
        if all(flow is None for flow in results):
            continue
        flows = special(equation, results)
        flows = flows or flows_back(Labels(), analysis.constants, equation, results)
        flows = flows or alike(equation, everything(Labels(), results))  # nothing is known
        for operand, (atom, flow) in enumerate(zip(equation.invars, flows, strict=True)):
            through[index, operand] = flow
            if flow is not None and carries_derivative(atom):
                reached[atom] = joined(Labels(), [reached.get(atom), flow])
    return reached, through


def alike(equation: Equation, one: Flow) -> list[Flow]:
    """Return the same flow for every element of the operands."""
    shapes = (atom.aval.shape for atom in equation.invars)
    return [one if one is None else spread(Labels(), one, shape) for shape in shapes]


# --- binding times
#
# A value is *parameter-derived* if it depends only on parameters, constants and read-only States: a
# mask times a weight, its transpose, the exponential of a time constant. It is the same for all
# samples and all steps between two updates of the parameters. Every other value is data.


class BindingTime(enum.IntEnum):
    """Binding time of a value; a value has the latest binding time of its operands.

    A value without a derivative to a parameter (an index, the result of ``stop_gradient``) counts
    as constant.
    """

    CONSTANT = 0
    PARAMETER = 1
    DATA = 2


def times_of_inputs(traced: TracedModel) -> list[BindingTime]:
    """Return the binding times of the inputs of a step, before it is mapped over samples or after.

    A State that the step does not write is data if each sample has another value.
    """
    is_mapped = traced.batch_size is not None
    times = [BindingTime.DATA] * len(traced.argument_vars)
    for leaf in traced.leaves:
        is_fixed = leaf.out_var is None and leaf.kind != "random"
        is_shared = is_fixed and not (is_mapped and leaf.per_sample)
        time = BindingTime.CONSTANT if is_shared else BindingTime.DATA
        times.append(BindingTime.PARAMETER if leaf.kind == "parameter" else time)
    return times


def binding_times(
    program: Program,
    inputs: Sequence[BindingTime],
    becomes_data: Callable[[Equation], bool] = lambda _: False,
) -> dict[Var, BindingTime]:
    """Return the binding times of all variables.

    Parameters
    ----------
    program, inputs
        The program, and the binding times of its inputs.
    becomes_data
        Tells whether the results of an equation count as data, even if they depend on parameters
        alone.
    """
    times = dict.fromkeys(program.constants, BindingTime.CONSTANT)
    times.update(zip(program.in_vars, inputs, strict=True))
    for equation in program.equations:
        last = max((times[a] for a in equation.invars if is_var(a)), default=BindingTime.CONSTANT)
        is_parametric = last is BindingTime.PARAMETER
        if equation.effects or _draws(equation) or (is_parametric and becomes_data(equation)):
            last = BindingTime.DATA
        ends = last is BindingTime.PARAMETER and equation.primitive.name in STOPS_GRADIENT
        for var in equation.outvars:
            is_held = ends or (last is BindingTime.PARAMETER and not carries_derivative(var))
            times[var] = BindingTime.CONSTANT if is_held else last
    return times


def _draws(equation: Equation) -> bool:
    every = (equation, *equations_inside(equation))
    return any(inner.primitive.name in DRAWS for inner in every)


# --- backward rules


def nonlinear_uses(
    program: Program, targets: Sequence[Atom], stops: frozenset[Var] = frozenset()
) -> Iterator[tuple[Equation, list[Atom]]]:
    """Yield the ancestors of some targets that have a nonlinear backward rule.

    Each equation comes with the operands whose cotangents are not proportional to the cotangents of
    its results. The ancestors of ``stops`` are left out.
    """
    for index in program.making(program.ancestors(targets, stops) - stops):
        equation = program.equations[index]
        operands = nonlinear_operands(equation)
        if operands:
            yield equation, [equation.invars[operand] for operand in sorted(operands)]


# --- elements


def couples(constants: Constants, equation: Equation, operand: int) -> bool:
    """Test whether an element of the results depends on several of an operand."""
    operands: list[Flow] = [None] * len(equation.invars)
    operands[operand] = numbered(equation.invars[operand])
    flows = sources(constants).flows_of_results(equation, operands)
    return any(flow is not None and bool(np.any(flow == TOP)) for flow in flows)


def numbered(var: Var) -> Ids:
    """Return a number for every element of a variable."""
    return np.arange(var.aval.size, dtype=np.int32).reshape(var.aval.shape)


def through_derivative(
    lattice: Lattice, equation: Equation, operands: Sequence[Flow]
) -> list[Flow]:
    """Return the flows of results along the derivative of an equation.

    A function with a custom derivative need not depend on its operands as its body does. A
    surrogate gradient may pass a derivative where the value passes none, and a custom rule may
    couple elements that the value does not couple.
    """
    return [_of_output(lattice, equation, operands, k) for k in range(len(equation.outvars))]


def _of_output(lattice: Lattice, equation: Equation, operands: Sequence[Flow], output: int) -> Flow:
    var = equation.outvars[output]
    cotangents: list[Flow] = [None] * len(equation.outvars)
    cotangents[output] = numbered(var)
    reached = flows_by_vjp(Labels(), equation, cotangents)
    results: list[Flow] = []
    for operand, flow in enumerate(operands):
        targets = None if reached is None else reached[operand]
        if flow is None or (targets is None and reached is not None):
            continue
        if targets is None or np.any(targets == TOP):
            one = everything(lattice, [flow])
            results.append(one if one is None else spread(lattice, one, var.aval.shape))
        else:
            results.append(lattice.put(lattice.empty(var.aval.shape), targets, flow))
    return joined(lattice, results)


def _special(equation: Equation, operands: Sequence[Flow]) -> list[Flow] | None:
    """Follow custom forward derivatives; end at custom VJPs and at ETP operations."""
    if equation.primitive.name == "custom_jvp_call":
        return through_derivative(Labels(), equation, operands)
    if equation.primitive.name in OWN_BACKWARD or is_marked(equation):
        return [np.full(var.aval.shape, TOP, np.int32) for var in equation.outvars]
    return None


def sources(constants: Constants) -> Dataflow:
    """Return the analysis of the element that each element depends on, by derivatives."""
    return Dataflow(constants, Labels(), derivatives=True, special=_special)
