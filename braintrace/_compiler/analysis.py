"""Cached facts about one program, shared by the passes of the compiler.

The last form of a step has one `Analysis`; `with_memories` needs another, of an earlier form.
Further facts: which values depend on data, and the nonlinear ``custom_vjp`` rules on the way to a
hidden state. A trace is computed forward in time, before the learning signal is known. It contains
the result of a backward rule for a cotangent of one, which is multiplied by the learning signal
later. This is exact only if the backward rule is linear in the cotangent.
"""

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from .._etrace_op.registry import MarkedRole, is_marked, role
from .._graph.hidden_group import Ids
from .._graph.traced_model import TracedModel
from .._jax import OWN_BACKWARD, Atom, Equation, Var
from .._jaxpr.constants import Constants
from .._jaxpr.dataflow import (
    BindingTime,
    Question,
    binding_times,
    flows_from,
    flows_of_results,
)
from .._jaxpr.lattices import TOP, Flow, Labels, Lattice, everything, joined, spread
from .._jaxpr.program import Program, carries_derivative
from .._jaxpr.vjp import flows_back, nonlinear_operands, vjp_of


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
    def operations(self) -> frozenset[Var]:
        """The outputs of ETP operations."""
        return self.program.made_by(self.roles)

    @functools.cached_property
    def opaque(self) -> frozenset[Var]:
        """The outputs of the ETP operations that end a walk."""
        return self.program.made_by(i for i, what in self.roles.items() if what == "opaque")

    def elements_of(self, start: Var) -> Mapping[Var, Ids]:
        """Return the one element of ``start`` that each element of a variable depends on.

        A variable is left out if one of its elements depends on several.
        """
        if start not in self._elements:  # an operation reaches several states
            flows = flows_from(SOURCES, self.constants, {start: numbered(start)}).items()
            one = {var: f for var, f in flows if f is not None and not np.any(f == TOP)}
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


def binding_times_of(
    traced: TracedModel,
    becomes_data: Callable[[Equation], bool] = lambda _: False,
    apart: Collection[Var] = frozenset(),
) -> dict[Var, BindingTime]:
    """Return the binding times of all variables of a step; inputs in ``apart`` are constants."""
    inputs = dict(zip(traced.program.in_vars, times_of_inputs(traced), strict=True))
    inputs |= dict.fromkeys(apart, BindingTime.CONSTANT)
    return binding_times(traced.program, [*inputs.values()], becomes_data)


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
    flows = flows_of_results(SOURCES, constants, equation, operands)
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
    reached = vjp_of(equation).flows(Labels(), None, equation.invars, cotangents)
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


SOURCES = Question(Labels(), derivatives=True, special=_special)
"""The element that each element depends on, by the derivatives of ordinary operations."""
