"""Base of a learner: a model, its compiled graph, and its traces."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import brainstate
import jax

from .._brainstate import Hidden, hold, is_watched
from .._checks import check_model
from .._compiler import CompilerOptions, compile_model
from .._core.traces import as_arrays, outliving, pack, starting_traces, unpack
from .._ended import missing
from .._errors import NotCompiledError, NotInitializedError, OptionError
from .._from_function import gradients_for
from .._graph import ETraceGraph, TraceMethod, Traces
from .._jax import strongly_typed
from .._model import (
    FoundStates,
    InitialFunction,
    Initialiser,
    InitialValues,
    States,
    all_states,
    find_states,
    of_kind,
    settings,
    shapes_of,
    short_term,
    values_by_path,
    write_by_path,
)
from .._typing import Path, PyTree
from ..sharding import DataAxis, Placement
from .arguments import example_arguments
from .compiled import CompiledModel, CompiledStep
from .optimizer import LearnerOptimizer
from .traces import CarriedTraces, EligibilityTraces, Zero, start_of_filter


class BaseLearner(brainstate.nn.Module):
    """What the methods of a `Learner` use: its model, compiled graph, traces and programs."""

    names: ClassVar[tuple[str, ...]] = ()  # for `braintrace.compile`
    told: ClassVar[tuple[str, ...]] = ()  # attributes that determine the traces
    told_rule: str | None = None
    readout_filters: bool = False
    method: TraceMethod

    def __init__(
        self,
        model: brainstate.nn.Module,
        *,
        window: int | None = None,
        strict: bool = False,
        unroll_limit: int = 32,
        mark: Any = None,
        trace_dtype: Any = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        check_model(model)
        if window is not None and window < 1:
            raise OptionError(f"`window` is {window}; expected a positive number of steps.")
        self.module, self.trace_dtype, self.window = model, trace_dtype, window
        self.every_state = window is not None  # whether traces follow every hidden state
        self.compiler_options = CompilerOptions(strict=strict, unroll_limit=unroll_limit, mark=mark)
        self.samples_of_model: int | None = None
        self.filters: dict[str, brainstate.ShortTermState] = {}
        self.filter_paths: list[Path] = []
        self._compiled: CompiledModel | None = None
        self.found_states = FoundStates()
        self.held_optimizer = LearnerOptimizer()
        self.programs: Hidden[dict[Any, Any]] = Hidden({})  # see `cached_program`

    def window_of(self, requested: int | None = None) -> int | None:
        """Return the window of a call; a call's length overrides the learner's."""
        return self.window if requested is None else int(requested)

    @property
    def rule(self) -> str:
        """The rule as text, such as ``"SnAp(n=1)"``; equal text means compatible traces."""
        options = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.told)
        return self.told_rule or type(self).__name__ + (f"({options})" if options else "")

    def __getattr__(self, name: str) -> Any:
        if name in ("traces", "carried"):
            raise NotInitializedError(
                f"This {type(self).__name__} has no `traces` yet: call `compile_graph` with an "
                "example input first."
            )
        raise missing("Learner", name)

    # --- the compiled model

    @property
    def graph(self) -> ETraceGraph:
        """The compiled model; ``print`` it for a table. Raises `NotCompiledError` before it is."""
        return self.compiled.graph

    @property
    def is_compiled(self) -> bool:
        """Whether the model has been compiled."""
        return self._compiled is not None

    @property
    def compiled_model(self) -> CompiledModel:
        """The model with all its compiled steps."""
        if self._compiled is None:
            raise NotCompiledError(
                f"Call `compile_graph` with an example input before using this "
                f"{type(self).__name__}."
            )
        return self._compiled

    @property
    def compiled(self) -> CompiledStep:
        """The compiled step for the current shapes of the States."""
        return (self._compiled or self.compiled_model).step

    # --- States

    @property
    def states_of_model(self) -> States:
        """All current States of the model and the filters of its readouts, by path."""
        return self.found_states(self.module, self.filters, self.filter_paths)

    @property
    def param_states(self) -> dict[Path, brainstate.State]:
        """The parameters of the model by path; gradients have the same keys."""
        return of_kind(self.states_of_model, brainstate.ParamState)

    @property
    def hidden_states(self) -> dict[Path, brainstate.State]:
        """The hidden States of the model by path."""
        return of_kind(self.states_of_model, brainstate.HiddenState)

    @property
    def states_of_step(self) -> dict[Any, brainstate.State]:
        """The current States that one step reads or writes, by path."""
        return find_states(self.graph, self.states_of_model, self.compiled.outside)

    @property
    def followed(self) -> list[brainstate.State]:
        """The hidden States that the traces follow."""
        states = self.states_of_model
        return [states[path] for path in self.compiled.followed]

    @property
    def short_term_states(self) -> dict[Path, brainstate.State]:
        """The States that are reset with each sequence, by path."""
        return short_term(self.states_of_model)

    # --- initial values

    def size_of_init(self) -> int | None:
        """Return the argument of ``init_state`` that makes the current shapes."""
        compiled, known = self.compiled_model, self.graph.batch.samples
        samples = self.samples_of_model if known is None else known
        shapes = shapes_of(values_by_path(short_term(all_states(self.module))))
        return compiled.initial.size_of(self.module, compiled.is_mapped, samples, shapes)

    def initialiser(self) -> Initialiser:
        """Return the compiled function of the initial values of the current shapes."""
        compiled = self.compiled_model
        size, is_mapped = self.size_of_init(), compiled.is_mapped
        return compiled.initial.initialiser(self.module, is_mapped, size)

    def initial_values(
        self, states: States, batch_size: int | None = None, /, **kwargs: Any
    ) -> dict[Path, Any]:
        """Return the initial values of short-term States among these, by path.

        Options and errors are the same as in `reset_state`.
        """
        compiled = self.compiled_model
        size = self.size_of_init() if batch_size is None else batch_size
        fresh = compiled.initial(self.module, compiled.is_mapped, size, kwargs)
        fresh |= self._filters_at_start()
        return {path: fresh[path] for path in short_term(states)}

    def initial_function(self) -> tuple[tuple[brainstate.State, ...], InitialFunction]:
        """Return the States that `initial_values` depends on, and its pure function."""
        made = self.initialiser()

        def with_filters(values: Any) -> Any:
            written, fresh = made.values(values)
            return written, {**fresh, **self._filters_at_start()}

        return made.states, with_filters

    def _filters_at_start(self) -> dict[Path, jax.Array]:
        return {leaf.path: start_of_filter(leaf) for leaf in self.graph.traced.filters}

    # --- compilation

    def analysed(self, example: tuple[Any, ...], batch_size: int | None) -> CompiledStep:
        """Return the model's step compiled for example arguments."""
        # A window's gradient passes coupled elements, and reaches states whose trace is not read.
        options = dataclasses.replace(
            self.compiler_options,
            every_state=self.every_state,
            rule=type(self).__name__,
            samples=self.samples_of_model,
            readout_filters=self.readout_filters,
        )
        graph, outside = compile_model(self.module, example, batch_size, options, self.method)
        return CompiledStep(graph, outside, self.method, self.trace_dtype)

    def _analysed_again(self) -> CompiledStep:
        """Return the step of the model as it is now, for the same shapes."""
        return self.analysed(example_arguments(self.graph), self.graph.traced.batch_size)

    def compile_first(self, example: tuple[Any, ...], batch_size: int | None) -> None:
        """Compile the model, with initialised States, for an example.

        ``batch_size`` is that of the batch axis over which a model for one sample is mapped.
        """
        states, initial = short_term(all_states(self.module)), InitialValues()
        brainstate.random.DEFAULT.value  # noqa: B018  created here, outside of every trace
        for state in states.values():
            state.value = strongly_typed(state.value)
        step, is_mapped = self.analysed(example, batch_size), batch_size is not None
        mapped = initial(self.module, True, batch_size, {}) if is_mapped else None
        shapes = shapes_of(values_by_path(states) if mapped is None else mapped)
        compiled = CompiledModel(step, shapes, settings(), is_mapped, initial)
        self._compiled = compiled.with_step(lambda: step)
        self.begin_traces()

    def move_to(self, values: Mapping[Path, Any], batch_size: int | None) -> None:
        """Write values to States, and compile the model for their shapes.

        If compilation fails, the States keep their values.
        """
        compiled, states, shapes = self.compiled_model, self.states_of_model, shapes_of(values)
        before = {path: states[path].value for path in values}

        def make() -> CompiledStep:
            if shapes == compiled.shapes:
                return self._analysed_again()
            example = example_arguments(self.graph, batch_size)
            return self.analysed(example, batch_size if compiled.is_mapped else None)

        try:
            write_by_path(states, values)
            moved = dataclasses.replace(compiled, shapes=shapes, settings=settings())
            self._compiled = moved.with_step(make)
        except BaseException:
            write_by_path(states, before)
            raise

    def current_states(self) -> States:
        """Return all States of the model, compiled for the current settings of the environment.

        Raises
        ------
        NotCompiledError
            Before `compile_graph`, and if the traces are others for the current settings.
        """
        compiled, now = self._compiled or self.compiled_model, settings()
        if now != compiled.settings:
            after = dataclasses.replace(compiled, settings=now).with_step(self._analysed_again)
            if after.step.carried_types != compiled.step.carried_types:
                raise NotCompiledError(
                    f"`{type(self.module).__name__}` has other traces for the current values of "
                    "`brainstate.environ`. Call `compile_graph`, which starts a new sequence."
                )
            self._compiled = after
            self.place()
        return self.states_of_model

    def follow_every_state(self, requested: int | None, is_given: bool = False) -> None:
        """Make traces follow every hidden state, if a call has a window, and compile if necessary.

        Parameters
        ----------
        requested
            The window of the call; ``None``: the learner's window, for which its traces follow
            every state.
        is_given
            Whether the user passes the traces. The learner's traces are replaced if no sequence has
            started.

        Raises
        ------
        OptionError
            If a sequence has started, and its traces omit a state.
        """
        if requested is None or self.every_state:
            return
        compiled = self.compiled_model
        is_alike = compiled.step.follows_every_state
        if not is_alike and (is_given or not self.carried.is_zero):
            raise OptionError(
                f"`window` is {requested}, but the current traces omit hidden states that a window "
                "needs. Give `window` to `compile`, or reset the learner before its first call "
                "with a `window`."
            )
        self.every_state = True
        if not is_alike:
            try:
                fresh = dataclasses.replace(compiled, known={})
                self._compiled = fresh.with_step(self._analysed_again)
            except BaseException:
                self.every_state = False
                raise
            self.begin_traces()

    # --- traces

    @property
    def traces(self) -> EligibilityTraces:
        """The traces, by key."""
        return EligibilityTraces(self.carried)

    def begin_traces(self) -> None:
        """Allocate the traces of the compiled model for the start of the first sequence."""

        def zeros() -> Traces:
            placed = as_arrays if self.placement is None else self.placement.traces
            return placed(self.starting_traces())

        self.carried = CarriedTraces(Zero(), zeros, self.compiled.pairs)
        leaves = self.graph.traced.filters
        self.filters = {
            leaf.name: brainstate.ShortTermState(start_of_filter(leaf)) for leaf in leaves
        }
        self.filter_paths = [leaf.path for leaf in leaves]
        self.leave_starting_traces()

    def starting_traces(self) -> Traces:
        """Return the initial traces of a sequence; zero traces are represented by shapes."""
        return pack(starting_traces(self.compiled.trace_specs), self.carried.pairs)

    def zero_traces(self) -> Traces:
        """Return the initial traces of the first sequence."""
        return unpack(self.carried.zeros())

    def traces_after_reset(self, before: Traces) -> Traces:
        """Return the initial traces of a sequence, given the traces of the sequence before.

        Each trace is a separate array, in the arguments and in the result.
        """
        going_on = {key: before[key] for key in outliving(self.compiled.trace_specs)}
        return {**self.zero_traces(), **going_on}

    def leave_starting_traces(self) -> None:
        """Set the traces to the initial traces of the first sequence."""
        # With a random stream, traces are zero only once: a program for that would not pay.
        has_stream = bool(outliving(self.compiled.trace_specs))
        form = self.carried.zeros() if has_stream else Zero()
        self.carried.store(form, not is_watched())

    # --- the mesh

    @property
    def placement(self) -> Placement | None:
        """The placement of the arrays on a mesh; ``None``: no mesh."""
        return self.compiled.placement

    def divide(self, data: DataAxis) -> None:
        """Compile for a mesh; see `braintrace.shard`."""
        compiled = self.compiled_model
        sharded = dataclasses.replace(compiled, known={}, data=data)
        self._compiled = sharded.with_step(lambda: compiled.step)

    def place(self) -> None:
        """Move the arrays to their placement on the mesh, if there is one."""
        if self.placement is not None:
            values = values_by_path(self.states_of_model).items()
            placed = {path: self.placement.value(path, value) for path, value in values}
            write_by_path(self.states_of_model, placed)
            if not self.carried.is_zero:
                hold(self.carried, self.placement.traces(self.carried.arrays()))
            self.carried.left = None  # the same values in other arrays
            for state in self.held_optimizer.states.values():
                state.value = self.placement.value(None, state.value)

    def parameters_for_optimizer(self) -> PyTree:
        """Return the parameters in the structure of their gradients."""
        states = self.param_states.items()
        return gradients_for(self.module, {path: state.value for path, state in states})
