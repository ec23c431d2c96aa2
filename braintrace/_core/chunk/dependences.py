"""Dependence graph of the next step's States, with its cycles."""

import dataclasses
from collections.abc import Collection

from ..._jax import Var, is_var
from ..._jaxpr import Program, components
from .step_program import StepProgram


@dataclasses.dataclass(frozen=True, eq=False)
class Dependences:
    """A graph of equations and carried States, with its strongly connected components.

    The node of an equation is its index. The node of a carried State is its index plus the number
    of equations; its value depends on the value written in the step before.

    Attributes
    ----------
    node_of
        The node that computes a variable.
    read
        The variables that others depend on.
    sources
        The nodes that each node depends on.
    components
        Strongly connected components, each after the components that it depends on.
    component_of
        The index of a node's component.
    """

    node_of: dict[Var, int]
    read: set[Var]
    sources: list[list[int]]
    components: list[list[int]]
    component_of: dict[int, int]

    def is_cyclic(self, node: int) -> bool:
        """Test whether a node depends on itself, over the steps."""
        group = self.components[self.component_of[node]]
        return len(group) > 1 or node in self.sources[node]


def dependences_of(
    step: StepProgram, values: Program, in_loops: Collection[int] = ()
) -> Dependences:
    """Return the dependence graph of the next step's States, and of some equations.

    Parameters
    ----------
    step
        The step.
    values
        Its program after CSE.
    in_loops
        Indices of these equations. Equations with effects run in order: each depends on the one
        before, and the first on the last.
    """
    written, equations = values.out_atoms[: len(step.carried)], values.equations
    operands = [a for i in in_loops for a in (*equations[i].invars, *equations[i].outvars)]
    needed = values.depends_on([*written, *operands]) & step.varying
    node_of = {var: len(equations) + k for k, var in enumerate(step.carried)}
    node_of.update({var: values.producer[var] for var in needed if var in values.producer})
    read = [e.invars if i in in_loops else () for i, e in enumerate(equations)]
    for index in values.making(needed):
        read[index] = equations[index].invars
    read += [[atom] for atom in written]
    sources = [[node_of[a] for a in atoms if is_var(a) and a in node_of] for atoms in read]
    in_turn = sorted(i for i in in_loops if equations[i].effects)
    for before, index in zip(in_turn[-1:] + in_turn[:-1], in_turn, strict=True):
        sources[index].append(before)
    groups = components(sources)
    component_of = {node: number for number, group in enumerate(groups) for node in group}
    return Dependences(node_of, needed, sources, groups, component_of)
