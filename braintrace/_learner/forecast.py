"""Methods of a learner for single samples: forecast now, learn when the label arrives."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Unpack

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from .._arguments import NOT_NEGATIVE, array_of, check_option, check_tree, level_of_user, shown
from .._brainstate import Hidden, is_watched, peek
from .._errors import OptionError
from .._jax import is_tracer
from .._runtime.changes import up_to_date
from .._runtime.states.model_states import read_arguments
from .._runtime.step_data import unwrap
from .._typing import PyTree
from .calls.options import SINGLE, LearnOptions, Options, complaint, options_of, takes
from .calls.parts import HasParts, LearnerParts
from .calls.request import Request, request_of
from .driver import run_request
from .methods.late_labels import Stream, Waiting, room
from .state.learner_state import FORECASTS, LearnerState
from .state.leaves import raw

MOST_COMPARED = 1 << 14
"""Maximum number of entries of a prediction that are compared with later inputs."""

NO_SAMPLES = (np.zeros(1, np.int32),)
"""The sequences of a call that takes no sample."""


def init_forecasts(learner: HasParts, *inputs: PyTree, max_delay: int = 0) -> None:
    """Prepare `forecast` for labels that arrive late.

    Call it before the first forecast if labels may be late, before a transformation, and before you
    use functions of a `LearnerState`. If the shapes and dtypes of the inputs and ``max_delay`` do
    not change, waiting forecasts are kept. Otherwise, samples without a label are passed over.

    Parameters
    ----------
    *inputs
        Example arguments of the model's ``update``; only shapes, dtypes and units matter.
    max_delay
        Maximum delay of a label, in samples. The learner stores the inputs of ``max_delay + 1``
        samples, and a second copy of the States that a step writes. It stores no second trace.

    Raises
    ------
    OptionError
        If ``max_delay`` is negative, or inside a transformation.
    """
    check_option("max_delay", max_delay, NOT_NEGATIVE)
    _prepare(learner.parts, inputs_of(learner.parts, inputs), max_delay)


def forecast(learner: HasParts, *inputs: PyTree) -> PyTree:
    """Run one step of the model, and keep its inputs until its label arrives.

    Parameters
    ----------
    *inputs
        Arguments of the model's ``update``.

    Returns
    -------
    pytree
        The output of the step, with the current parameters.

    Raises
    ------
    ShapeError
        If the inputs do not fit the compiled step.

    Notes
    -----
    A sample that waits for its label for more than ``max_delay`` samples (0, or as set by
    `init_forecasts`) is passed over: states and traces advance, and no parameter changes. The same
    holds for samples before a label that is learned, and for all waiting samples if another method
    runs. `reset_state` drops them. If you change a State that the step writes between two
    forecasts (draws change a random key), its value is the one before the next sample, and
    remains after `learn`.

    Examples
    --------
    >>> import braintrace, jax.numpy as jnp, optax
    >>> model = braintrace.nn.IndRNN(2, 1)
    >>> learner = braintrace.compile(model, "d_rtrl", jnp.ones((1, 2)), batch_size=1)
    >>> def loss_fn(output, y):
    ...     return ((output - y) ** 2).mean()
    >>> optimizer = optax.sgd(0.1)
    >>> output = learner.forecast(jnp.ones((1, 2)))
    >>> output.shape
    (1, 1)
    >>> loss = learner.learn(loss_fn, jnp.ones((1, 1)), optimizer=optimizer)
    >>> loss.shape
    ()
    """
    parts, sequences = learner.parts, inputs_of(learner.parts, inputs)
    waiting = peek(parts.held_forecasts.waiting)
    _prepare(parts, sequences, 0 if waiting is None else room(waiting) - 1)
    return _run(parts, "forecast", sequences, Options())


@takes(frozenset(LearnOptions.__annotations__))
def learn(
    learner: HasParts,
    loss_fn: Callable[..., PyTree],
    *targets: PyTree,
    delay: Any = 0,
    **options: Unpack[LearnOptions],
) -> PyTree:
    """Learn the label of a forecast, without another step of the stream.

    Gradient, update and traces are equal to the results of `etrace_online` for this sample. A late
    label is learned with the current parameters, from the states and traces after the sample
    before it. Its delay affects only the forecasts made meanwhile, and the current States: they
    were computed with older parameters.

    Parameters
    ----------
    loss_fn
        ``loss_fn(output, *targets)`` returns a scalar loss (with ``has_aux``: a pair of the loss
        and a pytree). It is traced once, like the ``step_fn`` of `etrace_grad`.
    *targets
        The label.
    delay
        Number of forecasts since the forecast that the label belongs to; 0 is the last one.
        Labels arrive in the order of their samples. Samples before it without a label are passed
        over, as in `forecast`.
    optimizer, update_fn, nonfinite, has_aux, unit_aware
        See `etrace_online`. A call of `reset_state` in ``update_fn`` resets the traces, and the
        States only if no later forecast waits. With ``nonfinite='skip'``, the default, entries
        of current States that are not finite get the values after the sample.

    Returns
    -------
    loss, or ``(loss, aux)``
        The loss before the update, with the current parameters. Inside a transformation, a label
        without a forecast changes nothing, and its loss is NaN.

    Raises
    ------
    OptionError
        If no forecast waits for this label, and as in `etrace_online`.
    NonFiniteError
        See ``nonfinite``.
    """
    parts = learner.parts
    read = options_of("learn", with_loss(loss_fn, options), SINGLE)
    count = delay_of(delay)
    check_waits(parts.held_forecasts.waiting, count)
    sequences = label(count, targets)
    if read.optimizer is None:
        return _run(parts, "learn", sequences, read)
    with parts.held_optimizer.begun(read.optimizer, parts.parameters_for_optimizer):
        return _run(parts, "learn", sequences, read)


def with_loss(loss_fn: Callable[..., PyTree], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `learn` with its loss.

    Raises
    ------
    TypeError
        For an option that it does not have; the loss is no ``step_fn`` of the user.
    """
    names = frozenset(LearnOptions.__annotations__)
    if not names.issuperset(options):
        raise TypeError(f"`learn` {complaint(options, names)}")
    return {**options, "step_fn": loss_fn}


def delay_of(value: Any) -> jax.Array:
    """Return a delay as an integer array.

    Raises
    ------
    DtypeError, OptionError
        If it is not an integer.
    """
    delay = array_of("delay", value)
    if delay.shape or not jnp.issubdtype(delay.dtype, jnp.integer):
        raise OptionError(f"`delay` is {shown(value)}; expected an integer.")
    return delay.astype(jnp.int32)


def label(delay: jax.Array, targets: tuple[PyTree, ...]) -> tuple[PyTree, ...]:
    """Return the sequences of a label: delay and targets in one step."""
    for index, target in enumerate(targets):
        check_tree(f"label {index}", target)

    def sequence(leaf: Any) -> jax.Array:
        return array_of("label", leaf)[None]

    return delay[None], *jax.tree.map(sequence, targets)


def check_waits(held: brainstate.State, delay: jax.Array) -> None:
    """Refuse a label without a forecast, if the number of forecasts is known.

    Raises
    ------
    OptionError
        If the learner has made no forecast, or has learned or passed over the sample.
    """
    waiting: Waiting | None = peek(held)
    if waiting is None:
        raise OptionError("No forecast waits for a label: call `forecast` before `learn`.")
    if is_tracer(waiting["count"]) or is_tracer(delay):
        return
    count = int(waiting["count"])
    if not 0 <= int(delay) < count:
        raise OptionError(
            f"`delay` is {delay}, and the last {count} forecasts wait for a label. Older samples "
            f"have been learned or passed over: labels arrive in order, at most {room(waiting) - 1}"
            " samples late (`init_forecasts(..., max_delay=...)`). `reset_state` drops forecasts, "
            "and other methods of the learner pass over them."
        )


def has_forecasts(state: LearnerState) -> bool:
    """Test whether a state may have forecasts that wait for a label."""
    waiting = _others(state).get(FORECASTS)
    if waiting is None:
        return False
    return is_tracer(waiting["count"]) or bool(np.any(waiting["count"]))


def waiting_in(state: LearnerState) -> None:
    """Refuse a state without a buffer for forecasts.

    Raises
    ------
    OptionError
        If it has none.
    """
    if FORECASTS not in _others(state):
        raise OptionError(
            "This `LearnerState` has no buffer for forecasts: call "
            "`learner.init_forecasts(*inputs)` before `functional.state()`."
        )


def _others(state: LearnerState) -> Mapping[Any, PyTree]:
    others = getattr(state, "others", None)
    return others if isinstance(others, Mapping) else {}  # refused by a later check


def with_room_as(learner: LearnerParts, state: LearnerState) -> LearnerState:
    """Return a state without forecasts if it is older than the learner's first forecast."""
    waiting = peek(learner.held_forecasts.waiting)
    if waiting is None or FORECASTS in _others(state):
        return state
    waiting = {**waiting, "count": np.zeros((), np.int32)}  # known to be zero, also when traced
    return dataclasses.replace(state, others={**state.others, FORECASTS: raw(waiting)})


def settle(learner: LearnerParts) -> None:
    """Pass over all samples that wait for a label, before another method runs."""
    waiting = peek(learner.held_forecasts.waiting)
    if waiting is not None and (is_tracer(waiting["count"]) or int(waiting["count"])):
        run_request(learner, Request("settle", NO_SAMPLES, Options()))


def drop_forecasts(learner: LearnerParts) -> None:
    """Drop all samples that wait for a label, after a reset."""
    held = learner.held_forecasts.waiting
    waiting = peek(held)
    forget_prediction(learner)
    if waiting is not None:
        held.value = {**held.value, "count": jnp.zeros((), jnp.int32)}


def inputs_of(learner: LearnerParts, arguments: tuple[PyTree, ...]) -> tuple[PyTree, ...]:
    """Return the arguments of the compiled step as sequences of length 1."""
    up_to_date(learner.algorithm)
    traced, known = learner.graph.traced, read_arguments(learner.graph, unwrap(arguments))
    leaves = [known[var][None] for var in traced.argument_vars]
    result: tuple[PyTree, ...] = jax.tree.unflatten(traced.argument_tree, leaves)
    return result


def warn_if_predicted(learner: LearnerParts, request: Request) -> None:
    """Warn if a call learns from the inputs of the last prediction: both run their steps."""
    held, sequences = learner.held_forecasts, request.sequences
    before = held.last_prediction.value
    if not before:
        return
    held.last_prediction = Hidden(())
    is_learning = request.method in ("etrace_grad", "etrace_online")
    if not is_learning or is_watched() or _starts_anew(request.options.reset):
        return
    if _is_alike(before, sequences):
        warnings.warn(
            f"`predict` has already run these steps, and `{request.method}` runs them "
            "again. To predict and then learn one step, call `learner.forecast(x)` and "
            "`learner.learn(loss_fn, y, ...)`; between two sequences, call `reset_state`.",
            stacklevel=level_of_user(),
        )


def forget_prediction(learner: LearnerParts) -> None:
    """Forget the inputs of the last prediction, after another method or in another state."""
    learner.held_forecasts.last_prediction = Hidden(())


def note_prediction(learner: LearnerParts, sequences: tuple[PyTree, ...]) -> None:
    """Remember the inputs of a prediction, up to a size that is cheap to compare."""
    if not is_watched() and sum(map(np.size, jax.tree.leaves(sequences))) <= MOST_COMPARED:
        learner.held_forecasts.last_prediction = Hidden(sequences)


def _starts_anew(reset: ArrayLike | None) -> bool:
    """Test whether all samples are known to be reset before the first step."""
    if reset is None or not is_here(reset):
        return False
    try:
        return bool(np.all(np.atleast_1d(reset)[:1]))
    except (TypeError, ValueError):  # no flags: refused by a later check
        return False


def _is_alike(before: PyTree, sequences: tuple[PyTree, ...]) -> bool:
    leaves, tree = jax.tree.flatten(before)
    others, other = jax.tree.flatten(sequences[: len(before)])
    is_same = tree == other and all(map(_is_readable, (*leaves, *others)))
    return is_same and all(map(np.array_equal, leaves, others))


def _is_readable(leaf: Any) -> bool:
    return is_here(leaf) and isinstance(getattr(leaf, "dtype", None), np.dtype)


def _run(
    learner: LearnerParts, method: str, sequences: tuple[PyTree, ...], options: Options
) -> PyTree:
    forget_prediction(learner)
    return run_request(learner, request_of(learner, method, sequences, options))


def _prepare(learner: LearnerParts, sequences: tuple[PyTree, ...], max_delay: int) -> None:
    held = learner.held_forecasts.waiting
    waiting = peek(held)
    is_alike = waiting is not None and room(waiting) == max_delay + 1
    if is_alike and _types(waiting["inputs"]) == _types(sequences):
        return
    if is_watched():
        raise OptionError(
            "These forecasts would wait inside a transformation, which discards them at its end. "
            "Call `learner.init_forecasts(*inputs, max_delay=...)` before it."
        )
    settle(learner)
    inputs = jax.tree.map(lambda leaf: leaf[0], sequences)
    held.value = Stream(learner).without_forecasts(inputs, max_delay)


def _types(sequences: PyTree) -> Any:
    """Return the structure of sequences, and the shapes and dtypes of one step."""
    leaves, tree = jax.tree.flatten(sequences)
    return tree, [(leaf.shape[1:], leaf.dtype) for leaf in leaves]


def is_here(array: Any) -> bool:
    """Test whether this process can read an array."""
    if not isinstance(array, jax.Array):
        return True
    if is_tracer(array):
        return False
    return not array.is_deleted() and array.is_fully_addressable
