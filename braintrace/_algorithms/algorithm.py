"""The object that holds a model, its compiled graph and its eligibility traces."""

import abc
from typing import Any

import brainstate
import jax

from .._compiler import ETraceGraph, compile_model
from .._errors import NotCompiledError, OptionError, ShapeError
from .._executor import TraceMethod, enter_window, single_step, window_step
from .._jax import Var
from .data import MultiStepData, first_step, is_sequence, unwrap
from .initial import fresh_values
from .model_states import find_states, read_arguments, read_states, write_states

VJP_METHODS = ("single-step", "multi-step")


class EligibilityTraces(brainstate.ShortTermState):
    """The State that holds an algorithm's traces: a dict with stable string keys."""


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
    ) -> None:
        super().__init__()
        if vjp_method not in VJP_METHODS:
            raise OptionError(
                f"`vjp_method` is {vjp_method!r}; expected one of {', '.join(VJP_METHODS)}."
            )
        self.model = model
        self.vjp_method = vjp_method
        self.strict = strict
        self.unroll_limit = unroll_limit
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
        self.traces = EligibilityTraces(self.zero_traces())

    def _analyse(self, example: tuple[Any, ...], batch_size: int | None) -> Any:
        return compile_model(self.model, example, batch_size, self.strict, self.unroll_limit)

    def zero_traces(self) -> Any:
        """Return traces as they are at the start of a sequence."""
        return self.method.init(self.graph, self.vjp_method == "multi-step")

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
            window = [
                MultiStepData(jax.tree.map(lambda leaf: jax.numpy.asarray(leaf)[None], a))
                for a in unwrap(arguments)
            ]
            outputs = self._window(unwrap(tuple(window)))
            return jax.tree.map(lambda leaf: leaf[0], outputs)
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
            Given to the model's ``init_state``. A size other than that of the current states
            compiles the model again.
        **kwargs
            Given to ``init_state`` as well.
        """
        compiled = self._require()
        graph = compiled.graph
        mapped = graph.traced.batch_size
        fresh = fresh_values(self.model, mapped, batch_size, kwargs)
        states = {tuple(path): state for path, state in self.model.states().items()}
        resized = False
        for path, value in fresh.items():
            old = jax.tree.leaves(states[path].value)
            new = jax.tree.leaves(value)
            resized |= [leaf.shape for leaf in old] != [leaf.shape for leaf in new]
            states[path].value = value
        if resized:
            self._compile_again(graph, batch_size)
        self.traces.value = self.zero_traces()

    def _compile_again(self, graph: ETraceGraph, batch_size: int | None) -> None:
        old_size = graph.traced.batch_size or _leading_size(graph)
        structs = [
            jax.numpy.zeros(
                (batch_size, *var.aval.shape[1:])
                if var.aval.shape[:1] == (old_size,)
                else var.aval.shape,
                var.aval.dtype,
            )
            for var in graph.traced.argument_vars
        ]
        example = jax.tree.unflatten(graph.traced.argument_tree, structs)
        mapped = None if graph.traced.batch_size is None else batch_size
        new_graph, outside = self._analyse(example, mapped)
        self._compiled = CompiledStep(new_graph, outside, self.method)


def _leading_size(graph: ETraceGraph) -> int:
    return graph.hidden_groups[0].shape[0]


class CompiledStep:
    """A compiled model and the functions made for it, each traced once per shape."""

    def __init__(self, graph: ETraceGraph, outside: Any, method: TraceMethod) -> None:
        self.graph = graph
        self.outside = outside
        in_vars = graph.traced.program.in_vars
        written = graph.traced.written_vars

        def run_single(values: list[Any], traces: Any) -> Any:
            step = single_step(graph, method, dict(zip(in_vars, values, strict=True)), traces)
            return step.outputs, [step.new_states[var] for var in written], step.traces

        def run_window(values: list[Any], traces: Any, sequences: Any) -> Any:
            inputs = dict(zip(in_vars, values, strict=True))
            return _run_window(graph, method, inputs, traces, sequences, written)

        self._single = jax.jit(run_single)
        self._window = jax.jit(run_window)
        self._written = written

    def inputs(self, states: Any, arguments: tuple[Any, ...]) -> list[Any]:
        values = {**read_arguments(self.graph, arguments), **read_states(self.graph, states)}
        return [values[var] for var in self.graph.traced.program.in_vars]

    def write(self, states: Any, new: list[Any]) -> None:
        write_states(self.graph, states, dict(zip(self._written, new, strict=True)))

    def single_step(self, inputs: list[Any], traces: Any) -> Any:
        return self._single(inputs, traces)

    def window(self, inputs: list[Any], traces: Any, sequences: Any) -> Any:
        return self._window(inputs, traces, sequences)


def _run_window(
    graph: ETraceGraph,
    method: TraceMethod,
    inputs: dict[Var, Any],
    traces: Any,
    sequences: Any,
    written: list[Var],
) -> Any:
    from .._executor import operands

    entered = dict(enter_window(graph, method, inputs, traces))
    fixed = {var: value for var, value in entered.items() if var not in written}
    start = {index: entered[var] for index, var in enumerate(written)}

    def step(carry: Any, slices: Any) -> Any:
        current = {**fixed, **{written[index]: value for index, value in carry.items()}}
        current.update(read_arguments(graph, slices))
        outputs, new_states, records = window_step(graph, current)
        return {i: new_states[var] for i, var in enumerate(written)}, (outputs, records)

    last, (outputs, records) = jax.lax.scan(step, start, sequences)
    held = jax.lax.stop_gradient((operands(graph, inputs), records, traces))
    new_traces = method.update(graph, held[0], held[1], held[2])
    return outputs, [last[index] for index in range(len(written))], new_traces
