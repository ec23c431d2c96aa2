"""The object that holds a model, its compiled graph and its eligibility traces."""

import abc
from collections.abc import Mapping
from typing import Any, ClassVar

import brainstate
import jax
import jax.numpy as jnp

from .._arguments import (
    BATCH_SIZE,
    BOOLEAN,
    FLOATING,
    MODEL,
    NOT_NEGATIVE,
    check_arrays,
    check_option,
    named,
    one_of,
)
from .._compiler import CompilerOptions
from .._errors import NotCompiledError, NotInitializedError, OptionError, ShapeError
from .._executor import as_arrays, pack, pairs_of, restart_traces, size_in_bytes, starting_traces
from .._foreign import in_words
from .._graph import ETraceGraph, TraceMethod, Traces
from .._interrupts import interruptible, uninterrupted
from .._jax import strongly_typed
from .._runtime.batch_axes import arguments_for_batch
from .._runtime.compiled_step import CompiledStep
from .._runtime.compiling import compile_step
from .._runtime.data import MultiStepData, check_steps, first_step, is_sequence, unwrap
from .._runtime.initial import InitialFunction, InitialValues, Shapes, shapes_of
from .._runtime.mesh import on_automatic_axes
from .._runtime.model_states import States, all_states, short_term
from .._runtime.program import Program, advance
from .._runtime.recent import Recent
from .._runtime.requests import RequestedRestarts
from .._runtime.restart import check_where, start_anew
from .._runtime.threads import lock_of, one_thread_at_a_time
from .._runtime.traces import EligibilityTraces
from .._typing import Path

MOST_SHAPES = 32
"""For how many shapes of its states a model is kept compiled: batches have a few sizes."""

VJP_METHODS = ("single-step", "multi-step")


class ETraceAlgorithm(brainstate.nn.Module, abc.ABC):
    """Base class of the online learning algorithms.

    Parameters
    ----------
    model
        A brainstate module with states initialised; its ``update`` is one time step.
    vjp_method
        ``'single-step'``: the derivative of each call goes back to the traces at once.
        ``'multi-step'``: it goes through all steps of a window (`MultiStepData`), recurrent
        mixing included, and then to the traces of the steps before. That is another
        estimate, closer to backpropagation through time the longer the window.
    strict
        Raise a `CompilationError` wherever a part of the gradient is cut, instead of warning.
    unroll_limit
        Longest loop inside ``update`` that is unrolled because it holds a marked operation, or
        because it mixes positions of a hidden state beside what it does position by position.
    trace_dtype
        Floating-point dtype in which traces are kept between chunks (between steps, for those
        called one by one), ``jnp.bfloat16`` for half the memory; ``None``: that of the model.
        What is computed with them is computed in the model's dtype. In half precision, a step
        copies the traces of coupled states, which it updates in place otherwise.

    Raises
    ------
    OptionError
        For an option value that is not accepted.

    Notes
    -----
    Call it inside your own ``brainstate.transform.grad``, ``jit``, ``for_loop`` or ``scan``.
    One ``grad`` around many calls gives the sum of the gradients of the calls.

    An algorithm is a class that gives its `method`, and whose ``names`` `braintrace.compile` takes.
    """

    names: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        model: brainstate.nn.Module,
        *,
        vjp_method: str = "single-step",
        strict: bool = False,
        unroll_limit: int = 32,
        trace_dtype: Any = None,
    ) -> None:
        super().__init__()
        check_option("model", model, MODEL)
        check_option("vjp_method", vjp_method, one_of(*VJP_METHODS))
        check_option("strict", strict, BOOLEAN)
        check_option("unroll_limit", unroll_limit, NOT_NEGATIVE)
        check_option("trace_dtype", trace_dtype, FLOATING.or_else(None))
        self.model = model
        self.vjp_method = vjp_method
        self.strict = strict
        self.unroll_limit = unroll_limit
        self.trace_dtype = trace_dtype
        self._compiled: CompiledStep | None = None
        self.requested_restarts = RequestedRestarts()

    @property
    @abc.abstractmethod
    def method(self) -> TraceMethod:
        """The learning rule: how traces are carried, and what gradient they give."""

    @property
    def graph(self) -> ETraceGraph:
        """The compiled model.

        Raises
        ------
        NotCompiledError
            Before `compile_graph`.
        """
        return self.compiled.graph

    @property
    def lock(self) -> Any:
        """What a thread holds while it runs or traces the model."""
        return lock_of(self.model)

    @property
    def states_of_step(self) -> dict[Any, brainstate.State]:
        """The States that one step touches, by path, as the model has them now."""
        return self.compiled.find_states(all_states(self.model))

    @property
    def short_term_states(self) -> dict[Path, brainstate.State]:
        """The States that start anew with a sequence, by path."""
        return short_term(all_states(self.model))

    def __getattr__(self, name: str) -> Any:
        if name == "traces":
            raise NotInitializedError(
                f"This {type(self).__name__} has no `traces` yet: call `compile_graph` with an "
                "example input first."
            )
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    @property
    def compiled(self) -> CompiledStep:
        """What `compile_graph` has made."""
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

    @one_thread_at_a_time
    def compile_graph(self, *arguments: Any, batch_size: int | None = None) -> None:
        """Analyse the model and make zero traces.

        What ``update`` takes from elsewhere than its arguments and States (attributes of a module,
        ``brainstate.environ``) stays as it is now, as with ``jax.jit``.

        Parameters
        ----------
        *arguments
            Example arguments of ``update`` (also as `SingleStepData` or `MultiStepData`).
        batch_size
            For a model written for one sample: the size of the batch axis over which it is
            to be mapped; the arguments and states then have that axis in front.

        Raises
        ------
        CompilationError, DtypeError
            See `compile_etrace_graph`.
        PrimitiveError
            If this algorithm's traces cannot carry one of the model's operations.
        """
        # A State belongs to the transformation that it is made in: not to what renames meshes.
        self._compile(first_step(arguments), batch_size)
        self.traces = EligibilityTraces({}, pairs_of(self.compiled.trace_specs))
        self._reset_traces()

    @on_automatic_axes
    def _compile(self, example: tuple[Any, ...], batch_size: int | None) -> None:
        for state in self.short_term_states.values():
            state.value = strongly_typed(state.value)
        self._compiled = self._analysed(example, batch_size)
        self._initial = InitialValues()
        self._shapes = shapes_of(
            _values(self.short_term_states)
            if batch_size is None
            else self._initial(self.model, True, batch_size, {})
        )
        self._by_shapes = Recent(MOST_SHAPES)
        self._by_shapes[self._shapes] = self._compiled

    def _analysed(self, example: tuple[Any, ...], batch_size: int | None) -> CompiledStep:
        # A window's gradient goes back, through mixing, to states that no trace is read from.
        options = CompilerOptions(self.strict, self.unroll_limit, self.vjp_method == "multi-step")
        step = (self.model, self.method, example, batch_size, options)
        return compile_step(*step, self.trace_dtype)

    def starting_traces(self) -> Traces:
        """Return traces at the start of a sequence; those that are zero are given by shapes."""
        return pack(starting_traces(self.compiled.trace_specs), self.traces.pairs)

    def zero_traces(self) -> Traces:
        """Return traces as they are at the start of a sequence."""
        traces: Traces = as_arrays(starting_traces(self.compiled.trace_specs))
        return traces

    @property
    def trace_bytes(self) -> int:
        """Size of the traces that are carried."""
        return size_in_bytes(self.compiled.trace_specs)

    def restarted_traces(self, traces: Traces, flags: jax.Array) -> Traces:
        """Return traces that start anew where flags, of one sample each or of all, are true."""
        return restart_traces(self.compiled.trace_specs, traces, flags)

    def _reset_traces(self) -> None:
        self.traces.carried.leave(lambda: as_arrays(self.starting_traces()), zero=True)

    @one_thread_at_a_time
    def update(self, *arguments: Any) -> Any:
        """Run one step (or the steps of a `MultiStepData`) and advance the traces.

        Returns
        -------
        pytree
            What the model's ``update`` returns; stacked over time for `MultiStepData`.

        Raises
        ------
        NotCompiledError, ShapeError
            Before `compile_graph`, or for inputs or states of another shape.
        """
        if is_sequence(arguments):
            return self._sequence(arguments)
        if self.vjp_method == "multi-step":
            check_arrays("arguments", unwrap(arguments), "`update`: ")
            one_step = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], unwrap(arguments))
            return jax.tree.map(lambda leaf: leaf[0], self._steps(one_step))
        return self._step(unwrap(arguments))

    def _step(self, arguments: tuple[Any, ...]) -> Any:
        compiled = self.compiled
        compiled.environment.check()
        states = self.states_of_step
        inputs = compiled.inputs(states, arguments)
        return self._advance(compiled.single_step, states, (inputs, self.traces.carried.read()))

    def _sequence(self, arguments: tuple[Any, ...]) -> Any:
        if not all(isinstance(argument, MultiStepData) for argument in arguments):
            raise ShapeError(
                "Some arguments are `MultiStepData` and some are not. Wrap all of them: every "
                "argument needs a leading time axis."
            )
        check_steps(arguments)
        return self._steps(unwrap(arguments))

    def _steps(self, sequences: tuple[Any, ...]) -> Any:
        compiled = self.compiled
        program = compiled.window if self.vjp_method == "multi-step" else compiled.steps
        compiled.environment.check()
        states = self.states_of_step
        step_arguments = jax.tree.map(lambda leaf: leaf[0], sequences)
        inputs = compiled.inputs(states, step_arguments)
        return self._advance(program, states, (inputs, self.traces.carried.read(), sequences))

    def _advance(
        self, program: Program, states: dict[Any, brainstate.State], arguments: tuple[Any, ...]
    ) -> Any:
        compiled = self.compiled

        def store(results: Any) -> None:
            _, new_states, traces = results
            compiled.write(states, new_states)
            self.traces.carried.write(traces)

        can_fail = program.can_fail(lambda: arguments)
        outputs, *_ = advance(self.traces.carried, can_fail, lambda _: program(*arguments), store)
        return jax.tree.unflatten(compiled.graph.traced.output_tree, outputs)

    @one_thread_at_a_time
    @on_automatic_axes
    def reset_state(
        self, batch_size: int | None = None, *, where: Any = None, **kwargs: Any
    ) -> None:
        """Start a new sequence: states as ``init_state`` makes them, traces zero.

        It works in a loop of your own (also inside ``brainstate.transform.jit``, ``for_loop`` and
        ``cond``), between the calls of a learner, and in the ``update_fn`` of `etrace_online`,
        where the new sequence starts with the next step.

        Parameters
        ----------
        batch_size
            Given to the model's ``init_state``; ``None``: as large as the states are now. The
            first time that it has a new size, the model is compiled for it. ``init_state`` is
            traced once for a size, and again when an attribute of a module is another one; what
            changes inside such an attribute (an entry of a list) is not seen.
        where
            Booleans ``(batch,)``: the samples that start anew; the others go on as they are. The
            states' first axis is the batch. ``None``: all samples, as with a single true.
        **kwargs
            Given to ``init_state`` as well.

        Raises
        ------
        ShapeError
            If ``batch_size`` is ``None`` and ``init_state`` does not give the states' shapes, or
            if ``where`` does not fit them.
        OptionError
            If ``where`` comes with a ``batch_size``, or samples that share the input of an
            operation are to start anew one by one with `ES_D_RTRL`; in ``update_fn``, for another
            batch size, or options of ``init_state``.
        """
        check_option("batch_size", batch_size, BATCH_SIZE)
        if self.requested_restarts.is_collecting:
            now = _values(self.short_term_states)
            self.requested_restarts.ask(now, self.graph.traced, batch_size, where, kwargs)
            return
        if where is not None:
            self._restart_samples(batch_size, where, kwargs)
            return
        given = named(["batch_size", *kwargs], [batch_size, *kwargs.values()])
        call = f"`init_state` of `{type(self.model).__name__}` fails for {given}"
        states = all_states(self.model)
        with in_words(OptionError, lambda: call):
            fresh = self.initial_values(states, batch_size, **kwargs)
        before = {path: states[path].value for path in fresh}
        with uninterrupted:
            try:
                _write(states, fresh)
                self._use_shapes(shapes_of(fresh), batch_size)
            except BaseException:
                _write(states, before)
                raise
            self._reset_traces()

    def _restart_samples(self, batch_size: int | None, where: Any, options: dict[str, Any]) -> None:
        if batch_size is not None:
            raise OptionError(
                f"`reset_state` got both `where` and `batch_size={batch_size}`. Samples start anew "
                "in the batch that there is: leave out one of the two."
            )
        states = all_states(self.model)
        now = _values(short_term(states))
        flags = check_where(where, now)
        fresh = self.initial_values(states, **options)
        anew = {path: start_anew(now[path], value, flags) for path, value in fresh.items()}
        traces, carried = None, self.traces.carried
        if not carried.is_zero:
            traces = self.compiled.restart(carried.read(), flags)
        with uninterrupted:
            if traces is not None:
                carried.leave(lambda: traces)
            _write(states, anew)

    def prepare_requests(self) -> None:
        """Prepare for restarts that are asked for in what a driver is about to trace."""
        self.requested_restarts.prepare(_values(self.short_term_states))

    def initial_values(
        self, states: States, batch_size: int | None = None, /, **kwargs: Any
    ) -> dict[Path, Any]:
        """Return the values of the short-term States at the start of a sequence, by path.

        Parameters
        ----------
        states
            All States of the model.
        batch_size, **kwargs
            See `reset_state`.

        Raises
        ------
        ShapeError
            See `reset_state`.
        """
        mapped = self.graph.traced.batch_size is not None
        if batch_size is None:
            now = _values(short_term(states))
            fresh = self._initial.of_shapes(self.model, mapped, shapes_of(now), kwargs)
            return {path: fresh[path] for path in now}
        return self._initial(self.model, mapped, batch_size, kwargs)

    def initial_function(self) -> tuple[tuple[brainstate.State, ...], InitialFunction]:
        """Return the States that `initial_values` are made of, and how."""
        mapped = self.graph.traced.batch_size is not None
        now = _values(self.short_term_states)
        return self._initial.function(self.model, mapped, shapes_of(now))

    def _use_shapes(self, shapes: Shapes, batch_size: int | None) -> None:
        """Compile the model for the shapes that its states have now, once for each."""
        if shapes not in self._by_shapes:
            self._by_shapes[shapes] = interruptible(self._resized)(shapes, batch_size)
        self._compiled, self._shapes = self._by_shapes[shapes], shapes

    def _resized(self, shapes: Shapes, batch_size: int | None) -> CompiledStep:
        mapped = self.graph.traced.batch_size is not None
        example = arguments_for_batch(
            self.model, self.graph.traced, (self._shapes, shapes), batch_size
        )
        return self._analysed(example, batch_size if mapped else None)


def _values(states: States) -> dict[Path, Any]:
    return {path: state.value for path, state in states.items()}


def _write(states: States, values: Mapping[Path, Any]) -> None:
    for path, value in values.items():
        states[path].value = value
