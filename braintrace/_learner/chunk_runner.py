"""The one runner of a chunk of recorded steps.

A loop contains only the operations that depend on the step before (see `split`). Losses, their
derivatives and the Jacobians are then computed from its recorded values: mapped over time, so
products with weights are taken over time and batch together, or one step after the other
(`OverTime`).
"""

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp

from .._executor import scan_over_time
from .._jax import Equation, Var, bind, runs_on_several_devices
from .._jaxpr import Rule, evaluate
from .._typing import PyTree
from .over_time import ONE_BY_ONE, run_where_samples_lie, values_over_time, zero_sum
from .pure_step import PureStep
from .recording import ChunkResult, record_what_waits
from .separate import separated
from .split import Split, split_step
from .stages import Loop
from .step_program import (
    ByVar,
    StepProgram,
    Values,
    equations_of,
    traced_step,
    value_of,
    vars_of,
    zip_dict,
)


def chunk_runner(
    step: PureStep,
    values: Values,
    slices: PyTree,
    has_mask: bool,
    length_of: Callable[[int], int],
) -> "ChunkRunner":
    """Return the chunk runner of a step.

    Parameters
    ----------
    step
        A function of ``(probes, held, slices)`` that returns ``(loss, aux, records)``.
    values, slices
        Example values.
    has_mask
        Whether to omit the backward pass of steps with scale zero.
    length_of
        ``bytes that a step records -> number of steps`` of a chunk, for which it is tested.
    """
    found = separated(traced_step(step, values, slices))
    split = split_step(found, has_mask)
    runner = ChunkRunner(found, split)
    steps = length_of(runner.recording.bytes_per_step)
    if _has_rules(runner, step, values, slices, steps):
        return runner
    return ChunkRunner(found, dataclasses.replace(split, losses=ONE_BY_ONE, results=ONE_BY_ONE))


def _has_rules(
    runner: "ChunkRunner", step: PureStep, values: Values, slices: PyTree, steps: int
) -> bool:
    """Test whether all operations that a runner maps over time have a batching rule.

    The trace of this test is reused for chunks of the same length.
    """

    def over_time(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((steps, *jnp.shape(leaf)), jnp.result_type(leaf))

    parameters, others, *_ = values
    outside = runner.recording.chosen(jax.tree.leaves(parameters))
    start = step.written_of(others), jax.eval_shape(lambda: jax.tree.map(zero_sum, outside))
    chunk = jax.tree.map(over_time, (slices, 1.0))
    try:
        result = jax.eval_shape(runner, values, start, chunk)
        jax.eval_shape(runner.recording.records, result.kept)
    except NotImplementedError:
        return False
    return True


class ChunkRunner:
    """Runs a chunk: loops over dependent operations, then losses with derivatives.

    Parameters
    ----------
    step, split
        The program of one step, and its fission into loops.

    Attributes
    ----------
    recording
        The recorded values of the steps.
    """

    def __init__(self, step: StepProgram, split: Split) -> None:
        self._step, self._split = step, split
        self.recording = record_what_waits(step, split)
        self._differentiated = self.recording.chosen(step.parameters)
        self._traced = jax.jit(self._run)

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

    def _run(
        self,
        values: Values,
        start: tuple[PyTree, list[jax.Array]],
        chunk: tuple[PyTree, jax.Array],
    ) -> ChunkResult:
        sequences, scales = chunk
        fixed = self._step.fixed(values)
        states, tree = jax.tree.flatten(start[0])
        states, over_time = self._loops(fixed, states, jax.tree.leaves(sequences))
        (gradients, signal), (losses, aux) = self._losses(fixed, over_time, scales, values[2])
        gradients = jax.tree.map(jnp.add, start[1], gradients)
        kept = self.recording.of_traces.keep(fixed, over_time, len(scales))
        return ChunkResult(gradients, signal, jax.tree.unflatten(tree, states), losses, aux, kept)

    def _loops(
        self, fixed: ByVar, start: list[Any], sequences: list[Any]
    ) -> tuple[list[Any], ByVar]:
        """Run the loops; return the last States, and values over time."""
        step, split = self._step, self._split
        over_time, states = zip_dict(step.slices, sequences), dict(enumerate(start))
        for loop in split.loops.in_order:
            ahead = values_over_time(split.results, split.values, loop.ahead, fixed, over_time)
            over_time.update(zip_dict(loop.ahead, ahead))
            last, recorded = self._loop(loop, fixed, [start[k] for k in loop.carried], over_time)
            states.update(zip_dict(loop.carried, last))
            over_time.update(recorded)
        at_last = [split.values.out_atoms[k] for k in split.loops.at_last]
        wanted = vars_of(at_last)
        read = split.values.depends_on(wanted, frozenset(over_time))
        now = {var: value[-1] for var, value in over_time.items() if var in read}
        found = zip_dict(wanted, evaluate(split.values, wanted, {**fixed, **now}))
        values = [value_of(atom, found) for atom in at_last]
        states.update(zip_dict(split.loops.at_last, values))
        return [states[k] for k in range(len(start))], over_time

    def _loop(
        self, loop: Loop, fixed: ByVar, start: list[Any], over_time: ByVar
    ) -> tuple[list[Any], ByVar]:
        """Run one loop; return the last States, and its recorded values."""
        program = self._split.values
        carried = [self._step.carried[k] for k in loop.carried]
        written = [program.out_atoms[k] for k in loop.carried]
        recorded = [var for var in self._split.recorded if var in loop.made]
        read = {var: over_time[var] for var in over_time if var in loop.read}
        wanted = vars_of((written, recorded))
        fixed = self._once(loop, fixed, wanted)

        def one_step(carry: list[Any], now: list[Any]) -> Any:
            current = {**fixed, **zip_dict(carried, carry), **zip_dict(list(read), now)}
            values = evaluate(program, wanted, current, effects=loop.has_effects)
            found = zip_dict(wanted, values)
            return [value_of(a, found) for a in written], [found[v] for v in recorded]

        steps = len(next(iter(over_time.values())))
        last, found = scan_over_time(one_step, start, list(read.values()), steps)
        return last, zip_dict(recorded, found)

    def _once(self, loop: Loop, fixed: ByVar, wanted: list[Var]) -> ByVar:
        """Return the loop-invariant values that a loop reads."""
        program, varying = self._split.values, self._step.varying
        acting = [e for e in program.equations if e.effects and loop.has_effects]
        computed = [*equations_of(program, loop.made), *acting]
        read = vars_of((wanted, [equation.invars for equation in computed]))
        once = [var for var in read if var not in varying]
        return zip_dict(once, evaluate(program, once, fixed))

    def _losses(self, fixed: ByVar, over_time: ByVar, scales: jax.Array, probes: PyTree) -> Any:
        """Return the gradients of parameters and probes, and losses and auxiliary results."""
        step = self._step
        source, same = self._split.source, self._split.same
        read = list(dict.fromkeys([*source.values(), *same.values()]))
        results, tree = jax.tree.flatten(step.results[:2])
        wanted = vars_of(results)

        def of_step(parameters: list[Any], probes: list[Any], now: list[Any]) -> Any:
            known = zip_dict(read, now)
            given = {var: known[first] for var, first in source.items()}
            own = zip_dict(self._differentiated, parameters)
            current = {**fixed, **own, **zip_dict(step.probes, probes), **given}
            rule = _with_values({var: known[first] for var, first in same.items()}, step.varying)
            found = zip_dict(wanted, evaluate(step.program, wanted, current, rules=rule))
            loss, aux = jax.tree.unflatten(tree, [value_of(atom, found) for atom in results])
            return loss, aux

        leaves, probe_tree = jax.tree.flatten(probes)
        own, now = [fixed[var] for var in self._differentiated], [over_time[var] for var in read]
        (gradients, signal), outcome = self._split.losses.gradient(
            of_step, own, leaves, now, scales
        )
        return (gradients, jax.tree.unflatten(probe_tree, signal)), outcome


def _with_values(known: ByVar, varying: Collection[Var]) -> Rule:
    """Return a rule that gives variables known values, with their ordinary derivatives.

    Products with known values are then not computed again for their derivatives. On several
    devices, products with weights are computed where their samples are.
    """
    is_divided = runs_on_several_devices()

    def rule(equation: Equation, values: list[Any]) -> list[Any] | None:
        is_mapped = any(var in varying for var in equation.outvars)
        found = run_where_samples_lie(equation, values) if is_divided and is_mapped else None
        if not any(var in known for var in equation.outvars):
            return found
        results = zip(equation.outvars, found or bind(equation, values), strict=True)
        return [_instead(value, known[var]) if var in known else value for var, value in results]

    return rule


def _known(value: jax.Array, known: jax.Array) -> jax.Array:
    return known


def _derivative_of_value(primals: Any, tangents: Any) -> Any:
    return primals[1], tangents[0]


_instead = jax.custom_jvp(_known)
"""``(value, known)``: the known value, with the derivative of the computed one."""
_instead.defjvp(_derivative_of_value)
