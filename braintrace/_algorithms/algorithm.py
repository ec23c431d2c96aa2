"""The object that holds a model, its compiled graph and its eligibility traces."""

import abc
from typing import Any

import brainstate
import jax
import jax.numpy as jnp

from .._compiler import ETraceGraph, compile_model
from .._errors import NotCompiledError, OptionError, ShapeError
from .._executor import TraceMethod
from .compiled_step import CompiledStep
from .data import MultiStepData, first_step, is_sequence, unwrap
from .initial import fresh_values, same_shapes, values_as_now
from .model_states import find_states
from .traces import EligibilityTraces

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
        Longest loop inside ``update`` that is unrolled because it holds a marked operation.
    trace_dtype
        Floating-point dtype in which traces are kept between chunks (between steps, for those
        called one by one), ``jnp.bfloat16`` for half the memory; ``None``: that of the model.
        What is computed with them is computed in the model's dtype.

    Raises
    ------
    OptionError
        For an option value that is not accepted.

    Notes
    -----
    Call it inside your own ``brainstate.transform.grad``, ``jit``, ``for_loop`` or ``scan``.
    One ``grad`` around many calls gives the sum of the gradients of the calls.
    """

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
        if vjp_method not in VJP_METHODS:
            raise OptionError(
                f"`vjp_method` is {vjp_method!r}; expected one of {', '.join(VJP_METHODS)}."
            )
        if trace_dtype is not None and not jnp.issubdtype(trace_dtype, jnp.floating):
            raise OptionError(
                f"`trace_dtype` is {trace_dtype!r}; expected a floating-point dtype such as "
                "`jnp.bfloat16`."
            )
        self.model = model
        self.vjp_method = vjp_method
        self.strict = strict
        self.unroll_limit = unroll_limit
        self.trace_dtype = trace_dtype
        self._compiled: CompiledStep | None = None

    @property
    @abc.abstractmethod
    def method(self) -> TraceMethod:
        """The functions that carry this algorithm's traces."""

    @property
    def graph(self) -> ETraceGraph:
        """The compiled model.

        Raises
        ------
        NotCompiledError
            Before `compile_graph`.
        """
        return self._require().graph

    @property
    def states_of_step(self) -> dict[Any, brainstate.State]:
        """The States that one step touches, by path, as the model has them now."""
        compiled = self._require()
        return find_states(compiled.graph, self.model, compiled.outside)

    @property
    def compiled(self) -> "CompiledStep":
        """The compiled step, for those who run it over whole sequences."""
        return self._require()

    def _require(self) -> "CompiledStep":
        if self._compiled is None:
            raise NotCompiledError(
                f"Call `compile_graph` with an example input before using this "
                f"{type(self).__name__}."
            )
        return self._compiled

    def compile_graph(self, *arguments: Any, batch_size: int | None = None) -> None:
        """Analyse the model and make zero traces.

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
        """
        example = first_step(arguments)
        graph, outside = self._analyse(example, batch_size)
        self._compiled = CompiledStep(graph, outside, self.method)
        self.traces = EligibilityTraces({})
        self._reset_traces()

    def _analyse(self, example: tuple[Any, ...], batch_size: int | None) -> Any:
        return compile_model(
            self.model, example, batch_size, self.strict, self.unroll_limit, self._every_state
        )

    @property
    def _every_state(self) -> bool:
        """Whether gradients go back, through mixing, to states that no trace is read from."""
        return self.vjp_method == "multi-step"

    def zero_traces(self) -> Any:
        """Return traces as they are at the start of a sequence."""
        traces = self.method.init(self.graph, self._every_state)

        def kept(leaf: jax.Array) -> jax.Array:
            is_real = jnp.issubdtype(leaf.dtype, jnp.floating)
            return leaf.astype(self.trace_dtype) if is_real else leaf

        return traces if self.trace_dtype is None else jax.tree.map(kept, traces)

    def _reset_traces(self) -> None:
        self.traces.leave(self.zero_traces, zero=True)

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
            one_step = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], unwrap(arguments))
            return jax.tree.map(lambda leaf: leaf[0], self._window(one_step))
        return self._step(unwrap(arguments))

    def _step(self, arguments: tuple[Any, ...]) -> Any:
        compiled = self._require()
        states = self.states_of_step
        inputs = compiled.inputs(states, arguments)
        outputs, new_states, traces = compiled.single_step(inputs, self.traces.value)
        compiled.write(states, new_states)
        self.traces.value = traces
        return jax.tree.unflatten(compiled.graph.traced.output_tree, outputs)

    def _sequence(self, arguments: tuple[Any, ...]) -> Any:
        if not all(isinstance(argument, MultiStepData) for argument in arguments):
            raise ShapeError(
                "Some arguments are `MultiStepData` and some are not. Wrap all of them: every "
                "argument needs a leading time axis."
            )
        sequences = unwrap(arguments)
        if self.vjp_method == "multi-step":
            return self._window(sequences)
        return brainstate.transform.for_loop(lambda *step: self._step(step), *sequences)

    def _window(self, sequences: tuple[Any, ...]) -> Any:
        compiled = self._require()
        states = self.states_of_step
        step_arguments = jax.tree.map(lambda leaf: leaf[0], sequences)
        inputs = compiled.inputs(states, step_arguments)
        outputs, new_states, traces = compiled.window(inputs, self.traces.value, sequences)
        compiled.write(states, new_states)
        self.traces.value = traces
        return jax.tree.unflatten(compiled.graph.traced.output_tree, outputs)

    def reset_state(self, batch_size: int | None = None, **kwargs: Any) -> None:
        """Start a new sequence: states as ``init_state`` makes them, traces zero.

        Parameters
        ----------
        batch_size
            Given to the model's ``init_state``; ``None``: as large as the states are now. A
            size other than that compiles the model again.
        **kwargs
            Given to ``init_state`` as well.

        Raises
        ------
        ShapeError
            If ``batch_size`` is ``None`` and ``init_state`` does not give the states' shapes.
        """
        graph = self.graph
        states = {tuple(path): state for path, state in self.model.states().items()}
        mapped = graph.traced.batch_size
        if batch_size is None:
            fresh = values_as_now(self.model, states, mapped, kwargs)
        else:
            fresh = fresh_values(self.model, mapped, batch_size, kwargs)
        resized = not same_shapes(fresh, states)
        for path, value in fresh.items():
            states[path].value = value
        if resized:
            self._compile_again(graph, batch_size)
        self._reset_traces()

    def _compile_again(self, graph: ETraceGraph, batch_size: int | None) -> None:
        mapped = graph.traced.batch_size
        old_size = mapped or graph.hidden_groups[0].shape[0]

        def resized(var: Any) -> jax.Array:
            shape = var.aval.shape
            lead = (batch_size,) if shape[:1] == (old_size,) else shape[:1]
            return jnp.zeros((*lead, *shape[1:]), var.aval.dtype)

        leaves = [resized(var) for var in graph.traced.argument_vars]
        example = jax.tree.unflatten(graph.traced.argument_tree, leaves)
        new_graph, outside = self._analyse(example, None if mapped is None else batch_size)
        self._compiled = CompiledStep(new_graph, outside, self.method)
