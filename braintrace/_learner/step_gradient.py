"""The value and gradient of one step, run over a chunk of steps.

What a step yields is recorded only where it has to be: a gradient that is constant zero is left
out, a value that is the same in every step is computed once, one that is a slice of the
sequences is not copied, and values that are the same variable are recorded once.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from .._graph import Records
from .._jax import Atom, Var, is_var
from .._jaxpr import Program, evaluate, program_of
from .pure_step import PureStep


@dataclasses.dataclass(frozen=True)
class StepResult:
    """What the differentiated steps of a chunk yield.

    Attributes
    ----------
    live
        Gradient leaves of the parameters that the steps' losses depend on outside the traces,
        summed over time.
    signal
        Derivative of the scaled losses with respect to the probes, time first.
    written
        New values of the States that the steps write.
    loss, aux, records
        What the function returned, time first; the losses are not scaled. The time axis of
        a transition ``D`` that is the same in every step has length 1.
    kept
        What the records can be computed from later on.
    """

    live: list[jax.Array]
    signal: Any
    written: list[Any]
    loss: jax.Array
    aux: Any
    records: Any
    kept: Any


class StepGradient:
    """A step of ``(probes, *inputs)`` that returns ``(loss, aux, records)``, differentiated.

    Parameters
    ----------
    step
        The step.
    parameters
        Values of its parameters.
    example
        Example arguments: probes, what is held fixed (operands among it), slices.
    has_mask
        Whether to look for steps of scale zero, and to leave out their backward pass.
    """

    def __init__(
        self,
        step: PureStep,
        parameters: list[Any],
        example: tuple[Any, ...],
        has_mask: bool,
    ) -> None:
        self._step = step
        self._has_mask = has_mask
        self._probes, held, slices = example

        def scaled_loss(
            parameters: Any, probes: Any, others: Any, held: Any, slices: Any, scale: Any
        ) -> tuple[Any, Any]:
            written, (loss, aux, records) = step(parameters, others, probes, held, slices)
            return loss * scale, (written, loss, aux, records)

        differentiate = jax.value_and_grad(scaled_loss, argnums=(0, 1), has_aux=True)

        def differentiated(*arguments: Any) -> Any:
            (_, (written, loss, aux, records)), (gradients, signal) = differentiate(*arguments)
            return gradients, written, (signal, loss, aux, records)

        others = [state.value for state in step.others]
        arguments = (parameters, self._probes, others, held, slices, jnp.ones(()))
        closed, shapes = jax.make_jaxpr(differentiated, return_shape=True)(*arguments)
        self._program = program_of(closed)
        self._in_vars = jax.tree.unflatten(jax.tree.structure(arguments), self._program.in_vars)
        atoms = [_behind_stop_gradient(self._program, a) for a in self._program.out_atoms]
        gradients, self._written, self._results = jax.tree.unflatten(
            jax.tree.structure(shapes), atoms
        )
        self._select(jax.tree.leaves(gradients))

    def _select(self, gradients: list[Atom]) -> None:
        """Find out which gradients are live, and which results have to be recorded."""
        program = self._program
        *_, others, _, slices, scale = self._in_vars
        # The gradient of a parameter without a path to the loss outside the traces is a
        # constant zero: it depends on no input of the step, not even on the loss's scale.
        inputs = set(program.in_vars)
        self.is_live = [bool(program.depends_on([atom]) & inputs) for atom in gradients]
        self._live = [a for a, is_live in zip(gradients, self.is_live, strict=True) if is_live]
        self._slices = jax.tree.leaves(slices)
        self._carried = jax.tree.leaves(self._step.written_of(others))
        varying = {*self._carried, *self._slices, scale}
        results = dict.fromkeys(atom for atom in jax.tree.leaves(self._results) if is_var(atom))
        self._fixed = [a for a in results if not program.depends_on([a]) & varying]
        self._recorded = [a for a in results if a not in self._fixed and a not in self._slices]
        of_loss = program.dependents_of([scale])
        self._backward = [a for a in (*self._live, *self._recorded) if a in of_loss]
        self._read_by_backward = _read_by(program, self._backward, of_loss)

    @functools.cached_property
    def recorded_bytes(self) -> int:
        """The bytes that every step of a chunk records."""
        return sum(var.aval.size * var.aval.dtype.itemsize for var in self._recorded)

    def __call__(
        self,
        values: tuple[list[Any], list[Any], Any],
        start: tuple[list[Any], list[jax.Array]],
        chunk: tuple[Any, jax.Array],
    ) -> StepResult:
        """Run a chunk.

        Parameters
        ----------
        values
            Of the parameters, of the other States, and of what is held fixed.
        start
            Values of the States that the steps write, and the sum of live gradients so far.
        chunk
            Slices of the sequences, and the scale of every step's loss.
        """
        parameters, others, held = values
        leaves = jax.tree.leaves((parameters, self._probes, others, held))
        known = dict(zip(jax.tree.leaves(self._in_vars[:4]), leaves, strict=True))
        differentiate = self._where_it_counts if self._has_mask else self._everywhere

        def step(carry: Any, inputs: Any) -> Any:
            written, live = carry
            varying = zip(
                (*self._carried, *self._slices, self._in_vars[5]),
                jax.tree.leaves((written, inputs)),
                strict=True,
            )
            written, found, recorded = differentiate({**known, **dict(varying)})
            return (written, jax.tree.map(jnp.add, live, found)), recorded

        (written, live), recorded = jax.lax.scan(step, start, chunk)
        sequences = zip(self._slices, jax.tree.leaves(chunk[0]), strict=True)
        varying = {**dict(sequences), **dict(zip(self._recorded, recorded, strict=True))}
        signal, loss, aux, records = self._over_time(known, varying, len(chunk[1]))
        if self._has_mask:
            records = dataclasses.replace(records, has_mask=True)
        return StepResult(live, signal, written, loss, aux, records, records)

    def records(self, kept: Any) -> Any:
        """Return the records of a chunk, from what a call has kept of them: all."""
        return kept

    def _everywhere(self, known: dict[Var, Any]) -> Any:
        """Return new values of States, live gradients, and what is recorded, of one step."""
        found = self._evaluated(known, [*self._live, *self._recorded])
        return self._sorted(found)

    def _where_it_counts(self, known: dict[Var, Any]) -> Any:
        """Return the same, with zeros for what comes from a loss that does not count."""
        forward = [a for a in (*self._live, *self._recorded) if a not in self._backward]
        found = self._evaluated(known, [*forward, *self._read_by_backward])

        def backward() -> list[Any]:
            return evaluate(self._program, self._backward, {**known, **found})

        def nothing() -> list[Any]:
            return [jnp.zeros(var.aval.shape, var.aval.dtype) for var in self._backward]

        values = jax.lax.cond(known[self._in_vars[5]] != 0, backward, nothing)
        return self._sorted({**found, **dict(zip(self._backward, values, strict=True))})

    def _evaluated(self, known: dict[Var, Any], targets: list[Var]) -> dict[Var, Any]:
        """Return the values of some variables and of the written States' new values."""
        wanted = [*targets, *(a for a in jax.tree.leaves(self._written) if is_var(a))]
        values = evaluate(self._program, wanted, known, effects=True)
        return dict(zip(wanted, values, strict=True))

    def _sorted(self, found: dict[Var, Any]) -> Any:
        written = jax.tree.map(lambda a: found[a] if is_var(a) else constant(a), self._written)
        return written, [found[a] for a in self._live], [found[a] for a in self._recorded]

    def _over_time(self, known: dict[Var, Any], varying: dict[Var, Any], steps: int) -> Any:
        """Return ``(signal, loss, aux, records)`` with a time axis in front."""
        once = dict(zip(self._fixed, evaluate(self._program, self._fixed, known), strict=True))

        def result(atom: Atom) -> jax.Array:
            if is_var(atom) and atom in varying:
                return varying[atom]
            return (once[atom] if is_var(atom) else constant(atom))[None]

        signal, loss, aux, records = jax.tree.map(result, self._results)
        return *over_time((signal, loss, aux), steps), stretched(records, steps)


def over_time(tree: Any, steps: int) -> Any:
    """Give arrays with a time axis of length 1 a full one."""

    def of_leaf(leaf: jax.Array) -> jax.Array:
        return jnp.broadcast_to(leaf, (steps, *leaf.shape[1:]))

    return jax.tree.map(of_leaf, tree)


def stretched(records: Records, steps: int) -> Records:
    """Give records a full time axis, but for transitions ``D`` that do not change."""
    rest: Records = over_time(dataclasses.replace(records, D={}), steps)
    return dataclasses.replace(rest, D=records.D)


def zero_sum(value: jax.Array) -> jax.Array:
    """Return a zero to which any number of arrays like ``value`` are added.

    It is in single precision at least: in bfloat16 a sum of ones stops at 256.
    """
    return jnp.zeros(value.shape, jnp.float32 if is_half(value.dtype) else value.dtype)


def is_half(dtype: Any) -> bool:
    """Tell whether a dtype is a floating-point one of less than single precision."""
    return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4


def constant(literal: Atom) -> jax.Array:
    """Return the value of a literal."""
    return jnp.asarray(literal.val, literal.aval.dtype)


def _behind_stop_gradient(program: Program, atom: Atom) -> Atom:
    """Return the variable whose value an output has: derivatives have been taken already."""
    while is_var(atom) and atom in program.producer:
        equation = program.equations[program.producer[atom]]
        if equation.primitive.name != "stop_gradient":
            break
        (atom,) = equation.invars
    return atom


def _read_by(program: Program, targets: list[Var], inside: set[Var]) -> list[Var]:
    """Return the variables outside a set that the equations inside it read for some targets."""
    behind = program.depends_on(targets) & inside
    indices = sorted({program.producer[var] for var in behind if var in program.producer})
    operands = (atom for index in indices for atom in program.equations[index].invars)
    return list(dict.fromkeys(a for a in operands if is_var(a) and a not in inside))
