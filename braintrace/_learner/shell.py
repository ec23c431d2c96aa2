"""The shell of a learner: reads States and traces once, runs one program, writes once.

A program is a compiled body: JAX compiles one for each form of the traces. The learner and the
user's `LearnerState` run the same programs.

If an interrupt ends a call after its program has run, the next call writes its results first; see
`CarriedTraces.unfinished`. Methods whose results are checked leave the old values in place until
the check has passed; all others reuse the buffers of the traces.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

import brainstate
import jax

from .._brainstate import is_in_loop, is_watched, peek, values_of
from .._checks import common_length
from .._from_function import gradients_for
from .._graph import SequenceRow, Traces
from .._jax import own_copy
from .._jax_kernels import for_devices
from .._model import States
from .._typing import PyTree
from .arguments import Options, is_sequence, key_of, of_numbers, static_values, unwrap, weights_of
from .base import BaseLearner
from .body import Arguments, Body, BodyResult, Initial
from .calls import calling, evolving
from .chunks import checkpointed_bytes
from .compiled import CompiledStep
from .gradient import SequenceGradient
from .online import OnlineLearning
from .optimizer import notice
from .resets import check_flags
from .traces import Deferred, Jitted, Zero


class Program:
    """A compiled body.

    Parameters
    ----------
    body, step, states
        The body, the compiled step, and the States of the model by path.
    key
        What programs with the same deferred traces have in common.
    """

    def __init__(
        self, body: Body, step: CompiledStep, states: States, key: Hashable = None
    ) -> None:
        self.body, self._placement = body, step.placement
        self.written = list(itertools.compress(body.states, body.is_written))
        self.followed_paths = step.followed
        self.followed = [states[path] for path in step.followed]
        paths = {id(state): path for path, state in states.items()}
        self._paths = [paths.get(id(state)) for state in body.states]
        # Programs are named after the body, as profilers and dumps of XLA show them.
        both = (functools.partial(self._run, defers=defers) for defers in (False, True))
        wrapped = (functools.update_wrapper(run, body.run) for run in both)
        self._whole, self._deferring = map(Jitted, wrapped)
        self._finish = Jitted(self._finished, key)

    def __call__(
        self,
        values: list[PyTree],
        traces: Traces | None,
        arguments: Arguments,
        steps: int,
        *,
        is_owned: bool,
        defers: bool,
        done: list[Any],
    ) -> None:
        """Run it, and append its results, new values, and traces (``None``: they stay).

        ``is_owned`` allows it to donate the buffers of the traces, and ``defers`` to leave
        `Deferred`. A single step that continues a sequence is followed by a next one, which
        reads the traces: two programs would take longer than one.
        """
        body, mesh = self.body, self._placement
        if mesh is not None:
            values = list(map(mesh.value, self._paths, values))
            traces = None if traces is None else mesh.traces(traces)
            *given, initial = arguments
            sequences, mask, flags = mesh.by_sample(given, body.batch_axis)
            arguments = Arguments(sequences, mask, flags, initial)
        run = self._whole
        if body.finish is not None and defers and (traces is None or steps > 1):
            run, cut = self._deferring, body.cut
            has_loop = cut is not None and traces is not None and cut(steps, False).length < steps
            is_owned = is_owned and has_loop
        run(values, traces, arguments, in_place=is_owned, done=done)

    def changes(self, done: BodyResult, traces: Traces | None) -> tuple[PyTree, list[PyTree], Any]:
        """Return results, new values, and the new traces in their form."""
        results, written, after = done
        if isinstance(after, Deferred):
            before = traces if after.before is None else after.before
            before = Zero() if before is None else before
            after = dataclasses.replace(after, before=before, finish=self._finish)
        return results, written, after

    def _run(
        self, values: list[PyTree], traces: Traces | None, arguments: Arguments, defers: bool
    ) -> BodyResult:
        """Run the body; the states before a call are constants in a user's own gradient."""
        body, mesh = self.body, self._placement
        if body.reads != "nothing":
            is_short = [isinstance(state, brainstate.ShortTermState) for state in body.states]
            pairs = zip(is_short, values, strict=True)
            values = [jax.lax.stop_gradient(v) if short else v for short, v in pairs]
        with for_devices(None if mesh is None else mesh.devices):
            results, written, after = body.run(values, traces, arguments)
            after = after if defers else body.finished(after, traces)
        if mesh is None:
            return results, written, after
        paths = itertools.compress(self._paths, body.is_written)
        written = list(map(mesh.value, paths, written))
        if isinstance(after, Deferred):
            before: Any = after.before
            before = None if before is None else mesh.traces(before)
            return results, written, dataclasses.replace(after, before=before)
        return results, written, None if after is None else mesh.traces(after)

    def _finished(self, sources: PyTree, before: Traces | Zero) -> Traces:
        assert self.body.finish is not None
        mesh = self._placement
        with for_devices(None if mesh is None else mesh.devices):
            after = self.body.finish(sources, None if isinstance(before, Zero) else before)
        return after if mesh is None else mesh.traces(after)


# --- finding a program


METHODS: dict[str, Callable[[BaseLearner, Options, Arguments], Body]] = {
    "etrace_grad": lambda *call: SequenceGradient(*call).body,
    "etrace_online": lambda *call: OnlineLearning(*call).body,
    "etrace_evolve": evolving,
    "predict": functools.partial(evolving, advances=False),
}
"""Constructors of the body of each method, from example arguments."""

SHAPE, DTYPE = operator.attrgetter("shape"), operator.attrgetter("dtype")
WITHOUT_TIME = operator.itemgetter(slice(1, None))


MOST_KEPT = 32
"""Maximum number of programs that a learner keeps. A program belongs to a step function with shapes
and options. Users call a few of them. Each contains executables of several megabytes and the
captured values of the function."""


def cached_program(
    kept: dict[Any, Program],
    functions: Iterable[Callable[..., PyTree]],
    key: tuple[Any, ...],
    make: Callable[[Hashable], Program],
) -> Program:
    """Return the cached program for functions and a key, or make it with the whole key.

    A key begins with the method and the analysed model, and ends with the ids of the States.
    Programs of functions that read tracers of an enclosing transformation are not cached.
    """
    own, reads_tracers = list[Hashable](), False
    for function in functions:
        key_of_function, reads = key_of(function)
        own.append(key_of_function)
        reads_tracers = reads_tracers or reads
    whole = (*own, key)
    if reads_tracers:
        return make(whole)  # the enclosing transformation compiles it
    program = kept.pop(whole, None) or make(whole)
    kept[whole] = program  # the last key is the one used last
    if len(kept) > MOST_KEPT:
        del kept[next(iter(kept))]
    return program


def find_program(
    learner: BaseLearner,
    method: str,
    sequences: tuple[PyTree, ...],
    options: Options,
    states: States,
    initial: Callable[[], Initial],
) -> tuple[Program, Arguments, int]:
    """Check the arguments of a method; return its program, its arguments, and the steps.

    ``states`` are those of the model, and ``initial`` returns their initial values.
    """
    step = learner.compiled
    sequences, leaves, tree = of_numbers(sequences)
    shapes = list(map(SHAPE, leaves))
    steps = common_length(shapes, "sequence")
    mask, flags, fresh = options.mask, options.reset, []
    if mask is not None:
        mask = weights_of(mask, steps)
    if flags is not None:
        flags, fresh = check_flags("reset", flags, step.graph, states, steps), initial()
    arguments = Arguments(sequences, mask, flags, fresh)
    mesh = jax.sharding.get_abstract_mesh()
    functions = filter(None, (options.step_fn, options.update_fn))
    rest = (
        None if options.optimizer is None else learner.held_optimizer.begun.value[1],
        *(static_values(options), step.placement, mesh if mesh.manual_axes else None),
        *(mask is not None, None if flags is None else flags.ndim, tree),
        *(tuple(map(WITHOUT_TIME, shapes)), tuple(map(DTYPE, leaves))),
        tuple(map(id, states.values())),
    )

    def make(key: Hashable) -> Program:
        with for_devices(None if step.placement is None else step.placement.devices):
            body = METHODS[method](learner, options, arguments)
        return Program(body, step, states, key)

    program = cached_program(learner.programs.value, functions, (method, step.graph, rest), make)
    return program, arguments, steps


def find_call(
    learner: BaseLearner, states: States, arguments: tuple[Any, ...]
) -> tuple[Program, Arguments]:
    """Return the program of one step, or of the steps of `MultiStepData`, and its arguments."""
    has_steps, step = is_sequence(arguments), learner.compiled
    kinds = ("step", "steps") if learner.window is None else ("one", "window")
    rest = step.placement, tuple(map(id, states.values()))
    program = cached_program(
        learner.programs.value,
        (),
        (kinds[has_steps], step.graph, rest),
        lambda key: Program(calling(learner, kinds[has_steps]), step, states, key),
    )
    return program, Arguments(jax.tree.map(own_copy, unwrap(arguments)))


def run_method(
    learner: BaseLearner,
    method: str,
    sequences: tuple[PyTree, ...],
    options: Options,
    start: int = 0,
) -> PyTree:
    """Run a method of a learner; ``start`` is the index of its first step in the user's call."""
    optimizer = learner.held_optimizer
    if peek(optimizer.skipped) is not optimizer.noticed.value:
        notice(optimizer)
    if options.window is not None:
        learner.follow_every_state(options.window)
    states = learner.current_states()

    def initial() -> Initial:
        return list(learner.initial_values(states).values())

    program, arguments, steps = find_program(learner, method, sequences, options, states, initial)
    results, verdict = advance(learner, program, arguments, steps)
    if program.body.notice is not None:
        program.body.notice(verdict, start)
    return shown(learner, program.body, results, options)


def run_call(learner: BaseLearner, arguments: tuple[Any, ...]) -> PyTree:
    """Run one step, or the steps of `MultiStepData`, and return the output of ``update``."""
    program, data = find_call(learner, learner.current_states(), arguments)
    return advance(learner, program, data)[0]


def shown(learner: BaseLearner, body: Body, results: PyTree, options: Options) -> PyTree:
    """Return the results of a method for the user: gradients by path."""
    if not body.parameters:
        return results
    gradients, losses, aux = results
    by_path = dict(zip(body.parameters, gradients, strict=True))
    if options.weights is None:
        given = gradients_for(learner.module, by_path)
    else:
        paths = {id(state): path for path, state in learner.param_states.items()}
        given = {key: by_path[paths[id(state)]] for key, state in options.weights.items()}
    extra = ((losses,) if options.return_value else ()) + ((aux,) if options.has_aux else ())
    return (given, *extra) if extra else given


def advance(
    learner: BaseLearner, program: Program, arguments: Arguments, steps: int = 1
) -> tuple[PyTree, PyTree]:
    """Run a program on its States and the learner's traces; return its results and verdicts.

    Raises
    ------
    LostTracesError
        If other code has written hidden states that the traces follow.
    """
    carried, body, is_outside = learner.carried, program.body, not is_watched()
    if is_outside:
        carried.finish()
        carried.check(program.followed, program.followed_paths)
    values, done = values_of(body.states), list[BodyResult]()
    traces, is_owned = carried.given(body.reads, is_outside)

    def finish() -> None:
        if done:
            _, new, after = program.changes(done[0], traces)
            carried.advance(program.followed, program.written, new, after, is_outside)

    is_owned = is_owned and is_outside and body.check is None
    if is_outside and body.check is None:
        carried.__dict__["unfinished"] = finish
    defers = is_outside or not is_in_loop()
    program(values, traces, arguments, steps, is_owned=is_owned, defers=defers, done=done)
    if body.check is not None:
        body.check(done[0][0][1])
    carried.complete(finish, is_outside)
    results: tuple[PyTree, PyTree] = done[0][0]
    return results


def rows_of(learner: BaseLearner) -> Iterator[SequenceRow]:
    """Yield the chunks that the methods have used for the compiled model."""
    graph = learner.graph
    for (*_, key), program in list(learner.programs.value.items()):
        for (_, from_zero), cut in program.body.chunks_by_length.items():
            if key[1] is graph:
                lengths = cut.steps, from_zero, cut.length, cut.count
                of_rival = checkpointed_bytes(graph, cut.steps)
                yield SequenceRow(key[0], *lengths, cut.record_bytes, cut.budget, of_rival)
