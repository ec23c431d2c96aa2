r"""Rewriting of linear readouts, whose derivative then goes through filters.

For ``o' = kappa o + A(v)``, everything after ``v`` is linear and the same for all units, so that
the filter and ``A`` commute:

.. math:: f' = \kappa f + v, \qquad o' = A(f') + \kappa^t o^0

The value of ``o'`` stays what the model computes. Its derivative is the derivative of ``A(f')``,
where ``kappa`` in ``f'`` counts as a constant. If ``kappa`` depends on parameters, the rest of the
derivative comes from ``c' = kappa c``, a state in the units of the readout with the value of ``o``.
It covers the start value as well, and its trace has the size of ``o``, not of ``v``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from .._etrace_op import element_wise
from .._etrace_op.registry import is_marked
from .._graph import FilteredReadout, StateLeaf, TracedModel
from .._graph.traced_model import FILTERS
from .._jax import (
    Aval,
    Equation,
    Var,
    bind,
    struct_of,
    trace_to_jaxpr,
    with_derivative_of,
)
from .._jaxpr import Program, Rule, evaluate, evaluate_all, evaluate_inlined, inlined, program_of
from .._typing import Path
from .canonicalize import rewritten, spell_out_broadcasts, with_program
from .linear_filters import LinearFilter

Source: TypeAlias = tuple[Hashable, ...]
"""Key of a value that a readout filters."""

Values: TypeAlias = Mapping[Source, Any]


def with_filters(
    traced: TracedModel,
    readouts: Sequence[LinearFilter],
    operations: Mapping[str, tuple[str, ...]],
) -> TracedModel:
    """Return a step in which readouts have their derivative through filters.

    Parameters
    ----------
    traced
        The step.
    readouts
        The readouts.
    operations
        Names of the former ETP operations on the way to each readout.
    """
    parts = [_Filtering(traced.program, readout) for readout in readouts]
    old = traced.program
    avals = [*(var.aval for var in old.in_vars), *(a for p in parts for a in p.avals.values())]
    new = program_of(inlined(trace_to_jaxpr(_run(old, parts), avals), spell_out_broadcasts))
    added = new.in_vars[len(old.in_vars) :], new.out_atoms[len(old.out_atoms) :]
    paths = [path for part in parts for path in part.paths]
    leaves = [_leaf(*fields) for fields in zip(paths, *added, strict=True)]
    records = [(p.readout.leaf.name, p.paths, p.readout.held, p.readout.parameters) for p in parts]
    again = with_program(traced, new)
    return dataclasses.replace(
        again,
        leaves=(*again.leaves, *leaves),
        state_trees={**traced.state_trees, **dict.fromkeys(paths, jax.tree.structure(0))},
        readouts=tuple(FilteredReadout(*each, operations[each[0]]) for each in records),
        unfiltered=traced,
    )


def without_marks(traced: TracedModel, equations: Sequence[int]) -> TracedModel:
    """Return a step in which some ETP operations are ordinary operations."""

    def plain(equation: Equation, values: list[Any]) -> Sequence[Any]:
        function = functools.partial(equation.primitive.implementation, **equation.params)
        body = jax.make_jaxpr(function)(*values)
        return evaluate_inlined(body, values, spell_out_broadcasts)

    marked = [i for i in equations if is_marked(traced.program.equations[i])]
    return rewritten(traced, dict.fromkeys(marked, plain)) if marked else traced


def _run(program: Program, parts: Sequence[_Filtering]) -> Callable[..., list[Any]]:
    """Return a program as a function of inputs and old filters, new filters last."""
    by_var = {part.readout.var: part for part in parts}

    def run(*values: Any) -> list[Any]:
        inputs, filters = values[: len(program.in_vars)], iter(values[len(program.in_vars) :])
        known = {**program.constants, **dict(zip(program.in_vars, inputs, strict=True))}
        old = {part: {source: next(filters) for source in part.avals} for part in parts}
        new: dict[_Filtering, Values] = {}

        def with_filters_of(equation: Equation, operands: list[Any]) -> list[Any]:
            known.update(zip(equation.outvars, bind(equation, operands), strict=True))
            for part in (by_var[v] for v in equation.outvars if v in by_var):
                known[part.readout.var], new[part] = part.step(known, old[part])
            return [known[var] for var in equation.outvars]

        outputs = evaluate_all(program.jaxpr, inputs, with_filters_of)
        return [*outputs, *(new[part][source] for part in parts for source in part.avals)]

    return run


DECAY: Source = ("decay",)
"""Source of the filter for a ``kappa`` that learns: the value of the readout."""


class _Filtering:
    """A readout, and filters of the values that it reads.

    Attributes
    ----------
    avals
        The types of the filtered values.
    paths
        The paths of the filters.
    """

    def __init__(self, program: Program, readout: LinearFilter) -> None:
        self._program, self.readout = program, readout
        self.avals: dict[Source, Aval] = {("value", v): struct_of(v.aval) for v in readout.values}
        for use in readout.added:
            aval = self._aval_of_ones(*use)
            self.avals["ones", aval.shape, aval.dtype] = aval
        if readout.decay_weights:
            self.avals[DECAY] = struct_of(readout.var.aval)
        name = readout.leaf.name
        self.paths: tuple[Path, ...] = tuple((FILTERS, name, i) for i in range(len(self.avals)))

    def _aval_of_ones(self, index: int, operand: int) -> Aval:
        equation = self._program.equations[index]
        atom = equation.invars[operand]
        aval = equation.outvars[0].aval if atom.aval.shape == () else atom.aval
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype)

    def step(self, known: Mapping[Var, Any], old: Values) -> tuple[Any, Values]:
        """Return the new value of the readout, with its derivative, and the new filters."""
        value, kappa = known[self.readout.var], self.readout.decay(known)
        fixed = jax.lax.stop_gradient(kappa)
        new = {
            source: (_times(fixed, old[source]) + self._current(source, known)).astype(aval.dtype)
            for source, aval in self.avals.items()
            if source != DECAY
        }
        through_filters = self._linear(known, new)
        if self.readout.decay_weights:
            kappa = kappa if self._is_marked() else element_wise(kappa)
            before = with_derivative_of(known[self.readout.leaf.in_var], old[DECAY])
            new[DECAY] = with_derivative_of(value, _times(kappa, before))
            through_filters = through_filters + new[DECAY]
        return with_derivative_of(value, through_filters), new

    def _current(self, source: Source, known: Mapping[Var, Any]) -> Any:
        kind, *what = source
        return known[what[0]] if kind == "value" else jnp.ones(*what)

    def _is_marked(self) -> bool:
        """Test whether an ETP operation computes the decay."""
        ancestors = self._program.making(self._program.depends_on(self.readout.decay_weights))
        return any(is_marked(self._program.equations[index]) for index in ancestors)

    def _linear(self, known: Mapping[Var, Any], sources: Values) -> Any:
        """Return a value with the derivative of ``A``, evaluated at ``sources``."""
        readout, old = self.readout, self.readout.leaf.in_var
        overrides = {var: sources["value", var] for var in readout.values}
        overrides[old] = jnp.zeros(old.aval.shape, old.aval.dtype)
        inputs = {var: value for var, value in known.items() if var not in readout.path}
        rules = {index: self._with_filtered_ones(index, sources) for index, _ in readout.added}
        return evaluate(self._program, [readout.var], inputs, overrides, rules)[0]

    def _with_filtered_ones(self, index: int, sources: Values) -> Rule:
        """Return the rule that multiplies the summands of an equation by filters of ones."""

        def rule(equation: Equation, values: list[Any]) -> list[Any]:
            for operand in (operand for i, operand in self.readout.added if i == index):
                aval = self._aval_of_ones(index, operand)
                values[operand] = values[operand] * sources["ones", aval.shape, aval.dtype]
            return bind(equation, values)

        return rule


def _times(number: Any, array: Any) -> Any:
    """Multiply an array by a number, in the dtype of the array."""
    return jnp.asarray(number, array.dtype) * array


def _leaf(path: Path, in_var: Var, out_var: Any) -> StateLeaf:
    return StateLeaf(
        path=path,
        leaf=0,
        kind="hidden",
        is_grouped=False,
        shape=tuple(in_var.aval.shape),
        dtype=in_var.aval.dtype,
        in_var=in_var,
        out_var=out_var,
    )
