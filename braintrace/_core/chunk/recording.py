"""Residuals of a chunk: which values are recorded, and how results are computed from them.

A step returns losses, auxiliary results, and the residuals of the traces. Each of these values is
one of the following:

* loop-invariant: it is computed once, and its time axis has length 1;
* a slice of the sequences, which exists already;
* hoisted: computed before a loop, from slices and values of earlier loops;
* recorded by a loop; equal variables are recorded once;
* computed after the loops, for all steps, from the other values.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TypeVar

import jax

from ..._graph import Records
from ..._jax import Atom, Var, is_var
from ..._jaxpr import Program, evaluate
from ..._jaxpr.dataflow import CONSTANT
from ..._typing import PyTree
from .over_time import OverTime, stretched, values_over_time
from .split import Split
from .step_program import (
    ByVar,
    StepProgram,
    equations_of,
    size_of,
    value_of,
    vars_of,
    zip_dict,
)

Leaf = TypeVar("Leaf")


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
    program
        The program of the step.
    results
        A pytree of its variables and of constants.
    source
        For variables with values over time: the variable that has the value.
    computed
        Variables computed from these.
    once
        Loop-invariant results and operands.
    literal
        The ones that depend only on literals; they are recomputed instead of stored.
    mode
        How the variables are computed for all steps.
    """

    program: Program
    results: PyTree
    source: Mapping[Var, Var]
    computed: tuple[Var, ...]
    once: tuple[Var, ...]
    literal: tuple[Var, ...]
    mode: OverTime

    @property
    def sources(self) -> list[Var]:
        """The variables whose values over time are stored."""
        return list(dict.fromkeys(self.source.values()))

    def source_values(self, fixed: ByVar, over_time: ByVar, steps: int) -> SourceValues:
        """Return the values of the sources.

        Parameters
        ----------
        fixed, over_time
            Values that are equal in all steps, and values per step.
        steps
            Number of steps.
        """
        return SourceValues(
            [over_time[var] for var in self.sources], self.same_in_all(fixed), steps
        )

    def same_in_all(self, fixed: ByVar) -> list[jax.Array]:
        """Return the values of `once`."""
        result: list[jax.Array] = evaluate(self.program, self.once, fixed)
        return result

    def __call__(self, residuals: SourceValues) -> PyTree:
        """Return the results, time first, with a time axis of length 1 if loop-invariant."""
        literal = evaluate(self.program, self.literal, {})
        once = {**zip_dict(self.once, residuals.once), **zip_dict(self.literal, literal)}
        over_time = zip_dict(self.sources, residuals.over_time)
        varying = {var: over_time[first] for var, first in self.source.items()}
        computed = values_over_time(self.mode, self.program, self.computed, once, varying)
        varying.update(zip_dict(self.computed, computed))

        def of_atom(atom: Atom) -> jax.Array:
            is_varying = is_var(atom) and atom in varying
            return varying[atom] if is_varying else value_of(atom, once)[None]

        return jax.tree.map(of_atom, self.results)


def results_of(
    step: StepProgram, results: PyTree, source: Mapping[Var, Var], mode: OverTime
) -> Results:
    """Find the sources of some results of a step.

    Parameters
    ----------
    step, results
        The step, and a pytree of its variables and of constants.
    source
        For all variables with values over time: the variable that has the value.
    mode
        How the other variables are computed for all steps.
    """
    targets, program = vars_of(results), step.program
    behind = program.depends_on(targets, frozenset(source)) & step.varying
    read = {var: first for var, first in source.items() if var in behind}
    computed = behind - read.keys()
    operands = [equation.invars for equation in equations_of(program, computed)]
    same = [var for var in vars_of((targets, operands)) if var not in step.varying]
    of_arrays = program.dependents_of([*program.in_vars, *program.constants])
    once = tuple(var for var in same if var in of_arrays)
    literal = tuple(var for var in same if var not in of_arrays)
    in_order = tuple(var for var in targets if var in computed)
    return Results(program, results, read, in_order, once, literal, mode)


@dataclasses.dataclass(frozen=True, eq=False)
class Recording:
    """The recorded values of a chunk.

    Attributes
    ----------
    differentiated
        For every leaf of the parameters: whether it has a gradient outside the traces.
    written
        Variables that have a value for every step.
    of_traces
        The residuals of the traces.
    product_bytes
        See `Split`.
    """

    differentiated: tuple[bool, ...]
    written: tuple[Var, ...]
    of_traces: Results
    product_bytes: int = 0

    @property
    def bytes_per_step(self) -> int:
        """Bytes that every step of a chunk writes."""
        written = vars_of((self.written, self.of_traces.computed))
        return self.product_bytes + sum(map(size_of, written))

    def chosen(self, leaves: Iterable[Leaf]) -> list[Leaf]:
        """Return the items of differentiated leaves, from one item per leaf of the parameters."""
        return list(itertools.compress(leaves, self.differentiated))

    def records(self, residuals: SourceValues) -> Records:
        """Return the residuals of a chunk, from the result of `Results.source_values`.

        All have a full time axis, except for constant values. Chunks of one length are traced once.
        """
        records: Records = self._traced(residuals)
        return records

    @functools.cached_property
    def _traced(self) -> Callable[[SourceValues], Records]:
        def run(residuals: SourceValues) -> Records:
            records: Records = self.of_traces(residuals)
            rest = dataclasses.replace(records, values={}, steps=residuals.steps)
            full: Records = stretched(rest, residuals.steps)
            return dataclasses.replace(full, values=records.values)

        traced: Callable[[SourceValues], Records] = jax.jit(run)
        return traced


def parameters_with_gradient(step: StepProgram, targets: PyTree) -> tuple[Var, ...]:
    """Return the parameters to which some targets have a derivative."""
    reaching = step.program.depends_on(vars_of(targets), blocked=CONSTANT)
    return tuple(var for var in step.parameters if var in reaching)


def recording_of(step: StepProgram, split: Split, differentiated: Collection[Var]) -> Recording:
    """Return the recorded values of a step, and the sources of its residuals.

    Parameters
    ----------
    step, split
        The step, and its fission into loops.
    differentiated
        The parameters with a gradient outside the traces.
    """
    written = (*split.recorded, *split.hoisted)
    of_traces = results_of(step, step.results[2], split.of_records, split.result_mode)
    has_gradient = tuple(var in differentiated for var in step.parameters)
    return Recording(has_gradient, written, of_traces, split.product_bytes)
