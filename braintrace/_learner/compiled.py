"""Compiled model: the steps compiled so far, by shapes of States and settings of the environment.

A step is compiled for the shapes of the short-term States, which have batch axes, and for the flags
of ``brainstate.environ``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import brainstate
import jax

from .._core.steps import Inputs
from .._core.traces import pairs_of, reset_traces, stored_specs
from .._core.windows import single_step
from .._errors import ShapeError
from .._graph import Diagnostic, ETraceGraph, TraceMethod
from .._jax import strongly_typed
from .._model import (
    InitialFunction,
    InitialValues,
    Shapes,
    States,
    Values,
    all_states,
    settings,
    shapes_of,
    short_term,
    values_by_path,
    write_by_path,
)
from .._typing import Path, path_name
from ..sharding import DataAxis, Placement, placement_of
from .arguments import arguments_for_batch, example_arguments


@dataclasses.dataclass(eq=False)
class CompiledStep:
    """A compiled model with its learning rule.

    Attributes
    ----------
    graph, method
        The compiled model, and the rule.
    outside
        States outside the model that a step uses.
    every_state, trace_dtype
        Which states have traces, and the dtype in which traces are stored; see `CompilerOptions`
        and `Learner`.
    placement
        Placement of its arrays on a mesh; ``None``: no mesh.
    trace_specs, pairs
        Specifications of the stored traces, and those that share an array.
    followed
        Paths of the model's hidden States that the traces follow, sorted: another step of the model
        may read them in another order.
    """

    graph: ETraceGraph
    outside: States
    method: TraceMethod
    every_state: bool
    trace_dtype: Any
    placement: Placement | None = None

    def __post_init__(self) -> None:
        self.trace_specs = stored_specs(self.graph.trace_specs, self.trace_dtype)
        self.pairs = pairs_of(self.trace_specs)
        followed = {s.path for s in self.graph.traced_states if s.path not in self.outside}
        self.followed = tuple(sorted(followed, key=path_name)) if self.trace_specs else ()
        self.reset = jax.jit(functools.partial(reset_traces, self.trace_specs))

    @property
    def follows_every_state(self) -> bool:
        """Whether traces follow every hidden state, including states that no later step reads."""
        if self.graph.flat_state is not None:
            return True
        if any(group.downstream or group.delay_line for group in self.graph.hidden_groups):
            return False
        every = stored_specs(self.method.trace_specs(self.graph, True), self.trace_dtype)
        return bool(jax.tree.structure(every) == jax.tree.structure(self.trace_specs))

    def carries_like(self, other: CompiledStep) -> bool:
        """Test whether another step has the same traces and filters, which mean the same."""

        def carried(step: CompiledStep) -> Any:
            specs = jax.tree.map(
                lambda s: (s.shape, str(s.dtype), s.axes, s.rule), step.trace_specs
            )
            filters = {leaf.name: (leaf.shape, leaf.dtype) for leaf in step.graph.traced.filters}
            return specs, filters

        return bool(carried(self) == carried(other))

    def one_step(self, inputs: Inputs, traces: Any, reset: jax.Array | None = None) -> Any:
        """Return one step, with its residuals placed on the mesh; see `single_step`."""
        step = self.graph, self.method, inputs, traces, reset
        return single_step(*step, *(() if self.placement is None else (self.placement.records,)))


Analyse: TypeAlias = Callable[[tuple[Any, ...], int | None], CompiledStep]
"""``(example, batch_size) -> step``; see `compile_step`."""


@dataclasses.dataclass(frozen=True, eq=False)
class CompiledModel:
    """The compiled steps of a model; methods take the model itself as an argument.

    A clone of an algorithm has its own model, and shares this object.

    Attributes
    ----------
    step
        The step compiled for the current shapes of the States and the settings.
    shapes, settings
        These shapes, and the settings of ``brainstate.environ``.
    is_mapped
        Whether the model is written for one sample and mapped over a batch.
    known, initial
        Compiled steps for other shapes and settings, and compiled initial values.
    data
        The mesh over which its arrays are sharded; ``None``: no mesh.
    """

    step: CompiledStep
    shapes: Shapes
    settings: Mapping[str, Any]
    is_mapped: bool
    known: dict[Any, CompiledStep]
    initial: InitialValues
    data: DataAxis | None = None

    def sharded(self, data: DataAxis) -> CompiledModel:
        """Return this model sharded over a mesh; steps of other shapes are compiled again.

        Raises
        ------
        ShapeError, OptionError
            If the batch size is not a multiple of the number of parts, or there is no batch axis.
        """
        return dataclasses.replace(self, data=data)._with_only(self.step)

    def initial_values(
        self,
        model: brainstate.nn.Module,
        states: States,
        batch_size: int | None,
        options: dict[str, Any],
        last_size: int | None,
    ) -> Values:
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
        now = values_by_path(short_term(states))
        if batch_size is None:
            batch_size = self._size(model, now, last_size)
        fresh = self.initial(model, self.is_mapped, batch_size, options)
        return {path: fresh[path] for path in now}

    def initial_function(
        self, model: brainstate.nn.Module, last_size: int | None
    ) -> tuple[tuple[brainstate.State, ...], InitialFunction]:
        """Return the States that initial values depend on, and their function."""
        size = self._size(model, values_by_path(short_term(all_states(model))), last_size)
        made = self.initial.initialiser(model, self.is_mapped, size)
        return made.states, made.values

    def _size(self, model: Any, now: Mapping[Path, Any], last_size: int | None) -> int | None:
        """Return the argument of ``init_state`` that makes the current shapes."""
        samples = self._samples(now, last_size)
        return self.initial.size_of(model, self.is_mapped, samples, shapes_of(now))

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
    ) -> CompiledModel:
        """Write values to States, and return this model compiled for their shapes.

        If compilation fails, the States keep their values.
        """
        shapes = shapes_of(values)
        before = {path: states[path].value for path in values}

        def compiled() -> CompiledStep:
            if shapes == self.shapes:
                return self._analysed(analyse)
            both = self.shapes, shapes
            example = arguments_for_batch(self.step.graph.traced, both, batch_size)
            return analyse(example, batch_size if self.is_mapped else None)

        try:
            write_by_path(states, values)
            step, now = self._step(shapes, compiled)
        except BaseException:
            write_by_path(states, before)
            raise
        return dataclasses.replace(self, step=step, shapes=shapes, settings=now)

    def up_to_date(self, analyse: Analyse) -> CompiledModel:
        """Return this model compiled for the current settings of the environment."""
        step, now = self._step(self.shapes, lambda: self._analysed(analyse))
        return dataclasses.replace(self, step=step, settings=now)

    def analysed_again(self, analyse: Analyse) -> CompiledModel:
        """Return this model compiled by another analysis, for the same shapes."""
        return self._with_only(self._analysed(analyse))

    def _analysed(self, analyse: Analyse) -> CompiledStep:
        """Return the step of the model as it is now, for the shapes of this one."""
        traced = self.step.graph.traced
        return analyse(example_arguments(traced), traced.batch_size)

    def _with_only(self, step: CompiledStep) -> CompiledModel:
        """Return this model with a new step, and no known steps of other shapes."""
        step = self._placed(step)
        known = {_key(self.shapes, self.settings): step}
        return dataclasses.replace(self, step=step, known=known)

    def _placed(self, step: CompiledStep) -> CompiledStep:
        if self.data is None:
            return step
        placement = placement_of(step.graph, step.trace_specs, self.data)
        return dataclasses.replace(step, placement=placement)

    def _step(
        self, shapes: Shapes, compiled: Callable[[], CompiledStep]
    ) -> tuple[CompiledStep, Mapping[str, Any]]:
        """Return the step for shapes and the current settings, and these."""
        now = settings()
        key = _key(shapes, now)
        if key not in self.known:
            self.known[key] = self._placed(compiled())
        return self.known[key], now


def _key(shapes: Shapes, now: Mapping[str, Any]) -> Any:
    return shapes, frozenset(now.items())


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
    brainstate.random.DEFAULT.value  # noqa: B018  created here, outside of every trace
    for state in states.values():
        state.value = strongly_typed(state.value)
    step = analyse(example, batch_size)
    is_mapped = batch_size is not None
    shapes = shapes_of(
        initial(model, True, batch_size, {}) if is_mapped else values_by_path(states)
    )
    now = settings()
    known = {_key(shapes, now): step}
    return CompiledModel(step, shapes, now, is_mapped, known, initial)


def learned_starts(compiled: CompiledModel, model: brainstate.nn.Module) -> list[Diagnostic]:
    """Return a warning for each parameter that only ``init_state`` reads: it has no gradient."""
    traced = compiled.step.graph.traced
    used, kind = {leaf.path for leaf in traced.parameters}, brainstate.ParamState
    unused = {p: s for p, s in all_states(model).items() if isinstance(s, kind) and p not in used}
    if not unused:
        return []
    samples = compiled.step.graph.batch.samples
    try:
        size = compiled.initial.size_of(model, compiled.is_mapped, samples, compiled.shapes)
    except ShapeError:  # `init_state` returns other shapes than the States have
        return []
    read = list(map(id, compiled.initial.initialiser(model, compiled.is_mapped, size).read))
    names = [path_name(path) for path, state in unused.items() if id(state) in read]
    return [
        Diagnostic(
            "warning",
            "no-trace",
            f"Parameter '{name}' is read by `init_state` alone, and an online rule has no trace "
            "for initial values: its gradient is zero.",
            (name,),
        )
        for name in names
    ]
