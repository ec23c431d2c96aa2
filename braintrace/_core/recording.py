"""Results of a chunk, and how the residuals are computed from values over time.

Each residual is one of the following:

* loop-invariant: it is computed once, and its time axis has length 1;
* a slice of the sequences, or the result of a hoisted product;
* recorded by a loop; equal variables are recorded once;
* computed after the loops, for all steps, from the other values.
"""

import dataclasses
from collections.abc import Mapping

import jax

from .._jax import Atom, Var, is_var
from .._jaxpr import evaluate
from .._typing import PyTree
from .over_time import MapOverTime, is_step_by_step, map_at_once, map_one_by_one, values_over_time
from .step_program import (
    ByVar,
    StepProgram,
    equations_of,
    find_varying,
    value_of,
    vars_of,
    zip_dict,
)


@dataclasses.dataclass(frozen=True)
class SourceValues:
    """Values of the variables from which results of a chunk are computed; see `Results`.

    Attributes
    ----------
    over_time, once
        Values per step, and loop-invariant values.
    steps
        Number of steps.
    """

    over_time: list[jax.Array]
    once: list[jax.Array]
    steps: int


jax.tree_util.register_dataclass(SourceValues, ["over_time", "once"], ["steps"])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ChunkResult:
    """Results of the differentiated steps of a chunk.

    Attributes
    ----------
    gradients
        Gradients of the parameters' leaves that have one outside the traces, summed over time.
    signal
        Derivatives of the scaled losses: with respect to the perturbations, time first; or with
        respect to the States before the chunk, if derivatives pass from step to step.
    written
        New values of the States that the steps write.
    loss, aux
        Results of the function, time first; the losses are not scaled.
    residuals
        Values over time of the sources of the residuals.
    """

    gradients: list[jax.Array]
    signal: list[jax.Array]
    written: PyTree
    loss: jax.Array
    aux: PyTree
    residuals: list[jax.Array]


@dataclasses.dataclass(frozen=True, eq=False)
class Results:
    """Some results of a step, and the sources of their values over time.

    Attributes
    ----------
    step, results
        The step, and a pytree of its variables and of constants.
    source
        For variables with values over time: the variable that has the value.
    sources
        These variables.
    computed
        Variables computed from these.
    once
        Loop-invariant results and operands; those of literals alone are not stored.
    map_over_time
        How the variables are computed for all steps.
    """

    step: StepProgram
    results: PyTree
    source: Mapping[Var, Var]
    sources: tuple[Var, ...]
    computed: tuple[Var, ...]
    once: tuple[Var, ...]
    map_over_time: MapOverTime

    def collect(self, fixed: ByVar, over_time: list[jax.Array], steps: int) -> SourceValues:
        """Return the values of the sources and of `once`.

        Parameters
        ----------
        fixed
            Values that are equal in all steps.
        over_time
            The values of the sources.
        steps
            Number of steps.
        """
        return SourceValues(over_time, evaluate(self.step.program, self.once, fixed), steps)

    def compute(self, values: SourceValues) -> PyTree:
        """Return the results, time first, with a time axis of length 1 if loop-invariant."""
        program, once = self.step.program, zip_dict(self.once, values.once)
        over_time = zip_dict(self.sources, values.over_time)
        varying = {var: over_time[first] for var, first in self.source.items()}
        same = [var for var in vars_of(self.results) if var not in self.step.varying]
        once.update(zip_dict(same, evaluate(program, same, {}, once)))
        computed = values_over_time(self.map_over_time, program, self.computed, once, varying)
        varying.update(zip_dict(self.computed, computed))

        def of_atom(atom: Atom) -> jax.Array:
            is_varying = is_var(atom) and atom in varying
            return varying[atom] if is_varying else value_of(atom, once)[None]

        return jax.tree.map(of_atom, self.results)


def find_sources(step: StepProgram, results: PyTree, known: Mapping[Var, Var]) -> Results:
    """Find the sources of some results of a step.

    Parameters
    ----------
    step, results
        The step, and a pytree of its variables and of constants.
    known
        For all variables with values over time: the variable that has the value.
    """
    targets, program = vars_of(results), step.program
    behind = find_varying(step, program, targets, known)
    source = {var: first for var, first in known.items() if var in behind}
    computed = behind - source.keys()
    run = list(equations_of(program, computed))
    operands = [equation.invars for equation in run]
    map_over_time = map_one_by_one if any(map(is_step_by_step, run)) else map_at_once
    of_arrays = program.dependents_of([*program.in_vars, *program.constants]) - step.varying
    once = tuple(var for var in vars_of((targets, operands)) if var in of_arrays)
    in_order = tuple(var for var in targets if var in computed)
    sources = tuple(dict.fromkeys(source.values()))
    return Results(step, results, source, sources, in_order, once, map_over_time)
