r"""The step again, with linear readouts that have their derivative through filters.

For ``o' = kappa o + A(v)``, everything after ``v`` is linear and the same at all positions, so that
filter and ``A`` commute:

.. math:: f' = \kappa f + v, \qquad o' = A(f') + \kappa^t o^0

The value of ``o'`` stays what the model computes; its derivative is that of ``A(f')``, where
``kappa`` in ``f'`` counts as constant. If ``kappa`` depends on parameters, the rest of the
derivative is that of ``c' = kappa c``, a state at the units of the readout that holds the value of
``o``: that covers the start value as well, and its trace has the size of ``o``, not of ``v``.

The value before the step, for whoever else reads it, is that of the model as well; its derivative
is that of ``A(f)`` (and of ``c``).

Where a filter ``g`` is filtered again, so are its own sources. What their filters do not give of
its value (its start, or a change of ``A`` on the way), is a source of its own, if somebody needs
that value.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from ..._etrace_op import element_wise
from ..._graph import FilteredReadout, StateLeaf, TracedModel
from ..._graph.marked import is_marked
from ..._graph.traced_model import FILTERS
from ..._jax import (
    Aval,
    Equation,
    Var,
    at_source_of,
    bind,
    is_var,
    struct_of,
    trace_to_jaxpr,
    with_derivative_of,
)
from ..._jaxpr import Rule, evaluate, evaluate_inlined, inlined, program_of
from ..._typing import Path
from ..frontend.canonicalize import spell_out_broadcasts
from ..frontend.rewritten import rewritten, with_program
from .linear_filters import LinearFilter

Key: TypeAlias = tuple[Hashable, ...]
"""Names what is filtered, or a filter: by its decay and what it filters."""

Values: TypeAlias = Mapping[Key, Any]


def with_filters(
    traced: TracedModel,
    readouts: Sequence[LinearFilter],
    operations: Mapping[str, tuple[str, ...]],
    late: Collection[str],
) -> TracedModel:
    """Return a step in which some states have their derivative through filters.

    Parameters
    ----------
    traced
        The step.
    readouts
        The states, in the order in which it computes them.
    operations
        Names of the marked operations that have been on the way to each.
    late
        Names of those whose value before the step is read by others than filters.
    """
    return _Rewriting(traced, readouts, operations, late).result()


def without_marks(traced: TracedModel, equations: Sequence[int]) -> TracedModel:
    """Return a step in which some marked operations are plain ones."""

    def plain(equation: Equation, values: list[Any]) -> Sequence[Any]:
        function = functools.partial(equation.primitive.implementation, **equation.params)
        body = jax.make_jaxpr(function)(*values)
        return evaluate_inlined(body, values, spell_out_broadcasts)

    marked = [i for i in equations if is_marked(traced.program.equations[i])]
    return rewritten(traced, dict.fromkeys(marked, plain)) if marked else traced


class _Rewriting:
    def __init__(
        self,
        traced: TracedModel,
        readouts: Sequence[LinearFilter],
        operations: Mapping[str, tuple[str, ...]],
        late: Collection[str],
    ) -> None:
        self._traced, self._program = traced, traced.program
        self._readouts = {readout.var: readout for readout in readouts}
        self._late = [readout for readout in readouts if readout.leaf.name in late]
        self._filters: dict[Key, Aval] = {}
        self._paths: dict[Key, Path] = {}
        self._of: list[FilteredReadout] = []
        self._with_rest: set[Hashable] = set()
        for readout in readouts:
            sources = self._sources(readout)
            self._with_rest |= {key[1] for key in sources if key[0] == "rest"}
            filters: dict[Key, Aval] = {(readout.decay.key, k): aval for k, aval in sources.items()}
            if readout.decays_learn:
                filters["decay", readout.var] = struct_of(readout.var.aval)
            for key, aval in filters.items():
                if key not in self._filters:
                    self._filters[key] = aval
                    self._paths[key] = (FILTERS, readout.leaf.name, len(self._filters) - 1)
            paths = tuple(self._paths[key] for key in filters)
            name = readout.leaf.name
            found = paths, readout.held, readout.parameters, operations[name]
            self._of.append(FilteredReadout(name, *found))

    def _sources(self, readout: LinearFilter) -> dict[Key, Aval]:
        """Return what a readout filters, with its types."""
        found: dict[Key, Aval] = {("value", v): struct_of(v.aval) for v in readout.values}
        for use in readout.added:
            aval = self._aval_of_ones(*use)
            found["ones", aval.shape, aval.dtype] = aval
        for var in readout.filters:
            inner = self._readouts[var]
            for key, aval in self._sources(inner).items():
                found["filter", inner.decay.key, key] = aval
            if var in readout.learning or inner.decays_learn:
                found["rest", var] = struct_of(var.aval)
        return found

    def _aval_of_ones(self, index: int, operand: int) -> Aval:
        equation = self._program.equations[index]
        atom = equation.invars[operand]
        aval = equation.outvars[0].aval if atom.aval.shape == () else atom.aval
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype)

    def result(self) -> TracedModel:
        """Return the step."""
        old, traced = self._program, self._traced
        avals = [*(var.aval for var in old.in_vars), *self._filters.values()]
        new = program_of(inlined(trace_to_jaxpr(self._run, avals), spell_out_broadcasts))
        added = new.in_vars[len(old.in_vars) :], new.out_atoms[len(old.out_atoms) :]
        leaves = [_leaf(*found) for found in zip(self._paths.values(), *added, strict=True)]
        whole = jax.tree.structure(0)
        again = with_program(traced, new)
        return dataclasses.replace(
            again,
            leaves=(*again.leaves, *leaves),
            state_trees={**traced.state_trees, **dict.fromkeys(self._paths.values(), whole)},
            readouts=tuple(self._of),
            unfiltered=traced,
        )

    def _run(self, *values: Any) -> list[Any]:
        program, count = self._program, len(self._program.in_vars)
        known: dict[Var, Any] = {
            **program.constants,
            **dict(zip(program.in_vars, values, strict=False)),
        }
        old = dict(zip(self._filters, values[count:], strict=True))
        new: dict[Key, Any] = {}
        rest: dict[Var, Any] = {}
        known |= {r.leaf.in_var: self._before(r, known, old) for r in self._late}
        for equation in program.equations:
            operands = [known[a] if is_var(a) else a.val for a in equation.invars]
            known.update(zip(equation.outvars, bind(equation, operands), strict=True))
            for readout in (self._readouts[v] for v in equation.outvars if v in self._readouts):
                with at_source_of(equation):
                    known[readout.var] = self._filtered(readout, known, old, new, rest)
        outputs = [known[a] if is_var(a) else a.val for a in program.out_atoms]
        return [*outputs, *(new[key] for key in self._filters)]

    def _before(self, readout: LinearFilter, known: Mapping[Var, Any], old: Values) -> Any:
        """Return the value of a readout before the step, with its derivative."""
        given = {key: old[readout.decay.key, key] for key in self._sources(readout)}
        through_filters = self._linear(readout, known, given)
        if readout.decays_learn:
            through_filters = through_filters + old["decay", readout.var]
        return with_derivative_of(known[readout.leaf.in_var], through_filters)

    def _filtered(
        self,
        readout: LinearFilter,
        known: Mapping[Var, Any],
        old: Values,
        new: dict[Key, Any],
        rest: dict[Var, Any],
    ) -> Any:
        """Return the new value of a readout, with its derivative; note filters and the rest."""
        value = known[readout.var]
        kappa = jax.lax.stop_gradient(readout.decay.compute(known))
        given: dict[Key, Any] = {}
        for key, aval in self._sources(readout).items():
            name = (readout.decay.key, key)
            if name not in new:
                now = self._current(key, aval, known, new, rest)
                new[name] = (_times(kappa, old[name]) + now).astype(aval.dtype)
            given[key] = new[name]
        through_filters = self._linear(readout, known, given)
        if not readout.decays_learn:
            if readout.var in self._with_rest:
                rest[readout.var] = jax.lax.stop_gradient(value - through_filters)
            return with_derivative_of(value, through_filters)
        held = self._with_own_decay(readout, known, old["decay", readout.var])
        new["decay", readout.var] = held
        if readout.var in self._with_rest:
            rest[readout.var] = with_derivative_of(value - through_filters, held)
        return with_derivative_of(value, through_filters + held)

    def _with_own_decay(self, readout: LinearFilter, known: Mapping[Var, Any], old: Any) -> Any:
        """Return the new value, with the derivative that it has by its decay alone."""
        kappa = readout.decay.compute(known)
        if not self._is_marked(readout):
            kappa = element_wise(kappa)
        before = with_derivative_of(known[readout.leaf.in_var], old)
        return with_derivative_of(known[readout.var], _times(kappa, before))

    def _is_marked(self, readout: LinearFilter) -> bool:
        behind = self._program.making(self._program.depends_on(readout.decay.variables))
        return any(is_marked(self._program.equations[index]) for index in behind)

    def _current(
        self, key: Key, aval: Aval, known: Mapping[Var, Any], new: Values, rest: Mapping[Var, Any]
    ) -> Any:
        kind, *what = key
        if kind == "value":
            return known[what[0]]
        if kind == "ones":
            return jnp.ones(aval.shape, aval.dtype)
        return rest[what[0]] if kind == "rest" else new[tuple(what)]

    def _linear(self, readout: LinearFilter, known: Mapping[Var, Any], given: Values) -> Any:
        """Return ``A`` of what is given for the sources of a readout."""
        overrides = {var: given["value", var] for var in readout.values}
        for var in (readout.leaf.in_var, *readout.unneeded_values):
            overrides[var] = jnp.zeros(var.aval.shape, var.aval.dtype)
        for var in readout.filters:
            inner = self._readouts[var]
            of_inner = {key: given["filter", inner.decay.key, key] for key in self._sources(inner)}
            overrides[var] = self._linear(inner, known, of_inner)
            if ("rest", var) in given:
                overrides[var] = overrides[var] + given["rest", var]
        inputs = {var: value for var, value in known.items() if var not in readout.path}
        rules = self._with_filtered_ones(readout, given)
        return evaluate(self._program, [readout.var], inputs, overrides, rules)[0]

    def _with_filtered_ones(self, readout: LinearFilter, given: Values) -> dict[int, Rule]:
        """Return rules that multiply what is added by filters of ones; the rest is left out."""

        def rule_for(index: int) -> Rule:
            def rule(equation: Equation, values: list[Any]) -> list[Any]:
                for operand in (operand for i, operand in readout.added if i == index):
                    aval = self._aval_of_ones(index, operand)
                    ones = given["ones", aval.shape, aval.dtype]
                    values[operand] = values[operand] * ones
                for operand in (operand for i, operand in readout.unneeded_added if i == index):
                    values[operand] = jnp.zeros_like(values[operand])
                return bind(equation, values)

            return rule

        uses = (*readout.added, *readout.unneeded_added)
        return {index: rule_for(index) for index, _ in uses}


def _times(number: Any, array: Any) -> Any:
    """Multiply an array by a number of its own dtype."""
    return jnp.asarray(number, array.dtype) * array


def _leaf(path: Path, in_var: Var, out_var: Any) -> StateLeaf:
    return StateLeaf(
        path=path,
        leaf=0,
        component=None,
        kind="hidden",
        shape=tuple(in_var.aval.shape),
        dtype=in_var.aval.dtype,
        in_var=in_var,
        out_var=out_var,
        joined_var=None,
    )
