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

`compile_model` calls every pass: trace, marks, canonical form, memories, ring buffers, batch axes,
leaky readouts, ETP operations, groups, relations, flat state, diagnostics, traces. A pass returns
new data and never modifies its arguments.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import brainstate
import jax

from .._checks import check_model, path_name
from .._errors import CompilationError, DtypeError
from .._graph.graph import ETraceGraph, TraceSpecs, slot_sizes, specs_of
from .._graph.hidden_group import HiddenParamOpRelation
from .._graph.method import FOLLOWS_ALL, Jacobian, TraceMethod
from .._graph.report import Diagnostic
from .._graph.traced_model import TracedModel
from .._jax import source_line
from .._typing import Path
from .analysis import Analysis
from .canonicalize import on_gradient_paths, rewritten
from .diagnostics import diagnose, publish
from .flat_state import about_layers, flattened_state, layers_of, structure_of
from .hidden_groups import GroupedStep, grouped, with_memories
from .leaky_readouts import with_filters
from .marks import wanted_marks, with_marks
from .relations import find_relations, marked_operations
from .rings import with_registers
from .trace import batch_of, trace_model


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompilerOptions:
    """Options of `compile_etrace_graph` and of every algorithm.

    Attributes
    ----------
    strict, mark
        See `compile_etrace_graph`.
    every_state
        Whether states that no later step reads elementwise have traces as well.
    rule
        Name of the learning rule, for messages.
    samples
        Number of samples that the model itself is written for; ``None``: unknown.
    """

    strict: bool = False
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

    # `update` as a flat program, of one sample if the model is mapped.
    jacobian = method.jacobian
    is_elementwise = jacobian == "elementwise"
    wants = wanted_marks(model, options.mark)
    traced, outside = trace_model(model, arguments, batch_size)

    # Uses of parameters are marked, if `mark` asks for it or if no ETP operation of the model
    # reaches a hidden state. Only rules with elementwise traces need marks.
    if is_elementwise:
        traced = with_marks(traced, wants, is_default=options.mark is None)

    # For all samples, branches and loops with ETP operations are lowered.
    traced = rewritten(traced, is_elementwise)

    # Any State that carries values of units to a later step is a hidden state.
    traced = with_memories(traced, jacobian in FOLLOWS_ALL)
    check_hidden_states(traced)
    check_loops(traced)
    if is_elementwise:
        traced = with_registers(traced) if traced.may_delay else traced

    # The batch axis of each state.
    batch = batch_of(model, batch_size, options.samples)

    # The memory of a leaky readout becomes a function of filters of the units that feed it.
    if method.filters_readouts:
        traced, batch = with_filters(traced, batch)

    # Weights that may learn: ETP operations whose operands are parameter-derived.
    analysis = Analysis(traced.program)
    operations = marked_operations(traced, analysis)

    # Groups of hidden states: those with units in common. The walks back from them find the
    # operations that reach them and the truncated paths.
    step = grouped(traced, analysis, operations, options.every_state)
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
    of_layers = about_layers(step, layers) if layers else ()
    diagnostics = tuple(dict.fromkeys([*findings, *of_layers]))
    check_learns(model, step, every_relation, diagnostics, method.jacobian)
    publish(diagnostics, options.strict)

    # Last, the arrays that the rule carries from step to step.
    parts = (step.traced, tuple(step.groups), tuple(relations), diagnostics)
    graph = ETraceGraph(*parts, needs=method.needs, trace_specs={}, batch=batch, flat_state=flat)
    method.check(graph)
    specs = method.fit(graph).trace_specs(graph, options.every_state)
    check_slots(graph, specs)
    return dataclasses.replace(graph, trace_specs=specs), outside


# --- checks


def check_parameters(model: brainstate.nn.Module) -> None:
    """Refuse parameters that cannot learn."""
    for path, state in model.states(brainstate.ParamState).items():
        for leaf in map(jax.numpy.asarray, jax.tree.leaves(state.value)):
            if not jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact):
                raise DtypeError(
                    f"Parameter '{path_name(path)}' of shape {tuple(leaf.shape)} has dtype "
                    f"{leaf.dtype}; a parameter that learns must be floating-point. Convert "
                    "it, or keep it in a State that is not a `ParamState`."
                )


def check_hidden_states(traced: TracedModel) -> None:
    """Refuse complex hidden states."""
    for leaf in traced.leaves:
        if leaf.kind == "hidden" and jax.numpy.issubdtype(leaf.dtype, jax.numpy.complexfloating):
            raise CompilationError(
                f"Hidden state '{leaf.name}' of shape {leaf.shape} has dtype {leaf.dtype}; traces "
                "need real states. Store the real and the imaginary part as two hidden states; "
                "weights and inputs may be complex."
            )


def check_loops(traced: TracedModel) -> None:
    """Refuse a ``while`` loop on a gradient path to a hidden state."""
    program = traced.program
    for index in program.making(on_gradient_paths(traced, "hidden")):
        equation = program.equations[index]
        if equation.primitive.name == "while":
            raise CompilationError(
                f"A gradient path of `update` passes a `while` loop ({source_line(equation)}). A "
                "loop of unknown length has no derivative backward. Use a loop of known length "
                "(`scan`, `for_loop`, or `fori_loop` with static bounds), or pass what enters "
                "the loop through `jax.lax.stop_gradient`."
            )


def check_has_states(model: brainstate.nn.Module, step: GroupedStep) -> None:
    """Refuse a step without hidden states."""
    if not step.groups and not step.traced.filtered:
        raise CompilationError(
            f"`{type(model).__name__}.update` writes no `brainstate.HiddenState` of a "
            "floating-point dtype, so there is nothing to trace. Store the memory of the model "
            "in a `brainstate.HiddenState`."
        )


MOST_BYTES = 2**32
"""Largest size of the traces of one State with several values for each unit."""


def check_slots(graph: ETraceGraph, specs: TraceSpecs) -> None:
    """Refuse a State with many values for each unit whose traces would fill the memory."""
    for leaf, count, size in slot_sizes(graph, specs_of(specs)):
        if size > MOST_BYTES:
            raise CompilationError(
                f"State '{leaf.name}' has {count:,} values for each unit, and their traces take "
                f"{size:,} bytes; the limit is {MOST_BYTES:,}. Delay values by "
                "`braintrace.nn.Delay`, whose values share one trace, or hold the State constant "
                "by `jax.lax.stop_gradient`."
            )


def check_learns(
    model: brainstate.nn.Module,
    step: GroupedStep,
    relations: Sequence[HiddenParamOpRelation],
    diagnostics: Iterable[Diagnostic],
    jacobian: Jacobian,
) -> None:
    """Refuse a model none of whose weights would learn online.

    A full-Jacobian rule follows every parameter, marked or not. A rule of single steps follows
    none.
    """
    if relations or step.traced.filtered or jacobian == "none" or jacobian in FOLLOWS_ALL:
        return
    names = ", ".join(state.name for state, _ in step.new_states)
    parameters = {leaf.in_var for leaf in step.traced.parameters}
    behind = step.analysis.program.ancestors(var for _, var in step.new_states)
    if behind.isdisjoint(parameters):
        raise CompilationError(
            f"No parameter reaches a hidden state ({names}) of `{type(model).__name__}`: it is a "
            'fixed reservoir, and its readout needs no trace. Use `Immediate` ("immediate"), '
            "which is exact here."
        )
    has_marks = step.traced.is_marked_automatically or bool(step.operations)
    advice = (
        ""
        if has_marks
        else (
            " Use `braintrace.matmul` (or `element_wise`, `conv`, `sparse_matmul`) for the weights "
            "on the way into it, or `mark='auto'`: the compiler then marks the weights."
        )
    )
    raise CompilationError(
        f"No ETP operation with a parameter reaches a hidden state ({names}) of "
        f"`{type(model).__name__}`, so no weight would learn online.{advice}"
        + "".join(f"\n- {diagnostic}" for diagnostic in diagnostics)
    )
