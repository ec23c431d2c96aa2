"""Base class of the learning algorithms: a model, its compiled graph and its traces."""

import abc
import dataclasses
from typing import Any, ClassVar

import brainstate

from .._checks import check_model
from .._compiler import CompilerOptions, publish
from .._core.traces import as_arrays, outliving, pack, pairs_of, starting_traces
from .._errors import NotCompiledError, NotInitializedError, OptionError
from .._graph import FILTERS, ETraceGraph, TraceMethod, Traces
from .._rules import eligibility_of
from .._runtime.carried_traces import Zero
from .._runtime.compiled_model import (
    CompiledModel,
    compile_first,
    compile_step,
    current_step,
    learned_starts,
)
from .._runtime.compiled_step import CompiledStep
from .._runtime.initial_values import InitialFunction
from .._runtime.model_states import (
    FoundStates,
    States,
    of_kind,
    short_term,
    values_by_path,
    write_by_path,
)
from .._runtime.program import LearnerStore
from .._runtime.stepping import first_step, run_call
from .._runtime.traces import EligibilityTraces, start_of_filter
from .._typing import Path, path_name
from ..sharding import DataAxis, Placement
from .reset_state import reset_state


def init_etrace_state(self: Any) -> None:
    """Do nothing: `compile_graph` has allocated the traces.

    Raises
    ------
    NotCompiledError
        Before `compile_graph`.
    """
    self.compiled_model  # noqa: B018 - raises


def get_etrace_of(self: Any, weight: brainstate.State | str | Path) -> dict[str, Any]:
    """Return the trace of one weight by hidden state; see `Learner.eligibility`.

    Parameters
    ----------
    weight
        The parameter, its path or its name.

    Raises
    ------
    OptionError, ShapeError
        If a State is not a parameter of the model, and as in `Learner.eligibility`.
    """
    if isinstance(weight, brainstate.State):
        weight = _path_of(self.param_states, weight)
    found: dict[str, Any] = self.eligibility(weight)
    return found


def _path_of(parameters: dict[Path, brainstate.State], weight: brainstate.State) -> Path:
    for path, state in parameters.items():
        if state is weight:
            return path
    known = ", ".join(f"'{path_name(path)}'" for path in parameters)
    raise OptionError(
        f"`weight` is a {type(weight).__name__} that is not a parameter of the model. Its "
        f"parameters are {known}."
    )


class ETraceAlgorithm(brainstate.nn.Module, abc.ABC):
    """Base class of the online learning algorithms.

    Parameters
    ----------
    model
        A brainstate module with initialised states. Its ``update`` is one time step.
    window
        Number of steps of a window. The gradient is backpropagation through time within each
        window, and the traces contain the time before it; see `Learner.etrace_grad`. A call of the
        learner in your own ``grad`` is a window of one step, or of all steps of a `MultiStepData`.
        Traces then follow every hidden state. ``None``: the rule itself.
    strict
        Raise a `CompilationError` if a part of the gradient is truncated, instead of warning.
    unroll_limit
        Maximum length of a loop inside ``update`` that is unrolled. A loop is unrolled if it
        contains an ETP operation, or if it couples elements of a hidden state in addition to its
        elementwise operations.
    mark
        ``None``, ``'explicit'``, ``'auto'`` or a filter of parameters; see `compile_etrace_graph`.
    trace_dtype
        Floating-point dtype in which traces are stored between chunks or single steps;
        ``jnp.bfloat16`` halves their memory. ``None``: the model's dtype, which is also used to
        compute with them. In half precision, a step copies the traces of coupled states.
    name
        Name of the module, as for every brainstate module.

    Raises
    ------
    OptionError
        For an option value that is not accepted.

    Notes
    -----
    Call it inside your own ``brainstate.transform.grad``, ``jit``, ``for_loop`` or ``scan``. One
    ``grad`` around several calls computes the sum of the gradients of the calls.

    A subclass defines its `method`. `braintrace.compile` accepts its ``names``.
    """

    names: ClassVar[tuple[str, ...]] = ()
    told: ClassVar[tuple[str, ...]] = ()  # attributes that determine the traces
    readout_filters: bool = False

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
        self.model, self.trace_dtype = model, trace_dtype
        if window is not None and window < 1:
            raise OptionError(f"`window` is {window}; expected a positive number of steps.")
        self.window = window
        self.every_state = self.window is not None  # whether traces follow every hidden state
        self.compiler_options = CompilerOptions(strict=strict, unroll_limit=unroll_limit, mark=mark)
        self.samples_of_model: int | None = None
        self.filters: dict[str, brainstate.ShortTermState] = {}
        self._compiled: CompiledModel | None = None
        self.found_states = FoundStates()

    @property
    @abc.abstractmethod
    def method(self) -> TraceMethod:
        """The learning rule: how traces advance, and the gradient computed from them."""

    def window_of(self, requested: int | None = None) -> int | None:
        """Return the window of a call; a call's length overrides the learner's."""
        return self.window if requested is None else int(requested)

    @property
    def rule(self) -> str:
        """The rule as text, such as ``"SnAp(n=1)"``; equal text means compatible traces."""
        options = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.told)
        return type(self).__name__ + (f"({options})" if options else "")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self.model).__name__})"

    @property
    def graph(self) -> ETraceGraph:
        """The compiled model; raises `NotCompiledError` before `compile_graph`."""
        return self.compiled.graph

    @property
    def states_of_model(self) -> States:
        """All current States of the model and the filters of its readouts, by path."""
        found = self.found_states(self.model)
        if not self.filters:
            return found
        filters = self.compiled.graph.traced.filters
        return {**found, **{leaf.path: self.filters[leaf.name] for leaf in filters}}

    @property
    def param_states(self) -> dict[Path, brainstate.State]:
        """The parameters of the model by path; gradients have the same keys."""
        return of_kind(self.found_states(self.model), brainstate.ParamState)

    @property
    def hidden_states(self) -> dict[Path, brainstate.State]:
        """The hidden States of the model by path."""
        return of_kind(self.found_states(self.model), brainstate.HiddenState)

    @property
    def states_of_step(self) -> dict[Any, brainstate.State]:
        """The current States that one step reads or writes, by path."""
        return self.compiled.find_states(self.states_of_model)

    @property
    def short_term_states(self) -> dict[Path, brainstate.State]:
        """The States that are reset with each sequence, by path."""
        return short_term(self.states_of_model)

    def __getattr__(self, name: str) -> Any:
        if name == "traces":
            raise NotInitializedError(
                f"This {type(self).__name__} has no `traces` yet: call `compile_graph` with an "
                "example input first."
            )
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    @property
    def compiled(self) -> CompiledStep:
        """The compiled step for the current shapes of the States."""
        return (self._compiled or self.compiled_model).step

    @property
    def placement(self) -> Placement | None:
        """The placement of the arrays on a mesh; ``None``: no mesh."""
        return self.compiled.placement

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
    def is_compiled(self) -> bool:
        """Whether `compile_graph` has been called."""
        return self._compiled is not None

    def compile_graph(self, *arguments: Any, batch_size: int | None = None) -> None:
        """Analyse the model and allocate zero traces.

        Values that ``update`` reads from anything but its arguments and States (attributes of a
        module, ``brainstate.environ``) are fixed now, as with ``jax.jit``.

        Parameters
        ----------
        *arguments
            Example arguments of ``update`` (also as `SingleStepData` or `MultiStepData`).
        batch_size
            For a model written for one sample: size of the batch axis over which the model is
            mapped. This axis is the first axis of the arguments and states.

        Raises
        ------
        CompilationError, DtypeError
            See `compile_etrace_graph`.
        PrimitiveError
            If this algorithm's traces do not support one of the model's operations.
        """
        compiled = compile_first(self.model, self.analysed, first_step(arguments), batch_size)
        publish(learned_starts(compiled, self.model), self.compiler_options.strict)
        self._compiled = compiled
        self.begin_traces()

    def begin_traces(self) -> None:
        """Allocate the traces of the compiled model for the start of the first sequence."""
        self.traces = EligibilityTraces(Zero(), pairs_of(self.compiled.trace_specs))
        filters = self.compiled.graph.traced.filters
        fresh = {leaf.name: start_of_filter(leaf) for leaf in filters}
        self.filters = {name: brainstate.ShortTermState(zero) for name, zero in fresh.items()}
        self.leave_starting_traces()

    def divide(self, data: DataAxis) -> None:
        """Compile for a mesh; see `braintrace.shard`."""
        self._compiled = self.compiled_model.sharded(data)

    def place(self) -> None:
        """Move States and traces to their placement on the mesh, if there is one."""
        if self.placement is not None:
            self.place_states()
            self.traces.carried.convert(self.placement.traces)

    def place_states(self) -> None:
        """Move States to their placement on the mesh, if there is one."""
        if self.placement is not None:
            values = values_by_path(self.states_of_model).items()
            placed = {path: self.placement.value(path, value) for path, value in values}
            write_by_path(self.states_of_model, placed)
            self.traces.carried.left = ()  # the same values in other arrays

    def _as_arrays(self, traces: Traces) -> Traces:
        return as_arrays(traces) if self.placement is None else self.placement.traces(traces)

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
        step = (self.model, self.method, example, batch_size, options)
        compiled = compile_step(*step, self.trace_dtype)
        self.check_model(compiled.graph)
        return compiled

    def check_model(self, graph: ETraceGraph) -> None:
        """Check that the algorithm supports a model; if not, raise a `CompilationError`."""

    init_etrace_state = init_etrace_state
    get_etrace_of = get_etrace_of
    reset_state = reset_state

    def eligibility(self, path: str | Path) -> dict[str, Any]:
        """Return the trace of one weight by hidden state; see `Learner.eligibility`."""
        compiled = self.compiled
        return eligibility_of(compiled.graph, compiled.trace_specs, self.traces.value, path)

    def starting_traces(self) -> Traces:
        """Return the initial traces of a sequence; zero traces are represented by shapes."""
        return pack(starting_traces(self.compiled.trace_specs), self.traces.pairs)

    def zero_traces(self) -> Traces:
        """Return the initial traces of the first sequence."""
        return self._as_arrays(starting_traces(self.compiled.trace_specs))

    def traces_after_reset(self, before: Traces) -> Traces:
        """Return the initial traces of a sequence, given the traces of the sequence before.

        Each trace is a separate array, in the arguments and in the result.
        """
        going_on = {key: before[key] for key in outliving(self.compiled.trace_specs)}
        return {**self.zero_traces(), **going_on}

    def leave_starting_traces(self) -> None:
        """Set the traces to the initial traces of the first sequence."""
        carried = self.traces.carried
        carried.zeros = lambda: self._as_arrays(self.starting_traces())
        # With a random stream, traces are zero only once: a program for that would not pay.
        carried.store(carried.zeros() if outliving(self.compiled.trace_specs) else Zero())

    def update(self, *arguments: Any) -> Any:
        """Run one step (or the steps of a `MultiStepData`) and advance the traces.

        Returns
        -------
        pytree
            Output of the model's ``update``, stacked over time for `MultiStepData`.

        Raises
        ------
        NotCompiledError, ShapeError
            Before `compile_graph`, or for inputs or states of a different shape.
        """
        step, states = current_step(self)
        return run_call(step, states, self.store(states), arguments, self.window is not None)

    def store(self, states: States) -> LearnerStore:
        """Return the store that a call on current States reads and writes, given these by path."""
        followed = {path: states[path] for path in self.compiled.followed}
        return LearnerStore(self.traces.carried, followed)

    def initial_values(
        self, states: States, batch_size: int | None = None, /, **kwargs: Any
    ) -> dict[Path, Any]:
        """Return the initial values of the short-term States, by path.

        ``states`` are all States of the model. Options and errors are the same as in `reset_state`.
        """
        own = {path: state for path, state in states.items() if path[0] != FILTERS}
        size = self.samples_of_model
        fresh = self.compiled_model.initial_values(self.model, own, batch_size, kwargs, size)
        return {**fresh, **self._starting_filters}

    @property
    def _starting_filters(self) -> dict[Path, Any]:
        return {leaf.path: start_of_filter(leaf) for leaf in self.compiled.graph.traced.filters}

    def initial_function(self) -> tuple[tuple[brainstate.State, ...], InitialFunction]:
        """Return the States that `initial_values` depends on, and its pure function."""
        states, function = self.compiled_model.initial_function(self.model, self.samples_of_model)

        def with_filters(values: Any) -> Any:
            written, fresh = function(values)
            return written, {**fresh, **self._starting_filters}

        return states, with_filters if self.filters else function
