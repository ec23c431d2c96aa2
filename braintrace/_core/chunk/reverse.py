r"""Reverse pass through the steps of a chunk, for windows and full-Jacobian rules.

Let :math:`h` be the States after a step, and :math:`y` the results of the operations that combine
parameters with values of the step. The derivatives of the scaled losses of one step with respect to
:math:`h`, :math:`y` and the old States, each with the others held constant, are :math:`l_h`,
:math:`l_y` and :math:`l_o`. Then

.. math::

    \lambda^{t-1} = l_o^t + (\partial h^t / \partial h^{t-1})^\top (\lambda^t + l_h^t)
    + (\partial y^t / \partial h^{t-1})^\top l_y^t, \qquad
    \nabla w = \sum_t (\partial y^t / \partial w)^\top \bar y^t,

where :math:`\bar y` is the total derivative with respect to :math:`y`, and other operands of
:math:`y` than :math:`w` are constant. All derivatives of a step (`Transition`) are computed around
the values that the loops have recorded. The recursion (`ReversePass`) is a step program like the
model's step, with :math:`\lambda` as its State, and is split in the same way: products that do not
depend on :math:`\lambda` are hoisted, and gradients of weights are taken over time and batch
together.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..._jax import Atom, Equation, Var, is_var, struct_of
from ..._jaxpr import carries_derivative, inlined, program_of
from ..._jaxpr.dataflow import CONSTANT
from .known import Known, evaluate_around
from .over_time import Differentiate, choose_differentiate, stretched
from .run_loops import run_loops
from .split import Split, split_step
from .step_program import ByVar, StepProgram, find_varying, value_of, vars_of, zeros_of, zip_dict


@dataclasses.dataclass(frozen=True, eq=False)
class Transition:
    """A step as a function of the States before it, around its known values.

    Attributes
    ----------
    step, known
        The step, and its known variables.
    old, new
        States before and after the step through which derivatives pass.
    combining
        The equations that combine parameters with values of a step.
    combined
        Their results with a derivative: :math:`y`.
    invariant
        Indices in `new` of the States that depend on parameters only.
    has_mask
        Whether some steps may be masked; their values may be NaN.
    """

    step: StepProgram
    known: Known
    old: tuple[Var, ...]
    new: tuple[Atom, ...]
    combining: tuple[Equation, ...]
    combined: tuple[Var, ...]
    invariant: tuple[int, ...]
    has_mask: bool

    def _first(self, var: Var) -> Var:
        known = self.known
        return known.constant[var] if var in known.constant else known.differentiated[var]

    def pull_back(
        self, fixed: ByVar, now: ByVar, targets: Sequence[Atom], derivatives: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Pull derivatives of some variables back to the old States and to `combined`.

        Parameters
        ----------
        fixed, now
            Values that are equal in all steps, and the known values of this step.
        targets, derivatives
            The variables, and their derivatives.
        """

        def values(old: list[Any], terms: list[Any]) -> list[Any]:
            current, added = {**fixed, **zip_dict(self.old, old)}, zip_dict(self.combined, terms)
            wanted = vars_of(targets)
            result = evaluate_around(self.step, self.known, now, wanted, current, added)
            return [value_of(atom, zip_dict(wanted, result)) for atom in targets]

        terms = zeros_of(self.combined)
        _, pull = jax.vjp(values, [now[self._first(var)] for var in self.old], terms)
        before, of_combined = pull(derivatives)
        return before, of_combined

    def product(self, fixed: ByVar, now: ByVar, of_combined: list[Any]) -> jax.Array:
        """Return the inner product of derivatives with values, as a function of the parameters.

        Its gradient with respect to the parameters is the gradient of a step. ``of_combined`` are
        the derivatives of `combined`, then of the new States in `invariant`. Other operands of
        `combining` are constant, since the derivatives with respect to their results contain all
        paths through them.
        """
        varying = self.step.varying
        operands = [v for v in vars_of([e.invars for e in self.combining]) if v in varying]
        old = {var: now[self._first(var)] for var in self.old}
        values = evaluate_around(self.step, self.known, now, operands, {**fixed, **old})
        constants = zip_dict(operands, jax.lax.stop_gradient(values))
        nothing, total = Known({}, {}), jnp.zeros(())
        targets = (*self.combined, *(self.new[k] for k in self.invariant))
        for var, derivative in zip(targets, of_combined, strict=True):
            others = {other: value for other, value in constants.items() if other is not var}
            (value,) = evaluate_around(self.step, nothing, {}, [var], {**fixed, **others})
            total = total + jnp.real(jnp.sum(derivative * value))
        return total

    def known_values(self, read: Sequence[Var], values: Sequence[Any], counts: jax.Array) -> ByVar:
        """Return values of all known variables: zero for variables that are not read.

        Parameters
        ----------
        read, values
            Variables that the pass reads, and their values.
        counts
            Whether the step has a derivative.
        """
        if self.has_mask:
            values = [_finite_if_masked(counts, value) for value in values]
        zeros = zip_dict(self.known.find_sources(), zeros_of(self.known.find_sources()))
        return {**zeros, **zip_dict(read, values)}


def _finite_if_masked(counts: jax.Array, value: Any) -> Any:
    is_number = jnp.issubdtype(value.dtype, jnp.inexact)
    return jnp.where(counts | jnp.isfinite(value), value, 0) if is_number else value


@dataclasses.dataclass(frozen=True, eq=False)
class ReversePass:
    """The reverse pass of a chunk.

    Attributes
    ----------
    states
        Indices of the carried States through which derivatives pass.
    parameters
        Parameters with a gradient.
    transition
        The step that is differentiated.
    fixed, read
        Variables of that step that the pass reads: its loop-invariant inputs, and known variables.
    step, split
        One step of the pass, and its split. Its results are whether the gradient of a step is
        needed, and the derivatives that `Transition.product` takes.
    """

    states: tuple[int, ...]
    parameters: tuple[Var, ...]
    transition: Transition
    fixed: tuple[Var, ...]
    read: tuple[Var, ...]
    step: StepProgram
    split: Split

    def __call__(
        self, fixed: ByVar, over_time: ByVar, of_losses: list[jax.Array], scales: jax.Array
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Return gradients of the parameters, and derivatives of the States before the first step.

        Parameters
        ----------
        fixed, over_time
            Values that are equal in all steps, and values per step.
        of_losses
            Derivatives of the scaled losses where they are perturbed, time first.
        scales
            Factors of the losses.
        """
        known, counts = [over_time[var] for var in self.read], scales != 0
        own = zip_dict(self.step.inputs, [fixed[var] for var in self.fixed])
        start = list[Any](zeros_of(self.step.carried))
        slices = zip_dict(self.step.slices, [*known, *of_losses, counts])
        before, result = run_loops(self.step, self.split, own, start, slices, reverse=True)
        found = self.split.of_results
        sources = found.collect(own, [result[var] for var in found.sources], len(scales))
        is_needed, of_combined = stretched(found.compute(sources), len(scales))

        def value(parameters: list[Any], _: list[Any], now: Any) -> Any:
            known, counts, of_combined = now
            current = {**fixed, **zip_dict(self.parameters, parameters)}
            values = self.transition.known_values(self.read, known, counts)
            return self.transition.product(current, values, of_combined), ()

        parameters, now = [fixed[var] for var in self.parameters], (known, counts, of_combined)
        scales = is_needed.astype(jnp.float32)
        (gradients, _), _ = self.split.differentiate(value, parameters, [], now, scales)
        return gradients, before

    def one_by_one(self) -> "ReversePass":
        """Return a pass that maps nothing over time."""
        return dataclasses.replace(self, split=self.split.run_one_by_one())


def reverse_pass(
    step: StepProgram, split: Split, parameters: Sequence[Var], has_mask: bool
) -> ReversePass:
    """Return the reverse pass of a chunk.

    Parameters
    ----------
    step, split
        The step, and its split.
    parameters
        Parameters with a gradient.
    has_mask
        Whether some steps are masked.
    """
    transition = _transition(step, split, parameters, has_mask)
    fixed = tuple(v for v in step.program.in_vars if v not in {*step.carried, *step.slices})
    read, own = _step_program(transition, fixed, tuple(split.perturbed), parameters)
    own_split = split_step(own, has_mask=False)
    differentiate = _choose_differentiate(transition, split)
    return ReversePass(
        states=tuple(map(step.carried.index, transition.old)),
        parameters=tuple(parameters),
        transition=transition,
        fixed=fixed,
        read=read,
        step=own,
        split=dataclasses.replace(own_split, differentiate=differentiate),
    )


def _step_program(
    transition: Transition,
    fixed: Sequence[Var],
    perturbed: Sequence[Var],
    parameters: Sequence[Var],
) -> tuple[tuple[Var, ...], StepProgram]:
    """Return the known variables that one step of the pass reads, and its program.

    Its slices are the values of these variables, the derivatives of the losses, and whether the
    step counts. The gradients are computed by the traced function only to find what they read.
    """
    run = _one_step(transition, fixed, perturbed, parameters)
    known, flag = transition.known.find_sources(), jax.ShapeDtypeStruct((), bool)
    of_step = (fixed, transition.old, known, perturbed)
    arguments = [*([struct_of(var.aval) for var in of] for of in of_step), flag]
    closed, shapes = jax.make_jaxpr(run, return_shape=True)(*arguments)
    program = program_of(inlined(closed))
    inputs = jax.tree.unflatten(jax.tree.structure(arguments), program.in_vars)
    of_fixed, carried, of_known, of_losses, counts = inputs
    written, results, gradients = jax.tree.unflatten(jax.tree.structure(shapes), program.out_atoms)
    needed = program.depends_on(vars_of((written, results, gradients)))
    read = {var: own for var, own in zip(known, of_known, strict=True) if own in needed}
    program = dataclasses.replace(program, out_atoms=tuple(jax.tree.leaves((written, results))))
    own = StepProgram(
        program,
        parameters=(),
        probes=(),
        inputs=tuple(of_fixed),
        carried=tuple(carried),
        slices=(*read.values(), *of_losses, counts),
        written=tuple(written),
        results=([], [], results),
    )
    return tuple(read), own


def _transition(
    step: StepProgram, split: Split, parameters: Sequence[Var], has_mask: bool
) -> Transition:
    """Return a step as a function of the States before it."""
    known, passing, program = split.known, split.differentiable, step.program
    states = [k for k, var in enumerate(step.carried) if var in passing and var in known]
    entering = program.dependents_of(parameters, None, CONSTANT, carries_derivative) - step.varying
    readers = sorted({index for var in entering for index, _ in program.readers.get(var, ())})
    new, places = [step.written[k] for k in states], split.perturbed.keys()
    needed = program.depends_on([*new, *places]) & step.varying
    combining = [e for e in map(program.equations.__getitem__, readers) if needed & {*e.outvars}]
    return Transition(
        step,
        Known(
            {var: first for var, first in known.items() if var not in passing},
            {var: first for var, first in known.items() if var in passing},
        ),
        old=tuple(step.carried[k] for k in states),
        new=tuple(new),
        combining=tuple(combining),
        combined=tuple(v for e in combining for v in e.outvars if v in passing and v in needed),
        invariant=tuple(k for k, atom in enumerate(new) if is_var(atom) and atom in entering),
        has_mask=has_mask,
    )


def _choose_differentiate(transition: Transition, split: Split) -> Differentiate:
    """Return how the gradients of parameters are computed for all steps."""
    operands = [equation.invars for equation in transition.combining]
    constant = transition.known.constant.keys()
    computed = find_varying(
        transition.step, transition.step.program, vars_of(operands), constant
    ) - constant | {*transition.combined}
    return choose_differentiate(
        transition.step,
        transition.combined,
        split.differentiable,
        computed,
        transition.has_mask,
    )


def _one_step(
    transition: Transition,
    fixed: Sequence[Var],
    perturbed: Sequence[Var],
    parameters: Sequence[Var],
) -> Callable[..., Any]:
    """Return one step of the pass.

    Returns
    -------
    run
        ``(loop-invariant values, derivatives of the States after a step, known values,
        derivatives of the losses, whether the step counts) -> (derivatives of the States before
        it, results, gradients)``, as flat lists.
    """
    within = [var for var in perturbed if var not in transition.old]
    targets = (*transition.new, *within)

    def run(
        of_fixed: list[Any],
        arriving: list[Any],
        known: list[Any],
        losses: list[Any],
        counts: jax.Array,
    ) -> Any:
        values, of_losses = zip_dict(fixed, of_fixed), zip_dict(perturbed, losses)
        now = transition.known_values(transition.known.find_sources(), known, counts)
        derivatives = [*arriving, *(of_losses[var] for var in within)]
        before, of_combined = transition.pull_back(values, now, targets, derivatives)
        of_combined = [*of_combined, *(arriving[k] for k in transition.invariant)]
        before = [d + of_losses.get(var, 0) for var, d in zip(transition.old, before, strict=True)]
        if transition.has_mask:
            counts |= jnp.stack([jnp.any(d != 0) for d in [*arriving, *losses]]).any()
            result = before, of_combined
            before, of_combined = jax.tree.map(lambda d: jnp.where(counts, d, 0), result)

        def of_parameters(own: list[Any]) -> jax.Array:
            return transition.product({**values, **zip_dict(parameters, own)}, now, of_combined)

        gradients = jax.grad(of_parameters)([values[var] for var in parameters])
        return before, (counts, of_combined), gradients

    return run
