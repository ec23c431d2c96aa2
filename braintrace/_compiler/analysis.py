"""Cached facts about one program, shared by the passes of the compiler.

There is one `Analysis` of a step, and another of every rewriting of it. Further facts: which values
depend on data, and the nonlinear ``custom_vjp`` rules on the way to a hidden state. A trace is
computed forward in time, before the learning signal is known. It contains the result of a backward
rule for a cotangent of one, which is multiplied by the learning signal later. This is exact only if
the backward rule is linear in the cotangent.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from types import MappingProxyType

import numpy as np

from .._etrace_op.registry import MarkedRole, role
from .._graph.traced_model import StateKind, StateLeaf, TracedModel
from .._jax import Atom, Equation, Var, is_var
from .._jaxpr.dataflow import BindingTime, binding_times, flows_from
from .._jaxpr.evaluate import Constants
from .._jaxpr.lattices import TOP
from .._jaxpr.primitives import CONSTANT
from .._jaxpr.program import Program, carries_derivative, reached
from .._jaxpr.vjp import nonlinear_operands
from .back_through import SOURCES, Ids, numbered


@dataclasses.dataclass(frozen=True, eq=False)
class Paths:
    """The paths between the variables of a step, by value or by gradient.

    Attributes
    ----------
    program
        The program of the step.
    passes
        Tests whether paths pass a variable.
    before
        The old values of the States with a new value.
    """

    program: Program
    passes: Callable[[Atom], bool]
    before: Mapping[Var, set[Var]] = dataclasses.field(default_factory=dict)

    def uses_of(self, var: Var) -> Iterable[int]:
        """Return the equations that read a variable, in order."""
        readers = (index for index, _ in self.program.readers.get(var, ()))
        return dict.fromkeys(index for index in readers if not self._ends_at(index))

    def ancestors(self, targets: Iterable[Atom], ends: Collection[Var] = ()) -> set[Var]:
        """Return some variables and what they depend on within the step.

        Variables in ``ends`` are included, what they depend on is not.
        """
        return self.program.depends_on(targets, frozenset(ends), CONSTANT, self.passes)

    def descendants(self, starts: Iterable[Var], ends: Collection[Var] = ()) -> set[Var]:
        """Return some variables and what depends on them within the step.

        Variables in ``ends`` are included, what depends on them is not.
        """
        return self._forward(starts, ends, {})

    def descendants_over_time(self, starts: Iterable[Var], ends: Collection[Var] = ()) -> set[Var]:
        """Return the same, in this step or in a later one."""
        return self._forward(starts, ends, self.before)

    def _forward(
        self, starts: Iterable[Var], ends: Collection[Var], before: Mapping[Var, set[Var]]
    ) -> set[Var]:
        def after(var: Var) -> Iterable[Var]:
            if var in ends or not self.passes(var):
                return ()
            results = (self.program.equations[index].outvars for index in self.uses_of(var))
            return chain(filter(self.passes, chain(*results)), before.get(var, ()))

        return reached(starts, after)

    def _ends_at(self, index: int) -> bool:
        return self.program.equations[index].primitive.name in CONSTANT


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
        self._elements: dict[Var, tuple[int, Mapping[Var, Ids]]] = {}

    # --- ETP operations

    @functools.cached_property
    def roles(self) -> Mapping[int, MarkedRole]:
        """The role of each ETP operation in a walk, by the index of its equation."""
        pairs = ((index, role(equation)) for index, equation in enumerate(self.program.equations))
        return MappingProxyType({index: what for index, what in pairs if what is not None})

    @functools.cached_property
    def opaque(self) -> frozenset[int]:
        """Equations of the ETP operations that end a walk."""
        return frozenset(index for index, what in self.roles.items() if what == "opaque")

    # --- what depends on what

    @functools.cached_property
    def _places(self) -> Mapping[Var, int]:
        return {var: place for place, var in enumerate(self.program.in_vars)}

    def inputs_among(self, variables: Iterable[Var]) -> list[Var]:
        """Return the inputs of the program among some variables, in order."""
        return sorted((v for v in variables if v in self._places), key=self._places.__getitem__)

    @functools.cached_property
    def values(self) -> Paths:
        """Paths by which values depend on values, except through ``stop_gradient``."""
        return Paths(self.program, is_var)

    @functools.cached_property
    def gradients(self) -> Paths:
        """Paths by which a gradient passes."""
        return Paths(self.program, carries_derivative)

    def elements_of(self, start: Var, last: int) -> Mapping[Var, Ids]:
        """Return the one element of ``start`` that each element of a variable depends on.

        A variable is left out if one of its elements depends on several. The result covers the
        variables that the equations up to ``last`` write, and may cover more.
        """
        known, elements = self._elements.get(start, (-2, {}))
        if known < last:
            flows = flows_from(SOURCES, self.constants, {start: numbered(start)}, last).items()
            elements = {v: f for v, f in flows if f is not None and not np.any(f == TOP)}
            self._elements[start] = last, elements
        return elements


def data_of(
    traced: TracedModel, analysis: Analysis, apart: Collection[Var] = frozenset()
) -> set[Var]:
    """Return the variables that depend on data, apart from some inputs."""
    leaves = {leaf.in_var: leaf for leaf in traced.leaves}
    inputs = [
        BindingTime.CONSTANT if var in apart else time_of_leaf(leaves.get(var))
        for var in analysis.program.in_vars
    ]
    times = binding_times(analysis.program, inputs, lambda _: False)
    return {var for var, time in times.items() if time is BindingTime.DATA}


def time_of_leaf(leaf: StateLeaf | None) -> BindingTime:
    """Return the binding time of an input of the step.

    ``None`` means an argument of the step.
    """
    return BindingTime.DATA if leaf is None else time_of(leaf.kind, leaf.out_var is not None)


def time_of(kind: StateKind, changes: bool) -> BindingTime:
    """Return the binding time of a State's leaf before the step.

    Parameters
    ----------
    kind
        The kind of the State.
    changes
        Whether the step writes it, or it differs from sample to sample.
    """
    if kind == "parameter":
        return BindingTime.PARAMETER
    return BindingTime.DATA if changes or kind == "random" else BindingTime.CONSTANT


def nonlinear_uses(
    analysis: Analysis, targets: Sequence[Atom], stops: frozenset[Var] = frozenset()
) -> Iterator[tuple[Equation, list[Atom]]]:
    """Yield the ancestors of some targets that have a nonlinear backward rule.

    Each equation comes with the operands whose cotangents are not proportional to the cotangents of
    its results. The ancestors of ``stops`` are left out.
    """
    for index in analysis.program.making(analysis.gradients.ancestors(targets, stops) - stops):
        equation = analysis.program.equations[index]
        operands = nonlinear_operands(equation)
        if operands:
            yield equation, [equation.invars[operand] for operand in sorted(operands)]


def states_as_outputs(traced: TracedModel, analysis: Analysis) -> tuple[StateLeaf, ...]:
    """Return the hidden states after a nonlinear rule that no later step reads."""
    program = analysis.program
    rules = [equation for equation in program.equations if nonlinear_operands(equation)]
    ancestors = analysis.gradients.descendants(
        var for equation in rules for var in equation.outvars
    )
    read = analysis.gradients.ancestors(program.out_atoms)
    return tuple(
        leaf
        for leaf in traced.leaves
        if leaf.kind == "hidden" and leaf.in_var not in read and leaf.out_var in ancestors
    )
