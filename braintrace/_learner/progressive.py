"""Progressive validation: test each forecast of a stream, then learn its label."""

from __future__ import annotations

import collections
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias, Unpack

import jax
import numpy as np

from .._arguments import (
    FUNCTION,
    NOT_NEGATIVE,
    Kind,
    array_of,
    check_option,
    common_length,
    level_of_user,
    not_an_array,
    shown,
)
from .._errors import OptionError
from .._optional import optional_import
from .._typing import PyTree
from .calls.options import LearnOptions
from .learner import LEARNER, Learner

METRICS = Kind("a dict of functions", lambda v: isinstance(v, Mapping)).or_else(None)

Metric: TypeAlias = Callable[[PyTree, PyTree], Any]
"""``(output, label) -> number`` of one sample."""


@dataclasses.dataclass(frozen=True)
class Forecast:
    """The forecast of one sample of a stream.

    Attributes
    ----------
    sample
        Index of the sample.
    output
        Output of the model, with the parameters before its label is learned.
    label
        Its label; ``None`` if it is missing.
    metrics
        Means of the metrics so far, over all labels that have arrived.
    """

    sample: int
    output: PyTree
    label: PyTree
    metrics: dict[str, float]


class ProgressiveValidation:
    """Forecast, validate and learn each sample of a stream, in this order.

    Parameters
    ----------
    learner
        The learner.
    stream
        Pairs of inputs and label, from a list or a generator; or a pair of arrays or pandas objects
        whose rows are samples. Several arguments of the model are a tuple. Rows without a batch
        axis get one of size 1, and a label gets the shape of the output if it has the same size.
        A label that is None or contains NaN is missing.
    loss_fn
        ``loss_fn(output, label)``; see `Learner.learn`.
    delay
        Number of samples after which a label arrives.
    metrics
        Functions ``(output, label) -> number`` by name; ``None``: the loss, without auxiliary
        results.
    **options
        Options of `Learner.learn`, such as ``optimizer``.

    Attributes
    ----------
    metrics
        Means of the metrics so far; after the stream, over all labels.

    Raises
    ------
    OptionError
        If a value is not accepted.

    Notes
    -----
    A stream is one sequence. For several, use one validation each and reset the learner in between:
    in the loop, `reset_state` and other methods of the learner end the waiting for labels, which
    are then refused.

    Examples
    --------
    >>> import brainstate, braintrace, numpy as np, optax
    >>> brainstate.random.seed(0)
    >>> model = braintrace.nn.LRUCell(2, 1, 4)
    >>> learner = braintrace.compile(model, "d_rtrl", np.ones((1, 2)), batch_size=1)
    >>> xs, ys = np.ones((50, 2)), np.full(50, 0.5)
    >>> def loss_fn(output, y):
    ...     return ((output - y) ** 2).mean()
    >>> validation = braintrace.ProgressiveValidation(
    ...     learner, (xs, ys), loss_fn, optimizer=optax.sgd(0.1)
    ... )
    >>> losses = [forecast.metrics["loss"] for forecast in validation]
    >>> len(losses), validation.metrics["loss"] < losses[0]
    (50, True)
    """

    def __init__(
        self,
        learner: Learner,
        stream: Iterable[Any],
        loss_fn: Metric,
        *,
        delay: int = 0,
        metrics: Mapping[str, Metric] | None = None,
        **options: Unpack[LearnOptions],
    ) -> None:
        _check(learner, loss_fn, "delay", delay)
        check_option("metrics", metrics, METRICS)
        loss = (lambda *pair: loss_fn(*pair)[0]) if options.get("has_aux") else loss_fn
        self._functions = {"loss": loss} if metrics is None else dict(metrics)
        for name, function in self._functions.items():
            check_option(f"metrics[{name!r}]", function, FUNCTION)
        self._learn = functools.partial(learner.learn, loss_fn, **options)
        _pairs(stream)  # refuses other values
        self._learner, self._stream, self._delay = learner, stream, delay
        self._sums, self._count = dict.fromkeys(self._functions, 0.0), 0

    @property
    def metrics(self) -> dict[str, float]:
        """Means of the metrics so far; NaN before the first label."""
        count = self._count or float("nan")
        return {name: total / count for name, total in self._sums.items()}

    def __iter__(self) -> Iterator[Forecast]:
        waiting: collections.deque[tuple[PyTree, PyTree]] = collections.deque()
        for sample, pair in enumerate(_pairs(self._stream)):
            x, label = _pair(sample, pair)
            inputs = inputs_like(self._learner, x if isinstance(x, tuple) else (x,))
            if not sample:
                self._learner.init_forecasts(*inputs, max_delay=self._delay)
            output = self._learner.forecast(*inputs)
            label = label_like(output, label)
            waiting.append((output, label))
            arrived = waiting.popleft() if len(waiting) > self._delay else (None, None)
            self._validate(*arrived)
            yield Forecast(sample, output, label, self.metrics)
            if arrived[1] is not None:
                self._learn(arrived[1], delay=self._delay)
        while waiting:
            output, label = waiting.popleft()
            self._validate(output, label)
            if label is not None:
                self._learn(label, delay=len(waiting))

    def _validate(self, output: PyTree, label: PyTree) -> None:
        if label is None:
            return
        self._count += 1
        output = jax.tree.map(np.asarray, output)
        for name, function in self._functions.items():
            self._sums[name] += _number(name, function(output, label))


def _check(learner: Any, loss_fn: Any, name: str, delay: Any) -> None:
    check_option("learner", learner, LEARNER)
    check_option("loss_fn", loss_fn, FUNCTION)
    check_option(name, delay, NOT_NEGATIVE)


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise OptionError(
            f"Metric `{name}` returned {shown(value)}; expected a number without a unit."
        ) from error


def _pair(sample: int, pair: Any) -> Any:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise OptionError(
            f"Sample {sample} of `stream` is {shown(pair)}; expected a pair of inputs and label."
        )
    return pair


def _pairs(stream: Iterable[Any]) -> Iterable[tuple[PyTree, PyTree]]:
    """Return pairs of inputs and label.

    Raises
    ------
    OptionError
        If the value is not a stream.
    DtypeError, ShapeError
        For arrays without numbers, or of different lengths.
    """
    parts = list(stream) if isinstance(stream, (tuple, list)) else []
    if len(parts) == 2 and all(hasattr(part, "shape") for part in parts):
        arrays = [_numbers(_rows(parts[0]), parts[0]), _rows(parts[1])]
        common_length([array.shape for array in arrays], "part of `stream`")
        return zip(*arrays, strict=True)
    if not isinstance(stream, Iterable) or isinstance(stream, (str, bytes, Mapping)):
        raise OptionError(
            f"`stream` is {shown(stream)}; expected pairs of inputs and label, or a pair of arrays."
        )
    return stream


def _rows(part: Any) -> Any:
    return np.asarray(array_of("stream", part) if isinstance(part, jax.Array) else part)


def _numbers(rows: np.ndarray, given: Any) -> np.ndarray:
    """Return rows as numbers: columns of different dtypes are an array of objects."""
    if rows.dtype != object:
        return rows
    try:
        return rows.astype(float)
    except (TypeError, ValueError) as error:
        raise not_an_array("stream", given) from error


def inputs_like(learner: Learner, arguments: tuple[PyTree, ...]) -> tuple[PyTree, ...]:
    """Return arguments of a step, with a batch axis of size 1 where it is missing."""
    shapes = iter(learner.graph.traced.argument_vars)

    def of_leaf(leaf: Any) -> Any:
        array, var = np.asarray(leaf), next(shapes, None)
        is_row = var is not None and (1, *array.shape) == tuple(var.aval.shape)
        return array[None] if is_row else leaf

    result: tuple[PyTree, ...] = jax.tree.map(of_leaf, arguments)
    return result


def label_like(output: PyTree, label: PyTree) -> PyTree:
    """Return a label, if it fits in the shape of the output; ``None`` if it is missing.

    Arrays are copied, since a stream may overwrite them before the label is learned.
    """
    if label is None:
        return None
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(label)]
    if any(np.issubdtype(leaf.dtype, np.inexact) and np.isnan(leaf).any() for leaf in leaves):
        return None
    shape = getattr(output, "shape", None)
    is_alike = len(leaves) == 1 and shape is not None and leaves[0].size == np.prod(shape)

    def of_leaf(leaf: Any) -> Any:
        if is_alike:
            return np.array(leaf).reshape(shape)
        return leaf.copy() if isinstance(leaf, np.ndarray) else leaf

    result: PyTree = jax.tree.map(of_leaf, label)
    return result


def river_regressor(
    learner: Learner,
    loss_fn: Metric,
    *,
    max_delay: int = 0,
    **options: Unpack[LearnOptions],
) -> Any:
    """Wrap a learner with one output as a regressor of river.

    ``predict_one(x)`` runs one step of the network, and ``learn_one(x, y)`` learns the label of
    this step. Features are the values of ``x``, in the order of the keys of the first sample. If a
    sample has no forecast, ``learn_one`` first runs its step, with a warning if other samples wait.

    Parameters
    ----------
    learner
        A learner with one input ``(1, features)`` and one output of one number.
    loss_fn
        ``loss_fn(output, label)``; see `Learner.learn`.
    max_delay
        Maximum number of forecasts between a sample and its label.
    **options
        Options of `Learner.learn`, such as ``optimizer``.

    Raises
    ------
    MissingPackageError
        Without river (extra ``river``).

    Notes
    -----
    Tools of river that copy or pickle a model, such as ensembles, raise an error: all copies would
    share one learner.

    A pipeline with a scaler updates it before ``learn_one``, so that the sample is another than in
    ``predict_one``. Evaluate such pipelines in ``with river.compose.learn_during_predict():``.
    """
    _check(learner, loss_fn, "max_delay", max_delay)
    base = optional_import("river.base", "river")
    learn = functools.partial(learner.learn, loss_fn, **options)
    names: list[Any] = []
    waiting: collections.deque[Any] = collections.deque(maxlen=max_delay + 1)

    def forecast(x: Mapping[Any, float]) -> Any:
        keys = names or list(x)
        if missing := [name for name in keys if name not in x]:
            raise OptionError(
                f"The sample has no features {missing}, which earlier samples have; expected "
                f"{keys}. Fill them in, for example with `river.preprocessing.StatImputer`."
            )
        row = np.array([x[name] for name in keys], np.float32)
        (inputs,) = inputs_like(learner, (row,))
        if not names:
            learner.init_forecasts(inputs, max_delay=max_delay)
        output = learner.forecast(inputs)
        names[:] = keys
        waiting.append((dict(x), output))
        return output

    class BraintraceRegressor(base.Regressor):  # type: ignore[name-defined]  # of river
        """A learner as a regressor of river."""

        def predict_one(self, x: Mapping[Any, float]) -> float:
            """Return the forecast for a sample; without delays, repeated calls take one step."""
            if not max_delay and waiting and waiting[-1][0] == dict(x):
                return float(np.asarray(waiting[-1][1]).item())
            return float(np.asarray(forecast(x)).item())

        def clone(self, *arguments: Any, **options: Any) -> Any:
            """Refuse copies, which would share one learner.

            Raises
            ------
            OptionError
                Always.
            """
            raise OptionError(
                "A copy of this regressor would share its learner: compile another learner, and "
                "call `river_regressor` for it."
            )

        __copy__ = __deepcopy__ = clone

        def learn_one(self, x: Mapping[Any, float], y: float) -> None:
            """Learn the label of a sample."""
            index = next((i for i, (own, _) in enumerate(waiting) if own == dict(x)), None)
            if index is None:
                if len(waiting) > max_delay:
                    warnings.warn(
                        "`learn_one` runs the step of a sample without a forecast, while another "
                        "sample waits for its label. If labels are late, give `max_delay`. In a "
                        "pipeline that scales samples, evaluate in "
                        "`river.compose.learn_during_predict()`: otherwise a sample is scaled "
                        "again before `learn_one`, and no longer equal to the forecast sample.",
                        stacklevel=level_of_user(),
                    )
                forecast(x)
                index = len(waiting) - 1
            delay, output = len(waiting) - 1 - index, waiting[index][1]
            label = label_like(output, y)
            if label is not None:
                learn(label, delay=delay)
            for _ in range(index + 1):
                waiting.popleft()

    return BraintraceRegressor()
