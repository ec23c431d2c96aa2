"""Driver of sequences: checks the arguments, finds the compiled program, and runs it.

A driver runs a `Body`, a pure function

    (values of States, traces, sequences, mask, restarts) -> (results, written values, traces).

It reads the values of States and the traces of the algorithm, whose buffers it lends or donates,
and writes back the body's results. Gradients, streams, and sequences without a loss differ only in
their bodies.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TypeAlias

import brainstate
import jax

from .._algorithms import ETraceAlgorithm
from .._arguments import common_length
from .._brainstate import is_watched, kept_for_other_threads, values_of
from .._errors import OptionError
from .._executor import pack, unpack
from .._foreign import loops_in_words
from .._graph import Traces
from .._jax import for_devices
from .._runtime import (
    Program,
    States,
    Take,
    advance,
    check_companions,
    in_automatic_region,
    note_companions,
    traced_on_automatic_axes,
    write_values,
)
from .._runtime.changes import caught_up, own_changes
from .._runtime.old_states import entered
from .._typing import PyTree, path_name
from .arguments import length_of, shapes_of, weights_of
from .body import Arguments, Body, Unfinished, not_taken, run_to_the_end
from .chunks import Cuts
from .compilations import Features
from .options import Options
from .parts import LearnerParts
from .placed import Placing, placed_body
from .recorder import LOOPS
from .request import Request
from .requests import BODIES
from .restart import Initial, check_reset, initial_values
from .skips import notice_counted

Stored: TypeAlias = tuple[PyTree, list[PyTree], Callable[[], Traces] | None]
"""Results, new values of States, and a function that computes the new traces, if there are any."""


class Driver:
    """A body, compiled once per shape, that advances States and traces.

    Parameters
    ----------
    algorithm
        The algorithm, which has the traces.
    body
        The pure function.
    placing
        Placement of its values on a mesh; ``None``: no mesh.
    """

    def __init__(
        self, algorithm: ETraceAlgorithm, body: Body, placing: Placing | None = None
    ) -> None:
        if placing is not None:
            body = placed_body(body, placing, body.states(algorithm.states_of_model))
        self.body = body
        self._placing = placing
        self._algorithm = algorithm
        # Named after the body, as profilers and dumps of XLA show it.
        traced = functools.update_wrapper(functools.partial(self._traced), body.run)
        self._program = Program(traced, donated=1)
        self._finish = None if body.finish is None else Program(body.finish, donated=1)
        self._pure = Program(self._unpacked)

    @property
    def cuts(self) -> Cuts:
        """Chunks of the sequences so far."""
        return self.body.cuts

    def pure(
        self, values: list[PyTree], traces: Traces, arguments: Arguments
    ) -> tuple[PyTree, list[PyTree], Traces | None]:
        """Return results, new values of the written States, and traces (None: unchanged).

        Parameters
        ----------
        values
            Values of the States that the body takes.
        traces
            Traces in unpacked form; see `complex_packing`.
        arguments
            Arguments of the body.
        """
        states = self.body.states(self._algorithm.states_of_model)
        values, arguments = self._given(states, values, arguments)
        replaced = self.body.written(values), traces
        run = functools.partial(in_automatic_region, self._pure, replaced)
        try:
            results, written, after = run(values, traces, *arguments, steps=length_of(arguments[0]))
        except jax.errors.UnexpectedTracerError as error:
            raise OptionError(LOOPS) from error
        if self.body.check is not None:
            self.body.check(results)
        return results, written, after

    def _traced(self, *arguments: PyTree) -> PyTree:
        with own_changes(self._algorithm), loops_in_words():
            return self.body.run(*arguments)

    def _unpacked(
        self, values: list[PyTree], traces: Traces, *arguments: PyTree
    ) -> tuple[PyTree, list[PyTree], Traces | None]:
        before = pack(traces, self._algorithm.traces.pairs)
        algorithm = self._algorithm
        with own_changes(algorithm), traced_on_automatic_axes(algorithm), loops_in_words():
            results, written, after = run_to_the_end(self.body, values, before, *arguments)
        return results, written, None if after is None else unpack(after)

    def trace(
        self, values: list[PyTree], traces: Traces | None, arguments: Arguments, owned: bool
    ) -> jax.stages.Traced:
        """Return the program for values, which may be shapes.

        Parameters
        ----------
        values, traces, arguments
            See `pure`; ``None`` for traces that are known to be zero.
        owned
            Whether their buffers may be donated.
        """
        in_place = owned and self.body.replaces(arguments[0], traces)
        return self._program.trace(values, traces, *arguments, in_place=in_place)

    def __call__(
        self,
        of_model: States,
        arguments: Arguments,
        options: Options,
        start: int = 0,
    ) -> PyTree:
        """Run the driver, and return the user's results.

        Parameters
        ----------
        of_model
            The States of the model, by path.
        arguments, options
            Arguments of the body, and options of its results.
        start
            Index of the first step in the user's call.

        Raises
        ------
        LostTracesError
            If other code has written hidden states that the traces follow.
        """
        body, held = self.body, self._algorithm.traces.carried
        states = body.states(of_model)
        values, arguments = self._given(states, values_of(states), arguments)
        if is_watched():
            mark = self._algorithm.step_mark
            values, after = self.entered(values, arguments, mark.value)
            write_values([mark], [after])
        can_fail = False

        def run(take: Take) -> Stored:
            traces, owned = body.take(held, take)
            if self._placing is not None:
                traces = self._placing.traces(traces)
            in_place = owned and body.replaces(arguments[0], traces)
            found = self._program(values, traces, *arguments, in_place=in_place)
            results, written, after = found
            if body.check is not None:
                body.check(results)
            if isinstance(after, Unfinished):
                return results, written, self._finished(after, traces, owned, at_once=can_fail)
            return results, written, None if after is None else lambda: after

        def store(found: Stored) -> None:
            _, written, after = found
            write_values(body.written(states), written)
            if after is not None:
                held.leave(after)
            note_companions(held, of_model, followed, with_traces=after is not None)

        followed = self._algorithm.compiled.followed
        check_companions(held, of_model, followed)
        try:
            can_fail = self._can_fail(values, arguments)
            results, *_ = advance(held, can_fail, run, store)
        except jax.errors.UnexpectedTracerError as error:
            raise OptionError(LOOPS) from error
        if body.notice is not None:
            body.notice(results, start)
        return body.results(results, options)

    def _given(
        self, states: Sequence[brainstate.State], values: list[PyTree], arguments: Arguments
    ) -> tuple[list[PyTree], Arguments]:
        """Return the arguments of the program, placed on the mesh."""
        if self._placing is None:
            return values, arguments
        return self._placing.values(states, values), self._placing.arguments(arguments)

    def entered(
        self, values: list[PyTree], arguments: Arguments, mark: PyTree
    ) -> tuple[list[PyTree], PyTree]:
        """Return values of States as a user's gradient may differentiate them, and the mark.

        See `old_states.entered`. A prediction is differentiated unchanged.
        """
        if self.body.take is not_taken:
            return values, mark
        algorithm = self._algorithm
        names = {
            id(state): path_name(path)
            for path, state in algorithm.states_of_step.items()
            if not isinstance(state, brainstate.ParamState)
        }
        both = list(zip(self.body.states(algorithm.states_of_model), values, strict=True))
        old = {names[id(state)]: value for state, value in both if id(state) in names}
        others = [value for state, value in both if id(state) not in names]
        held, mark = entered(old, (others, arguments), mark, through_steps=False)
        return [held.get(names.get(id(state), ""), value) for state, value in both], mark

    def _can_fail(self, values: list[PyTree], arguments: Arguments) -> bool:
        """Test whether the traces must not be overwritten until the program has finished."""
        body, held = self.body, self._algorithm.traces.carried
        return body.check is not None or self._program.can_fail(
            lambda: (values, body.take(held, held.lend)[0], *arguments)
        )

    def lower(self, of_model: States, arguments: Arguments) -> jax.stages.Lowered:
        """Return the program of a call; see `__call__`."""
        body, held = self.body, self._algorithm.traces.carried
        states = body.states(of_model)
        values, arguments = self._given(states, values_of(states), arguments)
        can_fail = self._can_fail(values, arguments)
        traces, _ = body.take(held, held.lend)
        if self._placing is not None:
            traces = self._placing.traces(traces)
        owned = not can_fail and (traces is None or held.is_owned)
        return self.trace(values, traces, arguments, owned).lower()

    def _finished(
        self, found: Unfinished, before: Traces | None, owned: bool, at_once: bool
    ) -> Callable[[], Traces]:
        """Return a function that computes the traces at the next read, or returns computed ones."""
        assert self._finish is not None
        finish = self._finish
        if found.before is not None:
            before, owned = found.before, True
        is_double = jax.config.jax_enable_x64

        def later() -> Traces:
            with jax.enable_x64(is_double):  # the setting may differ at the read
                after: Traces = finish(found.sources, before, in_place=owned)
            return after

        if not at_once:
            return later
        after = jax.block_until_ready(finish(found.sources, before))
        return lambda: after


def prepared(
    learner: LearnerParts, request: Request, states: States, initial: Callable[[], Initial]
) -> tuple[Driver, Arguments]:
    """Check the arguments of a method, and return its driver and the driver's arguments.

    Parameters
    ----------
    learner, request
        The learner, and the call.
    states
        All States of the model, by path.
    initial
        Returns the initial values of its States.

    Raises
    ------
    ShapeError, DtypeError, OptionError
        For arguments that the method does not accept.
    NotCompiledError
        If the model reads a value of the environment that has changed.
    """
    algorithm, sequences, options = learner.algorithm, request.sequences, request.options
    algorithm.compiled.environment.check()
    avals = shapes_of(sequences)
    steps = common_length([aval.shape for aval in avals], "sequence")
    mask = options.mask
    mask = None if mask is None else weights_of(mask, steps, options.reduction)
    flags = check_reset(options.reset, learner.graph, states, steps)
    restarts = (flags, [] if flags is None else initial())
    arguments = (sequences, mask, restarts)
    mesh = jax.sharding.get_abstract_mesh()
    place = algorithm.placement
    features = Features(
        request.method, options.static, request.chosen, learner.graph, placement=place
    )
    functions = options.functions
    if functions:
        features = features._replace(
            has_mask=mask is not None,
            reset_axes=None if flags is None else flags.ndim,
            structure=jax.tree.structure(sequences),
            slices=tuple((aval.shape[1:], aval.dtype) for aval in avals),
            states=tuple(map(id, states.values())),
            mesh=mesh if mesh.manual_axes else None,
            forecasts=learner.held_forecasts.structure if request.method == "learn" else None,
        )

    def make() -> Driver:
        placing = learner.placing()
        with (
            kept_for_other_threads(learner.states()),
            for_devices(None if placing is None else placing.devices),
            own_changes(algorithm),
            traced_on_automatic_axes(algorithm),
            loops_in_words(),
        ):
            kept = Request(request.method, (), options.compiled, request.chosen)
            return Driver(algorithm, BODIES[request.method](learner, kept, arguments), placing)

    driver = learner.drivers.find(functions, features, steps, make)
    if driver.body.reads_initial and flags is None:
        arguments = (sequences, mask, (None, initial()))
    return driver, arguments


def run_whole(learner: LearnerParts, request: Request) -> PyTree:
    """Run a call of a method on the current learner."""
    notice_counted(learner.held_optimizer)
    states = _states_for(learner, request)
    driver, arguments = _prepared_as_it_is(learner, request, states)
    return driver(states, arguments, request.options, request.start)


def lower_whole(learner: LearnerParts, request: Request) -> jax.stages.Lowered:
    """Return the program that `run_whole` would run."""
    states = _states_for(learner, request)
    driver, arguments = _prepared_as_it_is(learner, request, states)
    return driver.lower(states, arguments)


def _states_for(learner: LearnerParts, request: Request) -> States:
    """Return all States of the model, which is recompiled for its current contents and the call."""
    algorithm = learner.algorithm
    algorithm.prepare_windows(request.options.window, algorithm.traces.carried.is_zero)
    return caught_up(algorithm)


def _prepared_as_it_is(
    learner: LearnerParts, request: Request, states: States
) -> tuple[Driver, Arguments]:
    initial = functools.partial(initial_values, learner.algorithm, states)
    return prepared(learner, request, states, initial)
