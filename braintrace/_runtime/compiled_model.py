"""Compiled model: the steps compiled so far, by shapes and attributes.

A step is compiled for the shapes of the short-term States, which have batch axes, and for the plain
attributes of the model's modules.
"""

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import brainstate
import jax

from .._arguments import level_of_user
from .._brainstate import kept_for_other_threads
from .._compiler import CompilerOptions, compile_model, trace_model
from .._core.step import check_method
from .._errors import NotCompiledError, RecompilationWarning, ShapeError
from .._graph import Diagnostic, ETraceGraph, TraceMethod
from .._interrupts import interruptible
from .._jax import strongly_typed
from .._sharding import Division
from .._typing import Path, path_name
from .compiled_step import CompiledStep, carries_alike
from .environment.attributes import Attributes, attributes_of
from .environment.environ import Environment
from .on_mesh import sharded
from .states.batch_axes import arguments_for_batch, example_arguments
from .states.initial_values import InitialFunction, InitialValues, Shapes, shapes_of
from .states.lru_cache import LRUCache
from .states.model_states import States, all_states, short_term, values_by_path, write_by_path

MOST_STEPS = 32
"""Maximum number of compiled steps that are kept: batches have a few sizes."""

FOURTH = 4
"""Number of compiled steps that triggers a warning. Two or three values of an attribute are common
(training and validation); with four, it probably changes all the time."""


Analyse: TypeAlias = Callable[[tuple[Any, ...], int | None], CompiledStep]
"""``(example, batch_size) -> step``; see `compile_step`."""

Steps: TypeAlias = LRUCache[tuple[Shapes, Attributes], CompiledStep]
"""Compiled steps by shapes and attributes."""


@dataclasses.dataclass(frozen=True, eq=False)
class CompiledModel:
    """The compiled steps of a model; methods take the model itself as an argument.

    A clone of an algorithm has its own model, and shares this object.

    Attributes
    ----------
    step
        The step compiled for the current shapes of the States and the attributes.
    shapes, attributes
        These shapes, and the attributes at compilation or at the last lookup.
    is_mapped
        Whether the model is written for one sample and mapped over a batch.
    known, initial
        Compiled steps for other shapes and attributes, and compiled initial values.
    paths
        Paths of all States that the model had at compilation.
    written
        Names of attributes that ``update`` or the user's functions write while they are traced (a
        counter, a memo). They are ignored.
    division
        The mesh over which its arrays are sharded; ``None``: no mesh.
    """

    step: CompiledStep
    shapes: Shapes
    attributes: Attributes
    is_mapped: bool
    known: Steps
    initial: InitialValues
    paths: frozenset[Path]
    written: set[str]
    division: Division | None = None

    def sharded(self, division: Division) -> "CompiledModel":
        """Return this model sharded over a mesh; steps of other shapes are compiled again.

        Raises
        ------
        ShapeError, OptionError
            If the batch size is not a multiple of the number of parts, or there is no batch axis.
        """
        return dataclasses.replace(self, division=division)._with_only(self.step)

    def initial_values(
        self,
        model: brainstate.nn.Module,
        states: States,
        batch_size: int | None,
        options: dict[str, Any],
    ) -> dict[Path, Any]:
        """Return the initial values of the short-term States, by path.

        Parameters
        ----------
        model, states
            The model, and all its States.
        batch_size
            ``None``: the current size.
        options
            Options of ``init_state``.

        Raises
        ------
        ShapeError
            If ``batch_size`` is ``None`` and ``init_state`` returns other shapes than the States
            have.
        """
        if batch_size is not None:
            return self.initial(model, self.is_mapped, batch_size, options)
        now = values_by_path(short_term(states))
        fresh = self.initial.of_shapes(
            model, self.is_mapped, self._samples(now), shapes_of(now), options
        )
        return {path: fresh[path] for path in now}

    def initial_function(
        self, model: brainstate.nn.Module
    ) -> tuple[tuple[brainstate.State, ...], InitialFunction]:
        """Return the States that initial values depend on, and their function."""
        now = values_by_path(short_term(all_states(model)))
        made = self.initial.initialiser(model, self.is_mapped, self._samples(now), shapes_of(now))
        return made.states, made.values

    def _samples(self, values: Mapping[Path, Any]) -> int | None:
        """Return the number of samples of the values of States, from their batch axes."""
        batch = self.step.graph.batch
        leaves = ((p, i, x) for p, v in values.items() for i, x in enumerate(jax.tree.leaves(v)))
        sizes = (x.shape[a] for p, i, x in leaves if (a := batch.axis_at(p, i)) is not None)
        return next(sizes, batch.samples)

    def moved_to(
        self,
        model: brainstate.nn.Module,
        analyse: Analyse,
        states: States,
        values: Mapping[Path, Any],
        batch_size: int | None,
    ) -> "CompiledModel":
        """Write values to States, and return this model compiled for their shapes.

        If compilation fails, the States keep their values.
        """
        shapes = shapes_of(values)
        before = {path: states[path].value for path in values}

        def compiled() -> CompiledStep:
            both = self.shapes, shapes
            example = arguments_for_batch(self.step.graph, both, batch_size)
            return analyse(example, batch_size if self.is_mapped else None)

        try:
            write_by_path(states, values)
            step = self._step(model, shapes, self.attributes, interruptible(compiled))
        except BaseException:
            write_by_path(states, before)
            raise
        return dataclasses.replace(self, step=step, shapes=shapes)

    def up_to_date(
        self,
        model: brainstate.nn.Module,
        analyse: Analyse,
        states: States,
    ) -> "CompiledModel":
        """Return this model compiled for the current States and attributes.

        Parameters
        ----------
        model, analyse, states
            The model, its analysis, and all its States.

        Raises
        ------
        NotCompiledError
            If ``update`` uses a State that was added, or attributes have changed the traces.
        """
        compiled = self
        if not self.paths.issuperset(states):
            self._refuse_added_states(model, analyse, states)
            compiled = dataclasses.replace(self, paths=frozenset(states))
        now = attributes_of(model)
        if not (changed := compiled.changed(now)):
            return compiled
        after = compiled.with_attributes(model, analyse, now)
        if not carries_alike(compiled.step, after.step):
            told = ", ".join(compiled.attributes.change(now, name) for name in changed)
            raise NotCompiledError(
                f"`{type(model).__name__}` needs other traces, because attributes of its modules "
                f"have changed: {told}. Call `compile_graph` or `braintrace.compile` again, which "
                "starts a new sequence."
            )
        return after

    def _refuse_added_states(
        self, model: brainstate.nn.Module, analyse: Analyse, states: States
    ) -> None:
        """Refuse new States of ``update``; parameters of the user's functions may be added."""
        added = {path: state for path, state in states.items() if path not in self.paths}
        used = list(short_term(added))
        if not used:
            traced = self.step.graph.traced
            leaves = analyse(example_arguments(traced), traced.batch_size).graph.traced.leaves
            used = [leaf.path for leaf in leaves if leaf.path in added]
        if used:
            raise NotCompiledError(
                f"The State '{path_name(used[0])}' was added to `{type(model).__name__}` after "
                "compilation, so the compiled step does not contain it. Call `compile_graph` or "
                "`braintrace.compile` again after a change of the model."
            )

    def changed(self, now: Attributes) -> list[str]:
        """Return the names of attributes that differ from the attributes of the step."""
        return self.attributes.changed(now, self.written)

    def with_attributes(
        self,
        model: brainstate.nn.Module,
        analyse: Analyse,
        now: Attributes,
    ) -> "CompiledModel":
        """Return this model compiled for its current attributes.

        Parameters
        ----------
        model, analyse, now
            The model, its analysis, and its attributes.
        """
        traced = self.step.graph.traced

        def compiled() -> CompiledStep:
            return analyse(example_arguments(traced), traced.batch_size)

        count = len(self.known)
        step = self._step(model, self.shapes, now, compiled)
        if len(self.known) > count:
            self._warn_if_often(model, now)
        return dataclasses.replace(self, step=step, attributes=now)

    def analysed_again(self, analyse: Analyse) -> "CompiledModel":
        """Return this model compiled by another analysis, for the same shapes and attributes."""
        traced = self.step.graph.traced
        return self._with_only(analyse(example_arguments(traced), traced.batch_size))

    def _with_only(self, step: CompiledStep) -> "CompiledModel":
        """Return this model with a new step, and no known steps of other shapes."""
        step, known = sharded(step, self.division), Steps(MOST_STEPS)
        known[self.shapes, self.attributes] = step
        return dataclasses.replace(self, step=step, known=known)

    def _step(
        self,
        model: brainstate.nn.Module,
        shapes: Shapes,
        attributes: Attributes,
        compiled: Callable[[], CompiledStep],
    ) -> CompiledStep:
        """Return the known step for shapes and attributes, or compile it."""
        for key in list(self.known):
            if key[0] == shapes and not key[1].changed(attributes, self.written):
                return self.known[key]
        step = sharded(compiled(), self.division)
        self.written.update(attributes.changed(attributes_of(model)))
        self.known[shapes, attributes] = step
        return step

    def _warn_if_often(self, model: brainstate.nn.Module, now: Attributes) -> None:
        """Warn if attribute changes have caused several compilations."""
        if sum(shapes == self.shapes for shapes, _ in self.known) != FOURTH:
            return
        name, changes = type(model).__name__, self.changed(now)
        told = ", ".join(self.attributes.change(now, changed) for changed in changes)
        warnings.warn(
            f"`{name}` is compiled for the fourth time, because attributes of its modules change: "
            f"{told}. Each change takes as long as the first call. Keep a changing value in a "
            "State, or pass it as an argument of `update`.",
            RecompilationWarning,
            stacklevel=level_of_user(),
        )


def compile_first(
    model: brainstate.nn.Module,
    analyse: Analyse,
    example: tuple[Any, ...],
    batch_size: int | None,
) -> CompiledModel:
    """Compile a model with initialised States for an example.

    Parameters
    ----------
    model, analyse
        The model, and its analysis.
    example
        Example arguments of ``update``.
    batch_size
        ``None``, or the size of the batch axis over which a model for one sample is mapped.
    """
    states, initial = short_term(all_states(model)), InitialValues()
    known: Steps = LRUCache(MOST_STEPS)
    for state in states.values():
        state.value = strongly_typed(state.value)
    attributes = attributes_of(model)
    step = analyse(example, batch_size)
    is_mapped = batch_size is not None
    shapes = shapes_of(
        initial(model, True, batch_size, {}) if is_mapped else values_by_path(states)
    )
    known[shapes, attributes] = step
    written = set(attributes.changed(attributes_of(model)))
    paths = frozenset(all_states(model))
    return CompiledModel(step, shapes, attributes, is_mapped, known, initial, paths, written)


def learned_starts(compiled: CompiledModel, model: brainstate.nn.Module) -> list[Diagnostic]:
    """Return a warning for each parameter that only ``init_state`` reads: it has no gradient."""
    findings = compiled.step.graph.diagnostics
    unused = {name for f in findings if f.kind == "unused-parameter" for name in f.paths}
    if not unused:
        return []
    try:
        samples = compiled.step.graph.batch.samples
        given = model, compiled.is_mapped, samples, compiled.shapes
        read = compiled.initial.initialiser(*given).read
    except ShapeError:  # `init_state` returns other shapes than the States have
        return []
    parameters = model.states(brainstate.ParamState).items()
    names = [path_name(tuple(path)) for path, s in parameters if any(s is one for one in read)]
    return [
        Diagnostic(
            "warning",
            "unused-parameter",
            f"Parameter '{name}' is read by `init_state` alone, and the online gradient has no "
            "derivative with respect to initial values: its gradient is zero. Take its gradient "
            "on its own (docs: a learned initial state).",
            (name,),
        )
        for name in names
        if name in unused
    ]


def compile_step(
    model: brainstate.nn.Module,
    method: TraceMethod,
    example: tuple[Any, ...],
    batch_size: int | None,
    options: CompilerOptions,
    trace_dtype: Any,
) -> CompiledStep:
    """Analyse a model, and return the compiled step of an algorithm.

    Parameters
    ----------
    model, example, batch_size, options
        See `compile_model`.
    method
        The learning rule.
    trace_dtype
        Floating-point dtype in which traces are stored; ``None``: the model's dtype.

    Raises
    ------
    CompilationError, DtypeError
        See `compile_etrace_graph`.
    OptionError
        If ``method`` needs residuals that drivers do not provide.
    PrimitiveError
        If the traces of ``method`` do not support one of the model's operations.
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
