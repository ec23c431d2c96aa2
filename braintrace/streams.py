"""Streams whose labels arrive after the forecasts: late labels, and regressors of river."""

from __future__ import annotations

import collections
import dataclasses
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from ._checks import level_of_user
from ._errors import OptionError, optional_import
from ._learner import Learner, LearnerState
from ._typing import PyTree

Ahead: TypeAlias = dict[str, PyTree]
"""Fields of a state that a forecast advances: it reads current parameters, and no traces."""


class LateLabels:
    """Forecast each sample of a stream now, and learn its label when it arrives.

    A late label is learned with the current parameters, from the hidden states and traces before
    its sample: gradient, update and traces equal those of `Learner.etrace_online` for this sample.
    Its delay affects only the forecasts made meanwhile, which ran ahead with older parameters.

    Parameters
    ----------
    learner
        The learner. It does not change: ``learner.functional().restore(stream.state)`` stores what
        the stream has learned.
    loss_fn
        ``loss_fn(output, *targets)`` returns a scalar loss (with ``has_aux``, a pair).
    pending
        Maximum number of samples that wait for a label. A further forecast passes over the oldest
        one: states and traces advance, and no parameter changes. Use 1 if labels arrive before the
        next forecast, and ``d + 1`` if they arrive ``d`` samples late.
    **options
        Options of `Learner.etrace_online`, such as ``optimizer``.

    Attributes
    ----------
    state
        State before the oldest sample that waits: parameters, traces, optimizer.

    Examples
    --------
    >>> import braintrace, jax.numpy as jnp, optax
    >>> model = braintrace.nn.IndRNN(2, 1)
    >>> learner = braintrace.compile(model, "d_rtrl", jnp.ones((1, 2)), batch_size=1)
    >>> stream = braintrace.streams.LateLabels(
    ...     learner, lambda output, y: ((output - y) ** 2).mean(), optimizer=optax.sgd(0.1)
    ... )
    >>> output = stream.predict(jnp.ones((1, 2)))
    >>> loss = stream.learn(jnp.ones((1, 1)))
    >>> output.shape, loss.shape
    ((1, 1), ())
    """

    def __init__(
        self, learner: Learner, loss_fn: Callable[..., PyTree], *, pending: int = 1, **options: Any
    ) -> None:
        if options.get("optimizer") is not None:
            learner.init_optimizer(options["optimizer"])
        pure, self._pending = learner.functional(), pending

        def step_fn(inputs: tuple[PyTree, ...], targets: tuple[PyTree, ...]) -> PyTree:
            return loss_fn(learner(*inputs), *targets)

        def predict(state: LearnerState, ahead: Ahead, inputs: PyTree) -> tuple[Ahead, PyTree]:
            after, outputs = pure.predict(dataclasses.replace(state, **ahead), *_sequence(inputs))
            return _ahead(after), _first(outputs)

        def learn(
            state: LearnerState, ahead: Ahead, inputs: PyTree, targets: PyTree
        ) -> tuple[LearnerState, Ahead, PyTree]:
            pair = _sequence((inputs, targets))
            state, results = pure.online(state, *pair, step_fn=step_fn, **options)
            # A NaN in one sample must not stay in the forecasts after it.
            return state, jax.tree.map(_finite_or, ahead, _ahead(state)), _first(results)

        def pass_over(state: LearnerState, inputs: PyTree) -> LearnerState:
            return pure.evolve(state, *_sequence(inputs), return_outputs=False)[0]

        self._predict, self._learn = jax.jit(predict), jax.jit(learn)
        self._pass_over = jax.jit(pass_over)
        state = pure.state()
        self._held: tuple[LearnerState, Ahead, tuple[PyTree, ...]] = state, _ahead(state), ()

    @property
    def state(self) -> LearnerState:
        """State before the oldest sample that waits for a label."""
        return self._held[0]

    def predict(self, *inputs: PyTree) -> PyTree:
        """Run one step with the current parameters; the sample waits for its label."""
        state, ahead, waiting = self._held
        inputs = jax.tree.map(jnp.array, inputs)  # a copy: a stream may overwrite its arrays
        ahead, output = self._predict(state, ahead, inputs)
        waiting = (*waiting, inputs)
        if len(waiting) > self._pending:
            state, waiting = self._pass_over(state, waiting[0]), waiting[1:]
        self._held = state, ahead, waiting  # at once: an interrupt leaves a complete state
        return output

    def learn(self, *targets: PyTree, delay: int = 0) -> PyTree:
        """Learn the label of the sample ``delay`` forecasts ago, and return its loss.

        Labels arrive in the order of their samples: older samples that wait are passed over.

        Raises
        ------
        OptionError
            If this sample does not wait for a label.
        """
        state, ahead, waiting = self._held
        index = len(waiting) - 1 - delay
        if not 0 <= index < len(waiting):
            raise OptionError(
                f"`delay` is {delay}, and the last {len(waiting)} samples wait for a label. Call "
                "`predict` before `learn`, learn labels in order, and use a larger `pending`."
            )
        for inputs in waiting[:index]:
            state = self._pass_over(state, inputs)
        state, ahead, result = self._learn(state, ahead, waiting[index], targets)
        waiting = waiting[index + 1 :]
        self._held = state, ahead if waiting else _ahead(state), waiting
        return result


def _ahead(state: LearnerState) -> Ahead:
    return {name: getattr(state, name) for name in ("hidden", "others", "random")}


def _sequence(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], tree)


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
    loss_fn, pending, **options
        See `streams.LateLabels`; the label has the shape of the output.

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
    stream = LateLabels(learner, loss_fn, pending=pending, **options)
    names: list[Any] = []
    waiting: collections.deque[tuple[Mapping[Any, float], Any]] = collections.deque(maxlen=pending)

    class BraintraceRegressor(base.Regressor):  # type: ignore[name-defined]  # of river
        """A learner as a regressor of river."""

        def predict_one(self, x: Mapping[Any, float]) -> float:
            """Return the forecast; with ``pending=1``, a repeated call takes no step."""
            if not (pending == 1 and waiting and waiting[-1][0] == x):
                names[:] = names or list(x)
                row = np.array([[x[name] for name in names]], np.float32)
                waiting.append((dict(x), stream.predict(row)))
            return float(np.asarray(waiting[-1][1]).item())

        def learn_one(self, x: Mapping[Any, float], y: float) -> None:
            """Learn the label of a sample; NaN and ``None`` are missing labels."""
            indices = [index for index, (own, _) in enumerate(waiting) if own == x]
            if not indices:
                if len(waiting) == pending:
                    warnings.warn(
                        "`learn_one` runs the step of a sample without a forecast, while other "
                        "samples wait for a label. If labels are late, increase `pending`. "
                        "Evaluate a pipeline that scales samples in "
                        "`river.compose.learn_during_predict()`.",
                        stacklevel=level_of_user(),
                    )
                self.predict_one(x)
            index = indices[0] if indices else len(waiting) - 1
            delay, output = len(waiting) - 1 - index, waiting[index][1]
            if y is not None and not np.isnan(y):
                stream.learn(np.full(output.shape, y, output.dtype), delay=delay)
            for _ in range(index + 1):
                waiting.popleft()

        def clone(self, *arguments: Any, **options: Any) -> Any:
            """Refuse copies, which would share one learner."""
            raise OptionError("A copy of this regressor would share its learner: compile another.")

        __copy__ = __deepcopy__ = clone

    return BraintraceRegressor()
