"""The compiled model: a frozen description of what learns online, and how."""

import warnings
from typing import Any

import brainstate
import jax
import numpy as np

from .._arguments import BOOLEAN, MODEL, NOT_NEGATIVE, check_option
from .._errors import CompilationError, DtypeError
from .._graph import ETraceGraph
from .._graph.diagnostics import ApproximationWarning, Diagnostic
from .._graph.hidden_group import HiddenGroup
from .._graph.traced_model import TracedModel
from .._jax import is_tracer
from .._typing import Path, path_name
from .analysis import analysed
from .backward import about_outputs
from .derivative import Derivatives
from .diagnose import diagnose
from .relations import find_relations
from .trace import trace_model


def compile_etrace_graph(
    model: brainstate.nn.Module,
    *arguments: Any,
    batch_size: int | None = None,
    strict: bool = False,
    unroll_limit: int = 32,
) -> ETraceGraph:
    """Analyse one step of a model.

    Parameters
    ----------
    model
        A brainstate module whose states are initialised and whose ``update`` is one step.
    *arguments
        Example arguments of ``update``; their values do not matter.
    batch_size
        ``None``: the model is analysed as it is. A number: the model is written for one
        sample, and is analysed mapped over a leading batch axis of that size.
    strict
        Raise instead of warning wherever a part of the gradient is cut.
    unroll_limit
        Longest loop inside ``update`` that is unrolled because it holds a marked operation, or
        because it mixes positions of a hidden state beside what it does position by position.

    Returns
    -------
    ETraceGraph
        Frozen and printable.

    Raises
    ------
    CompilationError
        If the model has no hidden states, complex ones, no marked operation that reaches one,
        or (with ``strict``) a path that a trace cannot carry; or if ``update`` does something
        with its arguments and States that JAX or brainstate cannot.
    OptionError
        If ``model`` or an option is not what it should be.
    NotInitializedError
        If ``init_state`` has not been called.
    UnitError
        If units do not fit together in ``update``.
    DtypeError
        If a parameter of a marked operation is not floating-point, or is not finite, or if an
        argument is nothing that JAX computes with.

    Warns
    -----
    ApproximationWarning
        Once for every diagnostic of level ``'warning'``.
    """
    return compile_model(model, arguments, batch_size, strict, unroll_limit, False)[0]


def compile_model(
    model: brainstate.nn.Module,
    arguments: tuple[Any, ...],
    batch_size: int | None,
    strict: bool,
    unroll_limit: int,
    every_state: bool,
) -> tuple[ETraceGraph, dict[Path, brainstate.State]]:
    """Return the graph, and the States outside the model that a step touches (random keys).

    With ``every_state``, states that no later step reads position by position have traces as well.
    """
    check_option("model", model, MODEL)
    check_option("strict", strict, BOOLEAN)
    check_option("unroll_limit", unroll_limit, NOT_NEGATIVE)
    _check_parameters(model)
    traced, outside = trace_model(model, arguments, batch_size, unroll_limit)
    _check_hidden_states(traced)
    derivatives = Derivatives()
    found = analysed(traced, every_state, unroll_limit, derivatives)
    groups, outputs = found.groups, found.outputs
    if not groups and not outputs:
        raise CompilationError(
            f"`{type(model).__name__}.update` writes no `brainstate.HiddenState` of a "
            "floating-point dtype, so that there is nothing to trace. Keep what the model "
            "remembers from step to step in a `brainstate.HiddenState`."
        )
    parts = (found.traced, found.operations, groups, found.walks)
    relations = find_relations(*parts, derivatives)
    findings = (*diagnose(*parts, relations, derivatives), *about_outputs(outputs))
    # The steps of a loop say the same of their line of the model.
    diagnostics = tuple(dict.fromkeys(findings))
    if not relations and not outputs:
        raise CompilationError(_no_relation(model, groups, diagnostics))
    _publish(diagnostics, strict)
    return ETraceGraph(found.traced, tuple(groups), tuple(relations), diagnostics), outside


def _no_relation(model: Any, groups: list[HiddenGroup], diagnostics: tuple[Diagnostic, ...]) -> str:
    names = ", ".join(state.name for group in groups for state in group.states)
    reasons = "".join(f"\n- {diagnostic}" for diagnostic in diagnostics)
    return (
        f"No marked operation with a parameter reaches a hidden state ({names}) of "
        f"`{type(model).__name__}`, so that no weight would learn online. Use "
        "`braintrace.matmul` (or `element_wise`, `conv`, `sparse_matmul`, `lora_matmul`) for "
        f"the weights on the way into the hidden state.{reasons}"
    )


def _check_parameters(model: brainstate.nn.Module) -> None:
    leaves = [
        (path, jax.numpy.asarray(leaf))
        for path, state in model.states(brainstate.ParamState).items()
        for leaf in jax.tree.leaves(state.value)
    ]
    for path, leaf in leaves:
        if not jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact):
            raise DtypeError(
                f"Parameter '{path_name(path)}' of shape {tuple(leaf.shape)} has dtype "
                f"{leaf.dtype}; a parameter that learns must be floating-point. Convert "
                "it, or keep it in a State that is not a `ParamState`."
            )
    known = [(path, leaf) for path, leaf in leaves if not is_tracer(leaf)]
    finite = jax.device_get([_is_finite(leaf) for _, leaf in known])
    for (path, leaf), is_finite in zip(known, finite, strict=True):
        if not is_finite:
            raise DtypeError(
                f"Parameter '{path_name(path)}' of shape {tuple(leaf.shape)} has values that "
                "are not finite (NaN or infinity). Initialise it again before compiling."
            )


def _is_finite(leaf: jax.Array) -> Any:
    """Tell whether all of an array is finite, where it lies.

    NumPy reads an array on one CPU in place; JAX would compile a program for every shape.
    """
    is_here = [device.platform for device in leaf.devices()] == ["cpu"]
    return (np.isfinite(np.asarray(leaf)) if is_here else jax.numpy.isfinite(leaf)).all()


def _check_hidden_states(traced: TracedModel) -> None:
    for leaf in traced.leaves:
        if leaf.kind == "hidden" and jax.numpy.issubdtype(leaf.dtype, jax.numpy.complexfloating):
            raise CompilationError(
                f"Hidden state '{leaf.name}' of shape {leaf.shape} has dtype {leaf.dtype}; a trace "
                "follows real numbers. Keep the real and the imaginary part as two hidden states; "
                "weights and inputs may stay complex."
            )


def _publish(diagnostics: tuple[Diagnostic, ...], strict: bool) -> None:
    costly = [diagnostic for diagnostic in diagnostics if diagnostic.level == "warning"]
    if strict and costly:
        listed = "".join(f"\n- {diagnostic}" for diagnostic in costly)
        raise CompilationError(f"Parts of the gradient cannot be carried by traces:{listed}")
    for diagnostic in costly:
        warnings.warn(str(diagnostic), ApproximationWarning, stacklevel=3)
