"""Loops over time in a chunk, with hoisted products between them.

States that depend on each other over the steps share a loop. Between two loops, products are
computed for all steps at once, from the recorded values of earlier loops: a stack of layers runs
like a sequence of single layers. Elementwise operations stay in the loop of their readers.

The level of a loop is the number of products on the longest path to it. States of one level share a
loop. If several levels are possible, a State has the last one, close to its readers.
"""

import dataclasses
from collections.abc import Collection, Iterable, Sequence

from ..._jax import Atom, Var
from ..._jaxpr import Program
from .dependences import Dependences, dependences_of
from .step_program import StepProgram, equations_of, is_product, size_of

MOST_EXTRA = 4
"""Maximum size of a step's products, relative to its inputs and outputs, that are stored for all
steps of a chunk at once: for the logits of a large vocabulary, a loop is better."""


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
        Variables made by earlier loops, hoisted products and slices that it reads.
    has_effects
        Whether it runs the equations with effects.
    """

    hoisted: tuple[Var, ...]
    carried: tuple[int, ...]
    made: frozenset[Var]
    read: frozenset[Var]
    has_effects: bool


@dataclasses.dataclass(frozen=True, eq=False)
class Loops:
    """The loops of a chunk.

    Attributes
    ----------
    in_order
        The loops.
    at_last
        Indices of the States that no loop carries: no step reads them, so their values are computed
        at the last step only.
    available
        All variables whose values for all steps are slices or hoisted, or can be recorded.
    read
        Those of them that hoisted products, later loops, or the States in `at_last` read.
    """

    in_order: tuple[Loop, ...]
    at_last: tuple[int, ...]
    available: frozenset[Var]
    read: frozenset[Var]


@dataclasses.dataclass(frozen=True, eq=False)
class _Levels:
    """Levels of equations and States.

    Attributes
    ----------
    of_equation
        The level of each equation that must be in a loop, by index.
    of_state
        The first level at which a State can be carried, and whether it must be in that loop.
    products
        Results of the products that are computed for all steps at once.
    """

    of_equation: dict[int, int]
    of_state: list[tuple[int, bool]]
    products: frozenset[Var]


def loops_of(
    step: StepProgram, values: Program, in_loops: Collection[int], later: Collection[Var]
) -> Loops:
    """Split the loop over time into several loops.

    Parameters
    ----------
    step
        The step.
    values
        Its program after CSE.
    in_loops
        Indices of other equations that must run in a loop: branches, random numbers, effects.
    later
        Variables that the results of the step depend on.
    """
    levels = _levels(step, values, in_loops, later)
    written = values.out_atoms[: len(step.carried)]
    numbers = sorted({*levels.of_equation.values(), *(n for n, is_in in levels.of_state if is_in)})
    loop_of_state = [
        level if is_in else next((n for n in numbers if n >= level), None)
        for level, is_in in levels.of_state
    ]
    available, read, loops = set(step.slices), set[Var](), list[Loop]()
    for number in numbers:
        carried = [k for k, level in enumerate(loop_of_state) if level == number]
        loop, read_ahead = _loop(step, values, levels, number, carried, available)
        loops.append(loop)
        read |= loop.read | read_ahead
        available.update(loop.made, loop.hoisted)
    at_last = [k for k, level in enumerate(loop_of_state) if level is None]
    read |= _ancestors(step, values, [written[k] for k in at_last], available) & available
    return Loops(tuple(loops), tuple(at_last), frozenset(available), frozenset(read))


def _loop(
    step: StepProgram,
    values: Program,
    levels: _Levels,
    number: int,
    carried: list[int],
    available: set[Var],
) -> tuple[Loop, set[Var]]:
    """Return the loop of a level, and the available variables that its hoisted products read.

    Parameters
    ----------
    step, values, levels
        The step, its program after CSE, and all levels.
    number, carried
        The level, and the indices of the States that the loop carries.
    available
        Variables with values for all steps before the loop.
    """
    run = [values.equations[i] for i, level in levels.of_equation.items() if level == number]
    targets = [values.out_atoms[k] for k in carried]
    targets += [atom for equation in run for atom in (*equation.invars, *equation.outvars)]
    given = available | levels.products
    inside = _ancestors(step, values, targets, given)
    before = _ancestors(step, values, inside & levels.products - available, available)
    made = {v for e in equations_of(values, inside - given) for v in e.outvars}
    made.update(step.carried[k] for k in carried)
    hoisted = (v for e in equations_of(values, before) for v in e.outvars)
    loop = Loop(
        tuple(v for v in hoisted if v in levels.products and v not in available),
        tuple(carried),
        frozenset(made),
        frozenset(inside & given),
        any(equation.effects for equation in run),
    )
    return loop, before & available


def _ancestors(
    step: StepProgram, values: Program, targets: Iterable[Atom], stops: Collection[Var]
) -> set[Var]:
    """Return the varying variables that some targets depend on, up to stops, both included."""
    return values.depends_on(targets, frozenset(stops)) & step.varying


def _levels(
    step: StepProgram, values: Program, in_loops: Collection[int], later: Collection[Var]
) -> _Levels:
    """Return the number of products before each equation or State in a loop.

    Nodes of the graph are the equations, followed by the carried States.
    """
    graph, count = dependences_of(step, values, in_loops), len(values.equations)
    read = {count + k for k, v in enumerate(step.carried) if v in later or v in graph.read}
    stays = [
        any(graph.is_cyclic(node) or node in read or node in in_loops for node in group)
        for group in graph.components
    ]
    products, extra = set[int](), 0
    for index in sorted({node for node in graph.node_of.values() if node < count}):
        equation, component = values.equations[index], graph.component_of[index]
        if is_product(equation) and not stays[component]:
            extra += sum(map(size_of, equation.outvars))
            if extra <= MOST_EXTRA * step.bytes_in_and_out:
                products.add(index)
            else:
                stays[component] = True
    levels = _levels_of_components(graph, products, stays)
    of_node = {node: levels[number] for node, number in graph.component_of.items()}
    stay = {node for node, number in graph.component_of.items() if stays[number]}
    return _Levels(
        {node: of_node[node] for node in sorted(stay) if node < count},
        [(of_node[count + k], count + k in stay) for k in range(len(step.carried))],
        frozenset(v for i in products for v in values.equations[i].outvars),
    )


def _levels_of_components(
    graph: Dependences, products: Collection[int], stays: list[bool]
) -> list[int]:
    """Return the number of products before each component: the last possible one in loops."""
    edges = [
        {(graph.component_of[s], s in products) for node in group for s in graph.sources[node]}
        for group in graph.components
    ]
    first = _after(edges, [None] * len(edges))
    top = max((n for n, is_in in zip(first, stays, strict=True) if is_in), default=0)
    last = _before(edges, [top if is_in else len(edges) for is_in in stays])
    return _after(edges, [n if is_in else None for n, is_in in zip(last, stays, strict=True)])


Edges = list[set[tuple[int, bool]]]
"""The components that each component depends on, which precede it, and whether by a product."""


def _after(edges: Edges, fixed: Sequence[int | None]) -> list[int]:
    """Return the first possible level of each component whose level is not fixed."""
    levels: list[int] = []
    for number, level in enumerate(fixed):
        least = (levels[s] + by_product for s, by_product in edges[number] if s != number)
        levels.append(max(least, default=0) if level is None else level)
    return levels


def _before(edges: Edges, most: list[int]) -> list[int]:
    """Return the last possible level of each component below a maximum."""
    levels = list(most)
    for number in reversed(range(len(edges))):
        for source, by_product in edges[number]:
            if source != number:
                levels[source] = min(levels[source], levels[number] - by_product)
    return levels
