"""Learning at every step of a stream, compiled once per step function and shape.

A step is run on its own: its gradient comes from the traces after it, and the parameters may be
other ones before the next. Nothing is left for the end of the stream, so that it needs no end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import brainstate
import jax

from .._compiler import described, state_paths
from .._errors import OptionError
from .._executor import as_arrays, restart_traces
from .._function_model import gradients_for
from .._graph import Traces
from .._typing import PyTree, path_name
from .arguments import Options
from .body import Arguments, Body, Found, Request
from .pure_step import PureStep
from .recorder import Recorder, Restart, Values, first_written, run_online, values_of
from .restart import Initial, Restarts, initial_values, restart_states
from .step_function import (
    call_step_function,
    example_slices,
    no_loops_in_step_function,
)
from .units import split_loss, with_unit, with_units
from .update_function import call_update_function

if TYPE_CHECKING:
    from .learner import Learner


def learning_online(learner: Learner, request: Request, example: Arguments) -> Body:
    """Return a body that learns at every step.

    Raises
    ------
    OptionError
        If the algorithm differentiates windows of steps.
    """
    return OnlineLearning(learner, request, example).body


class OnlineLearning:
    """A stream of one learner, step function, update function and shape of slices.

    Parameters
    ----------
    learner, request
        The learner, and what its method is called with: the user's functions, the loss of a step,
        and what is done with its gradient.
    example
        Example arguments.

    Attributes
    ----------
    body
        What a driver runs.

    Raises
    ------
    OptionError
        If the algorithm differentiates windows of steps.
    """

    def __init__(self, learner: Learner, request: Request, example: Arguments) -> None:
        self._algorithm = learner.algorithm
        if self._algorithm.vjp_method == "multi-step":
            raise OptionError(
                "`etrace_online` differentiates single steps, and this algorithm was made with "
                "`vjp_method='multi-step'`. Make it with 'single-step', or use `etrace_grad`."
            )
        self._options = request.options
        self._parameters = self._algorithm.param_states
        sequences, _, (flags, initial) = example
        traces = jax.eval_shape(as_arrays, self._algorithm.starting_traces())
        slices = example_slices((sequences, flags))
        self._algorithm.prepare_requests()
        self._has_initial, self._asks = flags is not None, False
        step = self._learning(learner, **request.functions)
        with no_loops_in_step_function():
            self._step = PureStep(step, (), (traces, initial, slices))
            if self._asks and not self._has_initial:  # once more, with what samples start from
                self._has_initial = True
                initial = initial_values(self._algorithm, self._algorithm.states_of_model)
                self._step = PureStep(step, (), (traces, initial, slices))
        self._step.check_unused(self._algorithm.traces.carried)
        self.body = Body(
            run=self._stream,
            states=lambda of_model: self._step.others,
            written=self._step.written_of,
            results=self._results,
            reads_initial=self._asks,
        )

    def _results(self, found: tuple[PyTree, PyTree], options: Options) -> PyTree:
        losses, aux = found
        if options.unit_aware:
            losses = with_unit(losses, self._loss_unit)
        return (losses, aux) if options.has_aux else losses

    def _learning(
        self, learner: Learner, step_fn: Callable[..., PyTree], update_fn: Callable[..., PyTree]
    ) -> Callable[..., PyTree]:
        """Return one step as a function of traces, initial values of States, and slices."""
        algorithm, options = self._algorithm, self._options

        def step(traces: Traces, initial: Initial, inputs: tuple[PyTree, Restart]) -> PyTree:
            slices, restart = inputs
            if restart is not None:
                restart_states(algorithm, initial, restart)

            def loss_of_step() -> PyTree:
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
            given = gradients_for(algorithm.model, gradients)
            arguments = (given, *((aux,) if options.has_aux else ()))
            flags = call_update_function(learner, update_fn, arguments, after)
            self._asks = flags is not None
            if flags is not None and self._has_initial:
                restart_states(algorithm, initial, flags)
                after = restart_traces(algorithm.compiled.trace_specs, after, flags)
            return after, loss, aux

        return step

    def _check_not_written(self, before: Values) -> None:
        path = first_written(before, values_of(self._parameters))
        if path is not None:
            raise OptionError(
                f"`step_fn` writes the parameter '{path_name(path)}'. Change parameters in "
                "`update_fn`, which gets the gradient of the step."
            )

    def _check_kept(self, before: list[PyTree], after: list[PyTree]) -> None:
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

    def _stream(
        self,
        others: list[PyTree],
        traces: Traces,
        sequences: PyTree,
        mask: None,
        restarts: Restarts,
    ) -> Found:
        flags, initial = restarts

        def step(carry: PyTree, now: PyTree) -> PyTree:
            values = self._step.merge(others, carry[0])
            written, (after, loss, aux) = self._step((), values, carry[1], initial, now)
            self._check_kept(carry[0], written)
            return (written, after), (loss, aux)

        start = (self._step.written_of(others), traces)
        (written, after), (losses, aux) = jax.lax.scan(step, start, (sequences, flags))
        return (losses, aux), written, after
