"""Chunk runner: the steps of a chunk, their losses with derivatives, and their residuals.

Loops contain only the operations that depend on the step before (see `loops`). Losses, their
derivatives and the residuals are then computed from recorded values: mapped over time, so products
with weights are taken over time and batch together, or one step after the other (see `over_time`).
Where derivatives pass from step to step, those of the losses are pulled back through the loops.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from .._graph import Records, Signal
from .._jaxpr import carries_derivative, equal_values, merged
from .._jaxpr.dataflow import CONSTANT
from .._typing import PyTree
from .loops import Loops, find_loops
from .losses import Losses, find_losses
from .over_time import is_step_by_step, stretched
from .pure_step import PureStep
from .recording import ChunkResult, Results, SourceValues, find_sources
from .step_program import StepProgram, Values, size_of, traced_step, vars_of, zip_dict

PARTS = frozenset({"slice", "split"})
"""Operations whose results are not recorded beside their operand."""

Leaf = TypeVar("Leaf")


def chunk_runner(
    step: PureStep,
    values: Values,
    slices: PyTree,
    has_mask: bool,
    passes: bool,
) -> "ChunkRunner":
    """Return the chunk runner of a step.

    Parameters
    ----------
    step
        A function of ``(probes, constants, slices)`` that returns ``(loss, aux, records)``.
    values, slices
        Example values.
    has_mask
        Whether some steps may be masked: the scale of their loss is zero.
    passes
        Whether derivatives pass from step to step: in windows and under full-Jacobian rules.
    """
    traced = traced_step(step, values, slices)
    program = traced.program
    equal = equal_values(program, traced.probes)
    inputs = (*traced.parameters, *traced.probes, *(traced.carried if passes else ()))
    live = program.dependents_of(inputs, None, CONSTANT, carries_derivative)
    # Equal values may have different derivatives.
    in_loops = program if passes else merged(program, equal)
    constant = {first for var, first in equal.items() if var not in live} & traced.varying
    step_by_step = {
        index
        for index, e in enumerate(in_loops.equations)
        if e.effects or (not constant.isdisjoint(e.outvars) and is_step_by_step(e))
    }
    loops = find_loops(traced, in_loops, step_by_step, live, passes, has_mask)

    parts = {v for e in program.equations if e.primitive.name in PARTS for v in e.outvars}
    known = {var: first for var, first in equal.items() if first in loops.made.keys() - parts}
    targets = [traced.results[0], *(traced.written if passes else ())]
    reaching = program.depends_on(vars_of(targets), blocked=CONSTANT)
    parameters = tuple(var for var in traced.parameters if var in reaching)
    places = tuple(var for var in loops.made if var in known) if passes else traced.probes
    read = {*traced.slices}.union(*(loop.read for loop in loops.loops))
    losses = find_losses(traced, known, read, live, parameters, places, has_mask)
    residuals = find_sources(traced, traced.results[2], known)
    loops = loops.record({*losses.recorded, *residuals.sources})
    return ChunkRunner(traced, loops, losses, residuals, passes)


class ChunkRunner:
    """Runs a chunk: loops, then losses with derivatives, which may be pulled back through loops.

    Parameters
    ----------
    step
        The program of one step.
    loops, losses, residuals
        Its parts.
    passes
        Whether derivatives pass from step to step.

    Attributes
    ----------
    step
        The program of one step.
    differentiated
        For every leaf of the parameters: whether it has a gradient outside the traces.
    """

    def __init__(
        self, step: StepProgram, loops: Loops, losses: Losses, residuals: Results, passes: bool
    ) -> None:
        self.step, self._loops, self._losses = step, loops, losses
        self._residuals, self._passes = residuals, passes
        self.differentiated = tuple(var in losses.parameters for var in step.parameters)
        self._traced = jax.jit(self._run)

    def count_bytes(self) -> int:
        """Return the bytes that every step of a chunk writes."""
        written = self._loops.recorded & self._loops.made.keys() - {*self.step.slices}
        computed = written.union(self._residuals.computed)
        return self._losses.product_bytes + sum(map(size_of, computed))

    def choose(self, leaves: Iterable[Leaf]) -> list[Leaf]:
        """Return the items of differentiated leaves, from one item per leaf of the parameters."""
        return list(itertools.compress(leaves, self.differentiated))

    def passing(self, leaves: list[Any]) -> list[Any]:
        """Return the leaves of written States through which derivatives pass."""
        return self._loops.passing(leaves) if self._passes else []

    def signal_of(self, probes: dict[str, jax.Array], derivatives: list[jax.Array]) -> Signal:
        """Return the derivatives by the probes that the losses depend on, by name."""
        by_var = zip_dict(self._losses.places, derivatives)
        names, _ = jax.tree.flatten({name: name for name in probes})
        pairs = zip(names, self.step.probes, strict=True)
        return {name: by_var[var] for name, var in pairs if var in by_var}

    def __call__(
        self,
        values: Values,
        start: tuple[PyTree, list[jax.Array]],
        chunk: tuple[PyTree, jax.Array],
    ) -> ChunkResult:
        """Run a chunk. Chunks of one length are traced once.

        Parameters
        ----------
        values
            Values of the parameters, of the other States, of the perturbations, and of fixed
            values.
        start
            Values of the States that the steps write, and the sums of gradients so far.
        chunk
            Slices of the sequences, and the scale of every step's loss.
        """
        result: ChunkResult = self._traced(values, start, chunk)
        return result

    def residuals(self, values: Values, over_time: list[jax.Array], steps: int) -> SourceValues:
        """Return the residuals, with loop-invariant values, from those of a `ChunkResult`."""
        return self._residuals.collect(self.step.fixed(values), over_time, steps)

    def records(self, residuals: SourceValues) -> Records:
        """Return the residuals of a chunk, from the result of `residuals`.

        All have a full time axis, except for constant values. Chunks of one length are traced once.
        """
        records: Records = self._traced_records(residuals)
        return records

    @functools.cached_property
    def _traced_records(self) -> Callable[[SourceValues], Records]:
        def run(residuals: SourceValues) -> Records:
            records: Records = self._residuals.compute(residuals)
            rest = dataclasses.replace(records, values={}, steps=residuals.steps)
            full: Records = stretched(rest, residuals.steps)
            return dataclasses.replace(full, values=records.values)

        traced: Callable[[SourceValues], Records] = jax.jit(run)
        return traced

    def _run(
        self,
        values: Values,
        start: tuple[PyTree, list[jax.Array]],
        chunk: tuple[PyTree, jax.Array],
    ) -> ChunkResult:
        sequences, scales = chunk
        fixed = self.step.fixed(values)
        states, tree = jax.tree.flatten(start[0])
        slices = zip_dict(self.step.slices, jax.tree.leaves(sequences))
        loops, losses, sums = self._loops, self._losses, start[1]
        if self._passes:
            (states, over_time), pull_back = loops.run_with_derivative(
                fixed, states, slices, losses.parameters, losses.places, len(scales)
            )
            (gradients, of_places), results = losses.differentiate(fixed, over_time, scales)
            of_loops, signal = pull_back(of_places)
            sums = jax.tree.map(jnp.add, sums, of_loops)
        else:
            states, over_time = loops.run(fixed, states, slices)
            (gradients, signal), results = losses.differentiate(fixed, over_time, scales)
        return ChunkResult(
            jax.tree.map(jnp.add, sums, gradients),
            signal,
            jax.tree.unflatten(tree, states),
            *results,
            [over_time[var] for var in self._residuals.sources],
        )
