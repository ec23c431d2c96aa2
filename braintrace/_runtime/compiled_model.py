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
from .._brainstate import hold, kept_for_other_threads
from .._compiler import CompilerOptions, compile_model
from .._core.step import check_method
from .._errors import FOURTH, NotCompiledError, RecompilationWarning, ShapeError
from .._graph import Diagnostic, ETraceGraph, TraceMethod
from .._interrupts import interruptible
from .._jax import strongly_typed
from .._sharding import Division
from .._typing import Path, path_name
from .compiled_step import CompiledStep
from .environment.attributes import Attributes, attributes_of
from .environment.environ import Environment
from .known_steps import MOST_STEPS, KnownSteps
from .on_mesh import sharded
from .same_step import Fingerprint, fingerprint_of
from .states.batch_axes import arguments_for_batch, example_arguments
from .states.initial_values import Fresh, InitialFunction, InitialValues, Shapes, shapes_of
from .states.model_states import States, all_states, short_term, values_by_path, write_by_path

Analyse: TypeAlias = Callable[[tuple[Any, ...], int | None], CompiledStep]
"""``(example, batch_size) -> step``; see `compile_step`."""


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
    division
        The mesh over which its arrays are sharded; ``None``: no mesh.
    """

    step: CompiledStep
    shapes: Shapes
    attributes: Attributes
    is_mapped: bool
    known: KnownSteps
    initial: InitialValues
    paths: frozenset[Path]
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
        last_size: int | None,
    ) -> Fresh:
        """Return what ``init_state`` assigns.

        Parameters
        ----------
        model, states
            The model, and all its States.
        batch_size
            ``None``: the current size.
        options
            Options of ``init_state``.
        last_size
            The last batch size that the user gave, for states without a known batch axis.

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
            model, self.is_mapped, self._samples(now, last_size), shapes_of(now), options
        )
        return fresh._replace(values={path: fresh.values[path] for path in now})

    def initial_function(
        self, model: brainstate.nn.Module, last_size: int | None
    ) -> tuple[tuple[brainstate.State, ...], InitialFunction]:
        """Return the States that initial values depend on, and their function."""
        now = values_by_path(short_term(all_states(model)))
        samples = self._samples(now, last_size)
        made = self.initial.initialiser(model, self.is_mapped, samples, shapes_of(now))
        return made.states, made.values

    def _samples(self, values: Mapping[Path, Any], last_size: int | None) -> int | None:
        """Return the number of samples of the values of States, from their batch axes."""
        batch = self.step.graph.batch
        leaves = ((p, i, x) for p, v in values.items() for i, x in enumerate(jax.tree.leaves(v)))
        sizes = (x.shape[a] for p, i, x in leaves if (a := batch.axis_at(p, i)) is not None)
        return next(sizes, last_size if batch.samples is None else batch.samples)

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
            if shapes == self.shapes:
                return self._analysed(analyse)
            both = self.shapes, shapes
            example = arguments_for_batch(self.step.graph, both, batch_size)
            return analyse(example, batch_size if self.is_mapped else None)

        try:
            write_by_path(states, values)
            step, now = self._step(model, shapes, interruptible(compiled))
        except BaseException:
            write_by_path(states, before)
            raise
        return dataclasses.replace(self, step=step, shapes=shapes, attributes=now)

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
            If ``update`` uses a State that was added.
        """
        compiled = self.with_added_states(model, analyse, states)
        if not self.attributes.changed(attributes_of(model)):
            return compiled
        step, now = self._step(model, self.shapes, lambda: self._analysed(analyse))
        return dataclasses.replace(compiled, step=step, attributes=now)

    def with_added_states(
        self, model: brainstate.nn.Module, analyse: Analyse, states: States
    ) -> "CompiledModel":
        """Return this model with added States that ``update`` does not use.

        Raises
        ------
        NotCompiledError
            If it uses one.
        """
        if self.paths.issuperset(states):
            return self
        self._refuse_added_states(model, analyse, states)
        return dataclasses.replace(self, paths=frozenset(states))

    def _refuse_added_states(
        self, model: brainstate.nn.Module, analyse: Analyse, states: States
    ) -> None:
        """Refuse new States of ``update``; parameters of the user's functions may be added."""
        added = {path: state for path, state in states.items() if path not in self.paths}
        used = list(short_term(added))
        if not used:
            leaves = self._analysed(analyse).graph.traced.leaves
            used = [leaf.path for leaf in leaves if leaf.path in added]
        if used:
            raise NotCompiledError(
                f"The State '{path_name(used[0])}' was added to `{type(model).__name__}` after "
                "compilation, so the compiled step does not contain it. Call `compile_graph` or "
                "`braintrace.compile` again after a change of the model."
            )

    def analysed_again(self, analyse: Analyse) -> "CompiledModel":
        """Return this model compiled by another analysis, for the same shapes and attributes."""
        return self._with_only(self._analysed(analyse))

    def _analysed(self, analyse: Analyse) -> CompiledStep:
        """Return the step of the model as it is now, for the shapes of this one."""
        traced = self.step.graph.traced
        return analyse(example_arguments(traced), traced.batch_size)

    def _with_only(self, step: CompiledStep) -> "CompiledModel":
        """Return this model with a new step, and no known steps of other shapes."""
        step, known = sharded(step, self.division), KnownSteps()
        known.add(self.shapes, self.attributes, self.attributes, step)
        return dataclasses.replace(self, step=step, known=known)

    def _step(
        self, model: brainstate.nn.Module, shapes: Shapes, compiled: Callable[[], CompiledStep]
    ) -> tuple[CompiledStep, Attributes]:
        """Return the step for shapes and the current attributes, and the attributes after it.

        An unknown step is compiled. If another one does the same, its programs go on.
        """
        now = attributes_of(model)
        step = self.known.find(shapes, now)
        if step is not None:
            return step, now
        made, after = compiled(), attributes_of(model)
        alike = self.known.that_does(shapes, made)
        step = sharded(made, self.division) if alike is None else alike
        self.known.add(shapes, now, after, step)
        changed = self.attributes.changed(now)
        if alike is None and changed and len(self.known.of(shapes)) == FOURTH:
            self._warn(model, changed, now, "compiled for the fourth time", "the first call")
        if alike is not None and changed and self.known.found_alike == MOST_STEPS:
            self._warn(model, changed, now, f"analysed {MOST_STEPS} times", "an analysis")
        return step, after

    def _warn(
        self,
        model: brainstate.nn.Module,
        changed: list[str],
        now: Attributes,
        what: str,
        as_long_as: str,
    ) -> None:
        """Warn of several compilations or analyses because of attributes."""
        name = type(model).__name__
        told = ", ".join(self.attributes.change(now, attribute) for attribute in changed)
        warnings.warn(
            f"`{name}` is {what}, because attributes of its modules change: {told}. Each change "
            f"takes as long as {as_long_as}. Keep a changing value in a State, or pass it as an "
            "argument of `update`; keep what `update` does not read outside of the model.",
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
    known = KnownSteps()
    for state in states.values():
        state.value = strongly_typed(state.value)
    attributes = attributes_of(model)
    step = analyse(example, batch_size)
    is_mapped = batch_size is not None
    shapes = shapes_of(
        initial(model, True, batch_size, {}).values if is_mapped else values_by_path(states)
    )
    after = attributes_of(model)
    known.add(shapes, attributes, after, step)
    paths = frozenset(all_states(model))
    return CompiledModel(step, shapes, after, is_mapped, known, initial, paths)


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
    own = fingerprint_of(graph.traced, outside)

    def is_same(model: brainstate.nn.Module) -> bool:
        """Test whether the model has the same step in the current environment."""
        return bool(_fingerprint_now(model, graph, outside, options, method).value == own.value)

    environment = Environment(is_same)
    parameters = model.states(brainstate.ParamState).values()
    carried = options.every_state, trace_dtype
    return CompiledStep(graph, outside, method, *carried, own, environment, parameters)


def _fingerprint_now(
    model: brainstate.nn.Module,
    graph: ETraceGraph,
    outside: States,
    options: CompilerOptions,
    method: TraceMethod,
) -> Fingerprint:
    """Analyse the model again, and return the fingerprint of its step."""
    example, batch_size = example_arguments(graph.traced), graph.traced.batch_size
    states = [*model.states().values(), *outside.values()]
    before = [state.value for state in states]
    try:
        with kept_for_other_threads(states):
            now, used = compile_model(model, example, batch_size, options, method)
    finally:  # a trace that fails leaves tracers in the States; to restore is not to write
        for state, value in zip(states, before, strict=True):
            hold(state, value)
    return fingerprint_of(now.traced, used)
