"""Chunk runner without loop fission: whole steps, each with its derivative."""

from typing import Any

import jax
import jax.numpy as jnp

from .._executor import scan_over_time
from .._jax import Var
from .._jaxpr import Program, evaluate
from .._typing import PyTree
from .over_time import stretched
from .pure_step import PureStep
from .recording import ChunkResult, record_all, results_of
from .step_program import (
    ByVar,
    Values,
    differentiated_step,
    equations_of,
    value_of,
    vars_of,
    zip_dict,
)


class StepByStep:
    """A loop that runs whole steps, including derivatives.

    Parameters
    ----------
    step
        A function of ``(probes, held, slices)`` that returns ``(loss, aux, records)``.
    values, slices
        Example values.
    has_mask
        Whether to omit the backward pass of steps with scale zero.

    Attributes
    ----------
    recording
        The recorded values of the steps.
    """

    def __init__(self, step: PureStep, values: Values, slices: PyTree, has_mask: bool) -> None:
        self._step = found = differentiated_step(step, values, slices)
        self.recording = recording = record_all(found)
        gradients, *outcome, _ = found.results
        self._outcome = results_of(found, outcome, recording.source)
        self._gradients = recording.chosen(gradients)
        self._scale = found.slices[-1]
        of_loss = found.program.dependents_of([self._scale]) if has_mask else set()
        wanted = vars_of((found.written, self._gradients, recording.written))
        self._backward = [var for var in wanted if var in of_loss]
        self._forward = [var for var in wanted if var not in of_loss]
        self._forward += _read_by(found.program, self._backward, of_loss)

    def __call__(
        self,
        values: Values,
        start: tuple[PyTree, list[jax.Array]],
        chunk: tuple[PyTree, jax.Array],
    ) -> ChunkResult:
        """Run a chunk.

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
        step, recorded = self._step, self.recording.written
        fixed = step.fixed(values)
        states, tree = jax.tree.flatten(start[0])

        def one_step(carry: Any, now: Any) -> Any:
            states, sums = carry
            varying = {**zip_dict(step.carried, states), **zip_dict(step.slices, now)}
            found = self._values({**fixed, **varying})
            states = [value_of(atom, found) for atom in step.written]
            sums = [total + found[g] for total, g in zip(sums, self._gradients, strict=True)]
            return (states, sums), [found[var] for var in recorded]

        slices = jax.tree.leaves(chunk)
        (states, gradients), found = scan_over_time(one_step, (states, start[1]), slices)
        over_time = {**zip_dict(step.slices, slices), **zip_dict(recorded, found)}
        steps = len(chunk[1])
        outcome = self._outcome(self._outcome.keep(fixed, over_time, steps))
        signal, loss, aux = stretched(outcome, steps)
        kept = self.recording.of_traces.keep(fixed, over_time, steps)
        return ChunkResult(gradients, signal, jax.tree.unflatten(tree, states), loss, aux, kept)

    def _values(self, known: ByVar) -> ByVar:
        """Return the values of one step, with zeros for derivatives of a masked loss."""
        program = self._step.program
        forward = zip_dict(self._forward, evaluate(program, self._forward, known, effects=True))
        if not self._backward:
            return forward

        def backward() -> list[Any]:
            return evaluate(program, self._backward, {**known, **forward})

        def nothing() -> list[Any]:
            return [jnp.zeros(var.aval.shape, var.aval.dtype) for var in self._backward]

        values = jax.lax.cond(known[self._scale] != 0, backward, nothing)
        return {**forward, **zip_dict(self._backward, values)}


def _read_by(program: Program, targets: list[Var], inside: set[Var]) -> list[Var]:
    """Return the variables outside a set that the equations inside it read for some targets."""
    behind = program.depends_on(targets) & inside
    operands = [equation.invars for equation in equations_of(program, behind)]
    return [var for var in vars_of(operands) if var not in inside]
