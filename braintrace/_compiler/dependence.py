"""Which numbers of the old hidden states each number of the new ones is computed from.

The structure of ``J`` is followed through the program of a step, forward, from the states of the
first sample: a set of old numbers for every element of every value. Operations element by element
and data movement keep elements apart, products join those that meet (of a sparse matrix the entries
that there are), and of any other operation every output depends on all inputs.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np

from .._errors import CompilationError
from .._etrace_op import ETP_PRIMITIVE_SPECS, is_joined
from .._jax import Equation, Var, is_var
from .._jaxpr.data_movement import NOWHERE, is_data_movement, moved_operands
from .._jaxpr.factors import NOTHING, joining
from .analysis import Analysis
from .grouped_step import GroupedStep
from .transfer import CONSTANT, ELEMENTWISE, REDUCTIONS

Sets: TypeAlias = np.ndarray
"""Of every element, flat, whether it depends on each of the old numbers: ``(size, numbers)``."""


def with_dependence(step: GroupedStep) -> GroupedStep:
    """Return a step whose one hidden group knows what its numbers are computed from.

    Raises
    ------
    CompilationError
        If samples are not independent.
    """
    if len(step.groups) != 1:
        return step
    (group,) = step.groups
    is_batched = any(
        ETP_PRIMITIVE_SPECS[step.analysis.program.equations[operation.equation].primitive].batched
        for operation in step.operations
    )
    samples = group.shape[0] if is_batched and group.shape else 1
    units, states = group.num_positions // samples, group.num_states
    starts = {}
    for c, state in enumerate(group.states):
        sets = np.zeros((group.num_positions, states * units), bool)
        sets[np.arange(units), c * units + np.arange(units)] = True
        layout = group.old_layouts[c]
        starts[state.in_var] = sets if layout is None else sets[np.maximum(layout.ravel(), 0)]
    rows = []
    for a, found in enumerate(dependences(step.analysis, group.new_vars, starts)):
        layout = group.layouts[a]
        whole = np.zeros((group.num_positions, states * units), bool)
        whole[np.arange(len(found)) if layout is None else layout.ravel()] = found
        if whole[units:].any():
            raise CompilationError(
                f"SnAp follows every sample on its own, and hidden state '{group.states[a].name}' "
                "depends on several of them (a mean over the batch, for example). Compute what "
                "mixes samples through `jax.lax.stop_gradient`, or use `SnAp(n=1)`."
            )
        rows.append(whole[:units])
    known = dataclasses.replace(group, dependence=np.concatenate(rows))
    return dataclasses.replace(step, groups=[known])


def dependences(
    analysis: Analysis, targets: Sequence[Var], starts: Mapping[Var, Sets]
) -> list[Sets]:
    """Return what the elements of some variables depend on.

    Parameters
    ----------
    analysis
        Of the step.
    targets
        The variables.
    starts
        The old states, with the set of each element.
    """
    program = analysis.program
    numbers = next(iter(starts.values())).shape[1]
    known: dict[Var, Sets] = dict(starts)
    for index in program.making(program.depends_on(targets, frozenset(starts))):
        equation = program.equations[index]
        given = [known.get(atom) if is_var(atom) else None for atom in equation.invars]
        if all(sets is None for sets in given) or equation.primitive.name in CONSTANT:
            continue
        found = _through(analysis, equation, given)
        known.update(zip(equation.outvars, found, strict=True))
    return [
        known[var] if var in known else np.zeros((var.aval.size, numbers), bool) for var in targets
    ]


def _through(analysis: Analysis, equation: Equation, given: Sequence[Sets | None]) -> list[Sets]:
    """Return the sets of an equation's outputs, given those of its operands."""
    name = equation.primitive.name
    if name in ELEMENTWISE and len(equation.outvars) == 1:
        return [_elementwise(equation, given)]
    if is_data_movement(equation):
        moved = _moved(analysis, equation, given)
        return _of_all(equation, given) if moved is None else moved
    if name in REDUCTIONS and given[0] is not None:
        shape = equation.invars[0].aval.shape
        found = given[0].reshape(*shape, -1).any(tuple(equation.params["axes"]))
        return [found.reshape(-1, found.shape[-1])]
    if name == "dot_general":
        return [_dot(equation, given)]
    spec = ETP_PRIMITIVE_SPECS.get(equation.primitive)
    of_input = [] if spec is None else [spec.x_invar_index]
    if [i for i, sets in enumerate(given) if sets is not None] == of_input:
        return [_marked(equation, given[of_input[0] or 0])]
    if name == "conv_general_dilated" and given[1] is None and given[0] is not None:
        outputs, inputs = np.indices((equation.outvars[0].aval.size, len(given[0])))
        joined = joining(equation, 0, inputs, outputs) != NOTHING
        return [_product(joined, given[0])]
    if name in ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"):
        return _by_derivative(analysis, equation, given)
    return _of_all(equation, given)


def _elementwise(equation: Equation, given: Sequence[Sets | None]) -> Sets:
    shape = equation.outvars[0].aval.shape
    found = [
        np.broadcast_to(sets.reshape(*atom.aval.shape, -1), (*shape, sets.shape[1]))
        for atom, sets in zip(equation.invars, given, strict=True)
        if sets is not None
    ]
    return functools.reduce(np.logical_or, found).reshape(-1, found[0].shape[-1])


def _moved(
    analysis: Analysis, equation: Equation, given: Sequence[Sets | None]
) -> list[Sets] | None:
    sources = analysis.constants.sources(equation)
    carried = moved_operands(equation)
    if sources is None or any(
        sets is not None and i not in carried for i, sets in enumerate(given)
    ):
        return None
    numbers = next(sets.shape[1] for sets in given if sets is not None)
    parts = [
        np.zeros((equation.invars[i].aval.size, numbers), bool) if sets is None else sets
        for i, sets in ((i, given[i]) for i in carried)
    ]
    every = np.concatenate([*parts, np.zeros((1, numbers), bool)])
    return [every[np.where(s == NOWHERE, len(every) - 1, s).ravel()] for s in sources]


def _dot(equation: Equation, given: Sequence[Sets | None]) -> Sets:
    contracted, batch = equation.params["dimension_numbers"]
    shapes = [atom.aval.shape for atom in equation.invars]
    free = [
        [axis for axis in range(len(shape)) if axis not in (*contracted[i], *batch[i])]
        for i, shape in enumerate(shapes)
    ]
    result = equation.outvars[0].aval.shape
    every = []
    for own, sets in enumerate(given):
        if sets is not None:
            found = sets.reshape(*shapes[own], -1)
            order = (*batch[own], *free[own], *contracted[own], len(shapes[own]))
            found = found.transpose(order)
            kept = len(batch[own]) + len(free[own])
            found = np.asarray(found.any(tuple(range(kept, found.ndim - 1))))
            other = (1,) * len(free[1 - own])
            lead, rest = found.shape[: len(batch[own])], found.shape[len(batch[own]) : -1]
            middle = (*rest, *other) if own == 0 else (*other, *rest)
            found = found.reshape(*lead, *middle, found.shape[-1])
            every.append(np.broadcast_to(found, (*result, found.shape[-1])))
    joined = functools.reduce(np.logical_or, every)
    return joined.reshape(-1, joined.shape[-1])


def _product(joined: np.ndarray, sets: Sets) -> Sets:
    return (joined.astype(np.float32) @ sets.astype(np.float32)) > 0


def _marked(equation: Equation, sets: Sets | None) -> Sets:
    assert sets is not None
    spec = ETP_PRIMITIVE_SPECS[equation.primitive]
    y = equation.outvars[0].aval
    samples = y.shape[0] if spec.batched else 1
    outputs, inputs = np.indices((y.size // samples, len(sets) // samples))
    joined = is_joined(equation, inputs, outputs)
    of_samples = sets.reshape(samples, -1, sets.shape[1])
    return np.concatenate([_product(joined, own) for own in of_samples])


def _by_derivative(
    analysis: Analysis, equation: Equation, given: Sequence[Sets | None]
) -> list[Sets]:
    """Follow a function with a derivative of its own: elements to those that they reach."""
    found = []
    for output, var in enumerate(equation.outvars):
        ids = np.arange(var.aval.size, dtype=np.int32).reshape(var.aval.shape)
        back = analysis.derivatives.of(equation).back(
            [ids if i == output else None for i in range(len(equation.outvars))]
        )
        numbers = next(sets.shape[1] for sets in given if sets is not None)
        total = np.zeros((var.aval.size, numbers), bool)
        for sets, reached in zip(given, back, strict=True):
            if sets is None or reached is None:
                continue
            if not isinstance(reached, np.ndarray) or np.any(reached < -1):
                total |= sets.any(0)
            else:
                there = reached.ravel() >= 0
                np.logical_or.at(total, reached.ravel()[there], sets[there])
        found.append(total)
    return found


def _of_all(equation: Equation, given: Sequence[Sets | None]) -> list[Sets]:
    every = np.logical_or.reduce([sets.any(0) for sets in given if sets is not None])
    return [np.broadcast_to(every, (var.aval.size, len(every))) for var in equation.outvars]
