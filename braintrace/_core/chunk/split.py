"""Split of a step: what its loops record, and what is computed from that for all steps at once.

Only the operations that the next step's States depend on must be in loops (see `find_loops`).
Outputs, losses and Jacobians are computed after the loops, from their recorded values.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from ..._jax import Var, runs_on_several_devices
from ..._jaxpr import Program, carries_derivative, equal_values, merged
from ..._jaxpr.dataflow import CONSTANT
from .find_loops import Loop, find_loops
from .known import Known
from .over_time import (
    Differentiate,
    choose_differentiate,
    differentiate_one_by_one,
    is_step_by_step,
    map_one_by_one,
)
from .recording import Results, find_sources
from .step_program import StepProgram, equations_of, find_varying, is_product, size_of, vars_of

PARTS = frozenset({"slice", "split"})
"""Operations whose results are not recorded beside their operand."""

MOST_EXTRA = 4
"""Maximum size of a step's products, relative to its inputs and outputs, that are stored for all
steps of a chunk at once: for the logits of a large vocabulary, a loop is better."""


@dataclasses.dataclass(frozen=True, eq=False)
class Split:
    """Split of a step into loops, and operations between and after them.

    Attributes
    ----------
    program
        The program of the step after CSE, which the loops evaluate. It has no derivatives.
    loops
        The loops, in order.
    recorded
        Variables whose values over time are read: a loop records those that it makes.
    known
        For each variable whose value a loop can record: the variable after CSE that has it.
    differentiable
        Variables with a derivative.
    perturbed
        The variables to which the losses have a derivative, each with the variable that has its
        value; ``None``: the value is zero.
    of_losses
        Known variables that the losses read.
    of_results
        How the residuals are computed, and hoisted products too.
    product_bytes
        Bytes of operands and results of the products for all losses and residuals of a step; 0 if
        they are too small to limit the chunk length.
    differentiate
        How losses with their derivatives are computed for all steps.
    """

    program: Program
    loops: tuple[Loop, ...]
    recorded: frozenset[Var]
    known: Mapping[Var, Var]
    differentiable: frozenset[Var]
    perturbed: Mapping[Var, Var | None]
    of_losses: Known
    of_results: Results
    product_bytes: int
    differentiate: Differentiate

    def record_also(self, variables: Iterable[Var]) -> "Split":
        """Return the same split that records more variables."""
        return dataclasses.replace(self, recorded=self.recorded.union(variables))

    def run_one_by_one(self) -> "Split":
        """Return the same split that maps nothing over time."""
        results = dataclasses.replace(self.of_results, map_over_time=map_one_by_one)
        return dataclasses.replace(self, differentiate=differentiate_one_by_one, of_results=results)

    def count_bytes(self) -> int:
        """Return the bytes that every step of a chunk writes."""
        made = {var for loop in self.loops for var in (*loop.hoisted, *loop.made)}
        written = (made & self.recorded).union(self.of_results.computed)
        return self.product_bytes + sum(map(size_of, written))


def split_step(step: StepProgram, has_mask: bool, passes: bool = False) -> Split:
    """Split a step into loops and the rest.

    Parameters
    ----------
    step
        The step.
    has_mask
        Whether some steps may be masked: the scale of their loss is zero.
    passes
        Whether derivatives pass from step to step. The losses are then perturbed at the States and
        products of their step, else at its probes.
    """
    equal = equal_values(step.program, step.probes)
    program = merged(step.program, equal)
    inputs = (*step.parameters, *step.probes, *(step.carried if passes else ()))
    differentiable = step.program.dependents_of(inputs, None, CONSTANT, carries_derivative)
    constant = {first for var, first in equal.items() if var not in differentiable} & step.varying
    loops = find_loops(step, program, _find_step_by_step(program, constant))

    available = {*step.slices}.union(*((*loop.hoisted, *loop.made) for loop in loops))
    parts = {v for e in program.equations if e.primitive.name in PARTS for v in e.outvars}
    known = {var: first for var, first in equal.items() if first in available - parts}
    losses, constants, perturbed = _losses(step, known, differentiable, passes)
    of_results = find_sources(step, step.results[2], known)
    read = set[Any]().union(
        *(loop.read for loop in loops), constants.values(), of_results.sources, perturbed.values()
    )
    there, twice = read | {*step.slices}, losses & differentiable - perturbed.keys()
    same = {var: first for var, first in equal.items() if var in twice and first in there}

    records = find_varying(step, step.program, vars_of(step.results[2]), known) - known.keys()
    extra = _bytes_of_products(step, losses - constants.keys() | records, losses | records)
    computed = losses - constants.keys() - perturbed.keys()
    differentiate = choose_differentiate(step, step.results[:1], differentiable, computed, has_mask)
    # In a loop over steps, devices would sum the gradients of all weights at each step.
    if extra > 0 and not runs_on_several_devices():
        differentiate = differentiate_one_by_one
    return Split(
        program,
        loops,
        frozenset(read - {None}),
        known,
        frozenset(differentiable),
        perturbed,
        Known(constants, same),
        of_results,
        0 if differentiate is differentiate_one_by_one else extra,
        differentiate,
    )


def _find_step_by_step(program: Program, constant: set[Var]) -> set[int]:
    """Return the equations that must run in a loop; those with a derivative run after it."""
    return {
        index
        for index, e in enumerate(program.equations)
        if e.effects or (not constant.isdisjoint(e.outvars) and is_step_by_step(e))
    }


def _losses(
    step: StepProgram, known: Mapping[Var, Var], differentiable: set[Var], passes: bool
) -> tuple[set[Var], dict[Var, Var], dict[Var, Var | None]]:
    """Return how the losses of a step depend on known values.

    Returns
    -------
    ancestors
        The varying variables that losses and auxiliary results depend on, up to the others.
    constant
        Known variables without a derivative, each with the variable that has its value.
    perturbed
        See `Split`.
    """
    constant = {var: first for var, first in known.items() if var not in differentiable}
    places = _places(step) if passes else step.probes
    cuts = [v for v in places if v in differentiable and (v in known or not passes)]
    ancestors = find_varying(step, step.program, vars_of(step.results[:2]), {*constant, *cuts})
    of_loss = step.program.depends_on(vars_of(step.results[:1]), blocked=CONSTANT)
    reached = ancestors if passes else of_loss
    perturbed = {v: known.get(v) for v in cuts if v in reached}
    return ancestors, {v: first for v, first in constant.items() if v in ancestors}, perturbed


def _places(step: StepProgram) -> list[Var]:
    """Return the States of a step before and after it, and its products."""
    products = (e.outvars[0] for e in step.program.equations if is_product(e))
    return list(dict.fromkeys([*step.carried, *vars_of(step.written), *products]))


def _bytes_of_products(step: StepProgram, computed: set[Var], ancestors: set[Var]) -> int:
    """Return the bytes of computed products and of their operands among ancestors; 0 if few."""
    products = [e for e in equations_of(step.program, computed) if is_product(e)]
    met = [v for e in products for v in vars_of((e.invars, e.outvars)) if v in ancestors]
    size = sum(map(size_of, met))
    return size if size > MOST_EXTRA * step.bytes_in_and_out else 0
