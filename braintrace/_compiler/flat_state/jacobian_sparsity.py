"""Jacobian sparsity: the dependence of a sample's new state, element by element.

Sets of numbers flow forward through the program of a step (`_jaxpr.dataflow`). They number elements
of the first sample's old state, outputs of products, or entries of parameters. The sets of the new
state are the rows of a Jacobian: every entry outside of them is zero.
"""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np

from ..._etrace_op import ETP_PRIMITIVE_SPECS, is_joined
from ..._graph import FlatState, Structure
from ..._graph.traced_model import StateLeaf, TracedModel
from ..._jax import OWN_DERIVATIVE, Atom, Equation, Var
from ..._jaxpr.dataflow import Flow, Question, Sets, filled, flows_to, spread
from ..core.analysis import Analysis
from ..core.back_through import through_derivative
from .parameter_uses import new_vars

Rows: TypeAlias = np.ndarray
"""Dependence of every element, flattened, on each of some numbers: ``(size, numbers)``."""

MOST_NUMBERS = 2**26
"""Largest product of a parameter's entries and the largest value's elements for exact sets."""


def structure_of(traced: TracedModel, analysis: Analysis, flat: FlatState) -> Structure:
    """Return the sparsity pattern of a sample's new state.

    A parameter that enters other than by a product may be too large to follow entry by entry. Each
    of its entries then counts as if it reached all states that any of them reaches.
    """
    program, new = analysis.program, new_vars(flat.leaves)
    pairs = list(zip(flat.leaves, flat.axes, strict=True))
    firsts = [_of_first_sample(leaf.shape, axis) for leaf, axis in pairs]

    def reached_from(starts: Mapping[Var, Rows]) -> np.ndarray:
        every = dependences(analysis, new, starts)
        return np.concatenate([rows[first] for rows, first in zip(every, firsts, strict=True)]).T

    products = {
        program.equations[use.equation].outvars[0]: use
        for use in flat.uses
        if use.kind == "product" and use.equation is not None
    }
    of_outputs = {}
    for y, use in products.items():
        first = _of_first_sample(y.aval.shape, use.y_axis)
        of_outputs[use.key] = reached_from({y: _rows(y.aval.size, first)})
    of_parameters = {}
    largest = max((v.aval.size for e in program.equations for v in e.outvars), default=1)
    for leaf in _entering_otherwise(traced, analysis, flat):
        size = leaf.in_var.aval.size
        if size * largest <= MOST_NUMBERS:
            no_outputs = {y: np.zeros((y.aval.size, size), bool) for y in products}
            pattern = reached_from({leaf.in_var: np.eye(size, dtype=bool), **no_outputs})
        else:
            pattern = np.zeros((size, flat.size), bool)
            pattern[:, flat.rows(flat.reached[leaf.name])] = True
        of_parameters[leaf.name] = pattern
    ends = np.cumsum([0, *flat.sizes])
    old = {
        leaf.in_var: _rows(leaf.in_var.aval.size, first, ends[i], flat.size)
        for i, (leaf, first) in enumerate(zip(flat.leaves, firsts, strict=True))
    }
    return Structure(reached_from(old).T, of_outputs, of_parameters)


def _of_first_sample(shape: Sequence[int], axis: int | None) -> np.ndarray:
    """Return the elements of the first sample, flattened, in the order of a sample."""
    elements = np.arange(int(np.prod(shape))).reshape(shape)
    return (elements if axis is None else elements.take(0, axis)).ravel()


def _rows(size: int, elements: np.ndarray, start: int = 0, numbers: int | None = None) -> Rows:
    """Return rows in which some elements have one number each, in order."""
    rows = np.zeros((size, len(elements) if numbers is None else numbers), bool)
    rows[elements, start + np.arange(len(elements))] = True
    return rows


def _entering_otherwise(
    traced: TracedModel, analysis: Analysis, flat: FlatState
) -> list[StateLeaf]:
    """Return the parameters that reach a state other than by products alone."""
    program = analysis.program
    operands: list[Atom] = []
    for use in flat.uses:
        if use.equation is None:
            operands += new_vars([flat.leaves[use.operands[0]]])
        elif use.kind != "product":
            operands += [program.equations[use.equation].invars[place] for place in use.operands]
    ancestors = program.depends_on(operands)
    return [
        leaf for leaf in traced.parameters if leaf.in_var in ancestors and leaf.name in flat.reached
    ]


def dependences(
    analysis: Analysis, targets: Sequence[Var], starts: Mapping[Var, Rows]
) -> list[Rows]:
    """Return the dependence of the elements of some variables.

    Parameters
    ----------
    analysis
        Analysis of the step.
    targets
        The variables.
    starts
        Variables whose rows are known.
    """
    count = next(iter(starts.values())).shape[1]
    flows = {var: rows.reshape(*var.aval.shape, count) for var, rows in starts.items()}
    lattice = Sets(count)

    def special(equation: Equation, operands: Sequence[Flow]) -> list[Flow] | None:
        if equation.primitive in ETP_PRIMITIVE_SPECS:
            return _through_operation(lattice, equation, operands)
        if equation.primitive.name in OWN_DERIVATIVE:
            return through_derivative(lattice, equation, operands)
        return None

    question = Question(lattice, derivatives=True, special=special)
    every = zip(targets, flows_to(question, analysis.constants, flows, targets), strict=True)
    return [filled(lattice, flow, var.aval.shape).reshape(-1, count) for var, flow in every]


def _through_operation(
    lattice: Sets, equation: Equation, operands: Sequence[Flow]
) -> list[Flow] | None:
    """Follow the input of an ETP operation.

    ``None`` if another of its operands is followed as well.
    """
    spec, y = ETP_PRIMITIVE_SPECS[equation.primitive], equation.outvars[0].aval
    if spec.gradient_enabled and len(operands) == 1:
        (flow,) = operands
        return [None if flow is None else spread(lattice, flow, y.shape)]
    followed = [index for index, flow in enumerate(operands) if flow is not None]
    if followed != [spec.x_invar_index]:
        return None
    x = operands[followed[0]]
    assert x is not None
    samples = y.shape[0] if spec.batched else 1
    by_sample = x.reshape(samples, -1, lattice.count)
    outputs, inputs = np.indices((y.size // samples, by_sample.shape[1]))
    is_used = is_joined(equation, inputs, outputs).astype(np.float32)
    return [(is_used @ by_sample.astype(np.float32) > 0).reshape(*y.shape, lattice.count)]
