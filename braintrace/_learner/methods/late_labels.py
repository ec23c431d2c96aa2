"""Forecasts whose labels arrive later: two positions in one stream.

The States of the model are at the last forecast. The traces, and a second copy of the states that a
step writes (the *learned* states), are at the last sample that has been learned or passed over. A
ring contains the inputs of the samples between both positions. A label is therefore learned exactly
as `etrace_online` learns it: in the order of the stream, from the states and traces after the
sample before it. Its delay affects only the forecasts made meanwhile. If no sample is between both
positions, they are equal.

A user may change other States that a step writes between two forecasts: a random key when it draws
numbers, a counter. The ring therefore contains their values before each forecast, and which of them
had changed since the last one. A sample is learned from a changed value, and no change is undone.

The value of the State of forecasts is a dict: ``inputs``, ``before`` and ``changed``, the rings;
``left``, the other States after the last forecast; ``first`` and ``count``, the index of the first
sample in the rings and the number of samples; ``learned``, the learned states.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from ..._errors import OptionError
from ..._graph import Traces
from ..._jax import to_array
from ..._typing import PyTree
from ..calls.body import Arguments, Body, BodyResult
from ..calls.interceptor import intercepting, interceptor_of
from ..calls.options import Options
from ..calls.parts import LearnerParts
from ..calls.request import Request
from ..calls.resets import Resets
from .evolve import evolving, predicting
from .online import learning_online
from .step_function import call_loss_function

Waiting: TypeAlias = dict[str, PyTree]
"""Value of the State of forecasts."""

ALONE: Arguments = (None, None, (None, []))
"""Arguments of a step without a mask and without resets."""


class Stream:
    """The values of a model's States at two positions of a stream.

    Attributes
    ----------
    states
        The States of the model's step.
    written
        Selects the ones that it writes.
    others
        Selects of these the ones that traces do not follow.
    """

    def __init__(self, learner: LearnerParts) -> None:
        request = Request("etrace_evolve", (), Options(return_outputs=False))
        self._evolve = evolving(learner, request, ALONE)
        self.states = self._evolve.states(learner.algorithm.states_of_model)
        self.written = self._evolve.written
        of_model = learner.algorithm.states_of_model
        followed = {id(of_model[path]) for path in learner.algorithm.compiled.followed}
        written = enumerate(self.written(self.states))
        self._others = [index for index, state in written if id(state) not in followed]

    def others(self, written: Sequence[Any]) -> list[Any]:
        """Select from the States that a step writes."""
        return [written[index] for index in self._others]

    def without_forecasts(self, inputs: PyTree, max_delay: int) -> Waiting:
        """Return a value without forecasts, whose ring has room for some inputs."""
        values = [s.value for s in self.written(self.states)]
        size, learned = max_delay + 1, jax.tree.map(to_array, values)
        others, zero = self.others(learned), jnp.zeros((), jnp.int32)
        return {
            "inputs": jax.tree.map(lambda x: jnp.zeros((size, *x.shape), x.dtype), inputs),
            "before": jax.tree.map(lambda x: jnp.broadcast_to(x, (size, *x.shape)), others),
            "changed": jnp.zeros((size, len(others)), bool),
            "left": others,
            "first": zero,
            "count": zero,
            "learned": learned,
        }

    def with_equal_states(self, waiting: Waiting, values: list[PyTree]) -> Waiting:
        """Set the learned states to the current states, if no forecast is waiting."""
        learned = _where(waiting["count"] == 0, self.written(values), waiting["learned"])
        return {**waiting, "learned": learned}

    def settled(self, waiting: Waiting, values: list[PyTree]) -> list[PyTree]:
        """Return the current states; if no forecast is waiting, they are the learned states."""
        now = self.written(values)
        learned = _where(waiting["count"] == 0, waiting["learned"], now)
        for index, flag in zip(self._others, self.changed(waiting, values), strict=True):
            (learned[index],) = _where(flag, [now[index]], [learned[index]])
        return self.at(values, learned)

    def changed(self, waiting: Waiting, values: list[PyTree]) -> list[jax.Array]:
        """Test for each other State whether its value has changed since the last forecast."""
        pairs = zip(self.others(self.written(values)), waiting["left"], strict=True)
        return [_differ(now, left) for now, left in pairs]

    def before_first(self, waiting: Waiting) -> list[PyTree]:
        """Return the values of the written States before the first waiting sample."""
        learned = list(waiting["learned"])
        row = jax.tree.map(lambda ring: ring[waiting["first"]], waiting["before"])
        flags = waiting["changed"][waiting["first"]]
        for number, index in enumerate(self._others):
            (learned[index],) = _where(flags[number], [row[number]], [learned[index]])
        return learned

    def at(self, values: list[PyTree], written: Sequence[PyTree]) -> list[PyTree]:
        """Replace the values of the States that a step writes."""
        new = dict(zip(self.written(range(len(values))), written, strict=True))
        return [new.get(index, value) for index, value in enumerate(values)]

    def passed_over(
        self, waiting: Waiting, values: list[PyTree], traces: Traces, count: jax.Array
    ) -> tuple[Waiting, Traces]:
        """Advance learned states and traces over the first samples, which have no label."""

        def one(index: jax.Array, carry: Any) -> Any:
            waiting, traces = carry
            given = self.at(values, self.before_first(waiting))
            _, learned, traces = self._evolve.run(given, traces, entry(waiting, 0), *ALONE[1:])
            return {**after_first(waiting), "learned": learned}, traces

        result: tuple[Waiting, Traces] = jax.lax.fori_loop(0, count, one, (waiting, traces))
        return result


def entry(waiting: Waiting, index: Any) -> PyTree:
    """Return the inputs of one sample as a sequence of one step."""

    def of_ring(ring: jax.Array) -> jax.Array:
        position = (waiting["first"] + index) % len(ring)
        return jax.lax.dynamic_slice_in_dim(ring, position, 1)

    return jax.tree.map(of_ring, waiting["inputs"])


def room(waiting: Waiting) -> int:
    """Return the maximum number of forecasts that wait."""
    return len(jax.tree.leaves(waiting["inputs"])[0])


def after_first(waiting: Waiting) -> Waiting:
    """Remove the first sample."""
    first = (waiting["first"] + 1) % room(waiting)
    return {**waiting, "first": first, "count": waiting["count"] - 1}


def _with_last(
    waiting: Waiting, inputs: PyTree, before: list[PyTree], changed: list[jax.Array]
) -> Waiting:
    position = (waiting["first"] + waiting["count"]) % room(waiting)

    def written(ring: jax.Array, x: jax.Array) -> jax.Array:
        return ring.at[position].set(x)

    rows = {
        "inputs": jax.tree.map(lambda x, ring: x[0].astype(ring.dtype), inputs, waiting["inputs"]),
        "before": before,
        "changed": jnp.stack(changed) if changed else jnp.zeros(0, bool),
    }
    rings = jax.tree.map(written, {name: waiting[name] for name in rows}, rows)
    return {**waiting, **rings, "count": waiting["count"] + 1}


def _differ(value: PyTree, other: PyTree) -> jax.Array:
    """Test whether any entry differs; NaN is NaN."""

    def of_leaf(one: jax.Array, another: jax.Array) -> jax.Array:
        is_same = one == another
        if jnp.issubdtype(one.dtype, jnp.inexact):
            is_same |= jnp.isnan(one) & jnp.isnan(another)
        return ~jnp.all(is_same)

    flags = jax.tree.leaves(jax.tree.map(of_leaf, value, other))
    return jnp.any(jnp.stack(flags)) if flags else jnp.zeros((), bool)


def _where(flag: jax.Array, chosen: PyTree, otherwise: PyTree) -> PyTree:
    return jax.tree.map(lambda a, b: jnp.where(flag, a, b), list(chosen), list(otherwise))


def forecasting(learner: LearnerParts, request: Request, example: Arguments) -> Body:
    """Return a body that takes one step of the model, and stores its inputs."""
    stream, held = Stream(learner), learner.held_forecasts.waiting
    predict = predicting(learner, Request("predict", (), request.options), ALONE)

    def run(
        values: list[PyTree], traces: Traces, inputs: PyTree, mask: None, resets: Resets
    ) -> BodyResult:
        waiting, *current = values
        changed = stream.changed(waiting, current)
        waiting = stream.with_equal_states(waiting, current)
        is_full = waiting["count"] == room(waiting)
        waiting, traces = stream.passed_over(waiting, current, traces, is_full.astype(int))
        current = stream.settled(waiting, current)
        outputs, written, _ = predict.run(current, traces, inputs, *ALONE[1:])
        before = stream.others(stream.written(current))
        waiting = _with_last(waiting, inputs, before, changed)
        places = range(len(current))
        after = dict(zip(predict.written(places), written, strict=True))
        left = stream.others(stream.written(places))
        waiting = {**waiting, "left": [after.get(i, current[i]) for i in left]}
        return outputs, [waiting, *written], traces

    return Body(
        run=run,
        states=lambda of_model: [held, *predict.states(of_model)],
        written=lambda items: [items[0], *predict.written(items[1:])],
        results=lambda found, options: _first(predict.results(found, options)),
    )


def settling(learner: LearnerParts, request: Request, example: Arguments) -> Body:
    """Return a body that advances the traces to the last forecast, without any label."""
    stream, held = Stream(learner), learner.held_forecasts.waiting

    def run(values: list[PyTree], traces: Traces, *arguments: PyTree) -> BodyResult:
        waiting, *current = values
        waiting = stream.with_equal_states(waiting, current)
        waiting, traces = stream.passed_over(waiting, current, traces, waiting["count"])
        current = stream.settled(waiting, current)
        return None, [waiting, *stream.written(current)], traces

    return Body(
        run=run,
        states=lambda of_model: [held, *stream.states],
        written=lambda items: [items[0], *stream.written(items[1:])],
        results=lambda found, options: None,
    )


def learning_late(learner: LearnerParts, request: Request, example: Arguments) -> Body:
    """Return a body that learns the label of a forecast.

    Its sequences are the delay and the label, in one step. The samples before it are passed over.
    """
    return _Learning(learner, request, example).body


class _Learning:
    """The step of a stream that learns, at the position of the learned states."""

    def __init__(self, learner: LearnerParts, request: Request, example: Arguments) -> None:
        self._stream, held = Stream(learner), learner.held_forecasts.waiting
        (_, *targets), mask, resets = example
        self._loss_fn, self._algorithm = request.options.step_fn, learner.algorithm
        self._has_aux = request.options.has_aux
        if self._algorithm.window_of() not in (None, 1):
            raise OptionError(
                "`learn` updates the parameters after each sample, and no window spans an update: "
                "compile the learner without `window` and `vjp_method`."
            )
        options = dataclasses.replace(request.options, step_fn=self._step)
        sequences = (entry(held.value, 0), tuple(targets))
        online = Request("etrace_online", (), options)
        self._online = learning_online(learner, online, (sequences, mask, resets))
        self._keeps_finite = options.nonfinite == "skip" and room(held.value) > 1
        of_stream, of_online = self._stream.states, self._online.states({})
        known = set(map(id, of_stream))
        self._states = [*of_stream, *(s for s in of_online if id(s) not in known)]
        changed = {id(s) for s in self._online.written(of_online)}
        both = {id(s) for s in self._stream.written(of_stream)}
        self._changed = [id(s) for s in self._states if id(s) in changed - both]
        self._order = [id(s) for s in of_online]
        ids = [id(held), *map(id, self._states)]
        ordered = [id(held), *(i for i in ids if i in both), *self._changed]
        self.body = Body(
            run=self._run,
            states=lambda of_model: [held, *self._states],
            written=lambda items: [items[ids.index(i)] for i in ordered],
            results=lambda found, options: _first(self._online.results(found, options)),
            check=self._online.check,
            notice=self._online.notice,
        )

    def _step(self, inputs: tuple[PyTree, ...], targets: tuple[PyTree, ...]) -> PyTree:
        learner = interceptor_of(self._algorithm)
        assert learner is not None
        arguments = (learner(*inputs), *targets)
        with intercepting(self._algorithm, _refuse_step):
            return call_loss_function(self._loss_fn, arguments, self._has_aux)

    def _run(
        self,
        values: list[PyTree],
        traces: Traces,
        sequences: PyTree,
        mask: None,
        resets: Resets,
    ) -> BodyResult:
        stream, (waiting, *everything) = self._stream, values
        delay, *targets = sequences
        current = everything[: len(stream.states)]
        changed_by_user = stream.changed(waiting, current)
        waiting = stream.with_equal_states(waiting, current)
        index = waiting["count"] - 1 - delay[0]
        is_there = (index >= 0) & (delay[0] >= 0)
        before = jnp.where(is_there, index, 0)
        waiting, traces = stream.passed_over(waiting, current, traces, before)
        start = dict(zip(map(id, self._states), everything, strict=True))

        def learn(changed: list[PyTree], waiting: Waiting, traces: Traces) -> Any:
            given = start | dict(zip(self._changed, changed, strict=True))
            before = stream.before_first(waiting)
            given |= zip(map(id, stream.written(stream.states)), before, strict=True)
            arguments = (entry(waiting, 0), tuple(targets)), mask, resets
            result = [given[i] for i in self._order]
            results, written, after = self._online.run(result, traces, *arguments)
            given |= zip(self._online.written(self._order), written, strict=True)
            learned = [given[id(s)] for s in stream.written(stream.states)]
            waiting = {**after_first(waiting), "learned": learned}
            return [given[i] for i in self._changed], waiting, after, results

        carry = [start[i] for i in self._changed], waiting, traces
        shapes = jax.eval_shape(learn, *carry)[-1]
        nothing = jax.tree.map(lambda x: jnp.full(x.shape, _nothing(x.dtype), x.dtype), shapes)
        changed, waiting, traces, results = jax.lax.fori_loop(
            0, is_there.astype(int), lambda _, carry: learn(*carry[:-1]), (*carry, nothing)
        )
        current = stream.settled(waiting, current)
        if self._keeps_finite:
            finite = _finite_or(stream.written(current), waiting["learned"])
            current = stream.at(current, finite)
            changes = zip(changed_by_user, waiting["left"], stream.others(finite), strict=True)
            left = [_where(flag, [old], [new])[0] for flag, old, new in changes]
            waiting = {**waiting, "left": left}
        return results, [waiting, *stream.written(current), *changed], traces


def _refuse_step(*_: Any) -> PyTree:
    raise OptionError(
        "`loss_fn` calls the learner, but `learn` has already run the step of the forecast: return "
        "a loss of the output and the labels."
    )


def _first(results: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: leaf[0], results)


def _nothing(dtype: Any) -> Any:
    """Return the result of a label without a forecast."""
    return jnp.nan if jnp.issubdtype(dtype, jnp.inexact) else 0


def _finite_or(values: Sequence[PyTree], others: Sequence[PyTree]) -> list[PyTree]:
    """Replace entries that are not finite by the entries of other values."""

    def of_leaf(value: jax.Array, other: jax.Array) -> jax.Array:
        if not jnp.issubdtype(value.dtype, jnp.inexact):
            return value
        return jnp.where(jnp.isfinite(value), value, other)

    result: list[PyTree] = jax.tree.map(of_leaf, list(values), list(others))
    return result
