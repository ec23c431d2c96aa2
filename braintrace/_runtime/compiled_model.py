"""A model with the steps that have been compiled for it, one for each batch size.

What a step is compiled for are the shapes of the States that start anew with a sequence: those
have axes for the batch.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import brainstate

from .._brainstate import kept_for_other_threads
from .._compiler import CompilerOptions, compile_model, trace_model
from .._executor import check_method
from .._graph import ETraceGraph, TraceMethod
from .._interrupts import interruptible
from .._jax import strongly_typed
from .._sharding import Division
from .._typing import Path
from .batch_axes import arguments_for_batch, example_arguments
from .compiled_step import CompiledStep
from .environment import Environment
from .initial_values import InitialFunction, InitialValues, Shapes, shapes_of
from .model_states import States, all_states, short_term, values_by_path, write_by_path
from .on_mesh import divided
from .recent import Recent

MOST_SHAPES = 32
"""For how many shapes of its states a model is kept compiled: batches have a few sizes."""


Analyse: TypeAlias = Callable[[tuple[Any, ...], int | None], CompiledStep]
"""``(example, batch_size) -> step``; see `compile_step`."""


@dataclasses.dataclass(frozen=True, eq=False)
class CompiledModel:
    """What a model is compiled to; the model itself is given to every method.

    A clone of an algorithm has a model of its own, and shares this.

    Attributes
    ----------
    step
        What is compiled for the shapes that the States have now.
    shapes
        Those shapes.
    is_mapped
        Whether it is a model for one sample, mapped over a batch.
    known, initial
        What has been compiled for other shapes, and for initial values.
    division
        The mesh that divides its arrays; ``None``: there is none.
    """

    step: CompiledStep
    shapes: Shapes
    is_mapped: bool
    known: Recent[Shapes, CompiledStep]
    initial: InitialValues
    division: Division | None = None

    def divided(self, division: Division, samples: int | None) -> "CompiledModel":
        """Return the same with arrays on a mesh; for other shapes it is compiled again.

        Raises
        ------
        ShapeError, OptionError
            If the batch is no multiple of the number of its parts, or there is none to divide.
        """
        known: Recent[Shapes, CompiledStep] = Recent(MOST_SHAPES)
        known[self.shapes] = step = divided(self.step, division, samples)
        return dataclasses.replace(self, step=step, known=known, division=division)

    def initial_values(
        self,
        model: brainstate.nn.Module,
        states: States,
        batch_size: int | None,
        options: dict[str, Any],
    ) -> dict[Path, Any]:
        """Return the values of the short-term States at the start of a sequence, by path.

        Parameters
        ----------
        model, states
            The model, and all its States.
        batch_size
            ``None``: as large as they are now.
        options
            Of ``init_state``.

        Raises
        ------
        ShapeError
            If ``batch_size`` is ``None`` and ``init_state`` does not give the States' shapes.
        """
        if batch_size is not None:
            return self.initial(model, self.is_mapped, batch_size, options)
        now = values_by_path(short_term(states))
        fresh = self.initial.of_shapes(model, self.is_mapped, shapes_of(now), options)
        return {path: fresh[path] for path in now}

    def initial_function(
        self, model: brainstate.nn.Module
    ) -> tuple[tuple[brainstate.State, ...], InitialFunction]:
        """Return the States that initial values are made of, and how."""
        now = values_by_path(short_term(all_states(model)))
        return self.initial.function(model, self.is_mapped, shapes_of(now))

    def moved_to(
        self,
        model: brainstate.nn.Module,
        analyse: Analyse,
        values: Mapping[Path, Any],
        batch_size: int | None,
    ) -> "CompiledModel":
        """Write values to States, and return what the model is compiled to for their shapes.

        If it cannot be compiled for them, the States keep their values.
        """
        states, shapes = all_states(model), shapes_of(values)
        before = {path: states[path].value for path in values}

        def compiled() -> CompiledStep:
            both = self.shapes, shapes
            example = arguments_for_batch(model, self.step.graph.traced, both, batch_size)
            return analyse(example, batch_size if self.is_mapped else None)

        try:
            write_by_path(states, values)
            if shapes not in self.known:
                step = interruptible(compiled)()
                self.known[shapes] = divided(step, self.division, batch_size)
        except BaseException:
            write_by_path(states, before)
            raise
        return dataclasses.replace(self, step=self.known[shapes], shapes=shapes)


def compile_first(
    model: brainstate.nn.Module,
    analyse: Analyse,
    example: tuple[Any, ...],
    batch_size: int | None,
) -> CompiledModel:
    """Compile a model for an example, whose States have begun.

    Parameters
    ----------
    model, analyse
        The model, and how it is compiled.
    example
        Example arguments of ``update``.
    batch_size
        ``None``, or the size of the batch axis over which a model for one sample is mapped.
    """
    states, initial = short_term(all_states(model)), InitialValues()
    known: Recent[Shapes, CompiledStep] = Recent(MOST_SHAPES)
    for state in states.values():
        state.value = strongly_typed(state.value)
    step = analyse(example, batch_size)
    is_mapped = batch_size is not None
    shapes = shapes_of(
        initial(model, True, batch_size, {}) if is_mapped else values_by_path(states)
    )
    known[shapes] = step
    return CompiledModel(step, shapes, is_mapped, known, initial)


def compile_step(
    model: brainstate.nn.Module,
    method: TraceMethod,
    example: tuple[Any, ...],
    batch_size: int | None,
    options: CompilerOptions,
    trace_dtype: Any,
) -> CompiledStep:
    """Analyse a model, and return what an algorithm runs.

    Parameters
    ----------
    model, example, batch_size, options
        See `compile_model`.
    method
        The learning rule.
    trace_dtype
        Floating-point dtype in which traces are kept; ``None``: that of the model.

    Raises
    ------
    CompilationError, DtypeError
        See `compile_etrace_graph`.
    OptionError
        If ``method`` needs what drivers do not give it.
    PrimitiveError
        If the traces of ``method`` cannot carry one of the model's operations.
    """
    check_method(method)
    with kept_for_other_threads(model.states().values()):
        graph, outside = compile_model(model, example, batch_size, options, method)
    environment = Environment(lambda: _trace_again(model, graph, outside, options))
    parameters = model.states(brainstate.ParamState).values()
    carried = options.every_state, trace_dtype
    return CompiledStep(graph, outside, method, *carried, environment, parameters)


def _trace_again(
    model: brainstate.nn.Module, graph: ETraceGraph, outside: States, options: CompilerOptions
) -> None:
    traced = graph.traced
    states = [*model.states().values(), *outside.values()]
    before = [state.value for state in states]
    try:
        with kept_for_other_threads(states):
            trace_model(model, example_arguments(traced), traced.batch_size, options.unroll_limit)
    finally:  # a trace that fails leaves tracers in the States
        for state, value in zip(states, before, strict=True):
            state.value = value
