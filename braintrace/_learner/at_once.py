"""The steps of a chunk, most of it over time at once.

A loop runs what each step needs of the step before (see `split`). Losses, their derivative and
the Jacobians are then computed from what it has recorded, mapped over time, so that products
with weights are taken over time and batch together.
"""

from typing import Any

import jax
import jax.numpy as jnp

from .._jax import open_jaxpr
from .._jaxpr import evaluate
from .._typing import PyTree
from .over_time import mapped
from .pure_step import PureStep
from .recording import ChunkResult, record_what_waits
from .split import MOST_EXTRA, Split, split_step
from .step_program import (
    ByVar,
    StepProgram,
    Values,
    is_product,
    size_of,
    traced_step,
    value_of,
    vars_of,
    zip_dict,
)

EXAMPLE_STEPS = 61
"""Number of steps of the chunk on which a gradient is tried out; no other axis has that size."""


def at_once(step: PureStep, values: Values, slices: PyTree) -> "AtOnce | None":
    """Return how the steps of a chunk are run with most of it over time at once.

    The parameters are those of `StepByStep`.

    Returns
    -------
    AtOnce or None
        ``None`` for a step that has to be run step by step, or had better be.
    """
    found = traced_step(step, values, slices)
    split = split_step(found)
    if split is None:
        return None
    gradient = AtOnce(found, split)
    return gradient if _is_worth_it(gradient, found, values, (step, slices)) else None


def _is_worth_it(
    gradient: "AtOnce", found: StepProgram, values: Values, example: tuple[PureStep, PyTree]
) -> bool:
    """Tell whether a gradient can be mapped over time, without much more memory."""
    step, slices = example

    def run(parameters: PyTree, others: PyTree, probes: PyTree, held: PyTree, chunk: Any) -> Any:
        gradients = gradient.recording.chosen(jax.tree.leaves(parameters))
        start = (step.written_of(others), gradients)
        result = gradient((parameters, others, probes, held), start, chunk)
        return result, gradient.recording.records(result.kept)

    def over_time(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((EXAMPLE_STEPS, *jnp.shape(leaf)), jnp.result_type(leaf))

    chunk = jax.tree.map(over_time, (slices, jnp.ones(())))
    try:
        closed = jax.make_jaxpr(run)(*values, chunk)
    except NotImplementedError:  # an operation without a batching rule
        return False
    products = [e.outvars[0] for e in open_jaxpr(closed)[0].eqns if is_product(e)]
    extra = sum(size_of(v) for v in products if any(n % EXAMPLE_STEPS == 0 for n in v.aval.shape))
    return extra <= MOST_EXTRA * EXAMPLE_STEPS * found.bytes_in_and_out


class AtOnce:
    """A loop over what has to wait for the step before, and the rest for all steps at once.

    Parameters
    ----------
    step, split
        The program of one step, and how it is cut.

    Attributes
    ----------
    recording
        What the steps record.
    """

    def __init__(self, step: StepProgram, split: Split) -> None:
        self._step, self._split = step, split
        self.recording = record_what_waits(step, split)
        self._differentiated = self.recording.chosen(step.parameters)

    def __call__(
        self,
        values: Values,
        start: tuple[PyTree, list[jax.Array]],
        chunk: tuple[PyTree, jax.Array],
    ) -> ChunkResult:
        """Run a chunk; see `StepByStep`."""
        sequences, scales = chunk
        fixed = self._step.fixed(values)
        states, tree = jax.tree.flatten(start[0])
        states, over_time = self._loop(fixed, states, jax.tree.leaves(sequences))
        (gradients, signal), (losses, aux) = self._losses(fixed, over_time, scales, values[2])
        gradients = jax.tree.map(jnp.add, start[1], gradients)
        kept = self.recording.of_traces.keep(fixed, over_time, len(scales))
        return ChunkResult(gradients, signal, jax.tree.unflatten(tree, states), losses, aux, kept)

    def _loop(
        self, fixed: ByVar, start: list[Any], sequences: list[Any]
    ) -> tuple[list[Any], ByVar]:
        """Run what has to wait; return the last States, and values over time."""
        step, split = self._step, self._split
        over_time = zip_dict(step.slices, sequences)
        ahead = mapped(step.program, split.ahead, fixed, over_time)
        over_time.update(zip_dict(split.ahead, ahead))
        wanted = vars_of((step.written, split.recorded))

        def one_step(carry: list[Any], now: list[Any]) -> Any:
            current = {**fixed, **zip_dict(step.carried, carry), **zip_dict(list(over_time), now)}
            found = zip_dict(wanted, evaluate(step.program, wanted, current, effects=True))
            return [value_of(a, found) for a in step.written], [found[v] for v in split.recorded]

        last, recorded = jax.lax.scan(one_step, start, list(over_time.values()))
        over_time.update(zip_dict(split.recorded, recorded))
        return last, over_time

    def _losses(self, fixed: ByVar, over_time: ByVar, scales: jax.Array, probes: PyTree) -> Any:
        """Return the gradients of parameters and probes, and losses and auxiliary results."""
        step = self._step
        given = {var: over_time[source] for var, source in self._split.source.items()}
        results, tree = jax.tree.flatten(step.results[:2])
        wanted = vars_of(results)

        def total(parameters: list[Any], probes: list[Any]) -> Any:
            own = {**fixed, **zip_dict(self._differentiated, parameters)}

            def of_step(probes: list[Any], now: list[Any]) -> list[Any]:
                current = {**own, **zip_dict(step.probes, probes), **zip_dict(list(given), now)}
                found = zip_dict(wanted, evaluate(step.program, wanted, current))
                return [value_of(atom, found) for atom in results]

            found = jax.vmap(of_step)(probes, list(given.values()))
            losses, aux = jax.tree.unflatten(tree, found)
            return jnp.sum(losses * scales), (losses, aux)

        zeros, probe_tree = jax.tree.flatten(probes)
        zeros = [jnp.zeros((len(scales), *zero.shape), zero.dtype) for zero in zeros]
        differentiate = jax.grad(total, argnums=(0, 1), has_aux=True)
        own = [fixed[var] for var in self._differentiated]
        (gradients, signal), outcome = differentiate(own, zeros)
        return (gradients, jax.tree.unflatten(probe_tree, signal)), outcome
