"""The value and gradient of the steps of a chunk, most of it over time at once.

A loop runs what each step needs of the step before (see `split`). Losses, their derivative and
the Jacobians are then computed from what it has recorded, mapped over time, so that products
with weights are taken over time and batch together.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._jax import Atom, Var, is_var
from .._jaxpr import Program, evaluate, evaluate_inlined, program_of
from .pure_step import PureStep
from .split import Split, StepProgram, split_step
from .step_gradient import StepResult, constant, stretched

OverTime = dict[Var, jax.Array]


def split_gradient(
    step: PureStep, parameters: list[Any], example: tuple[Any, ...]
) -> "SplitGradient | None":
    """Return a step of ``(probes, *inputs)`` that returns ``(loss, aux, records)``, differentiated.

    Parameters
    ----------
    step
        The step.
    parameters
        Values of its parameters.
    example
        Example arguments: probes, what is held fixed (operands among it), slices.

    Returns
    -------
    SplitGradient or None
        ``None`` for a step that has to be run step by step.
    """
    arguments = (parameters, [state.value for state in step.others], *example)
    closed, shapes = jax.make_jaxpr(step, return_shape=True)(*arguments)
    leaves, tree = jax.tree.flatten(arguments)

    def inlined(*leaves: Any) -> list[Any]:
        return evaluate_inlined(closed, leaves, lambda *_: None)

    program = program_of(jax.make_jaxpr(inlined)(*leaves))
    in_vars = jax.tree.unflatten(tree, program.in_vars)
    outputs = jax.tree.unflatten(jax.tree.structure(shapes), program.out_atoms)
    parameter_vars, others, probes, _, slices = in_vars
    written, results = outputs
    parts = StepProgram(
        program=program,
        carried=tuple(jax.tree.leaves(step.written_of(others))),
        slices=tuple(jax.tree.leaves(slices)),
        differentiable=frozenset(jax.tree.leaves((parameter_vars, probes))),
        written=tuple(jax.tree.leaves(written)),
        results=tuple(jax.tree.leaves(results)),
    )
    split = split_step(parts)
    return None if split is None else SplitGradient(parts, split, example[0], in_vars, outputs)


class SplitGradient:
    """The steps of a chunk: a loop over what has to wait, and the rest at once.

    Parameters
    ----------
    parts, split
        The program of one step, and how it is cut.
    probes
        Zeros that are added to the hidden states, to be differentiated.
    in_vars, outputs
        Inputs ``(parameters, others, probes, held, slices)`` and outputs
        ``(written, (loss, aux, records))`` of the program, as pytrees.
    """

    def __init__(
        self, parts: StepProgram, split: Split, probes: Any, in_vars: Any, outputs: Any
    ) -> None:
        self._parts, self._split, self._probes = parts, split, probes
        program = parts.program
        self._in_vars = in_vars
        self._written, (self._loss, self._aux, self._records) = outputs
        reaching = program.depends_on([self._loss], blocked=frozenset({"stop_gradient"}))
        self._parameters = jax.tree.leaves(in_vars[0])
        self.is_live = [var in reaching for var in self._parameters]
        self._select_kept(program)

    def _select_kept(self, program: Program) -> None:
        """Find out what the records are computed from."""
        varying = program.dependents_of([*self._parts.carried, *self._parts.slices])
        targets = [atom for atom in jax.tree.leaves(self._records) if is_var(atom)]
        self._fixed = [atom for atom in targets if atom not in varying]
        behind = program.depends_on(targets, frozenset(self._split.source)) & varying
        self._known = [var for var in self._split.source if var in behind]
        computed = behind - set(self._known)
        made = {program.producer[var] for var in computed if var in program.producer}
        operands = (atom for index in sorted(made) for atom in program.equations[index].invars)
        fixed = (a for a in operands if is_var(a) and a not in varying)
        self._once = list(dict.fromkeys((*self._fixed, *fixed)))
        sources = (self._split.source[var] for var in self._known)
        # The first sequence tells how many steps there are.
        self._kept = list(dict.fromkeys((self._parts.slices[0], *sources)))
        self._computed = [a for a in dict.fromkeys(targets) if a in computed]

    @functools.cached_property
    def recorded_bytes(self) -> int:
        """The bytes that every step of a chunk records."""
        atoms = {*self._split.recorded, *self._split.ahead, *self._computed}
        return sum(var.aval.size * var.aval.dtype.itemsize for var in atoms)

    def __call__(
        self,
        values: tuple[list[Any], list[Any], Any],
        start: tuple[list[Any], list[jax.Array]],
        chunk: tuple[Any, jax.Array],
    ) -> StepResult:
        """Run a chunk; see `StepGradient`."""
        parameters, others, held = values
        sequences, scales = chunk
        leaves = jax.tree.leaves((parameters, others, self._probes, held))
        known = zip_dict(jax.tree.leaves(self._in_vars[:4]), leaves)
        states, tree = jax.tree.flatten(start[0])
        states, over_time = self._loop(known, states, jax.tree.leaves(sequences))
        found, (losses, aux) = self._losses(known, over_time, scales)
        live, signal = found
        kept = (
            [over_time[var] for var in self._kept],
            evaluate(self._parts.program, self._once, known),
        )
        live = jax.tree.map(jnp.add, start[1], live)
        written = jax.tree.unflatten(tree, states)
        return StepResult(live, signal, written, losses, aux, self.records(kept), kept)

    def _loop(
        self, known: dict[Var, Any], start: list[Any], sequences: list[Any]
    ) -> tuple[list[Any], OverTime]:
        """Run what has to wait; return the last States, and values over time."""
        parts, split = self._parts, self._split
        over_time = zip_dict(parts.slices, sequences)
        ahead = self._mapped(list(split.ahead), known, over_time)
        over_time.update(zip_dict(split.ahead, ahead))
        targets = [*parts.written, *split.recorded]

        def step(carry: list[Any], now: list[Any]) -> Any:
            current = {**zip_dict(parts.carried, carry), **zip_dict(list(over_time), now)}
            found = evaluate(parts.program, targets, {**known, **current})
            written = [jnp.asarray(value) for value in found[: len(carry)]]
            return written, found[len(carry) :]

        last, recorded = jax.lax.scan(step, start, list(over_time.values()))
        over_time.update(zip_dict(split.recorded, recorded))
        return last, over_time

    def _mapped(self, targets: list[Atom], known: dict[Var, Any], over_time: OverTime) -> list[Any]:
        """Return variables of every step."""

        def of_step(now: list[Any]) -> list[Any]:
            current = {**known, **zip_dict(list(over_time), now)}
            return evaluate(self._parts.program, targets, current)

        return jax.vmap(of_step)(list(over_time.values())) if targets else []

    def _losses(self, known: dict[Var, Any], over_time: OverTime, scales: jax.Array) -> Any:
        """Return the gradients of the live parameters and the probes, and losses and aux."""
        program = self._parts.program
        live_vars = [v for v, live in zip(self._parameters, self.is_live, strict=True) if live]
        probe_vars = jax.tree.leaves(self._in_vars[2])
        current = {var: over_time[source] for var, source in self._split.source.items()}
        aux, tree = jax.tree.flatten(self._aux)

        def total(live: list[Any], probes: list[Any]) -> Any:
            fixed = {**known, **zip_dict(live_vars, live)}

            def of_step(probes: list[Any], now: list[Any]) -> list[Any]:
                moving = {**zip_dict(probe_vars, probes), **zip_dict(list(current), now)}
                found = evaluate(program, [self._loss, *aux], {**fixed, **moving})
                return [jnp.asarray(value) for value in found]

            losses, *rest = jax.vmap(of_step)(probes, list(current.values()))
            return jnp.sum(losses * scales), (losses, jax.tree.unflatten(tree, rest))

        zeros, probe_tree = jax.tree.flatten(self._probes)
        steps = len(scales)
        zeros = [jnp.zeros((steps, *zero.shape), zero.dtype) for zero in zeros]
        differentiate = jax.grad(total, argnums=(0, 1), has_aux=True)
        (live, signal), results = differentiate([known[var] for var in live_vars], zeros)
        return (live, jax.tree.unflatten(probe_tree, signal)), results

    def records(self, kept: Any) -> Any:
        """Return the records of a chunk, from what a call has kept of them."""
        over_time, once = zip_dict(self._kept, kept[0]), zip_dict(self._once, kept[1])
        current = {var: over_time[self._split.source[var]] for var in self._known}
        computed = self._mapped(self._computed, once, current)
        current.update(zip_dict(self._computed, computed))

        def of_atom(atom: Atom) -> jax.Array:
            if is_var(atom) and atom in current:
                return current[atom]
            return (once[atom] if is_var(atom) else constant(atom))[None]

        records = jax.tree.map(of_atom, self._records)
        return stretched(records, len(kept[0][0]))


def zip_dict(keys: Sequence[Any], values: Sequence[Any]) -> dict[Any, Any]:
    """Return a dict of keys and as many values."""
    return dict(zip(keys, values, strict=True))
