"""What the steps of a chunk record, and what is made of it: decided here for both loops over steps.

A step gives losses, what the user wants besides, and the records that the traces need. Each of
them is one of these:

* the same in every step: it is computed once, and its time axis has length 1;
* a slice of the sequences, which are there already;
* computed ahead of the loop, from the slices alone;
* recorded by the loop; values that are the same variable are recorded once;
* computed after the loop, for all steps at once, from what is there by then.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import jax

from .._etrace_op import SideBySide
from .._graph import Records
from .._jax import Atom, Var, is_var
from .._jaxpr import Program, evaluate
from .._jaxpr.dataflow import CONSTANT
from .._typing import PyTree
from .over_time import mapped, stretched
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
class Kept:
    """What results of a chunk are computed from, later on.

    Attributes
    ----------
    over_time, once
        Values of every step, and those that are the same in all of them.
    steps
        How many steps there are.
    """

    over_time: list[jax.Array]
    once: list[jax.Array]
    steps: int


jax.tree_util.register_dataclass(Kept, ["over_time", "once"], ["steps"])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ChunkResult:
    """What the differentiated steps of a chunk yield.

    Attributes
    ----------
    gradients
        Of the parameters' leaves that the losses depend on outside the traces, summed over time.
    signal
        Derivative of the scaled losses with respect to the probes, time first.
    written
        New values of the States that the steps write.
    loss, aux
        What the function returned, time first; the losses are not scaled.
    kept
        What the records are computed from.
    """

    gradients: list[jax.Array]
    signal: PyTree
    written: PyTree
    loss: jax.Array
    aux: PyTree
    kept: Kept


@dataclasses.dataclass(frozen=True, eq=False)
class Results:
    """Some results of a step, and what their values over time are made of.

    Attributes
    ----------
    program
        The program of the step.
    results
        A pytree of its variables and of constants.
    given
        For variables that are given over time: which of them has the value.
    computed
        Those that are computed from these.
    once
        What is the same in every step, of the results and of what they are computed from.
    literal
        What of that is made of numbers in the program alone: it is not kept, but made again.
    """

    program: Program
    results: PyTree
    given: Mapping[Var, Var]
    computed: tuple[Var, ...]
    once: tuple[Var, ...]
    literal: tuple[Var, ...]

    @property
    def sources(self) -> list[Var]:
        """The variables whose values over time are kept."""
        return list(dict.fromkeys(self.given.values()))

    def keep(self, fixed: ByVar, over_time: ByVar, steps: int) -> Kept:
        """Return what the results are made of.

        Parameters
        ----------
        fixed, over_time
            Values that are the same in every step, and those that have one for each.
        steps
            How many steps there are.
        """
        once = evaluate(self.program, self.once, fixed)
        return Kept([over_time[var] for var in self.sources], once, steps)

    def __call__(self, kept: Kept) -> PyTree:
        """Return the results, time first; of length 1 for what is the same in every step."""
        literal = evaluate(self.program, self.literal, {})
        once = {**zip_dict(self.once, kept.once), **zip_dict(self.literal, literal)}
        over_time = zip_dict(self.sources, kept.over_time)
        varying = {var: over_time[source] for var, source in self.given.items()}
        computed = mapped(self.program, self.computed, once, varying)
        varying.update(zip_dict(self.computed, computed))

        def of_atom(atom: Atom) -> jax.Array:
            is_varying = is_var(atom) and atom in varying
            return varying[atom] if is_varying else value_of(atom, once)[None]

        return jax.tree.map(of_atom, self.results)


def results_of(step: StepProgram, results: PyTree, source: Mapping[Var, Var]) -> Results:
    """Find out what some results of a step are made of.

    Parameters
    ----------
    step, results
        The step, and a pytree of its variables and of constants.
    source
        For all variables that are given over time: which of them has the value.
    """
    targets, program = vars_of(results), step.program
    behind = program.depends_on(targets, frozenset(source)) & step.varying
    given = {var: first for var, first in source.items() if var in behind}
    computed = behind - given.keys()
    operands = [equation.invars for equation in equations_of(program, computed)]
    same = [var for var in vars_of((targets, operands)) if var not in step.varying]
    of_arrays = program.dependents_of([*program.in_vars, *program.constants])
    once = tuple(var for var in same if var in of_arrays)
    literal = tuple(var for var in same if var not in of_arrays)
    in_order = tuple(var for var in targets if var in computed)
    return Results(program, results, given, in_order, once, literal)


@dataclasses.dataclass(frozen=True, eq=False)
class Recording:
    """What the steps of a chunk record.

    Attributes
    ----------
    differentiated
        For every leaf of the parameters: whether the losses depend on it outside the traces.
    written
        Variables that have a value for every step.
    source
        For variables that are given for all steps: which of them has the value.
    of_traces
        The records that the traces need.
    of_products
        See `Split`.
    """

    differentiated: tuple[bool, ...]
    written: tuple[Var, ...]
    source: Mapping[Var, Var]
    of_traces: Results
    of_products: int = 0

    @property
    def bytes_per_step(self) -> int:
        """What every step of a chunk writes."""
        written = vars_of((self.written, self.of_traces.computed))
        return self.of_products + sum(map(size_of, written))

    def chosen(self, leaves: Iterable[Leaf]) -> list[Leaf]:
        """Return, of something for every leaf of the parameters, that for the differentiated."""
        return list(itertools.compress(leaves, self.differentiated))

    def records(self, kept: Kept) -> Records:
        """Return the records of a chunk, from what `Results.keep` has returned.

        All have a full time axis but for transitions ``D`` that do not change. Chunks of one length
        are traced once.
        """
        records: Records = self._traced(kept)
        return records

    @functools.cached_property
    def _traced(self) -> Callable[[Kept], Records]:
        def run(kept: Kept) -> Records:
            records: Records = self.of_traces(kept)
            rest: Records = stretched(dataclasses.replace(records, D={}), kept.steps)
            return dataclasses.replace(rest, D=records.D)

        traced: Callable[[Kept], Records] = jax.jit(run)
        return traced


def record_all(step: StepProgram) -> Recording:
    """Decide what a loop records that runs whole steps, derivatives included: all that changes.

    The gradient of a parameter without a path to the loss outside the traces is a constant zero:
    it depends on no input of the step, not even on the scale of the loss.
    """
    gradients, *results = step.results
    source = {var: var for var in vars_of(results) if var in step.varying}
    recorded = tuple(var for var in source if var not in step.slices)
    inputs = set(step.program.in_vars)
    return Recording(
        tuple(bool(step.program.depends_on([atom]) & inputs) for atom in gradients),
        recorded,
        source,
        results_of(step, results[-1], source),
    )


def record_what_waits(step: StepProgram, split: Split) -> Recording:
    """Decide what is recorded where a loop runs only what has to wait for the step before."""
    loss, _, records = step.results
    reaching = step.program.depends_on([loss], blocked=CONSTANT)
    differentiated = tuple(var in reaching for var in step.parameters)
    written = (*split.recorded, *split.ahead)
    records = dataclasses.replace(records, x=in_parts(step.program, records.x, split.source))
    of_traces = results_of(step, records, split.source)
    return Recording(differentiated, written, split.source, of_traces, split.of_products)


def in_parts(
    program: Program, inputs: Mapping[str, Atom], source: Mapping[Var, Var]
) -> dict[str, Atom | SideBySide]:
    """Return inputs of operations, and of what is joined but not given over time, the parts."""

    def parts_of(atom: Atom) -> Atom | SideBySide:
        index = None if not is_var(atom) or atom in source else program.producer.get(atom)
        if index is None:
            return atom
        equation = program.equations[index]
        if equation.primitive.name == "stop_gradient":
            return parts_of(equation.invars[0])
        is_joined = equation.primitive.name == "concatenate"
        is_last = is_joined and equation.params["dimension"] == len(atom.aval.shape) - 1
        return SideBySide(tuple(equation.invars)) if is_last else atom

    return {key: parts_of(atom) for key, atom in inputs.items()}
