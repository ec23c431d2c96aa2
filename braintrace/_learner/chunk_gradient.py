"""The gradient of one chunk of a sequence: by records and traces, or through a window.

Both kinds have the same functions: ``start`` (a gradient of zero), ``run`` (add one chunk's
gradient, and keep what its update of the traces needs), ``known_traces`` (those after the chunk
where `run` has computed them anyway), ``traces_after`` (that update) and ``total`` (the gradient
by parameter).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import brainstate
import jax
import jax.numpy as jnp

from .._algorithms import ETraceAlgorithm
from .._executor import chunk_gradient, zero_probes
from .._graph import Weights
from .._runtime import add_to_states
from .padding import leaving_gradients_alone
from .pure_step import PureStep
from .split_gradient import SplitGradient, split_gradient
from .step_gradient import StepGradient, zero_sum

Held = tuple[Weights, Any]
"""Operands of the relations, and the values that States start anew from."""

Chunk = tuple[Any, jax.Array]
"""Slices of the sequences, and the scale of every step's loss."""


class RecordedChunk:
    """Every step's derivative goes to the traces; see `braintrace._executor.param_dim`.

    Parameters
    ----------
    algorithm
        The algorithm.
    function
        ``(probes, held, slices) -> (loss, aux, records)``.
    parameters
        The model's parameters.
    held, slices
        Example slices, and what is held fixed: the operands, and initial values of States.
    has_mask
        Whether steps whose loss does not count are to have no backward pass.
    """

    def __init__(
        self,
        algorithm: ETraceAlgorithm,
        function: Callable[..., Any],
        parameters: list[brainstate.State],
        held: Held,
        slices: Any,
        has_mask: bool,
    ) -> None:
        self._graph, self._method = algorithm.graph, algorithm.method
        # This object outlives the jit in which it may be made.
        with jax.ensure_compile_time_eval():
            probes = zero_probes(self._graph)
        example = (probes, held, slices)
        self.step = PureStep(function, parameters, example)
        arguments = (self.step, [p.value for p in parameters], example)
        split = None if has_mask else split_gradient(*arguments)
        self._differentiated: SplitGradient | StepGradient = split or StepGradient(
            *arguments, has_mask
        )

    @property
    def bytes_per_step(self) -> int:
        """What one step of a chunk records."""
        return self._differentiated.recorded_bytes

    def start(self, parameters: list[Any], weights: Weights) -> Any:
        """Return zero gradients: outside the traces, and of the operands."""
        is_live = self._differentiated.is_live
        leaves = zip(jax.tree.leaves(parameters), is_live, strict=True)
        live = [zero_sum(leaf) for leaf, counts in leaves if counts]
        return live, jax.tree.map(zero_sum, weights)

    def run(
        self,
        parameters: list[Any],
        others: list[Any],
        held: Held,
        carry: Any,
        chunk: Chunk,
    ) -> Any:
        """Run one chunk from ``(written States, gradients, traces)``.

        Returns
        -------
        carry
            ``(written States, gradients, what `traces_after` needs)``; the last is a pair of the
            traces after the chunk and of what their records are computed from, one of them None.
        results
            The loss and the auxiliary results of every step.
        """
        written, (live, gradients), traces = carry
        weights, _ = held
        values = (parameters, others, held)
        result = self._differentiated(values, (written, live), chunk)
        solved, after = chunk_gradient(
            self._graph, self._method, weights, result.records, result.signal, traces
        )
        gradients = jax.tree.map(jnp.add, gradients, solved)
        kept = (after, result.kept if after is None else None)
        return (result.written, (result.live, gradients), kept), (result.loss, result.aux)

    def total(self, gradients: Any, to_parameters: Callable[[Weights], Any]) -> list[Any]:
        """Return the gradient of every parameter."""
        live, of_operands = gradients
        leaves, tree = jax.tree.flatten(to_parameters(of_operands))
        rest = iter(live)
        total = [
            (leaf + next(rest)).astype(leaf.dtype) if counts else leaf
            for leaf, counts in zip(leaves, self._differentiated.is_live, strict=True)
        ]
        return jax.tree.unflatten(tree, total)

    def known_traces(self, kept: Any) -> Any:
        """Return the traces after a chunk where `run` has computed them anyway, else None."""
        return kept[0]

    def traces_after(self, weights: Weights, kept: Any, before: Any) -> Any:
        """Return the traces after a chunk, from what `run` has kept and those before it."""
        after, sources = kept
        if after is not None:
            return after
        records = self._differentiated.records(sources)
        return self._method.update(self._graph, weights, records, before)


class WindowChunk:
    """A chunk's derivative goes through all its steps, then to the traces before it.

    Parameters
    ----------
    algorithm, function, parameters, held, slices, has_mask
        As for `RecordedChunk`; the probes of ``function`` are ``None``.
    """

    def __init__(
        self,
        algorithm: ETraceAlgorithm,
        function: Callable[..., Any],
        parameters: list[brainstate.State],
        held: Held,
        slices: Any,
        has_mask: bool,
    ) -> None:
        self._graph, self._method = algorithm.graph, algorithm.method
        self._has_mask = has_mask
        self.step = PureStep(function, parameters, (None, held, slices))
        paths = {id(state): path for path, state in algorithm.states_of_step.items()}
        self._paths = [paths.get(id(state)) for state in self.step.others]

    @property
    def bytes_per_step(self) -> int:
        """What one step of a window records for the traces."""
        return self._graph.record_bytes

    def start(self, parameters: list[Any], weights: Weights) -> Any:
        """Return zero gradients: through the window, and of the operands."""
        return jax.tree.map(zero_sum, (parameters, weights))

    def run(
        self,
        parameters: list[Any],
        others: list[Any],
        held: Held,
        carry: Any,
        chunk: Chunk,
    ) -> Any:
        """Run one window; see `RecordedChunk.run`."""
        weights, _ = held
        written, (inside, before), traces = carry
        current = self.step.merge(others, written)

        def window(parameters: list[Any], probes: Any) -> Any:
            entered = add_to_states(self._graph, self._paths, current, probes)

            def step(parameters: list[Any], written: Any, inputs: Any) -> Any:
                others, held, slices = inputs
                values = self.step.merge(others, written)
                return self.step(parameters, values, None, held, slices)

            def scaled(written: Any, now: Any) -> Any:
                slices, scale = now
                arguments = parameters, written, (others, held, slices)
                if self._has_mask:
                    run = leaving_gradients_alone(step)
                    written, results = run(scale != 0, *arguments)
                else:
                    written, results = step(*arguments)
                return written, (results[0] * scale, *results)

            written, results = jax.lax.scan(scaled, self.step.written_of(entered), chunk)
            return jnp.sum(results[0]), (written, results[1:])

        probes = {s.name: jnp.zeros(s.shape, s.dtype) for s in self._graph.traced_states}
        differentiate = jax.value_and_grad(window, argnums=(0, 1), has_aux=True)
        (_, (written, (losses, aux, records))), (found, signal) = differentiate(parameters, probes)
        inside = jax.tree.map(jnp.add, inside, found)
        if self._has_mask:
            records = dataclasses.replace(records, has_mask=True)
        past = self._method.entry_gradient(self._graph, weights, signal, traces, records)
        before = jax.tree.map(jnp.add, before, past)
        return (written, (inside, before), records), (losses, aux)

    def total(self, gradients: Any, to_parameters: Callable[[Weights], Any]) -> list[Any]:
        """Return the gradient of every parameter."""
        inside, before = gradients
        past = to_parameters(before)
        return jax.tree.map(lambda a, b: (a + b).astype(b.dtype), inside, past)

    def known_traces(self, kept: Any) -> None:
        """Return None: the gradient of a window computes no traces."""

    def traces_after(self, weights: Weights, kept: Any, before: Any) -> Any:
        """Return the traces after a window; see `RecordedChunk.traces_after`."""
        return self._method.update(self._graph, weights, kept, before)
