"""Losses of a chunk: computed and differentiated after the loops, from the values they recorded.

Their derivatives are taken with respect to parameters, and to the values of some *places* of the
step: its perturbations; or, if derivatives pass from step to step, values of the loops, through
which they are then pulled back.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from .._graph import Diagnostic
from .._jax import (
    Equation,
    Var,
    bind,
    is_var,
    runs_on_several_devices,
    source_line,
    with_derivative_of,
)
from .._jaxpr import Rule, carries_derivative, evaluate
from .._jaxpr.dataflow import CONSTANT
from .._typing import PyTree
from .derivatives import FROM_RESULT, from_result
from .over_time import MapOverTime, choose_map, map_one_by_one, scan_over_time, zero_sum
from .step_program import (
    ByVar,
    StepProgram,
    equations_of,
    find_varying,
    is_product,
    size_of,
    value_of,
    vars_of,
    zeros_of,
    zip_dict,
)

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
        is_one_by_one = self.map_over_time is map_one_by_one
        run = self._one_by_one if is_one_by_one else self._at_once
        return run(fixed, [over_time[var] for var in self.recorded], scales)

    def _of_step(
        self, fixed: ByVar, parameters: list[Any], terms: list[Any], recorded: list[Any]
    ) -> tuple[jax.Array, PyTree]:
        """Return the loss and auxiliary results of a step; terms are added to the places."""
        values = zip_dict(self.recorded, recorded)
        pairs = zip(self.places, terms, strict=True)
        places = {var: values[var] + term if var in values else term for var, term in pairs}
        known = {var: values[first] for var, first in self.constants.items()}
        own = zip_dict(self.parameters, parameters)
        results, tree = jax.tree.flatten(self.step.results[:2])
        wanted = vars_of(results)
        current = {**fixed, **known, **own, **places}
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

        parameters, zeros = [fixed[var] for var in self.parameters], zeros_of(self.places)
        terms = [jnp.zeros((len(scales), *zero.shape), zero.dtype) for zero in zeros]
        result: GradientsAndLosses = jax.grad(total, (0, 1), has_aux=True)(parameters, terms)
        return result

    def _one_by_one(
        self, fixed: ByVar, recorded: list[Any], scales: jax.Array
    ) -> GradientsAndLosses:
        """Differentiate loss after loss, none of masked steps, without storing values of losses."""
        parameters, terms = [fixed[var] for var in self.parameters], zeros_of(self.places)

        def one_step(sums: list[Any], now: Any) -> Any:
            recorded, scale = now

            def scaled(parameters: list[Any], terms: list[Any]) -> Any:
                value, aux = self._of_step(fixed, parameters, terms, recorded)
                return value * scale, (value, aux)

            def counted(*arguments: list[Any]) -> Any:
                return jax.grad(scaled, argnums=(0, 1), has_aux=True)(*arguments)

            def masked(*arguments: list[Any]) -> Any:
                return jax.tree.map(jnp.zeros_like, arguments), scaled(*arguments)[1]

            found = jax.lax.cond(scale != 0, counted, masked, parameters, terms)
            (gradients, signal), results = found
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
    reached = program.depends_on(loss, blocked=CONSTANT)
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
    return size if size > MOST_EXTRA * step.bytes_in_and_out else 0


def find_lost_gradients(step: StepProgram, places: dict[int, str]) -> list[Diagnostic]:
    """Report the States that a step fills with values of the model, and whose loss reads them.

    No trace follows such a value, so its gradient is the one of a constant.

    Parameters
    ----------
    step
        A step that is differentiated alone.
    places
        Descriptions of the States to look at, by their place among the carried ones.
    """
    program, loss = step.program, step.results[0]
    read = program.depends_on([loss], frozenset(), CONSTANT, carries_derivative)
    moving = {*step.parameters, *step.probes}

    def is_filled(place: int) -> bool:
        new = step.written[place]
        if not is_var(new):
            return False
        behind = program.depends_on([new], frozenset(), CONSTANT, carries_derivative)
        return not behind.isdisjoint(moving)

    def line_of(var: Var) -> str:
        readers = (program.equations[index] for index, _ in program.readers.get(var, ()))
        lines = (source_line(e) for e in readers if not read.isdisjoint(e.outvars))
        return next(lines, "")  # the loss may be the State itself

    return [
        Diagnostic(
            "warning",
            "untraced-state",
            f"{what} carries values that depend on weights to the loss of a later step, where "
            "they are constants. Compute the loss in a `window`, with `RTRL`, or write the State "
            "through `jax.lax.stop_gradient`; a `brainstate.HiddenState` that `update` writes has "
            "a trace.",
            (),
            line_of(step.carried[place]),
        )
        for place, what in places.items()
        if step.carried[place] in read and is_filled(place)
    ]
