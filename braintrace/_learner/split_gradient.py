"""The value and gradient of the steps of a chunk, most of it over time at once.

A loop runs what each step needs of the step before (see `split`). Losses, their derivative and
the Jacobians are then computed from what it has recorded, mapped over time, so that products
with weights are taken over time and batch together.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._etrace_op import ETPPrimitive, get_primitive_spec
from .._jax import Atom, Var, bind, divided_dependent, is_var, open_jaxpr
from .._jaxpr import evaluate, inlined, program_of
from .pure_step import PureStep
from .split import MOST_EXTRA, Split, StepProgram, equations_of, is_product, size_of, split_step
from .step_gradient import StepResult, constant, is_half, stretched

OverTime = dict[Var, jax.Array]

EXAMPLE_STEPS = 61
"""Number of steps of the chunk on which a gradient is tried out; no other axis has that size."""


@dataclasses.dataclass(frozen=True)
class Kept:
    """What the records of a chunk are computed from, later on.

    Attributes
    ----------
    scales
        Of the steps' losses; they tell how many steps there are.
    over_time, once
        Values of every step, and those that are the same in all of them.
    """

    scales: jax.Array
    over_time: list[jax.Array]
    once: list[jax.Array]


jax.tree_util.register_dataclass(Kept)


def split_gradient(
    step: PureStep, parameters: list[Any], example: tuple[Any, ...]
) -> "SplitGradient | None":
    """Return a step of ``(probes, *inputs)`` that returns ``(loss, aux, records)``, differentiated.

    The parameters are those of `StepGradient`.

    Returns
    -------
    SplitGradient or None
        ``None`` for a step that has to be run step by step, or had better be.
    """
    arguments = (parameters, [state.value for state in step.others], *example)
    closed, shapes = jax.make_jaxpr(step, return_shape=True)(*arguments)
    tree = jax.tree.structure(arguments)

    program = program_of(inlined(closed))
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
    if split is None or _adds_up_in_half_precision(parts, in_vars[0], outputs[1][0]):
        return None
    found = SplitGradient(parts, split, example[0], in_vars, outputs[1])
    return found if _is_worth_it(found, parts, arguments, step) else None


def _adds_up_in_half_precision(parts: StepProgram, parameter_vars: Any, loss: Atom) -> bool:
    """Tell whether the gradient of a parameter is a plain sum over time in half precision.

    Products add up in single precision inside; elsewhere a sum of ones stops at 256.
    """
    program = parts.program
    half = [v for v in jax.tree.leaves(parameter_vars) if is_half(v.aval.dtype)]
    behind_loss = program.depends_on([loss], blocked=frozenset({"stop_gradient"}))
    of_half = program.dependents_of(half) - parts.varying
    met = (e for e in equations_of(program, behind_loss & parts.varying) if not is_product(e))
    return any(is_var(a) and a in of_half & behind_loss for e in met for a in e.invars)


def _is_worth_it(
    gradient: "SplitGradient", parts: StepProgram, arguments: tuple[Any, ...], step: PureStep
) -> bool:
    """Tell whether a gradient can be mapped over time, without much more memory."""
    parameters, others, _, held, slices = arguments

    def run(parameters: Any, others: Any, held: Any, chunk: Any) -> Any:
        live = zip(jax.tree.leaves(parameters), gradient.is_live, strict=True)
        start = (step.written_of(others), [leaf for leaf, counts in live if counts])
        found = gradient((parameters, others, held), start, chunk)
        return found.live, found.signal, found.written, found.loss, found.records

    def over_time(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((EXAMPLE_STEPS, *jnp.shape(leaf)), jnp.result_type(leaf))

    chunk = jax.tree.map(over_time, (slices, jnp.ones(())))
    try:
        closed = jax.make_jaxpr(run)(parameters, others, held, chunk)
    except NotImplementedError:  # an operation without a batching rule
        return False
    products = [e.outvars[0] for e in open_jaxpr(closed)[0].eqns if is_product(e)]
    extra = sum(size_of(v) for v in products if any(n % EXAMPLE_STEPS == 0 for n in v.aval.shape))
    return extra <= MOST_EXTRA * EXAMPLE_STEPS * parts.bytes_in_and_out


class SplitGradient:
    """The steps of a chunk: a loop over what has to wait, and the rest at once.

    Parameters
    ----------
    parts, split
        The program of one step, and how it is cut.
    probes
        Zeros that are added to the hidden states, to be differentiated.
    in_vars, results
        Inputs ``(parameters, others, probes, held, slices)`` and results
        ``(loss, aux, records)`` of the program, as pytrees.

    Attributes
    ----------
    is_live
        For every leaf of the parameters: whether the losses depend on it outside the traces.
    """

    def __init__(
        self, parts: StepProgram, split: Split, probes: Any, in_vars: Any, results: Any
    ) -> None:
        self._parts, self._split, self._probes = parts, split, probes
        self._in_vars = in_vars
        self._loss, self._aux, self._records = results
        reaching = parts.program.depends_on([self._loss], blocked=frozenset({"stop_gradient"}))
        leaves = jax.tree.leaves(in_vars[0])
        self.is_live = [var in reaching for var in leaves]
        self._live_vars = [var for var in leaves if var in reaching]
        self._find_sources_of_records()

    def _find_sources_of_records(self) -> None:
        """Find out what the records are computed from, and which have to be computed."""
        program, source = self._parts.program, self._split.source
        varying = self._parts.varying
        targets = list(dict.fromkeys(a for a in jax.tree.leaves(self._records) if is_var(a)))
        behind = program.depends_on(targets, frozenset(source)) & varying
        self._given = [var for var in source if var in behind]
        computed = behind - set(self._given)
        operands = [a for e in equations_of(program, computed) for a in e.invars]
        fixed = [a for a in (*targets, *operands) if is_var(a) and a not in varying]
        self._once = list(dict.fromkeys(fixed))
        self._sources = list(dict.fromkeys(source[var] for var in self._given))
        self._computed = [var for var in targets if var in computed]

    @functools.cached_property
    def recorded_bytes(self) -> int:
        """The bytes that every step of a chunk records."""
        variables = dict.fromkeys((*self._split.recorded, *self._split.ahead, *self._computed))
        return sum(map(size_of, variables))

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
        inputs = zip_dict(jax.tree.leaves(self._in_vars[:4]), leaves)
        fixed = {v: value for v, value in inputs.items() if v not in self._parts.carried}
        states, tree = jax.tree.flatten(start[0])
        states, over_time = self._loop(fixed, states, jax.tree.leaves(sequences))
        (live, signal), (losses, aux) = self._losses(fixed, over_time, scales)
        once = evaluate(self._parts.program, self._once, fixed)
        kept = Kept(scales, [over_time[var] for var in self._sources], once)
        live = jax.tree.map(jnp.add, start[1], live)
        written = jax.tree.unflatten(tree, states)
        return StepResult(live, signal, written, losses, aux, self.records(kept), kept)

    def _loop(
        self, fixed: dict[Var, Any], start: list[Any], sequences: list[Any]
    ) -> tuple[list[Any], OverTime]:
        """Run what has to wait; return the last States, and values over time."""
        parts, split = self._parts, self._split
        over_time = zip_dict(parts.slices, sequences)
        over_time.update(zip_dict(split.ahead, self._mapped(split.ahead, fixed, over_time)))
        targets = [*parts.written, *split.recorded]

        def step(carry: list[Any], now: list[Any]) -> Any:
            current = {**zip_dict(parts.carried, carry), **zip_dict(list(over_time), now)}
            found = evaluate(parts.program, targets, {**fixed, **current}, effects=True)
            found = list(map(_as_array, targets, found))
            return found[: len(carry)], found[len(carry) :]

        last, recorded = jax.lax.scan(step, start, list(over_time.values()))
        over_time.update(zip_dict(split.recorded, recorded))
        return last, over_time

    def _mapped(
        self, targets: Sequence[Atom], fixed: dict[Var, Any], over_time: OverTime
    ) -> list[Any]:
        """Return variables of every step."""
        marked = {
            index: _run_where_samples_lie
            for index, equation in enumerate(self._parts.program.equations)
            if isinstance(equation.primitive, ETPPrimitive)
        }

        def of_step(now: list[Any]) -> list[Any]:
            current = {**fixed, **zip_dict(list(over_time), now)}
            return evaluate(self._parts.program, targets, current, rules=marked)

        return jax.vmap(of_step)(list(over_time.values())) if targets else []

    def _losses(self, fixed: dict[Var, Any], over_time: OverTime, scales: jax.Array) -> Any:
        """Return the gradients of the live parameters and the probes, and losses and aux."""
        given = {var: over_time[source] for var, source in self._split.source.items()}
        probe_vars = jax.tree.leaves(self._in_vars[2])
        aux, tree = jax.tree.flatten(self._aux)
        targets = [self._loss, *aux]

        def total(live: list[Any], probes: list[Any]) -> Any:
            parameters = zip_dict(self._live_vars, live)

            def of_step(probes: list[Any], now: list[Any]) -> list[Any]:
                current = {**zip_dict(probe_vars, probes), **zip_dict(list(given), now)}
                found = evaluate(self._parts.program, targets, {**fixed, **parameters, **current})
                return list(map(_as_array, targets, found))

            losses, *rest = jax.vmap(of_step)(probes, list(given.values()))
            return jnp.sum(losses * scales), (losses, jax.tree.unflatten(tree, rest))

        zeros, probe_tree = jax.tree.flatten(self._probes)
        zeros = [jnp.zeros((len(scales), *zero.shape), zero.dtype) for zero in zeros]
        differentiate = jax.grad(total, argnums=(0, 1), has_aux=True)
        (live, signal), results = differentiate([fixed[var] for var in self._live_vars], zeros)
        return (live, jax.tree.unflatten(probe_tree, signal)), results

    def records(self, kept: Kept) -> Any:
        """Return the records of a chunk, from what a call has kept of them."""
        over_time, once = zip_dict(self._sources, kept.over_time), zip_dict(self._once, kept.once)
        given = {var: over_time[self._split.source[var]] for var in self._given}
        computed = zip_dict(self._computed, self._mapped(self._computed, once, given))
        varying = {**given, **computed}

        def of_atom(atom: Atom) -> jax.Array:
            if is_var(atom) and atom in varying:
                return varying[atom]
            return (once[atom] if is_var(atom) else constant(atom))[None]

        return stretched(jax.tree.map(of_atom, self._records), len(kept.scales))


def _as_array(atom: Atom, value: Any) -> jax.Array:
    return value if is_var(atom) else constant(atom)


def zip_dict(keys: Sequence[Any], values: Sequence[Any]) -> dict[Any, Any]:
    """Return a dict of keys and as many values."""
    return dict(zip(keys, values, strict=True))


def _run_where_samples_lie(equation: Any, values: list[Any]) -> list[Any]:
    """Run a marked operation that is mapped over time.

    As an operation it folds samples into time. Samples that lie on different devices would have to
    be brought together for that; there, time is folded into samples.
    """
    plain = functools.partial(equation.primitive.implementation, **equation.params)
    x_index = get_primitive_spec(equation.primitive).x_invar_index
    divided = jax.custom_batching.custom_vmap(plain)

    def marked(*values: Any) -> Any:
        return bind(equation, values)[0]

    @divided.def_vmap
    def over_time(steps: int, is_mapped: list[bool], *values: Any) -> tuple[Any, bool]:
        is_of_samples = equation.primitive.batched and x_index == 0
        if not is_of_samples or list(is_mapped) != [True] + [False] * (len(values) - 1):
            axes = [0 if mapped else None for mapped in is_mapped]
            return jax.vmap(plain, axes)(*values), True
        x, *weights = values
        x = jnp.swapaxes(x, 0, 1)
        y = plain(x.reshape(-1, *x.shape[2:]), *weights)
        return jnp.swapaxes(y.reshape(-1, steps, *y.shape[1:]), 0, 1), True

    return [divided_dependent(*values, divided=divided, whole=marked)]
