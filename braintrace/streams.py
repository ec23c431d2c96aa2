"""Live streams: forecasts of single samples now, labels later, in any order; and river on them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from ._core.gradient import as_chunk
from ._errors import OptionError, optional_import
from ._jax import own_copy
from ._learner.functional import FunctionalLearner, LearnerState
from ._learner.learner import Learner
from ._typing import PyTree

Inputs: TypeAlias = tuple[PyTree, ...]
Leaves: TypeAlias = list[jax.Array]


class _Held(NamedTuple):
    """All that a stream knows, written at once: an interrupt leaves a complete record.

    Attributes
    ----------
    state
        Leaves of the state; it is before the step of the last sample, if there is one whose step
        has not been taken.
    last
        Identifier and inputs of this sample.
    waiting
        For each sample that waits for a label: its inputs, and the state before its step; ``None``
        for the last sample.
    forecasts, dropped
        Number of samples so far, and of those that waited in vain.
    """

    state: Leaves
    last: tuple[Hashable, Inputs] | None = None
    waiting: Mapping[Hashable, tuple[Inputs, Leaves | None]] = {}
    forecasts: int = 0
    dropped: int = 0


class LiveStream:
    """A learner of single samples; created by `Learner.live`."""

    def __init__(
        self,
        pure: FunctionalLearner,
        step_fn: Callable[..., PyTree],
        pending: int,
        options: Mapping[str, Any],
    ) -> None:
        self._pending = pending
        leaves, self._tree = jax.tree.flatten(pure.settle(pure.state()))

        def predict(state: LearnerState, inputs: Inputs) -> PyTree:
            return _first(pure.predict(state, *as_chunk(inputs))[1])

        def learn(
            state: LearnerState, inputs: Inputs, targets: Inputs
        ) -> tuple[LearnerState, PyTree]:
            slices = as_chunk((*inputs, *targets))
            state, results = pure.online(state, *slices, step_fn=step_fn, **options)
            return state, _first(results)

        def learn_late(
            state: LearnerState, before: Leaves, inputs: Inputs, targets: Inputs
        ) -> tuple[LearnerState, PyTree]:
            own = jax.tree.unflatten(self._tree, before)
            after, result = learn(_with_learned(own, state), inputs, targets)
            return _with_learned(state, after), result

        def pass_over(state: LearnerState, inputs: Inputs) -> tuple[LearnerState, None]:
            after, _ = pure.evolve(state, *as_chunk(inputs), return_outputs=False)
            # A NaN in one sample must not stay in the forecasts after it.
            return jax.tree.map(_finite_or, after, state), None

        self._predict = jax.jit(lambda leaves, *call: predict(self._state_of(leaves), *call))
        self._learn, self._learn_late = self._compiled(learn), self._compiled(learn_late)
        self._pass_over = self._compiled(pass_over)
        self._held = _Held(leaves)

    def _state_of(self, leaves: Leaves) -> LearnerState:
        return jax.tree.unflatten(self._tree, leaves)

    def _compiled(
        self, function: Callable[..., tuple[LearnerState, PyTree]]
    ) -> Callable[..., tuple[Leaves, PyTree]]:
        """Return a function of the leaves of a state: JAX reads a list faster than a state."""

        def of_leaves(leaves: Leaves, *call: Any) -> tuple[Leaves, PyTree]:
            state, result = function(self._state_of(leaves), *call)
            return jax.tree.leaves(state), result

        return jax.jit(of_leaves)

    @property
    def state(self) -> LearnerState:
        """Parameters, optimizer, and the states and traces after the last sample."""
        leaves, last, *_ = self._held
        if last is not None:
            leaves, _ = self._pass_over(leaves, last[1])
        return self._state_of(leaves)

    @property
    def waiting(self) -> tuple[Hashable, ...]:
        """Identifiers of the samples that wait for a label, the oldest first."""
        return tuple(self._held.waiting)

    @property
    def dropped(self) -> int:
        """Number of samples that waited in vain: their labels can no longer be learned."""
        return self._held.dropped

    def predict(self, *inputs: PyTree, id: Hashable = None) -> PyTree:
        """Run one step with the current parameters, and return the output of the model.

        The sample waits for its label. If more than ``pending`` samples wait, the oldest one is
        dropped.

        Parameters
        ----------
        *inputs
            The arguments of the model's ``update``.
        id
            Identifier of the sample for `learn`; ``None``: its number, from 0.
        """
        state, last, waiting, forecasts, dropped = self._held
        if id is not None and id in waiting:
            raise OptionError(f"Sample {id!r} waits for its label; give this one another `id`.")
        if last is not None:
            name, before = last
            after, _ = self._pass_over(state, before)
            if name in waiting:
                waiting = {**waiting, name: (before, state)}
            state = after
        # A copy: a stream may overwrite its arrays before the label arrives.
        inputs = jax.tree.map(own_copy, inputs)
        output = self._predict(state, inputs)
        name = forecasts if id is None else id
        waiting = {**waiting, name: (inputs, None)}
        if len(waiting) > self._pending:
            waiting, dropped = _without(waiting, next(iter(waiting))), dropped + 1
        self._held = _Held(state, (name, inputs), waiting, forecasts + 1, dropped)
        return output

    def learn(self, *targets: PyTree, id: Hashable = None) -> PyTree:
        """Learn the label of a sample, and return its loss (with ``has_aux``, a pair).

        Parameters
        ----------
        *targets
            The arguments of ``step_fn`` after those of ``update``.
        id
            Identifier of the sample; ``None``: the oldest that waits.

        Raises
        ------
        OptionError
            If this sample does not wait for a label.
        """
        held = self._held
        name = next(iter(held.waiting), None) if id is None else id
        if name not in held.waiting:
            raise OptionError(
                f"Sample {name!r} does not wait for a label: it has no forecast, has learned its "
                f"label, or was dropped because more than pending={self._pending} samples waited. "
                f"These samples wait: {list(held.waiting)}."
            )
        inputs, before = held.waiting[name]
        if before is None:
            state, result = self._learn(held.state, inputs, targets)
        else:
            state, result = self._learn_late(held.state, before, inputs, targets)
        last = None if before is None else held.last
        waiting = _without(held.waiting, name)
        self._held = held._replace(state=state, last=last, waiting=waiting)
        return result


def _with_learned(state: LearnerState, other: LearnerState) -> LearnerState:
    return dataclasses.replace(state, parameters=other.parameters, optimizer=other.optimizer)


def _without(waiting: Mapping[Hashable, Any], name: Hashable) -> dict[Hashable, Any]:
    return {other: sample for other, sample in waiting.items() if other != name}


def _first(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: leaf[0], tree)


def _finite_or(value: jax.Array, other: jax.Array) -> jax.Array:
    is_float = jnp.issubdtype(value.dtype, jnp.inexact)
    return jnp.where(jnp.isfinite(value), value, other) if is_float else value


def river_regressor(
    learner: Learner, loss_fn: Callable[..., PyTree], *, pending: int = 1, **options: Any
) -> Any:
    """Wrap a learner with one output as a regressor of river.

    ``predict_one(x)`` runs one step of the network, and ``learn_one(x, y)`` learns the label of
    this step. Features are the values of ``x``, in the order of the keys of the first sample. If a
    sample has no forecast, ``learn_one`` first runs its step.

    Parameters
    ----------
    learner
        A learner with one input ``(1, features)`` and one output of one number.
    loss_fn
        ``loss_fn(output, label)`` returns a scalar loss; the label has the shape of the output.
    pending, **options
        See `Learner.live`.

    Raises
    ------
    MissingPackageError
        Without the package river.

    Notes
    -----
    A copy would share the learner, so tools of river that copy a model (ensembles) raise an error.

    A pipeline with a scaler updates it before ``learn_one``, so that the sample is another than in
    ``predict_one``. Evaluate such pipelines in ``with river.compose.learn_during_predict():``.
    """
    base = optional_import("river.base", "test")
    names: list[Any] = []
    forecasts: dict[Hashable, tuple[Mapping[Any, float], Any]] = {}
    stream = learner.live(lambda x, y: loss_fn(learner(x), y), pending=pending, **options)

    class BraintraceRegressor(base.Regressor):  # type: ignore[name-defined]  # of river
        """A learner as a regressor of river."""

        def _find(self, x: Mapping[Any, float]) -> Hashable:
            return next((name for name in stream.waiting if forecasts[name][0] == x), None)

        def predict_one(self, x: Mapping[Any, float]) -> float:
            """Return the forecast; with ``pending=1``, a repeated call takes no step."""
            name = self._find(x) if pending == 1 else None
            if name is None:
                names[:] = names or list(x)
                output = stream.predict(np.array([[x[name] for name in names]], np.float32))
                name = stream.waiting[-1]
                forecasts[name] = dict(x), output
                for other in forecasts.keys() - set(stream.waiting):
                    del forecasts[other]
            return float(np.asarray(forecasts[name][1]).item())

        def learn_one(self, x: Mapping[Any, float], y: float) -> None:
            """Learn the label of a sample; NaN and ``None`` are missing labels."""
            if self._find(x) is None:
                self.predict_one(x)
            name = self._find(x)
            output = forecasts[name][1]
            if y is not None and not np.isnan(y):
                stream.learn(np.full(output.shape, y, output.dtype), id=name)

        def clone(self, *arguments: Any, **options: Any) -> Any:
            """Refuse copies, which would share one learner."""
            raise OptionError("A copy of this regressor would share its learner: compile another.")

        __copy__ = __deepcopy__ = clone

    return BraintraceRegressor()
