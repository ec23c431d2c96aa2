"""The shell of a learner: reads States and traces once, runs one program, writes once.

If an interrupt ends a call after its program has run, the next call writes its results first; see
`CarriedTraces.unfinished`. Methods whose results are checked leave the old values in place until
the check has passed; all others reuse the buffers of the traces.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import brainstate
import jax

from .._brainstate import is_in_loop, is_watched, peek, values_of
from .._checks import common_length
from .._errors import ShapeError
from .._jax import for_devices, own_copy
from .._model import States
from .._typing import PyTree
from .arguments import MultiStepData, check_steps, is_sequence, unwrap
from .base import BaseLearner
from .evolve import evolving, predicting
from .gradient import SequenceGradient
from .optimizer import notice_earlier
from .online import OnlineLearning
from .options import Options, chosen_among, of_numbers, weights_of
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
    if options.weights is not None:
        chosen_among(learner.param_states, options.weights)
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
        step.find_states(states)
        with for_devices(None if step.placement is None else step.placement.devices):
            body = METHODS[method](learner, options.compiled, arguments)
        paths = {id(state): path for path, state in states.items()}
        placed = learner.traces.pairs, step.placement, paths
        return Program(body, *placed, step.followed, key)

    program = learner.programs.find(functions, update, (method, step.graph, rest), make)
    return program, arguments, steps


def run_method(
    learner: BaseLearner,
    method: str,
    sequences: tuple[PyTree, ...],
    options: Options,
    start: int = 0,
) -> PyTree:
    """Run a method of a learner; ``start`` is the index of its first step in the user's call."""
    notice_earlier(learner.held_optimizer)
    if options.window is not None:
        learner.follow_every_state(options.window)
    states = learner.current_states()

    def initial() -> Initial:
        return list(learner.initial_values(states).values())

    program, arguments, steps = find_program(learner, method, sequences, options, states, initial)
    body = program.body
    own = body.states, program.written
    results, verdict = advance(learner, states, program, arguments, *own, steps)
    if body.notice is not None:
        body.notice(verdict, start)
    return shown(learner, body, results, options)


def shown(learner: BaseLearner, body: Body, results: PyTree, options: Options) -> PyTree:
    """Return the results of a method for the user: gradients by path."""
    if not body.parameters:
        return results
    gradients, losses, aux = results
    by_path = dict(zip(body.parameters, gradients, strict=True))
    if options.weights is None:
        given = by_path if body.as_params is None else body.as_params(by_path)
    else:
        chosen = chosen_among(learner.param_states, options.weights)
        given = {key: by_path[path] for key, path in chosen.items()}
    extra = ((losses,) if options.return_value else ()) + ((aux,) if options.has_aux else ())
    return (given, *extra) if extra else given


def run_call(learner: BaseLearner, arguments: tuple[Any, ...]) -> PyTree:
    """Run one step, or the steps of `MultiStepData`, and return the output of ``update``."""
    states = learner.current_states()
    program, data = program_of_call(learner, states, arguments)
    found = list(learner.compiled.find_states(states).values())
    written = program.body.written(found)
    return advance(learner, states, program, data, found, written)[0]


def program_of_call(
    learner: BaseLearner, states: States, arguments: tuple[Any, ...]
) -> tuple[Program, Arguments]:
    """Return the program of a call, and the data of its arguments.

    Raises
    ------
    ShapeError
        If only some of the arguments are sequences, or their lengths differ.
    """
    has_steps, has_window = is_sequence(arguments), learner.window is not None
    if has_steps:
        if not all(isinstance(argument, MultiStepData) for argument in arguments):
            raise ShapeError(
                "Some arguments are `MultiStepData` and some are not. Wrap all of them: every "
                "argument needs a leading time axis."
            )
        check_steps(arguments)
    names = {(0, 0): "step", (1, 0): "steps", (0, 1): "one", (1, 1): "window"}
    learner.compiled.find_states(states)
    program = learner.compiled.program(names[has_steps, has_window])
    return program, Arguments(jax.tree.map(own_copy, unwrap(arguments)))


def advance(
    learner: BaseLearner,
    of_model: States,
    program: Program,
    arguments: Arguments,
    states: Sequence[brainstate.State],
    written: Sequence[brainstate.State],
    steps: int = 1,
) -> tuple[PyTree, PyTree]:
    """Run a program on States and the learner's traces, and return its results and verdicts.

    Raises
    ------
    LostTracesError
        If other code has written hidden states that the traces follow.
    """
    carried, body, is_outside = learner.traces.carried, program.body, not is_watched()
    followed = tuple(map(of_model.__getitem__, program.followed))
    if is_outside:
        if carried.unfinished is not None:
            carried.finish()
        carried.check(followed, program.followed)
    values, done = values_of(states), list[BodyResult]()
    traces, is_owned = carried.given(body.reads, is_outside)

    def finish() -> None:
        if done:
            _, new, after = program.changes(done[0], traces)
            carried.advance(followed, written, new, after, is_outside)

    if is_outside and body.check is None:
        carried.__dict__["unfinished"] = finish
    is_owned = is_owned and is_outside and body.check is None
    call = values, traces, arguments, steps
    program(*call, is_owned=is_owned, defers=is_outside or not is_in_loop(), done=done)
    if body.check is not None:
        body.check(done[0][0][1])
    if is_outside:
        carried.__dict__["unfinished"] = finish
        carried.finish()
    else:
        finish()
    results: tuple[PyTree, PyTree] = done[0][0]
    return results
