"""Base of a learner: a model, its compiled steps, its States, and its traces."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import brainstate
import jax
import jax.numpy as jnp
import numpy as np

from .. import _model
from .._brainstate import Hidden, hold, is_watched, undone
from .._checks import check_model, path_name
from .._compiler import CompilerOptions, compile_model
from .._core import traces as core_traces
from .._core.sites import flags_along
from .._ended import missing
from .._errors import NotCompiledError, NotInitializedError, OptionError, ShapeError
from .._from_function import gradients_for
from .._graph.graph import ETraceGraph
from .._graph.method import TraceMethod, Traces
from .._graph.report import ApproximationWarning
from .._jax import strongly_typed
from .._model import States, Values
from .._typing import Path, PyTree
from ..sharding import DataAxis, Placement, placement_of
from .arguments import example_arguments
from .carried import CarriedTraces, EligibilityTraces, Form, LearnerOptimizer, Zero


class Purpose(NamedTuple):
    """Shapes, settings and options that a step is compiled for."""

    shapes: _model.Shapes
    settings: frozenset[tuple[str, Any]]
    every_state: bool
    data: DataAxis | None = None


@dataclasses.dataclass(eq=False)
class CompiledStep:
    """A compiled model with its learning rule; ``outside`` are States that it does not have."""

    graph: ETraceGraph
    outside: States
    method: TraceMethod
    trace_dtype: Any
    purpose: Purpose

    def __post_init__(self) -> None:
        self.trace_specs = core_traces.stored_specs(self.graph.trace_specs, self.trace_dtype)
        self.pairs = core_traces.pairs_of(self.trace_specs)
        followed = {s.path for s in self.graph.traced_states if s.path not in self.outside}
        self.followed = tuple(sorted(followed, key=path_name)) if self.trace_specs else ()
        self.reset = jax.jit(functools.partial(core_traces.reset_traces, self.trace_specs))
        self.placement: Placement | None = None  # on a mesh
        if self.purpose.data is not None:
            self.placement = placement_of(self.graph, self.trace_specs, self.purpose.data)
        self.devices = None if self.placement is None else self.placement.devices

    def filter_starts(self) -> Values:
        """Return the initial values of the filters of leaky readouts, by path."""
        filters = self.graph.traced.filters  # `jnp.zeros` compiles for every shape
        return Values({f.path: jnp.asarray(np.zeros(f.shape, f.dtype)) for f in filters})

    @property
    def carried_types(self) -> tuple[PyTree, PyTree]:
        """Types of the traces and filters: steps with equal ones may continue each other."""
        specs = jax.tree.map(lambda s: (s.shape, str(s.dtype), s.axes, s.rule), self.trace_specs)
        return specs, {leaf.name: (leaf.shape, leaf.dtype) for leaf in self.graph.traced.filters}


class BaseLearner(brainstate.nn.Module):
    """Model, compiled steps, traces and programs of a learner."""

    names: ClassVar[tuple[str, ...]] = ()  # for `braintrace.compile`
    rule: str = ""  # as text; equal text means compatible traces
    method: TraceMethod
    compiled: CompiledStep  # for the current shapes of the States, and settings

    def __init__(
        self,
        model: brainstate.nn.Module,
        *,
        window: int | None = None,
        strict: bool = False,
        mark: Any = None,
        trace_dtype: Any = None,
    ) -> None:
        super().__init__()
        check_model(model)
        self.rule = self.rule or type(self).__name__
        self.module, self.trace_dtype, self.window = model, trace_dtype, window
        self.compiler_options = CompilerOptions(strict=strict, mark=mark, rule=type(self).__name__)
        self.filters: dict[Path, brainstate.ShortTermState] = {}
        self.found_states = _model.FoundStates()
        self.held_optimizer = LearnerOptimizer()
        self.programs: Hidden[dict[Any, Any]] = Hidden({})  # see `cached_program`
        self.steps: Hidden[dict[Purpose, CompiledStep]] = Hidden({})

    def window_of(self, requested: int | None = None) -> int | None:
        """Return the window of a call; a call's length overrides the learner's."""
        return self.window if requested is None else int(requested)

    def __getattr__(self, name: str) -> Any:
        if name in ("compiled", "graph"):
            raise NotCompiledError("Call `compile_graph` with an example input first.")
        if name in ("traces", "carried"):
            raise NotInitializedError("There are no traces yet: call `compile_graph` first.")
        raise missing("Learner", name)

    # --- the compiled model

    @property
    def graph(self) -> ETraceGraph:
        """The compiled model; ``print`` it for a table. Raises `NotCompiledError` before it is."""
        return self.compiled.graph

    def step_for(
        self, purpose: Purpose, batch_size: int | None = None, example: Any = None
    ) -> CompiledStep:
        """Return the model's step for a purpose, compiled once.

        ``None``: with the current batch size, or for arguments shaped as in the current step.
        """
        known = self.steps.value
        if purpose not in known:
            if example is None:
                example = example_arguments(self.graph, batch_size)
                batch_size = batch_size or self.graph.traced.batch_size
            options = dataclasses.replace(self.compiler_options, every_state=purpose.every_state)
            mapped = batch_size if self.is_mapped else None
            graph, outside = compile_model(self.module, example, mapped, options, self.method)
            fitted = graph, outside, self.method.fit(graph)
            known[purpose] = CompiledStep(*fitted, self.trace_dtype, purpose)
        return known[purpose]

    def step_at(self, values: Values, batch_size: int | None) -> CompiledStep:
        """Return the step compiled for the shapes of new values of States."""
        now, shapes = self.compiled.purpose, _model.shapes_of(values)
        purpose = now._replace(shapes=shapes, settings=_model.settings())
        if purpose in self.steps.value:
            return self.steps.value[purpose]
        with undone():
            _model.write_by_path(self.states_of_model, values)
            return self.step_for(purpose, None if shapes == now.shapes else batch_size)

    def use(self, step: CompiledStep) -> None:
        """Make a step the current one."""
        self.steps.value[step.purpose] = self.compiled = step

    def compile_first(self, example: tuple[Any, ...], batch_size: int | None) -> None:
        """Compile the model, with initialised States, for an example.

        ``batch_size`` is the size of the axis over which a model for one sample is mapped.
        """
        states = _model.of_kind(_model.all_states(self.module), brainstate.ShortTermState)
        self.is_mapped = batch_size is not None
        made_once = functools.partial(_model.Initialiser, self.module, self.is_mapped)
        self.initialiser = functools.cache(made_once)
        brainstate.random.DEFAULT.value  # noqa: B018  created here, outside of every trace
        for state in states.values():
            state.value = strongly_typed(state.value)
        values = self.initial(batch_size) if self.is_mapped else _model.values_by_path(states)
        shapes = _model.shapes_of(values)
        # A window's gradient passes coupled elements, and reaches states whose trace is not read.
        purpose = Purpose(shapes, _model.settings(), self.window is not None)
        self.steps = Hidden({})
        self.use(self.step_for(purpose, batch_size, example))
        _model.write_by_path(states, values)
        self.found_states, self.filters = _model.FoundStates(), {}
        self.carried = CarriedTraces(self.zero_traces, lambda: self.compiled.pairs)
        self.begin_sequence()

    def current_states(self) -> States:
        """Return all States of the model, compiled for the current settings of the environment.

        Raises
        ------
        NotCompiledError
            Before `compile_graph`.
        OptionError
            If the traces are others for the current settings.
        """
        settings = _model.settings()
        if settings != self.compiled.purpose.settings:
            self._switch(True, settings=settings)
        return self.states_of_model

    def follow_every_state(self, requested: int | None, is_given: bool = False) -> None:
        """Make traces follow every hidden state, if a call has a window.

        ``is_given`` tells that the user passes the traces. The learner's own are replaced if no
        sequence has started.
        """
        if self.window_of(requested) is not None and not self.compiled.purpose.every_state:
            with warnings.catch_warnings():  # the same as those of the first compilation
                warnings.simplefilter("ignore", ApproximationWarning)
                self._switch(is_given, every_state=True)

    def _switch(self, is_given: bool, **changes: Any) -> None:
        step = self.step_for(self.compiled.purpose._replace(**changes))
        is_other = step.carried_types != self.compiled.carried_types
        if is_other and (is_given or self.carried.given("zero") is not None):
            raise OptionError(
                "The current traces are not those that this `window`, or the current values of "
                "`brainstate.environ`, need. Compile with them: give `window` to `compile`, or "
                "call `compile_graph`."
            )
        self.use(step)
        if is_other:
            self.begin_sequence()
        self.place()

    def divide(self, data: DataAxis) -> None:
        """Compile for a mesh, and move the arrays there; see `braintrace.shard`."""
        purpose = self.compiled.purpose._replace(data=data)
        self.use(dataclasses.replace(self.compiled, purpose=purpose))
        self.place()

    def place(self) -> None:
        """Move the arrays to their placement on the mesh, if there is one."""
        placement = self.compiled.placement
        if placement is not None:
            values = _model.values_by_path(self.states_of_model).items()
            placed = {path: placement.value(path, value) for path, value in values}
            _model.write_by_path(self.states_of_model, placed)
            if (traces := self.carried.given("zero")) is not None:
                hold(self.carried, placement.traces(traces))
            self.carried.left = None  # the same values in other arrays
            optimizer = self.held_optimizer.transformed
            optimizer.value = placement.value(None, optimizer.value)

    # --- States

    @property
    def states_of_model(self) -> States:
        """All current States of the model and the filters of its readouts, by path."""
        return self.found_states(self.module, self.filters)

    @property
    def param_states(self) -> dict[Path, brainstate.State]:
        """The parameters of the model by path; gradients have the same keys."""
        return _model.of_kind(self.states_of_model, brainstate.ParamState)

    @property
    def hidden_states(self) -> dict[Path, brainstate.State]:
        """The hidden States of the model by path."""
        return _model.of_kind(self.states_of_model, brainstate.HiddenState)

    @property
    def short_term_states(self) -> dict[Path, brainstate.State]:
        """The States that are reset with each sequence, by path."""
        return _model.of_kind(self.states_of_model, brainstate.ShortTermState)

    @property
    def states_of_step(self) -> dict[Any, brainstate.State]:
        """The current States that one step reads or writes, by path."""
        return _model.find_states(self.graph, self.states_of_model, self.compiled.outside)

    @property
    def followed(self) -> States:
        """The hidden States that the traces follow, by path."""
        states = self.states_of_model
        return {path: states[path] for path in self.compiled.followed}

    def parameters_for_optimizer(self) -> PyTree:
        """Return the parameters in the structure of their gradients."""
        return gradients_for(self.module, _model.values_by_path(self.param_states))

    # --- initial values

    def size_of_init(self) -> int | None:
        """Return the argument of ``init_state`` that makes the compiled shapes."""
        known, shapes = self.graph.batch.samples, self.compiled.purpose.shapes
        samples = self.compiler_options.samples if known is None else known
        for size in [samples] if self.is_mapped else dict.fromkeys([samples, None]):
            with contextlib.suppress(TypeError):  # `init_state` wants a batch size
                if self.initialiser(size).shapes == shapes:
                    return size
        raise ShapeError(
            f"`{type(self.module).__name__}.init_state` does not create states of the compiled "
            f"shapes, {', '.join(map(str, shapes))}. Call `reset_state` with the batch size of "
            "your initialisation, inside the same maps."
        )

    def initial(self, batch_size: int | None) -> Values:
        """Return the initial values of the model's short-term States for a batch size."""
        if is_watched():
            return _model.fresh_values(self.module, self.is_mapped, batch_size)
        return self.initialiser(batch_size)()

    def initial_values(self) -> Values:
        """Return the initial values of all short-term States, for the compiled shapes."""
        return Values({**self.initial(self.size_of_init()), **self.compiled.filter_starts()})

    def reset_values(self, now: Mapping[Path, Any], initial: Values, flags: jax.Array) -> Values:
        """Return values of States in which some samples, or all, are at the start of a sequence."""

        def of_state(path: Path) -> Any:
            axes = iter(self.graph.batch.axes.get(path, itertools.repeat(None)))

            def of_leaf(old: jax.Array, new: jax.Array) -> jax.Array:
                mixed = jnp.where(flags_along(next(axes), flags, old.ndim), new, old)
                # Random keys have no `astype`.
                return mixed if mixed.dtype == old.dtype else mixed.astype(old.dtype)

            return jax.tree.map(of_leaf, now[path], initial[path])

        return Values({path: of_state(path) for path in initial})

    def reset_samples(self, initial: Values, flags: jax.Array) -> None:
        """Reset some samples of the model's States, or all, to initial values."""
        states = self.short_term_states
        now = _model.values_by_path(states)
        _model.write_by_path(states, self.reset_values(now, initial, flags))

    # --- traces

    @property
    def traces(self) -> EligibilityTraces:
        """The traces, by key."""
        return EligibilityTraces(self.carried)

    def starting_traces(self) -> Traces:
        """Return the initial traces of a sequence; zero traces are represented by shapes."""
        traces = core_traces.starting_traces(self.compiled.trace_specs)
        return core_traces.pack(traces, self.carried.pairs())

    def zero_traces(self) -> Traces:
        """Return the initial traces of the first sequence as arrays."""
        placement, traces = self.compiled.placement, self.starting_traces()
        return core_traces.as_arrays(traces) if placement is None else placement.traces(traces)

    def traces_at_start(self, before: Callable[[], Traces]) -> Form:
        """Return the traces at the start of a sequence, given those before it.

        Random streams continue. They are zero only once, for which a program would not pay.
        """
        streams = core_traces.outliving(self.compiled.trace_specs)
        if not streams:
            return Zero()
        now, zeros = core_traces.unpack(before()), core_traces.unpack(self.zero_traces())
        fresh = {**zeros, **{key: now[key] for key in streams if key in now}}
        return core_traces.pack(fresh, self.carried.pairs())

    def begin_sequence(self) -> None:
        """Set traces and filters to the start of a sequence."""
        starts = self.compiled.filter_starts()
        if starts.keys() != self.filters.keys():
            self.filters = {path: brainstate.ShortTermState(v) for path, v in starts.items()}
        _model.write_by_path(self.filters, starts)
        self.carried.store(self.traces_at_start(self.carried.given), not is_watched())
