"""States as inputs and outputs of a traced step, leaf by leaf.

A model for one sample is mapped over the samples of a batch. A State that the step returns as it
was is a constant of the step: no gradient passes through it from step to step. Batch-norm
statistics in evaluation mode are an example, in a pure function that returns all its state.
"""

import dataclasses
from collections.abc import Callable, Sequence

import brainstate
import jax
import jax.numpy as jnp

from .._errors import CompilationError
from .._graph.traced_model import StateKind
from .._jax import Aval, ClosedJaxpr, is_tracer, strongly_typed, trace_to_jaxpr
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
    states: Sequence[brainstate.State], written: Sequence[bool], paths: dict[int, Path]
) -> tuple[list[StateArray], dict[Path, brainstate.State], dict[Path, brainstate.State]]:
    """Return the States' leaves, the States by path, and those outside the model."""
    arrays = []
    touched: dict[Path, brainstate.State] = {}
    outside: dict[Path, brainstate.State] = {}
    for state, is_written in zip(states, written, strict=True):
        path = paths.get(id(state))
        if path is None:
            path = ("<outside>", type(state).__name__, len(outside))
            outside[path] = state
        touched[path] = state
        kind, is_grouped = kind_of(state), isinstance(state, brainstate.HiddenGroupState)
        is_fresh = isinstance(state, brainstate.ShortTermState)
        for leaf in range(len(jax.tree.leaves(state.value))):
            arrays.append(StateArray(path, leaf, kind, is_grouped, bool(is_written), is_fresh))
    return arrays, touched, outside


def step_of(
    closed: ClosedJaxpr, arrays: list[StateArray], rule: Rule
) -> Callable[..., list[jax.Array]]:
    """Return the step as a function of arguments and of the leaves of States."""

    def step(*values: jax.Array) -> list[jax.Array]:
        results = evaluate_inlined(closed, values, rule)
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


def mapped_axes(arrays: list[StateArray], arguments: int) -> list[str]:
    """Return for every input ``'mapped'``, ``'shared'`` or ``'key'``."""
    return ["mapped"] * arguments + [*map(_axis, arrays)]


def _axis(array: StateArray) -> str:
    if array.kind == "random":
        return "key"
    if array.per_sample:
        return "mapped"
    if array.written and array.kind != "parameter":
        raise CompilationError(
            f"`update` writes State '{path_name(array.path)}', which has one value for all "
            "samples, but the model is mapped over the samples of a batch: each sample would "
            "write another value. Make it a `brainstate.ShortTermState`, one per sample, or "
            "write the model for a batch (`batch_size` without `vmap`)."
        )
    return "shared"


def mapped_avals(avals: list[Aval], axes: list[str], batch_size: int) -> list[Aval]:
    """Return the types of a vmapped step's arguments, from those for one sample."""
    return [
        jax.ShapeDtypeStruct((batch_size, *aval.shape), aval.dtype) if axis == "mapped" else aval
        for aval, axis in zip(avals, axes, strict=True)
    ]


def map_over_batch(
    step: Callable[..., list[jax.Array]], arrays: list[StateArray], axes: list[str], batch_size: int
) -> Callable[..., list[jax.Array]]:
    """Vmap a step over the batch; every sample has its own random key."""
    key_outputs = _key_outputs(arrays)
    in_axes = [None if axis == "shared" else 0 for axis in axes]

    def mapped_step(*values: jax.Array) -> list[jax.Array]:
        inputs = [
            jax.random.split(value, batch_size) if axis == "key" else value
            for value, axis in zip(values, axes, strict=True)
        ]
        results = list(jax.vmap(step, in_axes=in_axes, out_axes=0)(*inputs))
        for index in key_outputs:
            results[index] = results[index][0]
        return results

    return mapped_step


def _key_outputs(arrays: list[StateArray]) -> list[int]:
    """Return the places of random keys among the outputs, counted from the end."""
    ends = [array for array in arrays if array.written]
    return [i - len(ends) for i, array in enumerate(ends) if array.kind == "random"]


def without_unchanged(
    program: Program, arrays: Sequence[StateArray], arguments: int
) -> tuple[Program, list[StateArray]]:
    """Return a step that does not write its unchanged States, and the State leaves.

    Parameters
    ----------
    program
        The step without calls: ``(arguments, leaves) -> (results, leaves that it writes)``.
    arrays, arguments
        The State leaves, and the number of arguments.
    """
    results = len(program.out_atoms) - sum(array.written for array in arrays)
    after = iter(program.out_atoms[results:])
    written = list(program.out_atoms[:results])
    new_arrays = []
    for before, array in zip(program.in_vars[arguments:], arrays, strict=True):
        atom = next(after) if array.written else None
        if atom is before:
            array = dataclasses.replace(array, written=False)
        elif atom is not None:
            written.append(atom)
        new_arrays.append(array)
    if len(written) == len(program.out_atoms):
        return program, new_arrays

    def run(*values: object) -> list[object]:
        inputs = dict(zip(program.in_vars, values, strict=True))
        return evaluate(program, written, inputs, effects=True)

    return program_of(trace_to_jaxpr(run, [var.aval for var in program.in_vars])), new_arrays
