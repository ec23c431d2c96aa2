"""Driver of sequences: checks the arguments, finds the compiled program, and runs it.

A driver runs a `Body`, a pure function

    (values of States, traces, sequences, mask, resets) -> (results, written values, traces).

It reads the values of States and the traces of the learner, whose buffers it lends or donates,
and writes back the body's results. Gradients, streams, and sequences without a loss differ only in
their bodies.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import brainstate
import jax

from .._checks import common_length
from .._core.traces import pack, unpack
from .._graph import Traces
from .._jax import for_devices
from .._runtime.carried_traces import Deferred, Zero
from .._runtime.compiled_model import follow_every_state, up_to_date
from .._runtime.model_states import States
from .._runtime.program import Changes, LearnerStore, Program, Store, Take
from .._typing import PyTree
from .base import BaseLearner
from .body import Arguments, Body, DeferredTraces, Initial, not_taken, run_to_the_end
from .chunks import steps_of
from .compilations import DriverKey
from .evolve import evolving, predicting
from .gradient import SequenceGradient
from .nonfinite import notice_counted
from .online import OnlineLearning
from .options import Options, Request, flattened, weights_of
from .placed import Placing, placed_body
from .resets import check_reset, initial_values

BODIES: dict[str, Callable[[BaseLearner, Request, Arguments], Body]] = {
    "etrace_grad": lambda *call: SequenceGradient(*call).body,
    "etrace_online": lambda *call: OnlineLearning(*call).body,
    "etrace_evolve": evolving,
    "predict": predicting,
}
"""Constructors of the body of each method, from checked example arguments."""


class Driver:
    """A body, compiled once per shape, that advances States and traces.

    Parameters
    ----------
    learner
        The learner, which has the traces.
    body
        The pure function.
    placing
        Placement of its values on a mesh; ``None``: no mesh.
    key
        What drivers with the same program for deferred traces have in common.
    """

    def __init__(
        self, learner: BaseLearner, body: Body, placing: Placing | None, key: Hashable
    ) -> None:
        if placing is not None:
            body = placed_body(body, placing, body.states(learner.states_of_model))
        self.body = body
        self._placing = placing
        self._learner = learner
        self._whole = self._named(self._to_the_end)
        self._deferring = None if body.finish is None else self._named(self._traced)
        self._finish = None if body.finish is None else Program(self._finished, 1, key)

    def _named(self, function: Callable[..., PyTree]) -> Program:
        """Return a program that is named after the body, as profilers and dumps of XLA show it."""
        run = functools.update_wrapper(functools.partial(function), self.body.run)
        return Program(run, donated=1)

    def _traced(
        self, values: list[PyTree], traces: Traces | None, *arguments: PyTree
    ) -> tuple[PyTree, list[PyTree], Traces | DeferredTraces | None]:
        return self.body.run(self._with_constant_states(values), self._packed(traces), *arguments)

    def _packed(self, traces: Traces | None) -> Traces | None:
        pairs = self._learner.traces.pairs
        return pack(traces, pairs) if isinstance(traces, dict) else traces

    def _with_constant_states(self, values: list[PyTree]) -> list[PyTree]:
        """Hold the states before a call constant in a user's gradient, except for a prediction."""
        if self.body.take is not_taken:
            return values
        states = self.body.states(self._learner.states_of_model)
        return [
            jax.lax.stop_gradient(value) if isinstance(state, brainstate.ShortTermState) else value
            for state, value in zip(states, values, strict=True)
        ]

    def _to_the_end(
        self, values: list[PyTree], traces: Traces | None, *arguments: PyTree
    ) -> tuple[PyTree, list[PyTree], Traces | None]:
        """Run the body and compute deferred traces, in the form in which the traces are given."""
        before = self._packed(traces)
        values = self._with_constant_states(values)
        results, written, after = run_to_the_end(self.body, values, before, *arguments)
        after = after if before is traces or after is None else unpack(after)
        return results, written, after

    def _program(
        self, traces: Traces | None, arguments: Arguments, defers: bool
    ) -> tuple[Program, bool]:
        """Return the program of a call, and whether it can overwrite the traces.

        A single step that continues a sequence is followed by a next one, which reads the traces:
        two programs would take longer than one.
        """
        deferring = self._deferring if defers else None
        if deferring is None or (traces is not None and steps_of(arguments[0]) == 1):
            return self._whole, True
        return deferring, self.body.replaces(arguments[0], traces)

    def __call__(
        self,
        store: Store,
        of_model: States,
        arguments: Arguments,
        options: Options,
        start: int = 0,
    ) -> PyTree:
        """Run the driver, and return the user's results.

        Parameters
        ----------
        store
            The store of values and traces.
        of_model
            The States of the model, by path.
        arguments, options
            Arguments of the body, and options of its results.
        start
            Index of the first step in the user's call.
        """
        body = self.body
        states, placing = body.states(of_model), self._placing
        values = store.values(states)
        if placing is not None:
            values, arguments = placing.values(states, values), placing.arguments(arguments)
        defers = store.defers

        before: list[Any] = []

        def run(take: Take, done: list[Any]) -> None:
            traces, owned = body.take(store, take)
            if placing is not None:
                traces = placing.traces(traces)
            program, replaces = self._program(traces, arguments, defers)
            before[:] = [traces]
            program(values, traces, *arguments, in_place=owned and replaces, done=done)

        def settle(raw: Any) -> Changes:
            results, written, after = raw
            if body.check is not None:
                body.check(results)
            if isinstance(after, DeferredTraces):
                first = before[0] if after.before is None else after.before
                after = self._deferred(after.sources, Zero() if first is None else first)
            return results, written, after

        results = store.advance(body.written(states), run, settle, body.check is not None)
        if body.notice is not None and isinstance(store, LearnerStore):
            body.notice(results, start)
        return body.results(results, options)

    def _deferred(self, sources: PyTree, before: Traces | Zero) -> Deferred:
        assert self._finish is not None
        return Deferred(sources, before, self._finish, bool(jax.config.jax_enable_x64))

    def _finished(self, sources: PyTree, before: Traces | Zero) -> Traces:
        assert self.body.finish is not None
        return self.body.finish(sources, None if isinstance(before, Zero) else self._packed(before))


def prepared(
    learner: BaseLearner, request: Request, states: States, initial: Callable[[], Initial]
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
    """
    sequences, options = request.sequences, request.options
    compiled = learner.compiled
    leaves, tree = flattened(sequences)
    shapes = [leaf.shape for leaf in leaves]
    steps = common_length(shapes, "sequence")
    mask, flags, start = options.mask, options.reset, []
    if mask is not None:
        mask = weights_of(mask, steps)
    if flags is not None:
        flags, start = check_reset(flags, compiled.graph, states, steps), initial()
    arguments = (sequences, mask, (flags, start))
    functions = options.functions
    where = compiled.graph, compiled.placement
    if functions:
        mesh = jax.sharding.get_abstract_mesh()
        features = DriverKey(
            *(request.method, options.static, request.chosen, *where),
            has_mask=mask is not None,
            reset_axes=None if flags is None else flags.ndim,
            structure=tree,
            slices=tuple([s[1:] for s in shapes] + [leaf.dtype for leaf in leaves]),
            states=tuple(map(id, states.values())),
            mesh=mesh if mesh.manual_axes else None,
        )
    else:
        features = DriverKey(request.method, options.static, request.chosen, *where)

    make = functools.partial(_new_driver, learner, request, states, arguments)
    driver = learner.drivers.find(functions, features, make)
    return driver, arguments


def _new_driver(
    learner: BaseLearner, request: Request, states: States, arguments: Arguments, key: Hashable
) -> Driver:
    """Trace the body of a method, and return its driver."""
    placing = learner.placing
    with for_devices(None if placing is None else placing.devices):
        without_data = Request(request.method, (), request.options.compiled, request.chosen)
        body = BODIES[request.method](learner, without_data, arguments)
        return Driver(learner, body, placing, key)


def run_request(learner: BaseLearner, request: Request) -> PyTree:
    """Run a call of a method on the current learner."""
    notice_counted(learner.held_optimizer)
    follow_every_state(learner, request.options.window)
    states = up_to_date(learner)
    initial = functools.partial(initial_values, learner, states)
    driver, arguments = prepared(learner, request, states, initial)
    return driver(learner.store(states), states, arguments, request.options, request.start)
