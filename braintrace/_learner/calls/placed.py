"""Placement of a driver's values on a mesh: States, traces, sequences and results.

Arguments may be on any devices. Inside the compiled program, the same values are constrained at the
start and at the end, so a learner stays sharded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import brainstate
import jax

from ..._algorithms import ETraceAlgorithm
from ..._graph import Traces
from ..._jax import for_devices
from ..._sharding import Placement
from ..._typing import Path, PyTree
from ..state.leaves import by_path, like_leaves
from .body import Arguments, Body, BodyResult, DeferredTraces


class Placing:
    """Placement of the values of a learner's States, including its optimizer.

    Parameters
    ----------
    algorithm
        The algorithm of the learner.
    of_optimizer
        The States of its optimizer by path.
    placement
        Placement of the arrays of the model.
    """

    def __init__(
        self,
        algorithm: ETraceAlgorithm,
        of_optimizer: Mapping[Path, brainstate.State],
        placement: Placement,
    ) -> None:
        self._placement = placement
        self._paths = {id(state): path for path, state in algorithm.states_of_model.items()}
        self._fresh = list(algorithm.short_term_states)
        self._optimizer = {id(s): path for path, s in of_optimizer.items()}
        self._parameters = {
            (*map(str, path),): (parameter, index, leaf.shape)
            for parameter, state in algorithm.param_states.items()
            for index, (path, leaf) in enumerate(by_path(state.value, parameter).items())
        }

    @property
    def devices(self) -> int:
        """Number of devices of the mesh."""
        return self._placement.devices

    def values(self, states: Iterable[brainstate.State], values: Iterable[PyTree]) -> list[PyTree]:
        """Place the values of some States; values of unknown States are not moved."""
        return [self._of_state(state, value) for state, value in zip(states, values, strict=True)]

    def traces(self, traces: Traces | None) -> Traces | None:
        """Place traces, if there are any."""
        return None if traces is None else self._placement.traces(traces)

    def arguments(self, arguments: Arguments) -> Arguments:
        """Place the arguments of a body."""
        sequences, mask, (flags, initial) = arguments
        sequences, flags = self._placement.by_sample((sequences, flags), axis=1)
        if initial:
            fresh = zip(self._fresh, initial, strict=True)
            initial = [self._placement.value(path, value) for path, value in fresh]
        return sequences, self._placement.whole(mask), (flags, initial)

    def _of_state(self, state: brainstate.State, value: PyTree) -> PyTree:
        if id(state) in self._paths:
            return self._placement.value(self._paths[id(state)], value)
        if id(state) in self._optimizer:
            start = self._optimizer[id(state)]
            leaves = by_path(value, start)
            placed = {path: self._of_optimizer(path, leaf) for path, leaf in leaves.items()}
            return like_leaves(value, placed, start)
        return value

    def _of_optimizer(self, path: Path, leaf: jax.Array) -> jax.Array:
        """Place a leaf of an optimizer's state like the parameter that it belongs to."""
        parts = (*map(str, path),)
        ends = (self._parameters.get(parts[start:]) for start in range(len(parts)))
        for parameter, index, shape in filter(None, ends):
            if leaf.shape == shape:
                return self._placement.leaf(parameter, index, leaf)
        return self._placement.whole(leaf)


def placed_body(body: Body, placing: Placing, states: Sequence[brainstate.State]) -> Body:
    """Return a body whose values are constrained before and after."""

    def run(values: list[PyTree], traces: Traces | None, *arguments: PyTree) -> BodyResult:
        sequences, mask, resets = placing.arguments(arguments)
        values, traces = placing.values(states, values), placing.traces(traces)
        with for_devices(placing.devices):
            results, written, after = body.run(values, traces, sequences, mask, resets)
        written = placing.values(body.written(states), written)
        if isinstance(after, DeferredTraces):
            return results, written, dataclasses.replace(after, before=placing.traces(after.before))
        return results, written, placing.traces(after)

    def finish(sources: PyTree, before: Traces | None) -> Traces:
        assert body.finish is not None
        with for_devices(placing.devices):
            after = placing.traces(body.finish(sources, placing.traces(before)))
        assert after is not None
        return after

    return dataclasses.replace(body, run=run, finish=None if body.finish is None else finish)
