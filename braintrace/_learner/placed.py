"""Placement of the values of a body on a mesh of devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import brainstate

from .._graph import Traces
from .._jax import for_devices
from .._runtime.model_states import States, short_term
from .._typing import Path, PyTree
from ..sharding import Placement
from .body import Arguments, Body, BodyResult, DeferredTraces


class Placing:
    """Placement of the values of a learner's States."""

    def __init__(self, placement: Placement, states: States) -> None:
        self._placement = placement
        self._paths: Mapping[int, Path] = {id(state): path for path, state in states.items()}
        self._fresh = list(short_term(states))

    @property
    def devices(self) -> int:
        """Number of devices of the mesh."""
        return self._placement.devices

    def values(self, states: Iterable[brainstate.State], values: Iterable[PyTree]) -> list[PyTree]:
        """Place the values of some States."""
        both = zip(states, values, strict=True)
        return [self._placement.value(self._paths.get(id(s)), value) for s, value in both]

    def traces(self, traces: Traces | None) -> Traces | None:
        """Place traces, if there are any."""
        return None if traces is None else self._placement.traces(traces)

    def arguments(self, arguments: Arguments) -> Arguments:
        """Place the arguments of a body."""
        sequences, mask, (flags, initial) = arguments
        sequences, mask, flags = self._placement.by_sample((sequences, mask, flags), axis=1)
        if initial:
            initial = list(map(self._placement.value, self._fresh, initial))
        return sequences, mask, (flags, initial)


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
