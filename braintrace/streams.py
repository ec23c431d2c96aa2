"""Live streams, and regressors of river on them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import numpy as np

from ._errors import OptionError, optional_import
from ._learner import Learner
from ._learner import LiveStream as LiveStream
from ._typing import PyTree


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
