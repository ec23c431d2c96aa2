"""Chunk runner: the steps of a chunk, their losses with derivatives, and their residuals.

A loop contains only the operations that depend on the step before (see `split`). Losses, their
derivatives and the Jacobians are then computed from its recorded values: mapped over time, so
products with weights are taken over time and batch together, or one step after the other
(`over_time`). Where derivatives pass from step to step, a reverse pass follows (see `reverse`).
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from ..._graph import Records, Signal
from ..._jax import Var
from ..._jaxpr.dataflow import CONSTANT
from ..._typing import PyTree
from .known import evaluate_around
from .over_time import stretched, zero_sum
from .pure_step import PureStep
from .recording import ChunkResult, SourceValues
from .reverse import ReversePass, reverse_pass
from .run_loops import run_loops
from .split import Split, split_step
from .step_program import (
    ByVar,
    StepProgram,
    Values,
    traced_step,
    value_of,
    vars_of,
    zeros_of,
    zip_dict,
)

Leaf = TypeVar("Leaf")


def chunk_runner(
    step: PureStep,
    values: Values,
    slices: PyTree,
    has_mask: bool,
    length_of: Callable[[int], int],
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
    length_of
        ``bytes that a step records -> number of steps`` of a chunk. The batching rules are tested
        with this length.
    passes
        Whether derivatives pass from step to step: in windows and under full-Jacobian rules.
    """
    program = traced_step(step, values, slices)
    split, reverse = split_step(program, has_mask, passes), None
    targets = [program.results[0], *(program.written if passes else ())]
    reaching = program.program.depends_on(vars_of(targets), blocked=CONSTANT)
    differentiated = tuple(var for var in program.parameters if var in reaching)
    if passes:
        reverse = reverse_pass(program, split, differentiated, has_mask)
        split = split.record_also(reverse.read)
    runner = ChunkRunner(program, split, differentiated, reverse)
    steps = length_of(split.count_bytes())
    return runner if _has_rules(runner, step, values, slices, steps) else runner.one_by_one()


def _has_rules(
    runner: "ChunkRunner", step: PureStep, values: Values, slices: PyTree, steps: int
) -> bool:
    """Test whether all operations that a runner maps over time have a batching rule.

    The trace of this test is reused for chunks of the same length.
    """

    def over_time(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((steps, *jnp.shape(leaf)), jnp.result_type(leaf))

    parameters, others, *_ = values
    outside = runner.choose(jax.tree.leaves(parameters))
    start = step.written_of(others), jax.eval_shape(lambda: jax.tree.map(zero_sum, outside))
    chunk = jax.tree.map(over_time, (slices, 1.0))
    try:
        result = jax.eval_shape(runner, values, start, chunk)
        residuals = jax.eval_shape(lambda: runner.residuals(values, result.residuals, steps))
        jax.eval_shape(runner.records, residuals)
    except NotImplementedError:
        return False
    return True


class ChunkRunner:
    """Runs a chunk: loops, then losses with derivatives, then the reverse pass if there is one.

    Parameters
    ----------
    step, split
        The program of one step, and its split into loops.
    differentiated
        The parameters with a gradient outside the traces.
    reverse
        The reverse pass through the steps; ``None``: derivatives do not pass from step to step.

    Attributes
    ----------
    step
        The program of one step.
    differentiated
        For every leaf of the parameters: whether it has a gradient outside the traces.
    """

    def __init__(
        self,
        step: StepProgram,
        split: Split,
        differentiated: tuple[Var, ...],
        reverse: ReversePass | None,
    ) -> None:
        self.step, self._split = step, split
        self._differentiated, self._reverse = differentiated, reverse
        self.differentiated = tuple(var in differentiated for var in step.parameters)
        self._traced = jax.jit(self._run)

    def one_by_one(self) -> "ChunkRunner":
        """Return a runner that maps nothing over time."""
        reverse = None if self._reverse is None else self._reverse.one_by_one()
        split = self._split.run_one_by_one()
        return ChunkRunner(self.step, split, self._differentiated, reverse)

    def choose(self, leaves: Iterable[Leaf]) -> list[Leaf]:
        """Return the items of differentiated leaves, from one item per leaf of the parameters."""
        return list(itertools.compress(leaves, self.differentiated))

    def passing(self, leaves: list[Any]) -> list[Any]:
        """Return the leaves of written States through which derivatives pass."""
        return [] if self._reverse is None else [leaves[k] for k in self._reverse.states]

    def signal_of(self, probes: dict[str, jax.Array], derivatives: list[jax.Array]) -> Signal:
        """Return the derivatives by the probes that the losses depend on, by name."""
        by_var = zip_dict(self._split.perturbed, derivatives)
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
        return self._split.of_results.collect(self.step.fixed(values), over_time, steps)

    def records(self, residuals: SourceValues) -> Records:
        """Return the residuals of a chunk, from the result of `residuals`.

        All have a full time axis, except for constant values. Chunks of one length are traced once.
        """
        records: Records = self._traced_records(residuals)
        return records

    @functools.cached_property
    def _traced_records(self) -> Callable[[SourceValues], Records]:
        def run(residuals: SourceValues) -> Records:
            records: Records = self._split.of_results.compute(residuals)
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
        states, over_time = run_loops(self.step, self._split, fixed, states, slices)
        (gradients, signal), (losses, aux) = self._losses(fixed, over_time, scales)
        if self._reverse is not None:
            more, signal = self._reverse(fixed, over_time, signal, scales)
            gradients = jax.tree.map(jnp.add, gradients, more)
        gradients = jax.tree.map(jnp.add, start[1], gradients)
        residuals = [over_time[var] for var in self._split.of_results.sources]
        return ChunkResult(
            gradients, signal, jax.tree.unflatten(tree, states), losses, aux, residuals
        )

    def _losses(
        self, fixed: ByVar, over_time: ByVar, scales: jax.Array
    ) -> tuple[tuple[list[jax.Array], list[jax.Array]], tuple[jax.Array, PyTree]]:
        """Return the gradients of parameters and perturbations, losses and auxiliary results."""
        step, split, places = self.step, self._split, self._split.perturbed
        known = split.of_losses
        given = list(dict.fromkeys([*known.find_sources(), *filter(None, places.values())]))
        results, tree = jax.tree.flatten(step.results[:2])
        wanted = vars_of(results)

        def of_step(parameters: list[Any], terms: list[Any], now: list[Any]) -> Any:
            values, own = zip_dict(given, now), zip_dict(self._differentiated, parameters)
            at = {
                var: term if first is None else values[first] + term
                for (var, first), term in zip(places.items(), terms, strict=True)
            }
            current = {**fixed, **own, **at}
            found = zip_dict(wanted, evaluate_around(step, known, values, wanted, current))
            loss, aux = jax.tree.unflatten(tree, [value_of(atom, found) for atom in results])
            return loss, aux

        terms = zeros_of(places)
        own, now = [fixed[var] for var in self._differentiated], [over_time[var] for var in given]
        return split.differentiate(of_step, own, terms, now, scales)
