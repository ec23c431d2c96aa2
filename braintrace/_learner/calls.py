"""Calls of a learner: each finds its program, reads States once, runs it, and writes once.

The methods run whole sequences, in which time is axis 0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from .. import _brainstate
from .._graph.report import SequenceRow
from .._graph.traced_model import checkpointed_bytes
from .._jax import own_copy
from .._jax_kernels import for_devices
from .._model import Values
from .._typing import PyTree
from .arguments import (
    STATIC,
    WRAPPERS,
    FunctionKey,
    MultiStepData,
    Options,
    check_flags,
    key_of,
    of_numbers,
    unwrap,
    weights_of,
)
from .base import BaseLearner
from .gradient import SequenceGradient
from .online import OnlineLearning, learn_in_slices
from .program import Arguments, Call, Prediction, Program


def etrace_grad(
    learner: BaseLearner,
    *sequences: PyTree,
    step_fn: Callable[..., PyTree],
    window: int | None = None,
    mask: ArrayLike | None = None,
    reduction: str = "mean",
    chunk_size: int | str | None = "auto",
    memory_budget: int | None = None,
    checkpoint: bool = False,
    has_aux: bool = False,
    return_value: bool = False,
    reset: ArrayLike | None = None,
) -> Any:
    """Return the gradient of a loss over a sequence, and advance states and traces.

    Parameters
    ----------
    *sequences
        Pytrees of arrays ``(T, …)``; ``step_fn`` receives the slices of one step.
    step_fn
        Calls this learner once and returns the scalar loss of the step (with ``has_aux``: a pair of
        the loss and a pytree). It is compiled once for its code, its defaults, its closed-over
        values, and the objects that global names in its code are bound to, so you can create a
        lambda in every call. Numbers, strings and flags are compared by value, all other objects by
        identity. Changes of attributes, and inside lists, dicts and arrays, have no effect: store
        such values in a State. A hidden State that it reads before the call carries its trace, so a
        penalty on the change of a state has its gradient. States of your own have no gradient from
        one step to the next (nor, with a ``window``, to the next window).
    window
        Number of steps that are differentiated in full. The gradient is backpropagation through
        time within each window, plus the rule's traces for the time before it. Windows start at the
        first step of the call, and the last one may be shorter. A reset within a window truncates
        the gradient of its samples, and steps of weight 0 count towards the length. `RTRL` is exact
        without windows and ignores it. ``None``: the window that the learner was compiled with, or
        none, which is the rule itself. ``window=1`` differs from the rule if units are coupled.
    mask
        Weights ``(T,)`` of the steps' losses; ``None``: all are 1. If all are 0, the gradient is 0.
        A step of weight 0 does not change the gradient, for any inputs: padding may be NaN, and so
        may the states and traces after it.
    reduction
        ``'mean'``: the weighted mean over the steps. ``'sum'``: the weighted sum.
    chunk_size
        Number of steps between two updates of the traces. It changes speed and memory, not the
        gradient. ``'auto'`` or ``None``: after a reset, the longest chunk within ``memory_budget``,
        since a single chunk for the whole sequence needs no trace; otherwise at most 128 steps.
        `report` shows it. With a ``window``, a chunk is the largest number of whole windows that
        fits, at least one; where traces are as small as filters, it is one window.
    memory_budget
        For ``chunk_size='auto'``: limit of the bytes that the steps of a chunk may record. The
        limit is never below one step, or below the size of the traces. Memory is constant in
        sequence length. ``None``: 1 GiB.
    checkpoint
        Compute the same gradient with memory that grows with ``sqrt(T)``, in parts of
        ``chunk_size`` steps, or of as many as need the least. `D_RTRL` runs each part a second
        time, as checkpointed backpropagation through time does, and forms no trace between them; at
        the next read of the traces the sequence runs once more. Other rules, and windows, update
        their traces after every part.
    has_aux
        Whether ``step_fn`` also returns auxiliary results; they are stacked over time.
    return_value
        Also return the losses of the steps, ``(T,)``: 0 where the mask is 0, and otherwise as
        ``step_fn`` returns them.
    reset
        Booleans ``(T,)``, or ``(T, batch)`` to reset single samples along the batch axis of each
        state (a state without a batch axis is reset if all samples are). States and traces are
        reset before the steps with True, as for a separate sequence. States get the values of
        ``init_state``; earlier NaN values have no effect after a reset.

    Returns
    -------
    gradients, or a named tuple
        With ``return_value`` or ``has_aux``, a named tuple of ``gradients``, ``losses`` and
        ``aux``, without those that are not requested. Gradients are a dict keyed like
        ``model.states(brainstate.ParamState)``, in the containers and units of the parameters. For
        a `from_function` model, they are a pytree like its ``params``.

    Raises
    ------
    ShapeError
        For sequences that are empty, differ in length or do not fit the states.
    DtypeError
        For sequences whose numbers the dtype of the example arguments cannot represent.
    OptionError
        For an option value that is not accepted, or a ``step_fn`` that does not call the learner
        exactly once, writes a parameter or a hidden state, or returns no scalar.
    """
    return run_method("etrace_grad", **locals())


def etrace_online(
    learner: BaseLearner,
    *sequences: PyTree,
    step_fn: Callable[..., PyTree],
    optimizer: Any = None,
    update_fn: Callable[..., PyTree] | None = None,
    every: int = 1,
    window: int | None = None,
    mask: ArrayLike | None = None,
    nonfinite: str = "skip",
    has_aux: bool = False,
    reset: ArrayLike | None = None,
    progress: bool = False,
    log_every: int | None = None,
    on_log: Callable[[int, dict[str, Any]], Any] | None = None,
) -> Any:
    """Learn online: compute the gradient of each step of a stream, and update the parameters.

    Parameters
    ----------
    *sequences
        Pytrees of arrays ``(T, …)``; ``step_fn`` receives the slices of one step.
    step_fn
        As for `etrace_grad`. It must not write parameters.
    optimizer
        An ``optax.GradientTransformation``, whose state the learner stores (`optimizer_state`) and
        continues from call to call. It receives gradients in the units of their parameters,
        conjugated for complex parameters, so that it descends. It does not receive the loss, so
        ``optax.lbfgs`` and ``optax.contrib.reduce_on_plateau`` are not possible. Pass either
        ``optimizer`` or ``update_fn``. If an optimizer keeps its own States, as in braintools,
        pass its method: ``update_fn=optimizer.update``.
    update_fn
        Called after every step with the gradient of its loss, keyed like
        ``model.states(brainstate.ParamState)``, and with ``has_aux`` also with the auxiliary
        results. It writes the parameters, and any States of its own; its result is ignored. It is
        traced once, like ``step_fn``. Create the States that both use before the first call. It
        is not called after steps of weight 0 or when an update is skipped. It must not write hidden
        states or traces.
    every
        Number of steps per update, which uses the mean of their losses. Parameters are constant for
        these steps, which run as chunks (see `etrace_grad`). The last block of a call may be
        shorter. ``update_fn`` receives the auxiliary results of the block.
    window
        As for `etrace_grad`, from the first step of each block: no window spans an update.
    mask
        Weights ``(T,)`` of the steps' losses, as for `etrace_grad`, in the mean of each block. If
        all steps of a block have weight 0, there is no update of parameters or optimizer.
    nonfinite
        Action for a NaN or infinite loss or gradient. ``'skip'``: the update is omitted and counted
        (`skipped_updates`), samples with non-finite states or traces are reset, and a
        `NonFiniteWarning` names the first step. A call of one step does not wait
        for its result: it warns in a later call, at the latest the eighth, or when
        `skipped_updates` is read. Inside a transformation, updates are counted without a warning.
        ``'raise'``: the call changes nothing, and its error names step and loss.
        ``'ignore'``: none. The gradient is checked before ``optimizer`` or ``update_fn`` receives
        it.
    has_aux
        Whether ``step_fn`` also returns auxiliary results; they are stacked over time.
    reset
        See `etrace_grad`.
    progress
        Show a progress bar with steps, their rate and the latest loss (needs tqdm).
    log_every, on_log
        Call ``on_log(step, metrics)`` after every ``log_every`` steps of the call. The learner is
        then in the state after these steps: you can save, evaluate or plot it. ``metrics`` contains
        the means since the last call, of ``"loss"`` and with ``has_aux`` of ``"aux"``, and
        ``"steps_per_second"``.

    Returns
    -------
    losses, or a named tuple
        The loss of every step before its update, ``(T,)``; 0 where the mask is 0. With ``has_aux``,
        a named tuple of ``losses`` and ``aux``.

    Raises
    ------
    ShapeError
        For sequences that are empty, differ in length or do not fit the states.
    OptionError
        For a ``step_fn`` that does not call the learner exactly once, writes a parameter or a
        hidden state, or returns no scalar; for an ``update_fn`` that calls the learner or writes
        hidden states or traces; and for another ``optimizer`` than the one whose state the learner
        has.
    NonFiniteError
        See ``nonfinite``. The learner is in the state before the call, or before its last block.

    Notes
    -----
    Online updates make traces stale: they contain derivatives with respect to earlier parameters,
    as in every online learner with a memory. Operations between a parameter and its trace (the
    function of `element_wise`, the factors of `lora_matmul`, a mask) are differentiated at the
    current parameters.

    If a stream arrives step by step, pass sequences of length 1. The traces are then updated in
    place, which is not possible in your own loop around the learner.

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

    The same with your own update:

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
    return run_method("etrace_online", **locals())


def etrace_evolve(
    learner: BaseLearner,
    *sequences: PyTree,
    chunk_size: int | str | None = "auto",
    memory_budget: int | None = None,
    reset: ArrayLike | None = None,
    return_outputs: bool = True,
) -> Any:
    """Advance states and traces over a sequence without a loss.

    Parameters
    ----------
    *sequences
        One sequence ``(T, …)`` per argument of ``update``.
    chunk_size, memory_budget, reset
        See `etrace_grad`.
    return_outputs
        Whether to return the outputs; otherwise they are not stored.

    Returns
    -------
    pytree or None
        The outputs of the steps, stacked over time. They have no derivative.

    Raises
    ------
    ShapeError
        For sequences that are empty, differ in length or do not fit the states.
    """
    return run_method("etrace_evolve", **locals())


def predict(
    learner: BaseLearner,
    *sequences: PyTree,
    step_fn: Callable[..., PyTree] | None = None,
    reset: ArrayLike | None = None,
) -> Any:
    """Run only the model over a sequence, which advances states but not traces.

    Parameters
    ----------
    *sequences
        One sequence ``(T, …)`` per argument of ``update``, or of ``step_fn``.
    step_fn
        Calls this learner once and returns any pytree of arrays, such as the output and a hidden
        state. It is compiled as in `etrace_grad`. ``None``: the output of ``update``.
    reset
        See `etrace_grad`.

    Returns
    -------
    pytree
        The outputs of the steps, or the results of ``step_fn``, stacked over time.

    Raises
    ------
    ShapeError
        For sequences that are empty, differ in length or do not fit the states.
    """
    return run_method("predict", **locals())


# --- the program of a call


METHODS: dict[str, Callable[[BaseLearner, Options, Arguments], Program]] = {
    "etrace_grad": SequenceGradient,
    "etrace_online": OnlineLearning,
    "etrace_evolve": functools.partial(SequenceGradient, evolves=True),
    "predict": Prediction,
}

NO_FUNCTION = key_of()

MOST_KEPT = 32
"""Maximum number of programs that a learner keeps. A program belongs to a step function with shapes
and options. Users call a few of them. Each contains executables of several megabytes and the
captured values of the function."""


def cached_program(
    learner: BaseLearner, kind: str, functions: FunctionKey, rest: Any, make: Callable[[], Program]
) -> Program:
    """Return the program for a kind of call, the key of its functions, and the rest of a key."""
    states = tuple(map(id, learner.current_states().values()))
    step, mesh = learner.compiled, jax.sharding.get_abstract_mesh()
    context = step.placement, mesh if mesh.manual_axes else None, states
    key: Hashable = (functions, *context, *rest, (kind, step.graph))
    if functions.reads_tracers:
        return make().compile(key)  # the enclosing transformation compiles it
    kept = learner.programs.value
    program = kept.pop(key, None) or make().compile(key)
    kept[key] = program  # the last key is the one used last
    if len(kept) > MOST_KEPT:
        del kept[next(iter(kept))]
    return program


def find_program(
    learner: BaseLearner,
    method: str,
    sequences: tuple[PyTree, ...],
    options: Options,
    initial: Callable[[], Values | None],
) -> tuple[Program, Arguments, int]:
    """Check the arguments of a method; return its program, its arguments, and the steps.

    ``initial`` returns the initial values of the States.
    """
    sequences, steps, types = of_numbers(sequences)
    mask, flags, fresh = options.mask, options.reset, None
    if mask is not None:
        mask = weights_of(mask, steps)
    if flags is not None:
        batch, fresh = learner.graph.batch, initial()
        flags = check_flags("reset", flags, batch, steps)
    arguments = Arguments(sequences, mask, flags, fresh)
    begun = None if options.optimizer is None else learner.held_optimizer.begun.value[1]
    flags_ndim = None if flags is None else flags.ndim
    rest = options[STATIC], begun, mask is not None, flags_ndim, *types

    def make() -> Program:
        with for_devices(learner.compiled.devices):
            return METHODS[method](learner, options, arguments)

    functions = key_of(options.step_fn, options.update_fn)
    return cached_program(learner, method, functions, rest, make), arguments, steps


def find_call(learner: BaseLearner, arguments: tuple[Any, ...]) -> tuple[Program, Arguments]:
    """Return the program of one step, or of the steps of `MultiStepData`, and its arguments."""
    wrapped = [each for each in arguments if isinstance(each, WRAPPERS)]
    has_steps = any(isinstance(each, MultiStepData) for each in wrapped)
    make = functools.partial(Call, learner, has_steps)
    program = cached_program(learner, "call", NO_FUNCTION, (has_steps,), make)
    return program, Arguments(jax.tree.map(own_copy, unwrap(arguments) if wrapped else arguments))


def rows_of(learner: BaseLearner) -> Iterator[SequenceRow]:
    """Yield the chunks that the methods have used for the compiled model."""
    for key, program in list(learner.programs.value.items()):
        for (steps, from_zero), cut in program.cuts.items():
            method, graph = key[-1]
            if graph is learner.graph:
                lengths = steps, from_zero, cut.length, cut.count
                rival = checkpointed_bytes(graph.traced.unfiltered or graph.traced, steps)
                yield SequenceRow(method, *lengths, cut.record_bytes, rival)


# --- on States


def run_method(
    method: str, learner: BaseLearner, sequences: tuple[PyTree, ...], start: int = 0, **given: Any
) -> PyTree:
    """Run a method of a learner; ``start`` is the index of its first step in the user's call."""
    options = Options(**given)
    if options.optimizer is not None:
        learner.held_optimizer.begin(options.optimizer, learner.parameters_for_optimizer)
    if options.progress or options.log_every is not None:
        run = functools.partial(run_method, method, learner)
        results = learn_in_slices(run, sequences, options)
        learner.held_optimizer.notice_all()
        return results
    if options.window is not None:
        learner.follow_every_state(options.window)
    call = learner, method, sequences, options, learner.initial_values
    program, arguments, steps = find_program(*call)
    results, verdict = advance(learner, program, arguments, steps, start)
    if program.notice is not None:
        program.notice(verdict, start)
    return program.named(results, options)


def advance(
    learner: BaseLearner, program: Program, arguments: Arguments, steps: int = 1, start: int = 0
) -> tuple[PyTree, PyTree]:
    """Run a program on its States and the learner's traces; return its results and verdicts.

    If an interrupt comes after the program has run, the next call writes what it has computed.
    """
    carried, is_outside = learner.carried, not _brainstate.is_watched()
    if is_outside:
        carried.begin(program.followed)
    values, done = _brainstate.values_of(program.states), list[Any]()
    traces = carried.given(program.reads, is_outside)

    def write() -> None:
        if done:
            changes = program.written, *program.changes(done, traces)
            carried.advance(program.followed.values(), *changes, is_outside)

    is_certain = is_outside and program.check is None  # to be written once it has run
    if is_certain:
        carried.__dict__["unfinished"] = write
    in_place = is_certain and program.is_overwriting(steps, traces is None)
    if in_place and not carried.is_owned:  # a program that overwrites nothing would be a second one
        traces = jax.tree.map(jnp.copy, traces)
    program(values, traces, arguments, in_place=in_place, done=done)
    if program.check is not None:
        program.check(program.jitted.result(done)[0][1], start)
    carried.complete(write, is_outside)
    return done[1][0]
