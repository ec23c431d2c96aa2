"""The methods of a learner that run whole sequences, in which time is axis 0."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Literal, Unpack, overload

import jax

from .._runtime import on_automatic_axes, one_thread_at_a_time
from .._typing import PyTree
from .arguments import Gradients
from .driver import run_whole
from .options import (
    WATCHED,
    WatchedGradientOptions,
    WatchedPredictOptions,
    WatchedSequenceOptions,
    WatchedStreamOptions,
    options_of,
    takes,
)
from .parts import HasParts, LearnerParts
from .request import Request
from .requests import request_of
from .watching import run_watched


@overload
def etrace_grad(
    learner: HasParts,
    *sequences: PyTree,
    has_aux: Literal[False] = False,
    return_value: Literal[False] = False,
    **options: Unpack[WatchedGradientOptions],
) -> Gradients: ...
@overload
def etrace_grad(
    learner: HasParts,
    *sequences: PyTree,
    has_aux: Literal[False] = False,
    return_value: Literal[True],
    **options: Unpack[WatchedGradientOptions],
) -> tuple[Gradients, jax.Array]: ...
@overload
def etrace_grad(
    learner: HasParts,
    *sequences: PyTree,
    has_aux: Literal[True],
    return_value: Literal[False] = False,
    **options: Unpack[WatchedGradientOptions],
) -> tuple[Gradients, PyTree]: ...
@overload
def etrace_grad(
    learner: HasParts,
    *sequences: PyTree,
    has_aux: Literal[True],
    return_value: Literal[True],
    **options: Unpack[WatchedGradientOptions],
) -> tuple[Gradients, jax.Array, PyTree]: ...
@overload
def etrace_grad(
    learner: HasParts,
    *sequences: PyTree,
    has_aux: bool = ...,
    return_value: bool = ...,
    **options: Unpack[WatchedGradientOptions],
) -> PyTree: ...


@one_thread_at_a_time
@on_automatic_axes
@takes(WATCHED["etrace_grad"])
def etrace_grad(learner: HasParts, *sequences: PyTree, **options: Any) -> PyTree:
    """Return the gradient of a loss over a sequence; states and traces move on.

    Parameters
    ----------
    *sequences
        Pytrees of arrays ``(T, …)``; ``step_fn`` gets the slices of one step.
    step_fn
        Calls this learner once and returns the scalar loss of the step (with ``has_aux``:
        a pair of it and a pytree). It is traced once for its code, its defaults and the
        values that it has closed over, so you can create a lambda in every call. Changes of
        globals, and inside closed-over objects, are not seen, as in ``jax.jit``: keep such
        values in a State. States that it reads before the call, and States that it owns, carry no
        gradient from one step to the next (nor, with a ``window``, to the next window).
    window
        Number of steps that are differentiated in full. The gradient is backpropagation through
        time within each window, plus the rule's traces for the time before it. Windows begin at the
        first step of the call, and the last one may be shorter. A reset within a window ends what
        its samples have from before, and steps of weight 0 count towards its length. `RTRL` is
        exact without windows and ignores it. ``None``: the window that the learner was compiled
        with, or none, which is the rule itself. ``window=1`` differs from that where units couple.
    mask
        Weights ``(T,)`` of the steps' losses; ``None``: all are 1. Where all are 0, the
        gradient is 0. A step of weight 0 leaves the gradient alone, whatever its inputs are:
        padding may be NaN, and so may the states and traces that it leaves behind.
    reduction
        ``'mean'``: the weighted mean over the steps. ``'sum'``: the weighted sum.
    chunk_size
        Number of steps that are run between two updates of the traces. It changes speed and
        memory, not the gradient. ``'auto'``: the shortest chunk that is expected to be among the
        fastest within ``memory_budget``; `report` says which. From zero traces a sequence is best
        run as one chunk, which needs no trace. With a ``window``, a chunk is as many whole windows
        as fit into that number of steps, at least one; ``'auto'`` is one, or with ``memory_budget``
        as many as it admits.
    memory_budget
        For ``chunk_size='auto'``: how many bytes the steps of a chunk may record, at least one
        step and as many as the traces take. Beyond it memory does not grow with the
        sequence. ``None``: a tenth of the device's memory, and at most 1 GiB.
    has_aux
        Whether ``step_fn`` returns auxiliary results as well; they are stacked over time.
    return_value
        Return the losses of the steps as well, ``(T,)``: 0 where the mask is 0, and otherwise
        as ``step_fn`` returns them.
    unit_aware
        Give gradients the unit of the loss over that of the parameter, as
        ``brainstate.transform.grad`` does with this option; without it they are in the
        parameter's own container, and the loss must have no unit.
    reset
        Booleans ``(T,)``, or ``(T, batch)`` to reset single samples along the batch axis of each
        state (a state without one is reset when all samples are): states and traces are
        reset before the steps where it is true, as for a separate sequence. States get the
        values of ``init_state``; nothing that was NaN before is seen after it.
    weights
        Parameters whose gradients are wanted, some of ``model.states(brainstate.ParamState)``
        as a dict; ``None``: all. The traces of all move on.
    progress, log_every, on_log
        See `etrace_online`. The sequence is then run in blocks, whose traces are all computed.

    Returns
    -------
    gradients, or ``(gradients, losses)``, ``(gradients, aux)``, ``(gradients, losses, aux)``
        Gradients are a dict keyed like ``model.states(brainstate.ParamState)``, or like
        ``weights``. Those of a `from_function` model are a pytree like its ``params``.

    Raises
    ------
    ShapeError
        For sequences that are empty, differ in length or do not fit the states.
    DtypeError
        For sequences, a mask or flags that are nothing that JAX computes with.
    OptionError
        For an option value that is not accepted, or a ``step_fn`` that does not call the
        learner exactly once, writes a parameter or a hidden state, or returns no scalar.
    """
    return _run(learner, "etrace_grad", sequences, options)


@overload
def etrace_online(
    learner: HasParts,
    *sequences: PyTree,
    has_aux: Literal[False] = False,
    **options: Unpack[WatchedStreamOptions],
) -> jax.Array: ...
@overload
def etrace_online(
    learner: HasParts,
    *sequences: PyTree,
    has_aux: Literal[True],
    **options: Unpack[WatchedStreamOptions],
) -> tuple[jax.Array, PyTree]: ...
@overload
def etrace_online(
    learner: HasParts,
    *sequences: PyTree,
    has_aux: bool = ...,
    **options: Unpack[WatchedStreamOptions],
) -> PyTree: ...


@one_thread_at_a_time
@on_automatic_axes
@takes(WATCHED["etrace_online"])
def etrace_online(learner: HasParts, *sequences: PyTree, **options: Any) -> PyTree:
    """Learn at every step of a stream: its gradient, an update, then the next step.

    Parameters
    ----------
    *sequences
        Pytrees of arrays ``(T, …)``; ``step_fn`` gets the slices of one step.
    step_fn
        As for `etrace_grad`. It does not write parameters.
    optimizer
        An ``optax.GradientTransformation``, whose state the learner holds (`optimizer_state`), or
        an object whose method ``update(gradients)`` changes parameters, as brainstate's optimizers
        have it. It goes on from call to call. Gradients are in the units of their parameters for
        it, and those of complex parameters conjugated: it goes downhill. Give it or ``update_fn``.
    update_fn
        Called after every step with the gradient of its loss, keyed like
        ``model.states(brainstate.ParamState)``, and with ``has_aux`` with the auxiliary
        results as well. It writes the parameters, and whatever States it keeps for that; its result
        is not used. It is traced once, like ``step_fn``. Create the States that they use before
        the first call. `reset_state` in it, of all samples or with ``where`` of some, starts a new
        sequence with the next step, as ``reset`` does; it does not write hidden states or traces
        itself.
    every
        Number of steps for one update, by the mean of their losses. Parameters hold still for as
        many, which are run as chunks (see `etrace_grad`); the last block of a call may be shorter.
        ``update_fn`` gets the auxiliary results of the block.
    window
        As for `etrace_grad`, from the first step of each block. It divides ``every``, so that no
        window spans an update. With ``every=1`` it can be 1.
    mask
        Weights ``(T,)`` of the steps' losses, as for `etrace_grad`, in the mean of each block.
        Where all steps of a block have weight 0, nothing is updated: neither parameters nor
        optimizer.
    nonfinite
        What is done where a loss or a gradient is NaN or infinite. ``'ignore'``: nothing.
        ``'skip'``: that update is left out and counted (`skipped_updates`), and samples whose
        states or traces are not finite start anew. ``'raise'``: the call changes nothing, and its
        error names step, loss and parameter. Every step is looked at, before its update, if and
        only if losses, parameters or optimizer are not finite after the call, which then begins
        once more: a gradient that the update makes finite, as ``optax.zero_nans`` does, is found
        in calls of one step and in functions of a `LearnerState` alone.
    has_aux
        Whether ``step_fn`` returns auxiliary results as well; they are stacked over time.
    unit_aware
        See `etrace_grad`.
    reset
        See `etrace_grad`.
    progress
        Show a bar with steps, their rate and the latest loss (tqdm, of the extra ``progress``).
    log_every, on_log
        Call ``on_log(step, metrics)`` after every ``log_every`` steps of the call, when the learner
        is where they have left it: it may be saved, tried out, or plotted. ``metrics`` has the
        means since the last call, of ``"loss"`` and with ``has_aux`` of ``"aux"``, and
        ``"steps_per_second"``.

    Returns
    -------
    losses, or ``(losses, aux)``
        The loss of every step, ``(T,)``, each before its update; 0 where the mask is 0.

    Raises
    ------
    ShapeError
        For sequences that are empty, differ in length or do not fit the states.
    OptionError
        For a ``step_fn`` that does not call the learner exactly once, writes a parameter or a
        hidden state, or returns no scalar, for an ``update_fn`` that calls the learner or writes
        hidden states or traces, for another ``optimizer`` than the one whose state the learner
        holds, and for a ``window`` that does not divide ``every``.
    NonFiniteError
        See ``nonfinite``. The learner is as it was before the call, or before its last block.
    Interrupted
        After Ctrl-C in a call with ``progress`` or ``log_every``, which ends with the next block.

    Notes
    -----
    The traces hold what older parameters have done, as in every online learner that has a
    memory. What lies between a parameter and its trace (the function of `element_wise`, the
    factors of `lora_matmul`, a mask) is differentiated at the parameters of the step.

    A stream that arrives step by step is given step by step, as sequences of length 1. The
    traces are then updated in place, which a loop of your own around the learner cannot do.

    Examples
    --------
    >>> import braintrace, jax.numpy as jnp, optax
    >>> model = braintrace.nn.IndRNN(2, 1)
    >>> learner = braintrace.compile(model, "d_rtrl", jnp.ones((1, 2)), batch_size=1)
    >>> xs, targets = jnp.ones((100, 1, 2)), 0.5 * jnp.ones((100, 1, 1))
    >>> losses = learner.etrace_online(
    ...     xs,
    ...     targets,
    ...     step_fn=lambda x, y: ((learner(x) - y) ** 2).mean(),
    ...     optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.03)),
    ... )
    >>> losses.shape
    (100,)

    The same with an update of your own:

    >>> import brainstate, jax
    >>> weights = model.states(brainstate.ParamState)
    >>> def descend(gradients):
    ...     for path, weight in weights.items():
    ...         step = jax.tree.map(lambda w, g: w - 0.1 * g, weight.value, gradients[path])
    ...         weight.value = step
    >>> losses = learner.etrace_online(
    ...     xs, targets, step_fn=lambda x, y: ((learner(x) - y) ** 2).mean(), update_fn=descend
    ... )
    """
    return _run(learner, "etrace_online", sequences, options)


@overload
def etrace_evolve(
    learner: HasParts,
    *sequences: PyTree,
    return_outputs: Literal[False],
    **options: Unpack[WatchedSequenceOptions],
) -> None: ...
@overload
def etrace_evolve(
    learner: HasParts,
    *sequences: PyTree,
    return_outputs: bool = ...,
    **options: Unpack[WatchedSequenceOptions],
) -> PyTree: ...


@one_thread_at_a_time
@on_automatic_axes
@takes(WATCHED["etrace_evolve"])
def etrace_evolve(learner: HasParts, *sequences: PyTree, **options: Any) -> PyTree:
    """Advance states and traces over a sequence without a loss.

    Parameters
    ----------
    *sequences
        One sequence ``(T, …)`` per argument of ``update``.
    chunk_size, memory_budget, reset
        See `etrace_grad`.
    return_outputs
        Whether the outputs are returned; without, they are not kept.
    progress, log_every, on_log
        See `etrace_online`; there is no loss to tell of.

    Returns
    -------
    pytree or None
        The outputs of the steps, stacked over time.

    Raises
    ------
    ShapeError
        For sequences that are empty, differ in length or do not fit the states.
    """
    return _run(learner, "etrace_evolve", sequences, options)


@one_thread_at_a_time
@on_automatic_axes
@takes(WATCHED["predict"])
def predict(
    learner: HasParts, *sequences: PyTree, **options: Unpack[WatchedPredictOptions]
) -> PyTree:
    """Run the model alone over a sequence: states move on, traces do not.

    Parameters
    ----------
    *sequences
        One sequence ``(T, …)`` per argument of ``update``.
    reset
        See `etrace_grad`.
    progress, log_every, on_log
        See `etrace_online`; there is no loss to tell of.

    Returns
    -------
    pytree
        The outputs of the steps, stacked over time.

    Raises
    ------
    ShapeError
        For sequences that are empty, differ in length or do not fit the states.
    """
    return _run(learner, "predict", sequences, options)


def _run(
    learner: HasParts, method: str, sequences: tuple[PyTree, ...], given: Mapping[str, Any]
) -> PyTree:
    parts, options = learner.parts, options_of(method, given, WATCHED)
    request = request_of(parts, method, sequences, options)
    if options.optimizer is None:
        return _run_request(parts, request)
    with parts.held_optimizer.begun(options.optimizer, parts.parameters_for_optimizer):
        return _run_request(parts, request)


def _run_request(learner: LearnerParts, request: Request) -> PyTree:
    if not request.options.is_logged:
        return run_whole(learner, request)
    return run_watched(learner, request, functools.partial(run_whole, learner))
