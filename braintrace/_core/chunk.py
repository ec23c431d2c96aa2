r"""The steps of a chunk, their losses with derivatives, and their residuals.

Loops contain only the operations that depend on the step before (see `loops`). Losses and residuals
are then computed from recorded values, for all steps at once or one step after the other. Losses
are differentiated with respect to parameters, and to some *places* of the step: its perturbations;
or, if derivatives pass from step to step, values of the loops, through which they are then pulled
back. A residual is one of the following:

* loop-invariant: it is computed once, and its time axis has length 1;
* a slice of the sequences, or the result of a hoisted product;
* recorded by a loop; equal variables are recorded once;
* computed after the loops, for all steps, from the other values.
"""

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from .._graph.method import Records, Signal
from .._jax import Equation, Var, bind
from .._jax_kernels import runs_on_several_devices, with_derivative_of
from .._jaxpr.derivatives import FROM_RESULT, from_result
from .._jaxpr.equal import equal_values, merged
from .._jaxpr.program import Rule, evaluate
from .._typing import PyTree
from .loops import Loops, find_loops
from .masks import map_one_by_one
from .step_program import (
    ByVar,
    MapOverTime,
    PureStep,
    Results,
    SourceValues,
    StepProgram,
    Values,
    choose_map,
    equations_of,
    find_sources,
    find_varying,
    is_product,
    is_step_by_step,
    scan_over_time,
    size_of,
    traced_step,
    value_of,
    vars_of,
    zero_sum,
    zeros_of,
    zeros_over_time,
    zip_dict,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ChunkResult:
    """Results of the differentiated steps of a chunk.

    Attributes
    ----------
    gradients
        Gradients of the parameters' leaves that have one outside the traces, summed over time.
    signal
        Derivatives of the scaled losses, time first: with respect to the perturbations; or with
        respect to the States before the steps, if derivatives pass from step to step.
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


MOST_EXTRA = 4
"""Maximum size of a step's products, relative to its inputs and outputs, that are stored for all
steps of a chunk at once: for the logits of a large vocabulary, a loop is better."""

GradientsAndLosses: TypeAlias = tuple[tuple[list[Any], list[Any]], tuple[jax.Array, PyTree]]
"""Gradients of parameters (sums) and of places (over time); losses and auxiliary results."""


@dataclasses.dataclass(frozen=True, eq=False)
class Losses:
    """The losses of a step.

    Attributes
    ----------
    step
        The step.
    parameters, places
        Variables to which they are differentiated.
    constants
        Known variables without a derivative, each with the variable that has its value.
    computed
        Variables with a derivative that the loops have computed anyway, each with the variable that
        has its value: a product is not computed twice.
    recorded
        The variables whose values over time are read.
    map_over_time
        How they are computed for all steps.
    product_bytes
        Bytes of operands and results of products for the losses and residuals of a step; 0 if they
        are too small to limit the chunk length.
    """

    step: StepProgram
    parameters: tuple[Var, ...]
    places: tuple[Var, ...]
    constants: Mapping[Var, Var]
    computed: Mapping[Var, Var]
    recorded: tuple[Var, ...]
    map_over_time: MapOverTime
    product_bytes: int

    def differentiate(
        self, fixed: ByVar, over_time: ByVar, scales: jax.Array
    ) -> GradientsAndLosses:
        """Return losses with their derivatives; the derivatives are scaled.

        Parameters
        ----------
        fixed, over_time
            Values that are equal in all steps, and values per step.
        scales
            Factors of the losses.
        """
        run = self._one_by_one if self.map_over_time is map_one_by_one else self._at_once
        return run(fixed, [over_time[var] for var in self.recorded], scales)

    def _of_step(
        self, fixed: ByVar, parameters: list[Any], terms: list[Any], recorded: list[Any]
    ) -> tuple[jax.Array, PyTree]:
        """Return the loss and auxiliary results of a step; terms are added to the places."""
        values = zip_dict(self.recorded, recorded)
        pairs = zip(self.places, terms, strict=True)
        places = {var: values[var] + term if var in values else term for var, term in pairs}
        known = {var: values[first] for var, first in self.constants.items()}
        results, tree = jax.tree.flatten(self.step.results[:2])
        wanted = vars_of(results)
        current = {**fixed, **known, **zip_dict(self.parameters, parameters), **places}
        rule = _with_results({var: values[first] for var, first in self.computed.items()})
        found = zip_dict(wanted, evaluate(self.step.program, wanted, current, rules=rule))
        loss, aux = jax.tree.unflatten(tree, [value_of(atom, found) for atom in results])
        return loss, aux

    def _at_once(self, fixed: ByVar, recorded: list[Any], scales: jax.Array) -> GradientsAndLosses:
        """Differentiate the sum of all losses."""

        def total(parameters: list[Any], terms: list[Any]) -> Any:
            def of_step(now: Any) -> Any:
                return self._of_step(fixed, parameters, *now[:2])

            losses, aux = self.map_over_time(of_step, (terms, recorded, scales))
            return jnp.sum(losses * scales), (losses, aux)

        parameters = [fixed[var] for var in self.parameters]
        terms = zeros_over_time(self.places, len(scales))
        return jax.grad(total, (0, 1), has_aux=True)(parameters, terms)

    def _one_by_one(
        self, fixed: ByVar, recorded: list[Any], scales: jax.Array
    ) -> GradientsAndLosses:
        """Differentiate loss after loss, without storing values of losses."""
        parameters, terms = [fixed[var] for var in self.parameters], zeros_of(self.places)

        def one_step(sums: list[Any], now: Any) -> Any:
            recorded, scale = now

            def scaled(parameters: list[Any], terms: list[Any]) -> Any:
                value, aux = self._of_step(fixed, parameters, terms, recorded)
                return value * scale, (value, aux)

            found, results = jax.grad(scaled, argnums=(0, 1), has_aux=True)(parameters, terms)
            # Selected, not multiplied by zero: a masked step may be NaN.
            kept = jax.tree.map(lambda value: jnp.where(scale != 0, value, 0), found)
            gradients, signal = kept
            return jax.tree.map(jnp.add, sums, gradients), (signal, results)

        sums = jax.tree.map(zero_sum, parameters)
        sums, (signal, results) = scan_over_time(one_step, sums, (recorded, scales))
        return (sums, signal), results


def _with_results(known: ByVar) -> Rule:
    """Return a rule that gives equations their known results; derivatives are the usual ones."""

    def rule(equation: Equation, operands: list[Any]) -> list[Any] | None:
        if known.keys().isdisjoint(equation.outvars):
            return None
        if equation.primitive.name in FROM_RESULT:
            return [from_result(equation, operands[0], known[equation.outvars[0]])]
        pairs = zip(equation.outvars, bind(equation, operands), strict=True)
        return [with_derivative_of(known[v], y) if v in known else y for v, y in pairs]

    return rule


def find_losses(
    step: StepProgram,
    known: Mapping[Var, Var],
    read: Collection[Var],
    live: set[Var],
    parameters: tuple[Var, ...],
    places: Sequence[Var],
    has_mask: bool,
) -> Losses:
    """Find out how the losses of a step depend on known values.

    Parameters
    ----------
    step
        The step.
    known
        For each variable whose value over time is known: the variable that has it.
    read
        The variables whose values the loops read.
    live
        Variables with a derivative.
    parameters, places
        Variables to which the losses are differentiated; those that they do not read are left out
        of the places.
    has_mask
        Whether some steps may be masked: the scale of their loss is zero.
    """
    program, loss = step.program, vars_of(step.results[:1])
    constant = {var: first for var, first in known.items() if var not in live}
    cuts = [var for var in places if var in live]
    behind = find_varying(step, program, vars_of(step.results[:2]), {*constant, *cuts})
    reached = program.ancestors(loss)
    constants = {var: first for var, first in constant.items() if var in behind}
    # An auxiliary result may read a known value that the loss does not read.
    own_places = tuple(var for var in cuts if var in (behind if var in known else reached))
    evaluated = behind - constants.keys() - {*own_places}
    again = evaluated & live
    computed = {var: first for var, first in known.items() if var in again and first in read}
    recorded = [*constants.values(), *computed.values(), *(v for v in own_places if v in known)]

    map_over_time = choose_map(step, loss, evaluated, live, has_mask)
    records = find_varying(step, program, vars_of(step.results[2]), known) - known.keys()
    extra = _bytes_of_products(step, behind - constants.keys() | records, behind | records)
    # In a loop over steps, devices would sum the gradients of all weights at each step.
    if extra > 0 and not runs_on_several_devices():
        map_over_time = map_one_by_one
    return Losses(
        step,
        parameters,
        own_places,
        constants,
        computed,
        tuple(dict.fromkeys(recorded)),
        map_over_time,
        product_bytes=0 if map_over_time is map_one_by_one else extra,
    )


def _bytes_of_products(step: StepProgram, computed: set[Var], ancestors: set[Var]) -> int:
    """Return the bytes of computed products and of their operands among ancestors; 0 if few."""
    products = [e for e in equations_of(step.program, computed) if is_product(e)]
    met = [v for e in products for v in vars_of((e.invars, e.outvars)) if v in ancestors]
    size = sum(map(size_of, met))
    in_and_out = sum(map(size_of, (*step.slices, *vars_of(step.results))))
    return size if size > MOST_EXTRA * in_and_out else 0


PARTS = frozenset({"slice", "split"})
"""Operations whose results are not recorded beside their operand."""


def chunk_runner(
    step: PureStep,
    values: Values,
    slices: PyTree,
    has_mask: bool,
    window: int | None,
    recomputes: bool,
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
    window
        Number of steps between which derivatives pass; ``0``: all steps of a chunk, ``None``: none.
    recomputes
        Whether residuals are computed again from States, slices and products, which takes the least
        memory if steps are then pulled back one by one.
    """
    traced, passes = traced_step(step, values, slices), window is not None
    program = traced.program
    equal = equal_values(program, traced.probes)
    inputs = (*traced.parameters, *traced.probes, *(traced.carried if passes else ()))
    live = program.descendants(inputs)
    # Equal values may have different derivatives.
    in_loops = program if passes else merged(program, equal)
    constant = {first for var, first in equal.items() if var not in live} & traced.varying
    step_by_step = {
        index
        for index, e in enumerate(in_loops.equations)
        if e.effects or (not constant.isdisjoint(e.outvars) and is_step_by_step(e))
    }
    if recomputes:
        # A loop that records nothing becomes one kernel, which takes three times as long if it
        # reads several parts of a product of all steps (GRU of 128 units, two cores).
        needed = find_varying(traced, in_loops, in_loops.out_atoms[: len(traced.carried)])
        step_by_step.update(i for i in in_loops.making(needed) if is_product(in_loops.equations[i]))
    loops = find_loops(traced, in_loops, step_by_step, live, passes, bool(window), has_mask)

    parts = {v for e in program.equations if e.primitive.name in PARTS for v in e.outvars}
    made = loops.made.keys() - parts
    known = {var: first for var, first in equal.items() if first in made}
    targets = [traced.results[0], *(traced.written if passes else ())]
    reaching = program.ancestors(vars_of(targets))
    parameters = tuple(var for var in traced.parameters if var in reaching)
    places = tuple(var for var in loops.made if var in known) if passes else traced.probes
    read = {*traced.slices}.union(*(loop.read for loop in loops.loops))
    losses = find_losses(traced, known, read, live, parameters, places, has_mask)
    if recomputes:
        kept = [e for e in program.equations if is_product(e) or is_step_by_step(e)]
        stored = {*program.in_vars}.union(*(e.outvars for e in kept))
        known = {var: first for var, first in known.items() if first in stored}
    residuals = find_sources(traced, traced.results[2], known)
    loops = loops.record({*losses.recorded, *residuals.sources})
    return ChunkRunner(traced, loops, losses, residuals, window)


@dataclasses.dataclass(frozen=True, eq=False)
class ChunkRunner:
    """Runs a chunk: loops, then losses with derivatives, which may be pulled back through loops.

    Attributes
    ----------
    step
        The program of one step.
    loops, losses, sources
        Its parts: loops, losses, and the sources of the residuals.
    window
        Number of steps between which derivatives pass; ``0``: all steps of a chunk, ``None``: none.
    """

    step: StepProgram
    loops: Loops
    losses: Losses
    sources: Results
    window: int | None

    @functools.cached_property
    def differentiated(self) -> tuple[bool, ...]:
        """For every leaf of the parameters: whether it has a gradient outside the traces."""
        return tuple(var in self.losses.parameters for var in self.step.parameters)

    def count_bytes(self) -> int:
        """Return the bytes that every step of a chunk writes."""
        written = self.loops.recorded & self.loops.made.keys() - {*self.step.slices}
        return self.losses.product_bytes + sum(map(size_of, written.union(self.sources.computed)))

    def signal_of(self, probes: dict[str, jax.Array], derivatives: list[jax.Array]) -> Signal:
        """Return the derivatives by the probes that the losses depend on, by name."""
        by_var = zip_dict(self.losses.places, derivatives)
        # JAX flattens a dict in the order of its keys.
        pairs = zip(sorted(probes), self.step.probes, strict=True)
        return {name: by_var[var] for name, var in pairs if var in by_var}

    def residuals(self, values: Values, over_time: list[jax.Array], steps: int) -> SourceValues:
        """Return a result's residuals together with the loop-invariant values."""
        program, once = self.step.program, self.sources.once
        return SourceValues(over_time, evaluate(program, once, self.step.fixed(values)), steps)

    # Chunks of one length are traced once.
    run = functools.cached_property[Any](lambda self: jax.jit(self._run))
    records = functools.cached_property[Any](lambda self: jax.jit(self._records))

    def _records(self, residuals: SourceValues) -> Records:
        """Return the residuals of a chunk with a full time axis, except for constant values."""
        records: Records = self.sources.compute(residuals)
        rest = dataclasses.replace(records, values={}, steps=residuals.steps)
        full: Records = jax.tree.map(
            lambda leaf: jnp.broadcast_to(leaf, (residuals.steps, *leaf.shape[1:])), rest
        )
        return dataclasses.replace(full, values=records.values)

    def _run(
        self, values: Values, start: tuple[PyTree, list[jax.Array]], chunk: tuple[PyTree, jax.Array]
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
        sequences, scales = chunk
        fixed = self.step.fixed(values)
        states, tree = jax.tree.flatten(start[0])
        slices = zip_dict(self.step.slices, jax.tree.leaves(sequences))
        loops, losses, sums = self.loops, self.losses, start[1]
        if self.window is not None:
            steps = len(scales)
            own, places = losses.parameters, losses.places
            (states, over_time), pull_back = loops.run_with_derivative(
                fixed, states, slices, own, places, steps, self.window or steps
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
            [over_time[var] for var in self.sources.sources],
        )
