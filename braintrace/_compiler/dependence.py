"""Which numbers the new hidden states of a sample are computed from.

The structure of derivatives is followed through the program of a step, forward, from numbers of the
first sample (old states, outputs of products, entries of parameters): a set of them for every
element of every value. Operations element by element and data movement keep elements apart,
products join those that meet (of a sparse matrix the entries that there are), and of any other
operation every output depends on all inputs.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np

from .._errors import CompilationError
from .._etrace_op import ETP_PRIMITIVE_SPECS, is_joined
from .._graph import Structure, WholeState
from .._graph.traced_model import StateLeaf, TracedModel
from .._jax import Atom, Equation, Var, is_var
from .._jaxpr.data_movement import NOWHERE, is_data_movement, moved_operands
from .._jaxpr.dataflow import CONSTANT, ELEMENTWISE, REDUCTIONS
from .._jaxpr.factors import NOTHING, joining
from .._most_memory import check_fits
from .analysis import Analysis
from .parameter_uses import new_vars, parameters_of

Sets: TypeAlias = np.ndarray
"""Of every element, flat, whether it depends on each of some numbers: ``(size, numbers)``."""


MOST_NUMBERS = 2**26
"""Entries of a parameter, times the elements of the largest value, that are followed one by one."""


def structure_of(traced: TracedModel, analysis: Analysis, whole: WholeState) -> Structure:
    """Return what the numbers of a sample's new state are computed from.

    A parameter that enters in another way than a product, and is too large to be followed entry by
    entry, counts as if each entry reached all states that any of them reaches.
    """
    check_fits(
        "The sparsity pattern of the recurrent Jacobian",
        (whole.size, whole.size),
        bool,
        "`SnAp(n=1)`, `D_RTRL` and `UORO` need none.",
        CompilationError,
    )
    program, new = analysis.program, new_vars(whole.leaves)
    pairs = list(zip(whole.leaves, whole.axes, strict=True))
    firsts = [_of_first_sample(leaf.shape, axis) for leaf, axis in pairs]

    def reached_from(starts: Mapping[Var, Sets]) -> np.ndarray:
        every = dependences(analysis, new, starts)
        return np.concatenate([sets[own] for sets, own in zip(every, firsts, strict=True)]).T

    products = {
        program.equations[use.equation].outvars[0]: use
        for use in whole.uses
        if use.kind == "product" and use.equation is not None
    }
    of_outputs = {}
    for y, use in products.items():
        own = _of_first_sample(y.aval.shape, use.y_axis)
        of_outputs[use.key] = reached_from({y: _sets(y.aval.size, own)})
    of_parameters = {}
    largest = max((v.aval.size for e in program.equations for v in e.outvars), default=1)
    for leaf in _entering_otherwise(traced, analysis, whole):
        size = leaf.in_var.aval.size
        if size * largest <= MOST_NUMBERS:
            held = {y: np.zeros((y.aval.size, size), bool) for y in products}
            found = reached_from({leaf.in_var: np.eye(size, dtype=bool), **held})
        else:
            found = np.zeros((size, whole.size), bool)
            found[:, whole.rows(whole.reached[leaf.name])] = True
        of_parameters[leaf.name] = found
    ends = np.cumsum([0, *whole.sizes])
    old = {
        leaf.in_var: _sets(leaf.in_var.aval.size, own, ends[i], whole.size)
        for i, (leaf, own) in enumerate(zip(whole.leaves, firsts, strict=True))
    }
    return Structure(reached_from(old).T, of_outputs, of_parameters)


def _of_first_sample(shape: Sequence[int], axis: int | None) -> np.ndarray:
    """Return the elements of the first sample, flat, in the order in which samples have theirs."""
    elements = np.arange(int(np.prod(shape))).reshape(shape)
    return (elements if axis is None else elements.take(0, axis)).ravel()


def _sets(size: int, elements: np.ndarray, start: int = 0, numbers: int | None = None) -> Sets:
    """Return sets of which those of some elements have one number each, in order."""
    sets = np.zeros((size, len(elements) if numbers is None else numbers), bool)
    sets[elements, start + np.arange(len(elements))] = True
    return sets


def _entering_otherwise(
    traced: TracedModel, analysis: Analysis, whole: WholeState
) -> list[StateLeaf]:
    """Return the parameters that reach a state, and not by products alone."""
    program = analysis.program
    operands: list[Atom] = []
    for use in whole.uses:
        if use.equation is None:
            operands += new_vars([whole.leaves[use.operands[0]]])
        elif use.kind != "product":
            operands += [program.equations[use.equation].invars[place] for place in use.operands]
    behind = program.depends_on(operands)
    return [
        leaf
        for leaf in parameters_of(traced)
        if leaf.in_var in behind and leaf.name in whole.reached
    ]


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
        Those whose sets are known.
    """
    program = analysis.program
    numbers = next(iter(starts.values())).shape[1]
    known: dict[Var, Sets] = dict(starts)
    behind = program.depends_on(targets, frozenset(starts))
    for index in program.making(behind.difference(starts)):
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
    if spec is not None and spec.gradient_enabled and len(equation.invars) == 1:
        return [_elementwise(equation, given)]
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
