"""Learning at every step of a stream, compiled once per step function and shape.

A step is run on its own: its gradient comes from the traces after it, and the parameters may be
other ones before the next. Nothing is left for the end of the stream, so that it needs no end.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import brainstate
import jax

from .._arguments import BOOLEAN, check_option
from .._compiler import described, state_paths
from .._errors import OptionError
from .._runtime import Program, Take, advance, all_states
from .._typing import path_name
from .pure_step import PureStep
from .recorder import Recorder, Values, first_written, run_online, values_of
from .restart import Initial, Restarts, initial_values, restart_states
from .step_function import (
    call_step_function,
    example_slices,
    no_loops_in_step_function,
    parameters_of,
)
from .units import split_loss, with_unit, with_units
from .update_function import call_update_function


@dataclasses.dataclass(frozen=True)
class OnlineOptions:
    """What a stream gives back.

    Attributes
    ----------
    has_aux
        Whether the step function returns auxiliary results.
    unit_aware
        Whether gradients have the unit of the loss over that of the parameter.
    """

    has_aux: bool
    unit_aware: bool

    def __post_init__(self) -> None:
        check_option("has_aux", self.has_aux, BOOLEAN)
        check_option("unit_aware", self.unit_aware, BOOLEAN)


class OnlineLearning:
    """A compiled stream of one learner, step function, update function and shape of slices.

    Parameters
    ----------
    learner
        The learner.
    step_fn, update_fn
        The user's functions: the loss of a step, and what is done with its gradient.
    options
        What is given back.
    sequences
        Example sequences.
    restarts
        Flags of every step, and the values that States start anew from; see `check_reset`.

    Raises
    ------
    OptionError
        If the algorithm differentiates windows of steps.
    """

    def __init__(
        self,
        learner: Any,
        step_fn: Callable[..., Any],
        update_fn: Callable[..., Any],
        options: OnlineOptions,
        sequences: Any,
        restarts: Restarts,
    ) -> None:
        self._algorithm = learner.algorithm
        if self._algorithm.vjp_method == "multi-step":
            raise OptionError(
                "`etrace_online` differentiates single steps, and this algorithm was made with "
                "`vjp_method='multi-step'`. Make it with 'single-step', or use `etrace_grad`."
            )
        self._options = options
        self._parameters = parameters_of(self._algorithm)
        flags, initial = restarts
        traces = jax.eval_shape(self._algorithm.zero_traces)
        slices = example_slices((sequences, flags))
        self._algorithm.prepare_requests()
        self._has_initial, self._asks = flags is not None, False
        step = self._learning(learner, step_fn, update_fn)
        with no_loops_in_step_function():
            self._step = PureStep(step, (), (traces, initial, slices))
            if self._asks and not self._has_initial:  # once more, with what samples start from
                self._has_initial, initial = True, self._initial_values()
                self._step = PureStep(step, (), (traces, initial, slices))
        self._step.check_unused(self._algorithm.traces)
        self._program = Program(self._stream, donated=1)

    def __call__(self, sequences: Any, restarts: Restarts) -> tuple[Any, Any]:
        """Return losses and auxiliary results of all steps; States and traces move on."""
        if self._asks and restarts[0] is None:
            restarts = None, self._initial_values()
        held = self._algorithm.traces
        others = [state.value for state in self._step.others]

        def run(take: Take) -> Any:
            traces, in_place = take()
            return self._program(others, traces, sequences, restarts, in_place=in_place)

        def store(results: Any) -> None:
            written, after, _, _ = results
            held.leave(lambda: after)
            self._step.write(written)

        can_fail = self._program.can_fail(lambda: (others, held.lend()[0], sequences, restarts))
        _, _, losses, aux = advance(held, can_fail, run, store)
        if self._options.unit_aware:
            losses = with_unit(losses, self._loss_unit)
        return losses, aux

    def _initial_values(self) -> Initial:
        return initial_values(self._algorithm, all_states(self._algorithm.model))

    def _learning(
        self, learner: Any, step_fn: Callable[..., Any], update_fn: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Return one step as a function of traces, initial values of States, and slices."""
        algorithm, options = self._algorithm, self._options

        def step(traces: Any, initial: Initial, inputs: tuple[Any, Any]) -> Any:
            slices, restart = inputs
            if restart is not None:
                restart_states(algorithm, initial, restart)

            def loss_of_step() -> Any:
                before = values_of(self._parameters)
                run = run_online(algorithm.graph, algorithm.method, traces, restart)
                recorder = Recorder(algorithm, run)
                loss, aux = call_step_function(learner, step_fn, recorder, slices, options.has_aux)
                self._check_not_written(before)
                mantissa, self._loss_unit = split_loss(loss, options.unit_aware)
                return mantissa, (aux, recorder.records)

            differentiate = brainstate.transform.grad(
                loss_of_step, self._parameters, has_aux=True, return_value=True
            )
            gradients, loss, (aux, after) = differentiate()
            if options.unit_aware:
                gradients = with_units(gradients, self._loss_unit)
            arguments = (gradients, *((aux,) if options.has_aux else ()))
            flags = call_update_function(learner, update_fn, arguments, after)
            self._asks = flags is not None
            if flags is not None and self._has_initial:
                restart_states(algorithm, initial, flags)
                after = algorithm.restarted_traces(after, flags)
            return after, loss, aux

        return step

    def _check_not_written(self, before: Values) -> None:
        path = first_written(before, values_of(self._parameters))
        if path is not None:
            raise OptionError(
                f"`step_fn` writes the parameter '{path_name(path)}'. Change parameters in "
                "`update_fn`, which gets the gradient of the step."
            )

    def _check_kept(self, before: list[Any], after: list[Any]) -> None:
        """Refuse States whose type the next step could not read."""
        states = self._step.written_of(self._step.others)
        paths = state_paths(self._algorithm.model)
        for state, old, new in zip(states, before, after, strict=True):
            if described(old) != described(new):
                name = path_name(paths.get(id(state), (type(state).__name__,)))
                raise OptionError(
                    f"A step changes State '{name}' from {described(old)} to {described(new)}. "
                    "What `step_fn` and `update_fn` write keeps shape, dtype and unit from step to "
                    "step: convert the new value (`.astype`, `.to`), or begin with such a one."
                )

    def _stream(self, others: list[Any], traces: Any, sequences: Any, restarts: Restarts) -> Any:
        flags, initial = restarts

        def step(carry: Any, now: Any) -> Any:
            values = self._step.merge(others, carry[0])
            written, (after, loss, aux) = self._step((), values, carry[1], initial, now)
            self._check_kept(carry[0], written)
            return (written, after), (loss, aux)

        start = (self._step.written_of(others), traces)
        (written, after), (losses, aux) = jax.lax.scan(step, start, (sequences, flags))
        return written, after, losses, aux
