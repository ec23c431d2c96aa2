"""The shell of a learner: reads States and traces once, runs one program, writes once.

If an interrupt ends a call after its program has run, the next call writes its results first; see
`CarriedTraces.unfinished`. Methods whose results are checked leave the old values in place until
the check has passed; all others reuse the buffers of the traces.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable
from typing import Any

import jax

from .._brainstate import is_in_loop, is_watched, peek, values_of
from .._checks import common_length
from .._from_function import gradients_for
from .._jax import for_devices, own_copy
from .._model import States
from .._typing import PyTree
from .arguments import is_sequence, unwrap
from .base import BaseLearner
from .calls import calling
from .evolve import evolving, predicting
from .gradient import SequenceGradient
from .online import OnlineLearning
from .optimizer import notice_earlier
from .options import Options, of_numbers, weights_of
from .program import Arguments, Body, BodyResult, Initial, Program
from .resets import check_reset

METHODS: dict[str, Callable[[BaseLearner, Options, Arguments], Body]] = {
    "etrace_grad": lambda *call: SequenceGradient(*call).body,
    "etrace_online": lambda *call: OnlineLearning(*call).body,
    "etrace_evolve": evolving,
    "predict": predicting,
}
"""Constructors of the body of each method, from example arguments."""

SHAPE, DTYPE = operator.attrgetter("shape"), operator.attrgetter("dtype")
WITHOUT_TIME = operator.itemgetter(slice(1, None))


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
        flags, fresh = check_reset(flags, step.graph, states, steps), initial()
    arguments = Arguments(sequences, mask, flags, fresh)
    mesh = jax.sharding.get_abstract_mesh()
    functions, update, static = options.parts()
    rest = (
        *(static, step.placement, mesh if mesh.manual_axes else None),
        *(mask is not None, None if flags is None else flags.ndim, tree),
        *(tuple(map(WITHOUT_TIME, shapes)), tuple(map(DTYPE, leaves))),
        tuple(map(id, states.values())),
    )

    def make(key: Hashable) -> Program:
        with for_devices(None if step.placement is None else step.placement.devices):
            body = METHODS[method](learner, options.compiled, arguments)
        return Program(body, step, states, key)

    program = learner.programs.find(functions, update, (method, step.graph, rest), make)
    return program, arguments, steps


def find_call(
    learner: BaseLearner, states: States, arguments: tuple[Any, ...]
) -> tuple[Program, Arguments]:
    """Return the program of one step, or of the steps of `MultiStepData`, and its arguments."""
    has_steps, step = is_sequence(arguments), learner.compiled
    kinds = ("step", "steps") if learner.window is None else ("one", "window")
    rest = step.placement, tuple(map(id, states.values()))
    program = learner.programs.find(
        (),
        None,
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
        notice_earlier(optimizer)
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
    if is_outside:
        carried.__dict__["unfinished"] = finish
        carried.finish()
    else:
        finish()
    results: tuple[PyTree, PyTree] = done[0][0]
    return results
