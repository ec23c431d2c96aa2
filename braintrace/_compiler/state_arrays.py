"""States as inputs and outputs of a traced step, leaf by leaf.

A model for one sample is mapped over the samples of a batch. A State that the step returns as it
was is a constant of the step: no gradient passes through it from step to step. Batch-norm
statistics in evaluation mode are an example, in a pure function that returns all its state.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import brainstate
import jax
import jax.numpy as jnp

from .._errors import CompilationError
from .._graph.traced_model import StateKind
from .._jax import Aval, is_tracer, strongly_typed, trace_to_jaxpr
from .._jaxpr.evaluate import Rule, evaluate, evaluate_inlined
from .._jaxpr.program import Program, program_of
from .._typing import Path, path_name


def kind_of(state: brainstate.State) -> StateKind:
    """Return the kind of a State."""
    if isinstance(state, brainstate.HiddenState):
        return "hidden"
    if isinstance(state, brainstate.ParamState):
        return "parameter"
    return "random" if isinstance(state, brainstate.random.RandomState) else "other"


@dataclasses.dataclass(frozen=True)
class StateArray:
    """One leaf of a State, as an input and an output of the traced function."""

    path: Path
    leaf: int
    kind: StateKind
    is_grouped: bool
    written: bool
    per_sample: bool


def state_arrays_of(
    states: Mapping[Path, brainstate.State], is_written: Sequence[bool]
) -> list[StateArray]:
    """Return the leaves of States."""
    return [
        StateArray(
            path,
            leaf,
            kind_of(state),
            isinstance(state, brainstate.HiddenGroupState),
            written,
            isinstance(state, brainstate.ShortTermState),
        )
        for (path, state), written in zip(states.items(), is_written, strict=True)
        for leaf in range(len(jax.tree.leaves(state.value)))
    ]


Step = Callable[..., list[jax.Array]]
"""A step as a function of arguments and of the leaves of States."""


def step_of(program: Program, arrays: Sequence[StateArray], rule: Rule) -> Step:
    """Return a step whose new States have variables of their own."""

    def step(*values: jax.Array) -> list[jax.Array]:
        results = evaluate_inlined(program.jaxpr, values, rule)
        writes = [array for array in arrays if array.written]
        outputs = results[: len(results) - len(writes)]
        taken = {id(value) for value in values}
        for array, value in zip(writes, results[len(outputs) :], strict=True):
            value = value if array.kind == "random" else strongly_typed(value)
            # A hidden state that equals an input, a constant or another state is copied: with its
            # own variable, changes to one do not affect the other.
            is_state = array.kind in ("hidden", "other")
            if is_state and (id(value) in taken or not is_tracer(value)):
                value = jnp.copy(value)
            taken.add(id(value))
            outputs.append(value)
        return outputs

    return step


def map_over_batch(
    step: Step, arrays: Sequence[StateArray], avals: Sequence[Aval], batch_size: int
) -> tuple[Step, list[Aval]]:
    """Vmap a step over the batch; every sample has its own random key.

    Return the step, and the types of its arguments, given those for one sample.
    """
    count = len(avals) - len(arrays)
    is_key = [False] * count + [array.kind == "random" for array in arrays]
    axes = [0] * count + [0 if _has_samples(array) else None for array in arrays]
    ends = [array for array in arrays if array.written]

    def mapped(*values: jax.Array) -> list[jax.Array]:
        inputs = (
            jax.random.split(value, batch_size) if key else value
            for value, key in zip(values, is_key, strict=True)
        )
        results = list(jax.vmap(step, axes)(*inputs))
        for place, array in enumerate(ends, len(results) - len(ends)):
            if array.kind == "random":
                results[place] = results[place][0]
        return results

    every = zip(avals, axes, is_key, strict=True)
    return mapped, [
        jax.ShapeDtypeStruct((batch_size, *aval.shape), aval.dtype)
        if axis == 0 and not key
        else aval
        for aval, axis, key in every
    ]


def _has_samples(array: StateArray) -> bool:
    """Test whether a State of a vmapped model has a value for each sample."""
    if array.written and not array.per_sample and array.kind not in ("parameter", "random"):
        raise CompilationError(
            f"`update` writes State '{path_name(array.path)}', which has one value for all "
            "samples, but the model is mapped over the samples of a batch: each sample would "
            "write another value. Make it a `brainstate.ShortTermState`, one per sample, or "
            "write the model for a batch (`batch_size` without `vmap`)."
        )
    return array.per_sample or array.kind == "random"


def without_unchanged(
    program: Program, arrays: Sequence[StateArray]
) -> tuple[Program, list[StateArray]]:
    """Return a step that does not write its unchanged States, and the State leaves.

    Parameters
    ----------
    program
        The step without calls: ``(arguments, leaves) -> (results, leaves that it writes)``.
    arrays
        The State leaves.
    """
    results = len(program.out_atoms) - sum(array.written for array in arrays)
    leaves = program.in_vars[len(program.in_vars) - len(arrays) :]
    new = iter(program.out_atoms[results:])
    pairs = [(next(new) if a.written else None, old) for a, old in zip(arrays, leaves, strict=True)]
    written = [*program.out_atoms[:results]]
    written += [atom for atom, old in pairs if atom is not None and atom is not old]
    changed = [
        dataclasses.replace(array, written=array.written and atom is not old)
        for array, (atom, old) in zip(arrays, pairs, strict=True)
    ]
    if len(written) == len(program.out_atoms):
        return program, changed

    def run(*values: object) -> list[object]:
        inputs = dict(zip(program.in_vars, values, strict=True))
        return evaluate(program, written, inputs, effects=True)

    return program_of(trace_to_jaxpr(run, [var.aval for var in program.in_vars])), changed
