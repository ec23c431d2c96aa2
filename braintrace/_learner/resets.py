"""Resets inside a sequence: flags, affected States, and initial values."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import jax
from jax.typing import ArrayLike

from .._checks import flags_of
from .._errors import OptionError
from .._graph import ETraceGraph
from .._jax import Var
from .._runtime.model_states import States, read_states, short_term
from .._runtime.resets import flags_of_samples, reset_values
from .._typing import Path, PyTree, path_name
from .base import BaseLearner
from .body import Initial


def check_reset(
    reset: ArrayLike | None, graph: ETraceGraph, states: States, steps: int
) -> jax.Array | None:
    """Return reset flags of steps, or of samples at steps; ``None``: no resets.

    Parameters
    ----------
    reset
        The user's argument.
    graph, states
        The compiled model, and all its States.
    steps
        Length of the sequence.

    Raises
    ------
    ShapeError
        If the flags are not boolean, or have neither the shape ``(T,)`` nor ``(T, batch)``, with
        one for each sample of the model.
    OptionError
        If the learning rule follows all samples as one.
    """
    if reset is None:
        return None
    shapes = f"({steps},), or ({steps}, batch) to reset samples one by one"
    flags = flags_of("reset", reset, shapes, lambda f: f.ndim in (1, 2) and f.shape[0] == steps)
    if flags.ndim == 2:
        given = f"`reset` has shape {flags.shape}, one flag per step and sample"
        now = {path: state.value for path, state in short_term(states).items()}
        return flags_of_samples(given, flags, graph, now)
    return flags


def initial_values(learner: BaseLearner, states: States) -> Initial:
    """Return the initial values of all States of the model."""
    return list(learner.initial_values(states).values())


def check_fixed_weights(learner: BaseLearner, written: Collection[Path], resets: bool) -> None:
    """Refuse a sequence in which the weight of an ETP operation, or of a readout, changes.

    Parameters
    ----------
    learner
        The learner.
    written
        Paths of the States that the steps of the sequence write.
    resets
        Whether short-term States are reset within it.

    Raises
    ------
    OptionError
        If a weight is computed from a State that is written.
    """
    held = {f"The weight of '{key}'": paths for key, paths in learner.graph.held_paths.items()}
    held |= {f"The readout '{r.state}'": r.held_paths for r in learner.graph.traced.readouts}
    for what, paths in held.items():
        for path in paths:
            if path not in written:
                continue
            is_fresh = resets and path in learner.short_term_states
            changes = "`reset` initialises" if is_fresh else "`step_fn` writes"
            remedy = (
                "Make it a `brainstate.LongTermState`, which keeps its value"
                if is_fresh
                else "Change it between the calls, or in the `update_fn` of `etrace_online`"
            )
            is_readout = what.startswith("The readout")
            remedy += ", or compile with `readout_filters=False`" if is_readout else ""
            raise OptionError(
                f"{what} is computed from State '{path_name(path)}', which {changes}. Weights are "
                f"fixed within a sequence. {remedy}."
            )


def reset_states(learner: BaseLearner, initial: Initial, flags: jax.Array) -> None:
    """Reset some samples of the model's States, or all."""
    states = learner.short_term_states
    now = {path: state.value for path, state in states.items()}
    after = reset_values(learner.graph.batch, now, dict(zip(states, initial, strict=True)), flags)
    for path, state in states.items():
        state.value = after[path]


def initial_inputs(
    learner: BaseLearner, values: Mapping[Path, PyTree], initial: Initial
) -> dict[Var, PyTree]:
    """Return the inputs of the step's program that a reset changes, with their initial values.

    Parameters
    ----------
    learner, values
        The learner, and values of the States of its step.
    initial
        Initial values of States; empty without resets.
    """
    by_path = dict(zip(learner.short_term_states, initial, strict=True)) if initial else {}
    graph, states = learner.graph, learner.states_of_step
    inputs = read_states(graph, states, {path: by_path.get(path, values[path]) for path in states})
    return {
        leaf.in_var: inputs[leaf.in_var] for leaf in graph.traced.leaves if leaf.path in by_path
    }
