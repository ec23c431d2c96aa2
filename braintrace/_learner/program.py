"""Programs: methods of a learner as compiled functions of the values of States.

A learner and its functional form run the same programs. JAX compiles one for each form of the
traces. Here are single calls, and prediction; see `gradient` and `online` for programs with a loss.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import brainstate
import jax

from .._core import windows
from .._core.gradient import Inputs, as_chunk, operands
from .._core.step_program import scan_over_time, scan_records
from .._errors import OptionError
from .._graph.method import Chunk, Traces
from .._jax import Var
from .._jax_kernels import for_devices
from .._model import Values, leaves_by_var, whole_values
from .._typing import PyTree
from .arguments import Options, read_arguments
from .base import BaseLearner
from .carried import ZERO, Deferred, Jitted, Zero
from .chunks import Chunks, steps_of
from .user_step import PureStep, Recorder, example_slices


class Arguments(NamedTuple):
    """Arguments of a method.

    Attributes
    ----------
    sequences
        The user's sequences, time first; or the arguments of one step.
    mask, flags
        Weights of the losses, and flags of resets; ``None``: there are none.
    initial
        Values of the short-term States at the start of a sequence, for resets.
    """

    sequences: PyTree
    mask: jax.Array | None = None
    flags: jax.Array | None = None
    initial: Values | None = None


Result: TypeAlias = tuple[tuple[PyTree, PyTree], list[PyTree], Traces | Deferred | None]
"""Results and verdicts, new values of the written States, and traces; ``None``: they stay."""


class Program:
    """A method as a pure function `run` of values of States, traces and arguments.

    Attributes
    ----------
    states, is_written
        The States whose values it takes, and for each of them, whether it returns a new one.
    reads
        ``"zero"``: traces that are known to be zero are passed as ``None``. ``"nothing"``: it
        neither reads nor changes traces.
    batch_axis
        Axis of samples in the arguments.
    finish
        Returns traces from the sources of `Deferred`, and those before the call; ``None``: zeros.
    cuts
        The chunks of sequences by their length, and whether they start from zero traces.
    check, notice
        Called with the verdicts and the index of the first step: before anything is written, and
        after it.
    """

    reads: Literal["zero", "arrays", "nothing"] = "arrays"
    batch_axis = 1
    run: Callable[[list[PyTree], Any, Arguments], Result]
    finish: Callable[[Any, Traces | None], Traces]
    check: Callable[[PyTree, int], None] | None = None
    notice: Callable[[PyTree, int], None] | None = None

    def __init__(
        self, learner: BaseLearner, states: Sequence[brainstate.State], is_written: Sequence[bool]
    ) -> None:
        if any(state is learner.carried for state in states):
            raise OptionError(
                "`step_fn` or `update_fn` reads or writes the State of the traces, which is not "
                "available during a call. To start a new sequence, use `reset`."
            )
        self.states, self.is_written = states, is_written
        self.written = list(itertools.compress(states, is_written))
        self.followed, self.placement = learner.followed, learner.compiled.placement
        self.devices = learner.compiled.devices
        self.cuts: dict[tuple[int, bool], Chunks] = {}
        paths = {id(state): path for path, state in learner.states_of_step.items()}
        self.paths = [paths.get(id(state)) for state in states]

    def named(self, results: PyTree, options: Options) -> PyTree:
        """Return the results for the user: gradients by path, and names for several results."""
        return results

    def overwrites(self, steps: int, from_zero: bool) -> bool:
        """Test whether the buffers of the traces before a call are free after it."""
        return True

    def compile(self, key: Hashable) -> Program:
        """Compile when called; deferred traces of programs with equal keys have one type."""
        run: Any = functools.partial(self._placed)
        run.__name__ = type(self).__name__
        self.jitted, self._finish = Jitted(run), Jitted(self._finished, key)
        self.is_overwriting = functools.cache(self.overwrites)
        return self

    def __call__(
        self, values: list[PyTree], traces: Any, arguments: Arguments, in_place: bool, done: Any
    ) -> None:
        """Run on the first devices or on a mesh, and append the result."""
        if self.placement is not None:
            sequences, mask, flags = self.placement.by_sample(arguments[:3], self.batch_axis)
            arguments = Arguments(sequences, mask, flags, arguments.initial)
        self.jitted(values, traces, arguments, in_place=in_place, done=done)

    def changes(self, done: list[Any], traces: Traces | None) -> tuple[list[PyTree], Any]:
        """Return the new values, and the new traces in their form, given those before."""
        _, written, after = self.jitted.result(done)
        if isinstance(after, Deferred):
            after = Deferred(after.sources, ZERO if traces is None else traces, self._finish)
        return written, after

    def _placed(self, values: list[PyTree], traces: Traces | None, arguments: Arguments) -> Result:
        """Run; the states before a call are constants in a user's own gradient."""
        if self.reads != "nothing":
            values = [
                jax.lax.stop_gradient(v) if isinstance(s, brainstate.ShortTermState) else v
                for s, v in zip(self.states, values, strict=True)
            ]
        with for_devices(self.devices):
            results, written, after = self.run(values, traces, arguments)
        return results, written, self._on_mesh(after)

    def _finished(self, sources: PyTree, before: Traces | Zero) -> Any:
        with for_devices(self.devices):
            after = self.finish(sources, None if isinstance(before, Zero) else before)
        return self._on_mesh(after)

    def _on_mesh(self, traces: Any) -> Any:
        if self.placement is None or traces is None or isinstance(traces, Deferred):
            return traces
        return self.placement.traces(traces)


# --- without a loss


class Call(Program):
    """One step, or the steps of a `MultiStepData`: each differentiated alone, or as one window."""

    def __init__(self, learner: BaseLearner, has_steps: bool) -> None:
        self._graph, self._method = learner.graph, learner.compiled.method
        self._by_path, self._traced = learner.states_of_step, learner.graph.traced
        is_written = [path in self._traced.written_paths for path in self._by_path]
        super().__init__(learner, list(self._by_path.values()), is_written)
        self._has_steps, self._has_window = has_steps, learner.window is not None
        self.batch_axis = int(has_steps)

    def run(self, values: list[PyTree], traces: Any, arguments: Arguments) -> Result:
        """Run the steps."""
        data = arguments.sequences if self._has_steps else as_chunk(arguments.sequences)
        first = leaves_by_var(self._graph, self._by_path, values)
        # The states before a step are constants: traces contain how they depend on parameters.
        first |= {var: jax.lax.stop_gradient(first[var]) for var in self._traced.written_vars}
        run = self._window if self._has_window else self._alone
        (last, traces), outputs = run(first, traces, data)
        if not self._has_steps:
            outputs = jax.tree.map(lambda leaf: leaf[0], outputs)
        by_var = dict(zip(self._traced.written_vars, last, strict=True))
        new = list(whole_values(self._graph, by_var).values())
        return (jax.tree.unflatten(self._traced.output_tree, outputs), None), new, traces

    def _alone(self, first: Inputs, traces: Any, sequences: PyTree) -> Any:
        def step(carry: tuple[list[Any], Any], slices: Any) -> Any:
            now = self._inputs(first, jax.lax.stop_gradient(carry[0]), slices)
            outputs, new, traces = windows.single_step(self._graph, self._method, now, carry[1])
            return (self._written(new), traces), outputs

        return scan_records(step, (self._written(first), traces), sequences, steps_of(sequences))

    def _window(self, first: Inputs, traces: Any, sequences: PyTree) -> Any:
        graph, method = self._graph, self._method
        weights = operands(graph, first)

        def step(written: list[Any], slices: Any) -> Any:
            outputs, new, records = windows.window_step(graph, self._inputs(first, written, slices))
            return self._written(new), (outputs, records)

        constants, before = jax.lax.stop_gradient((weights, traces))
        probes = windows.probes_of_entry(graph, method, weights, before)
        start = self._written(windows.before_window(graph, first, probes))
        last, (outputs, records) = scan_over_time(step, start, sequences)
        records = dataclasses.replace(jax.lax.stop_gradient(records), steps=steps_of(sequences))
        after = method.update(Chunk(graph, constants, records), before)
        return (last, after), outputs

    def _written(self, values: Mapping[Var, Any]) -> list[Any]:
        return [values[var] for var in self._traced.written_vars]

    def _inputs(self, first: Inputs, written: list[Any], slices: Any) -> dict[Var, Any]:
        new = zip(self._traced.written_vars, written, strict=True)
        return {**first, **dict(new), **read_arguments(self._graph, slices)}


class Prediction(Program):
    """The model, or the user's function, over a sequence; traces do not advance."""

    reads = "nothing"

    def __init__(self, learner: BaseLearner, options: Options, example: Arguments) -> None:
        def step(initial: Values, inputs: tuple[PyTree, Any]) -> PyTree:
            slices, reset = inputs
            if reset is not None:
                learner.reset_samples(initial, reset)
            recorder = Recorder(learner, lambda x: (*windows.plain_step(learner.graph, x), None))
            return recorder.run(options.step_fn, slices)

        slices = example_slices((example.sequences, example.flags))
        parameters = list(learner.param_states.values())
        self._step = PureStep(step, parameters, (example.initial, slices))
        super().__init__(learner, self._step.states, self._step.is_written)

    def run(self, values: list[PyTree], traces: Traces | None, arguments: Arguments) -> Result:
        """Run the steps."""
        step, initial = self._step, arguments.initial

        def one_step(written: list[PyTree], now: PyTree) -> PyTree:
            return step(step.merge(values, written), initial, now)

        data = arguments.sequences, arguments.flags
        written, outputs = jax.lax.scan(one_step, step.written_of(values), data)
        return (outputs, None), written, None
