"""The list of compiler passes, in order: from a model to an `ETraceGraph`.

One step of the model is a flat program whose inputs and outputs are States. Hidden states that
depend on each other elementwise form a *group*. Their elements correspond to the *units* of the
group (``positions`` in the code), at most one element of each state for each unit. An ETP operation
reaches a group elementwise if element ``u`` of its output reaches one unit ``p(u)``, or several by
a broadcast. Such an operation, with the groups that it reaches, is a *relation*, and its weight
learns online.

Two passes are central. Labels that flow forward through the step find the units (`units`). A walk
goes backward (`walk`). It starts at the new value of a hidden state, whose elements have the unit
numbers ``0 .. V-1``. It carries these numbers back through the equations, to the ETP operations and
to the states before the step. An equation that couples elements ends the walk on that path: the
path is truncated, and reported.

Each pass has its own file. A pass returns new data and never modifies its arguments.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import brainstate

from .._checks import check_model
from .._graph.graph import ETraceGraph
from .._graph.method import FOLLOWS_ALL, TraceMethod
from .._graph.traced_model import TracedModel
from .._typing import Path
from .analysis import Analysis, states_as_outputs
from .batch import batch_of
from .canonicalize import with_loops_unrolled
from .check_model import (
    check_has_states,
    check_hidden_states,
    check_learns,
    check_loops,
    check_parameters,
)
from .findings import diagnose, publish
from .flat_state import about_layers, flattened_state, layers_of
from .hidden_groups import GroupedStep, grouped
from .hidden_states import hidden_arrays, with_memories, written
from .jacobian_sparsity import structure_of
from .marks import marking_of
from .readouts import with_filters
from .relations import find_relations, marked_operations
from .rings import with_registers
from .trace import trace_model
from .units import Units


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompilerOptions:
    """Options of `compile_etrace_graph` and of every algorithm.

    Attributes
    ----------
    strict, unroll_limit, readout_filters, mark
        See `compile_etrace_graph`.
    every_state
        Whether states that no later step reads elementwise have traces as well.
    rule
        Name of the learning rule, for messages.
    samples
        Number of samples that the model itself is written for; ``None``: unknown.
    """

    strict: bool = False
    unroll_limit: int = 32
    readout_filters: bool = False
    mark: Any = None
    every_state: bool = False
    rule: str = "D_RTRL"
    samples: int | None = None


def compile_model(
    model: brainstate.nn.Module,
    arguments: tuple[Any, ...],
    batch_size: int | None,
    options: CompilerOptions,
    method: TraceMethod,
) -> tuple[ETraceGraph, Mapping[Path, brainstate.State]]:
    """Compile a model for a learning rule.

    Return the graph, and the States outside the model that a step reads or writes (random keys).
    The ``method`` is the learning rule.
    """
    check_model(model)
    check_parameters(model)

    # `update` as a flat program: calls are inlined, branches and loops with ETP operations lowered.
    # Before that, uses of parameters are marked, if `mark` asks for it or if no ETP operation of
    # the model reaches a hidden state. Only rules with elementwise traces need marks.
    jacobian = method.jacobian
    is_elementwise = jacobian == "elementwise"
    wanted = marking_of(model, options.mark, options.unroll_limit)
    marking = wanted if is_elementwise else None
    traced, outside = trace_model(model, arguments, batch_size, options.unroll_limit, marking)

    # Any State that carries values of units to a later step is a hidden state.
    traced = with_memories(traced, jacobian in FOLLOWS_ALL)
    check_hidden_states(traced)
    check_loops(traced)
    if is_elementwise:
        traced = with_registers(with_loops_unrolled(traced, options.unroll_limit))

    # The batch axis of each state.
    batch = batch_of(model, batch_size, options.samples)

    # The memory of a leaky readout becomes a function of filters of the units that feed it.
    if options.readout_filters:
        traced, batch = with_filters(traced, batch)

    # Groups of hidden states.
    step = _grouped(options, traced)
    check_has_states(model, step)

    # Relations: how the output of each ETP operation reaches the units of each group. Operations
    # that the rule does not carry are ordinary operations from here on.
    every_relation = find_relations(step)
    relations = [relation for relation in every_relation if method.carries(relation)]

    # For full-Jacobian rules, all hidden state as one vector.
    layers = layers_of(step) if jacobian == "layered" else []
    samples = options.samples if batch_size is None else batch_size
    context = options.rule, batch, samples is not None, "operands" not in method.needs
    flat = flattened_state(step, *context, layers) if jacobian in FOLLOWS_ALL else None
    if flat is not None and jacobian == "sparse":
        flat = dataclasses.replace(flat, structure=structure_of(step.traced, step.analysis, flat))

    # Report the gradient paths that this rule leaves out.
    findings = diagnose(step, every_relation, relations, jacobian)
    # Steps of an unrolled loop repeat their diagnostics.
    diagnostics = tuple(dict.fromkeys([*findings, *about_layers(step, layers)]))
    check_learns(model, step, every_relation, diagnostics, method.jacobian)
    publish(diagnostics, options.strict)

    # Last, the arrays that the rule carries from step to step.
    parts = (step.traced, tuple(step.groups), tuple(relations), diagnostics)
    graph = ETraceGraph(*parts, needs=method.needs, trace_specs={}, batch=batch, flat_state=flat)
    method.check(graph)
    specs = method.trace_specs(graph, options.every_state)
    return dataclasses.replace(graph, trace_specs=specs), outside


def _grouped(options: CompilerOptions, traced: TracedModel) -> GroupedStep:
    """Analyse the step as it is and group its hidden states."""
    # Facts about the program that several passes need are computed once.
    analysis = Analysis(traced.program)

    # Weights that may learn: ETP operations whose operands are parameter-derived.
    operations = marked_operations(traced, analysis)

    # No trace can follow a nonlinear `custom_vjp`. A state after one that no later step reads is
    # therefore an output, which needs no trace. The same holds for a readout, whose derivative goes
    # through filters.
    outputs = (*states_as_outputs(traced), *traced.filtered)

    # The units of the other hidden states, and the variables that the model continues with.
    leaves = [leaf for leaf in written(traced, "hidden") if leaf not in outputs]
    units = Units(analysis, leaves)
    states = hidden_arrays(analysis, units)

    # States with units in common are a group. The walks back from them find the operations that
    # reach them and the truncated paths.
    return grouped(traced, analysis, units, states, operations, outputs, options.every_state)
