"""State of the optimizer of a learner, and the warnings about updates that were skipped."""

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeAlias

import brainstate
import jax
import jax.numpy as jnp
import numpy as np

from .._brainstate import Hidden, is_watched, peek
from .._checks import differences, level_of_user
from .._errors import NonFiniteWarning, OptionError, in_words
from .._jax import strongly_typed
from .._typing import PyTree
from ..sharding import on_host
from .arguments import key_of

Verdict: TypeAlias = tuple[jax.Array, jax.Array, jax.Array]
"""Of each step: whether its update was skipped, the number of skipped updates before it, and the
samples that were reset after it."""

MOST_RUNNING = 8
"""Maximum number of calls of one step whose results are not read yet."""


class LearnerOptimizer(brainstate.graph.Node):
    """State of the optimizer of a learner, and the number of updates that were skipped.

    Attributes
    ----------
    transformed
        State of a gradient transformation; ``None`` if there is none.
    begun
        The transformation that it belongs to, and its cache key.
    skipped
        Number of updates that were omitted because of non-finite numbers.
    calls
        Verdicts of calls that may still run, and the index of their first step.
    """

    def __init__(self) -> None:
        self.transformed = brainstate.LongTermState(None)
        self.begun: Hidden[tuple[Any, Any]] = Hidden((None, None))
        # From NumPy: `jnp.zeros` compiles a program.
        self.skipped = brainstate.LongTermState(jnp.asarray(np.zeros((), np.int32)))
        self.calls: Hidden[list[tuple[Verdict, int]]] = Hidden([])

    def write(self, value: PyTree) -> None:
        """Write the state of the optimizer; ``None`` removes it."""
        if value is None:
            self.begun = Hidden((None, None))
        self.transformed.value = strongly_typed(value)

    def begin(self, optimizer: Any, parameters: Callable[[], PyTree], creates: bool = True) -> None:
        """Initialise an optimizer, with its current state or a new one.

        Parameters
        ----------
        optimizer, parameters
            The optimizer, and a function that returns the parameters, in the structure of their
            gradients.
        creates
            Whether its state may be created here, and not only be continued.

        Raises
        ------
        OptionError
            If there is another one, or if its state would be created inside a transformation.
        """
        held, (begun, _) = peek(self.transformed), self.begun.value
        if begun is optimizer and held is not None:
            return
        if held is None and (is_watched() or not creates):
            raise OptionError(
                "The state of `optimizer` would be created inside a transformation or a pure "
                "function, which cannot store it: call `learner.init_optimizer(optimizer)` before."
            )
        with in_words(
            lambda: (
                "`optimizer` is not an `optax.GradientTransformation`, or its `init` fails for "
                "the parameters. Of another optimizer, pass `update_fn=optimizer.update`"
            )
        ):
            fresh = functools.partial(optimizer.init, parameters())
            start = fresh() if held is None else jax.eval_shape(fresh)
        if held is None:
            self.transformed.value = strongly_typed(start)
        elif differences(held, start):
            raise OptionError(
                f"The learner holds the state of another optimizer ({type(begun).__name__}). To "
                "use this one, write `learner.optimizer_state = None` first."
            )
        self.begun = Hidden((optimizer, key_of(optimizer.update)))

    def notice(self, verdict: Verdict, start: int) -> None:
        """Warn of updates that a call has skipped; after single steps, at the latest the eighth."""
        if not is_watched():
            self.calls.value.append((verdict, start))
            if len(verdict[0]) > 1 or len(self.calls.value) > MOST_RUNNING:
                self.notice_all()

    def notice_all(self) -> None:
        """Wait for all calls, and warn at the first skipped update, and then at powers of ten."""
        calls, self.calls.value = self.calls.value, []
        bad = [call for call in calls if on_host(call[0][0]).any()]
        if not bad:
            return
        verdict, start = bad[0]
        skips, before, samples = map(on_host, verdict)
        count, known = int(on_host(self.skipped.value)), int(before[0])
        if len(str(count)) > len(str(known or "")):
            step = int(np.argmax(skips))
            is_reset = np.atleast_1d(samples[step])
            which = "all" if is_reset.all() else ", ".join(map(str, np.nonzero(is_reset)[0][:10]))
            warnings.warn(
                f"A loss or gradient is NaN or infinite, first at step {start + step} of "
                f"{'this' if len(skips) > 1 else 'a'} call. Samples that were reset, with "
                f"non-finite states or traces: {which or 'none'}. Updates skipped: {count}. If an "
                "input has gaps that are NaN, fill them (`jnp.nan_to_num`). A skipped update "
                "changes neither parameters nor optimizer, and `learner.skipped_updates` counts "
                "it; the next warning follows at the next power of ten. `nonfinite='raise'` stops "
                "at the first, and `nonfinite='ignore'` updates nevertheless.",
                NonFiniteWarning,
                stacklevel=level_of_user(),
            )
