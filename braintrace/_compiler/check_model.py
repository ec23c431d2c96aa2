"""Checks that a model can learn online."""

from collections.abc import Iterable, Sequence

import brainstate
import jax

from .._errors import CompilationError, DtypeError
from .._graph.hidden_group import HiddenParamOpRelation
from .._graph.method import FOLLOWS_ALL, Jacobian
from .._graph.report import Diagnostic
from .._graph.traced_model import TracedModel
from .._jax import source_line
from .._typing import path_name
from .canonicalize import on_gradient_paths
from .hidden_groups import GroupedStep


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
    for index in program.making(on_gradient_paths(traced)):
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
    if not step.groups and not step.outputs:
        raise CompilationError(
            f"`{type(model).__name__}.update` writes no `brainstate.HiddenState` of a "
            "floating-point dtype, so there is nothing to trace. Store the memory of the model "
            "in a `brainstate.HiddenState`."
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
    if relations or step.outputs or jacobian == "none" or jacobian in FOLLOWS_ALL:
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
    has_marks = step.traced.has_found_marks or bool(step.operations)
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
