"""The one driver of sequences: it checks what is given, finds what is compiled, and runs it.

What is run is a `Body`, a pure function

    (values of States, traces, sequences, mask, restarts) -> (results, written values, traces).

A `Driver` takes the values from States and the traces from the algorithm, whose buffers it lends or
gives away, and writes back what the body returns. Gradients, streams, and sequences without a loss
differ in their bodies alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import brainstate
import jax
from jax.typing import ArrayLike

from .._algorithms import ETraceAlgorithm
from .._arguments import common_length
from .._brainstate import kept_for_other_threads
from .._errors import OptionError
from .._executor import pack, unpack
from .._graph import Traces
from .._runtime import (
    CarriedTraces,
    Program,
    States,
    Take,
    advance,
    write_values,
)
from .._typing import PyTree
from .arguments import PLAIN, Options, shapes_of, weights_of
from .compilations import Features
from .restart import Initial, Restarts, check_reset
from .step_function import LOOPS

if TYPE_CHECKING:
    from .learner import Learner

Arguments: TypeAlias = tuple[PyTree, jax.Array | None, Restarts]
"""``(sequences, mask, restarts)``, as every body takes them."""


@dataclasses.dataclass(frozen=True)
class Request:
    """A call of one of a learner's methods.

    Attributes
    ----------
    method
        Its name.
    make
        Makes the body of such calls, given checked arguments as an example.
    sequences, options, functions, mask, reset
        What the user gives; see `Learner.etrace_grad`.
    """

    method: str
    make: Callable[[Learner, Request, Arguments], Body]
    sequences: tuple[PyTree, ...]
    options: Options = PLAIN
    functions: Mapping[str, Callable[..., PyTree]] = dataclasses.field(default_factory=dict)
    mask: ArrayLike | None = None
    reset: ArrayLike | None = None


@dataclasses.dataclass(frozen=True)
class Unfinished:
    """Traces after a sequence that are not computed unless somebody reads them.

    Attributes
    ----------
    sources
        What they are computed from.
    before
        The traces that they replace; ``None``: those from before the sequence.
    """

    sources: PyTree
    before: Traces | None


jax.tree_util.register_dataclass(Unfinished)

Found: TypeAlias = tuple[PyTree, list[PyTree], "Traces | Unfinished | None"]
"""What a body returns: results, new values of States, and traces, if it moves any."""

Stored: TypeAlias = tuple[PyTree, list[PyTree], Callable[[], Traces] | None]
"""The same, with a function that computes the traces."""


Given: TypeAlias = tuple[Traces | None, bool]
"""Traces that a body gets, and whether their buffers may be given away."""


def taken(held: CarriedTraces, take: Take) -> Given:
    """Return the traces, and whether their buffers may be given away."""
    return take()


def taken_unless_zero(held: CarriedTraces, take: Take) -> Given:
    """Return the same, and ``None`` for traces that are known to be zero."""
    return (None, True) if held.is_zero else take()


def not_taken(held: CarriedTraces, take: Take) -> Given:
    """Return no traces, for what moves none."""
    return None, False


@dataclasses.dataclass(frozen=True, eq=False)
class Body:
    """A pure function of values of States, and the States that these are of.

    Attributes
    ----------
    run
        ``(values, traces, sequences, mask, restarts) -> (results, written values, traces)``.
        Traces may be `Unfinished`, or None if none are moved.
    states
        Returns the States whose values it takes, given those of the model by path.
    written
        Returns of as many items those whose States are written.
    results
        Makes of results and options what the user gets.
    take
        How it gets the traces; see `taken`.
    replaces
        Tells for sequences whether it can write traces over those that it is given.
    finish
        ``(sources, before) -> traces`` of what is `Unfinished`.
    reads_initial
        Whether it reads the initial values of States also where no step has a flag.
    """

    run: Callable[..., Found]
    states: Callable[[States], Sequence[brainstate.State]]
    written: Callable[[Sequence[PyTree]], Sequence[PyTree]]
    results: Callable[[PyTree, Options], PyTree] = lambda found, options: found
    take: Callable[[CarriedTraces, Take], Given] = taken
    replaces: Callable[[PyTree], bool] = lambda sequences: True
    finish: Callable[[PyTree, Traces | None], Traces] | None = None
    reads_initial: bool = False


class Driver:
    """A body, compiled once per shape, that moves States and traces on.

    Parameters
    ----------
    algorithm
        The algorithm, whose traces they are.
    body
        What is run.
    """

    def __init__(self, algorithm: ETraceAlgorithm, body: Body) -> None:
        self.body = body
        self._algorithm = algorithm
        self._program = Program(body.run, donated=1)
        self._finish = None if body.finish is None else Program(body.finish, donated=1)
        self._pure = Program(self._unpacked)

    def pure(
        self, values: list[PyTree], traces: Traces, arguments: Arguments
    ) -> tuple[PyTree, list[PyTree], Traces | None]:
        """Return results, new values of the written States, and traces; None: as they are.

        Parameters
        ----------
        values
            Of the States that the body takes.
        traces
            Each an array of its own; see `complex_packing`.
        arguments
            What it is run on.
        """
        found: tuple[PyTree, list[PyTree], Traces | None] = self._pure(values, traces, *arguments)
        return found

    def _unpacked(
        self, values: list[PyTree], traces: Traces, *arguments: PyTree
    ) -> tuple[PyTree, list[PyTree], Traces | None]:
        before = pack(traces, self._algorithm.traces.pairs)
        results, written, after = self.body.run(values, before, *arguments)
        if isinstance(after, Unfinished):
            assert self.body.finish is not None
            before = before if after.before is None else after.before
            after = self.body.finish(after.sources, before)
        return results, written, None if after is None else unpack(after)

    def __call__(self, of_model: States, arguments: Arguments, options: Options) -> PyTree:
        """Run it on the States of the model, given by path, and return what the user gets."""
        body, held = self.body, self._algorithm.traces.carried
        states = body.states(of_model)
        values = [state.value for state in states]

        def run(take: Take) -> Stored:
            traces, owned = body.take(held, take)
            in_place = owned and body.replaces(arguments[0])
            found = self._program(values, traces, *arguments, in_place=in_place)
            results, written, after = found
            if isinstance(after, Unfinished):
                return results, written, self._finished(after, traces, owned, at_once=can_fail)
            return results, written, None if after is None else lambda: after

        def store(found: Stored) -> None:
            _, written, after = found
            write_values(body.written(states), written)
            if after is not None:
                held.leave(after)

        try:
            can_fail = self._program.can_fail(
                lambda: (values, body.take(held, held.lend)[0], *arguments)
            )
            results, *_ = advance(held, can_fail, run, store)
        except jax.errors.UnexpectedTracerError as error:
            raise OptionError(LOOPS) from error
        return body.results(results, options)

    def _finished(
        self, found: Unfinished, before: Traces | None, owned: bool, at_once: bool
    ) -> Callable[[], Traces]:
        """Return what computes the traces when somebody reads them, or has computed them."""
        assert self._finish is not None
        finish = self._finish
        if found.before is not None:
            before, owned = found.before, True
        if not at_once:
            return lambda: finish(found.sources, before, in_place=owned)
        after = jax.block_until_ready(finish(found.sources, before))
        return lambda: after


def prepared(
    learner: Learner, request: Request, states: States, initial: Callable[[], Initial]
) -> tuple[Driver, Arguments]:
    """Check what a method is called with, and return what runs it, and on what.

    Parameters
    ----------
    learner, request
        The learner, and what its method is called with.
    states
        All States of the model, by path.
    initial
        Returns the values that its States start anew from.

    Raises
    ------
    ShapeError, DtypeError, OptionError
        If it is called with something else than what it takes.
    NotCompiledError
        If the model reads a value of the environment that has changed.
    """
    algorithm, sequences = learner.algorithm, request.sequences
    algorithm.compiled.environment.check()
    avals = shapes_of(sequences)
    steps = common_length([aval.shape for aval in avals], "sequence")
    mask = request.mask
    mask = None if mask is None else weights_of(mask, steps, request.options.reduction)
    flags = check_reset(request.reset, states, steps)
    restarts = (flags, [] if flags is None else initial())
    arguments = (sequences, mask, restarts)
    features = Features(request.method, request.options, learner.graph)
    if request.functions:
        features = features._replace(
            has_mask=mask is not None,
            reset_axes=None if flags is None else flags.ndim,
            structure=jax.tree.structure(sequences),
            slices=tuple((aval.shape[1:], aval.dtype) for aval in avals),
            states=tuple(map(id, states.values())),
        )

    def make() -> Driver:
        with kept_for_other_threads(learner.states().values()):
            return Driver(algorithm, request.make(learner, request, arguments))

    driver = learner.drivers.find(request.functions, features, steps, make)
    if driver.body.reads_initial and flags is None:
        arguments = (sequences, mask, (None, initial()))
    return driver, arguments
