"""Compiled model: the steps compiled so far, by shapes of States and settings of the environment.

A step is compiled for the shapes of the short-term States, which have batch axes, and for the flags
of ``brainstate.environ``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from .._core.steps import Inputs
from .._core.traces import pairs_of, reset_traces, stored_specs
from .._core.windows import single_step
from .._graph import ETraceGraph, TraceMethod
from .._model import InitialValues, Shapes, States
from .._typing import PyTree, path_name
from ..sharding import DataAxis, Placement, placement_of


@dataclasses.dataclass(eq=False)
class CompiledStep:
    """A compiled model with its learning rule.

    Attributes
    ----------
    graph, method
        The compiled model, and the rule.
    outside
        States outside the model that a step uses.
    trace_dtype
        The dtype in which traces are stored; see `Learner`.
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

    @property
    def carried_types(self) -> tuple[PyTree, PyTree]:
        """Types of the traces and filters: steps with equal ones may continue each other."""
        specs = jax.tree.map(lambda s: (s.shape, str(s.dtype), s.axes, s.rule), self.trace_specs)
        return specs, {leaf.name: (leaf.shape, leaf.dtype) for leaf in self.graph.traced.filters}

    def one_step(self, inputs: Inputs, traces: Any, reset: jax.Array | None = None) -> Any:
        """Return one step, with its residuals placed on the mesh; see `single_step`."""
        step = self.graph, self.method, inputs, traces, reset
        return single_step(*step, *(() if self.placement is None else (self.placement.records,)))


@dataclasses.dataclass(frozen=True, eq=False)
class CompiledModel:
    """The compiled steps of a model; copies of a learner share this object.

    Attributes
    ----------
    step
        The step compiled for the current shapes of the States and the settings.
    shapes, settings
        These shapes, and the settings of ``brainstate.environ``.
    is_mapped
        Whether the model is written for one sample and mapped over a batch.
    initial
        Compiled initial values.
    known
        Compiled steps for other shapes and settings.
    data
        The mesh over which its arrays are sharded; ``None``: no mesh.
    """

    step: CompiledStep
    shapes: Shapes
    settings: Mapping[str, Any]
    is_mapped: bool
    initial: InitialValues
    known: dict[Any, CompiledStep] = dataclasses.field(default_factory=dict)
    data: DataAxis | None = None

    def with_step(self, make: Callable[[], CompiledStep]) -> CompiledModel:
        """Return this model with the step for its shapes and settings, a known one if it can.

        Raises
        ------
        ShapeError, OptionError
            If the batch size is not a multiple of the parts of a mesh, or there is no batch axis.
        """
        key = self.shapes, frozenset(self.settings.items())
        if key not in self.known:
            step = make()
            if self.data is not None:
                placement = placement_of(step.graph, step.trace_specs, self.data)
                step = dataclasses.replace(step, placement=placement)
            self.known[key] = step
        return dataclasses.replace(self, step=self.known[key])
