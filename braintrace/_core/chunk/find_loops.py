"""Loops over time in a chunk, with hoisted products between them.

A loop over time is slow compared with a single product over time and batch. A loop contains only
the operations that the next step's States depend on, and States that depend on each other over the
steps share it. Between two loops, products are computed for all steps at once, from the recorded
values of earlier loops: a stack of layers runs like a sequence of single layers.

The level of a loop is the number of products on the longest path to it. States of one level share a
loop; an elementwise operation runs in each loop that reads it, unless an earlier one records it.
"""

import dataclasses
from collections.abc import Collection

from ..._jax import Var, is_var
from ..._jaxpr import Program, components
from .step_program import StepProgram, equations_of, find_varying, is_product


@dataclasses.dataclass(frozen=True, eq=False)
class Loop:
    """A loop over time, and the products that are computed for all steps before it.

    Attributes
    ----------
    hoisted
        Results of these products.
    carried
        Indices of the States that it carries.
    made
        Variables that it computes or carries, so it can record their values.
    read
        Variables made by earlier loops, hoisted products and slices that it or its products read.
    has_effects
        Whether it runs the equations with effects.
    """

    hoisted: tuple[Var, ...]
    carried: tuple[int, ...]
    made: tuple[Var, ...]
    read: frozenset[Var]
    has_effects: bool


def find_loops(step: StepProgram, program: Program, in_loops: Collection[int]) -> tuple[Loop, ...]:
    """Return the loops of a step in order.

    Parameters
    ----------
    step
        The step.
    program
        Its program after CSE.
    in_loops
        Indices of other equations that must run in a loop: branches, random numbers, effects.
    """
    levels, products = _find_levels(step, program, in_loops)
    count, available, loops = len(program.equations), set(step.slices), list[Loop]()
    for level in sorted({*levels.values()}):
        nodes = sorted(node for node in levels if levels[node] == level)
        run = [program.equations[node] for node in nodes if node < count]
        carried = [node - count for node in nodes if node >= count]
        targets = [program.out_atoms[k] for k in carried]
        targets += [atom for equation in run for atom in (*equation.invars, *equation.outvars)]
        inside = find_varying(step, program, targets, available | products)
        before = find_varying(step, program, inside & products - available, available)
        hoisted = _results_in_order(program, before & products - available)
        made = [step.carried[k] for k in carried]
        made += _results_in_order(program, inside - available - products)
        read = (inside & (available | products)) | (before & available)
        has_effects = any(equation.effects for equation in run)
        loops.append(
            Loop(tuple(hoisted), tuple(carried), tuple(made), frozenset(read), has_effects)
        )
        available.update(hoisted, made)
    return tuple(loops)


def _find_levels(
    step: StepProgram, program: Program, in_loops: Collection[int]
) -> tuple[dict[int, int], set[Var]]:
    """Return the level of each node that runs in a loop, and the results of hoisted products."""
    sources, count = _build_graph(step, program, in_loops), len(program.equations)
    levels, in_a_loop, products = dict[int, int](), list[int](), set[int]()
    for group in components(sources):
        before = {source for node in group for source in sources[node]}
        level = max((levels[s] + (s in products) for s in before.difference(group)), default=0)
        levels.update(dict.fromkeys(group, level))
        # A node that depends on itself depends on the step before.
        if before.intersection(group) or group[0] >= count or group[0] in in_loops:
            in_a_loop += group
        elif is_product(program.equations[group[0]]):
            products.add(group[0])
    return {node: levels[node] for node in in_a_loop}, set(program.made_by(products))


def _build_graph(step: StepProgram, program: Program, in_loops: Collection[int]) -> list[list[int]]:
    """Return the nodes that each node depends on: equations by index, then the carried States."""
    equations, count = program.equations, len(program.equations)
    written = program.out_atoms[: len(step.carried)]
    operands = [a for i in in_loops for a in (*equations[i].invars, *equations[i].outvars)]
    needed = find_varying(step, program, [*written, *operands])
    run = {*program.making(needed), *in_loops}
    node_of = {var: index for index in run for var in equations[index].outvars}
    node_of.update({var: count + k for k, var in enumerate(step.carried)})
    read = [equation.invars if i in run else () for i, equation in enumerate(equations)]
    # The value of a State depends on the value written in the step before.
    read += [[atom] for atom in written]
    sources = [[node_of[a] for a in atoms if is_var(a) and a in node_of] for atoms in read]
    # Equations with effects run in order: each depends on the one before, the first on the last.
    in_turn = sorted(index for index in in_loops if equations[index].effects)
    for before, index in zip(in_turn[-1:] + in_turn[:-1], in_turn, strict=True):
        sources[index].append(before)
    return sources


def _results_in_order(program: Program, variables: set[Var]) -> list[Var]:
    made = (var for equation in equations_of(program, variables) for var in equation.outvars)
    return [var for var in made if var in variables]
