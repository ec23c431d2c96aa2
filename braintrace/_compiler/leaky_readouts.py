r"""Leaky readouts, written filter first.

A readout ``o' = kappa o + A(z) + b`` couples the units of the layer below, so that the memory of
``o`` would be truncated for the weights below. With one number ``kappa`` for all its units, and a
linear ``A`` that is the same at every step, the filter and ``A`` commute:

.. math:: f' = \kappa f + z, \qquad g' = \kappa g + 1, \qquad o' = A(f') + g' b + \kappa^t o^0

The filter ``f`` is one more state of the units of the layer below. The value of ``o'`` stays what
the model computes; its derivative is that of ``A(f') + g' b``. If ``kappa`` depends on parameters,
the rest comes from ``c' = kappa c``, a state in the units of the readout with the value of ``o``.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._etrace_op.registry import ETP_PRIMITIVE_SPECS, is_marked
from .._graph.traced_model import FILTERS, Batch, StateLeaf, TracedModel
from .._jax import Atom, Equation, Var, bind, is_var, trace_to_jaxpr
from .._jax_kernels import with_derivative_of
from .._jaxpr.dataflow import Dataflow, Labels
from .._jaxpr.primitives import PRODUCTS, Constants
from .._jaxpr.program import (
    Program,
    carries_derivative,
    evaluate,
    evaluate_all,
    evaluate_inlined,
    program_of,
)
from .._typing import Path
from .canonicalize import spell_out_broadcasts, with_program
from .hidden_groups import seen_by_losses, written
from .trace import follow, laid_out

_SUMS = ("add", "add_any", "sub")
_FACTORS = ("mul", "div", "neg", "convert_element_type", "copy")
_MOVES = ("reshape", "squeeze", "expand_dims", "transpose", "broadcast_in_dim")


def with_filters(traced: TracedModel, batch: Batch) -> tuple[TracedModel, Batch]:
    """Write the leaky readouts of a step filter first; the batch gets the axes of the filters."""
    find, program = _Finder(traced, batch), traced.program
    readouts = [found for leaf in find.states if (found := find(leaf)) is not None]
    if not readouts:
        return traced, batch
    like = [*program.in_vars, *(var for readout in readouts for var in readout.filters.values())]
    run = functools.partial(_run, traced, readouts)
    new = program_of(trace_to_jaxpr(run, [var.aval for var in like]))
    again = with_program(traced, new)
    paths = [(FILTERS, r.leaf.name, i) for r in readouts for i in range(len(r.filters))]
    added = zip(paths, new.in_vars[-len(paths) :], new.out_atoms[-len(paths) :], strict=True)
    filters = [StateLeaf(path, 0, "hidden", False, True, var, out) for path, var, out in added]
    ends = {leaf.name: leaf for leaf in again.leaves}
    axes = {leaf.path: (_axis(new, batch, leaf, ends[leaf.path[1]]),) for leaf in filters}
    unclear = () if batch.samples is None else (p for p, axis in axes.items() if axis == (None,))
    filtered = dataclasses.replace(
        again,
        leaves=(*again.leaves, *filters),
        state_trees={**traced.state_trees, **dict.fromkeys(paths, jax.tree.structure(0))},
        readouts={readout.leaf.name: readout.parameters for readout in readouts},
        unfiltered=traced,
    )
    return filtered, Batch(batch.samples, {**batch.axes, **axes}, (*batch.unclear, *unclear))


def _axis(program: Program, batch: Batch, leaf: StateLeaf, end: StateLeaf) -> int | None:
    """Return the axis of a filter that has the samples of its readout."""
    axis, samples = batch.axis(end), batch.samples
    if axis is None or samples is None:
        return None
    constants, expected = Constants(program), laid_out(end.shape, axis, samples)
    for place in (a for a, size in enumerate(leaf.shape) if size == samples):
        start = {leaf.in_var: laid_out(leaf.shape, place, samples)}
        flow = Dataflow(constants, Labels()).flows_from(start).get(end.out_var)
        if follow(flow, expected):
            return place
    return None


@dataclasses.dataclass(frozen=True, eq=False)
class _Readout:
    """A readout.

    Attributes
    ----------
    leaf, new
        The state, and the variable of its new value.
    path
        The variables from its products to the new value.
    products
        Its products, each with the operand ``z``.
    filters
        A variable of the shape of each filter: every ``z`` itself, ``"ones"``, and ``"old"``.
    parameters
        Paths of the parameters of ``kappa``, ``A`` and ``b``.
    """

    leaf: StateLeaf
    new: Var
    path: frozenset[Var]
    products: list[tuple[Equation, int]]
    filters: Mapping[Any, Var]
    parameters: tuple[Path, ...]


class _Finder:
    """Find the hidden states that are leaky readouts of other states."""

    def __init__(self, traced: TracedModel, batch: Batch) -> None:
        self._program, self.states = traced.program, written(traced, "hidden")
        self._constants = Constants(traced.program)
        self._parameters, unwritten = traced.parameters, ("parameter", "other")
        # A State that resets do not concern, such as a feedback matrix, is fixed as a weight is.
        kept = (leaf for leaf in traced.leaves if leaf.path not in batch.axes)
        fixed = {leaf.in_var for leaf in kept if leaf.out_var is None and leaf.kind in unwritten}
        self._varying = self._program.dependents_of({*self._program.in_vars} - fixed)
        weights = [leaf.in_var for leaf in self._parameters]
        old = [leaf.in_var for leaf in self.states]
        self._learning = self._program.descendants(weights)
        self._followed = self._program.descendants([*weights, *old])
        self._targets = seen_by_losses(traced)

    def __call__(self, leaf: StateLeaf) -> _Readout | None:
        """Return a state as a readout; ``None``: it is not one."""
        program, old = self._program, leaf.in_var
        new: Any = leaf.out_var
        pairs = ((other.in_var, other.out_var) for other in self.states)
        others: set[Any] = {var for pair in pairs if pair[1] is not new for var in pair}
        behind = program.descendants([old])
        late = program.ancestors(self._targets, frozenset({new}))
        is_apart = others.isdisjoint(program.ancestors([new]))
        if leaf.is_grouped or is_apart or old in late or not behind.isdisjoint(others):
            return None
        passed, path, products = {new}, set[int](), list[tuple[Equation, int]]()
        biased = shifted = decays = scaled = adds_data = False
        for index in program.backward([new], passed):
            equation, name = program.equations[index], program.equations[index].primitive.name
            data = [i for i, a in enumerate(equation.invars) if is_var(a) and a in self._varying]
            fixed = [atom for i, atom in enumerate(equation.invars) if i not in data]
            weights = sum(is_var(atom) and atom in self._learning for atom in fixed)
            moving = [equation.invars[i] for i in data if equation.invars[i] in self._followed]
            is_old = not behind.isdisjoint(moving)
            path.add(index)
            if _is_product(equation, data):
                products.append((equation, data[0]))
                biased |= is_marked(equation) and weights > 1
                shifted |= is_marked(equation) and len(fixed) > 1
                continue
            if name in _SUMS:
                biased |= weights > 0
                shifted |= len(fixed) > 0
                adds_data |= len(moving) < len(data)
            elif len(moving) == len(data) == 1 and (name != "div" or data == [0]):
                # The old value is scaled by one number for all units.
                is_uniform = name in _FACTORS and all(map(self._is_number, fixed))
                if not (is_uniform if is_old else name in (*_FACTORS, *_MOVES)):
                    return None
                decays |= is_old and weights > 0
                scaled |= weights > 0
            else:
                return None
            passed.update(moving)
        filters: dict[Any, Var] = {e.invars[x]: e.invars[x] for e, x in products}
        below = program.ancestors(filters)
        is_above = old not in below and not others.isdisjoint(below)
        # An operation that something else reads as well keeps its trace.
        marked = program.made_by(i for i in path if is_marked(program.equations[i]))
        is_shared = any(i not in path for var in marked for i, _ in program.readers.get(var, ()))
        # Data that are only added have no filter, which a weight of theirs would need.
        is_exact = passed & {*program.in_vars, *others} == {old} and not (adds_data and scaled)
        if is_shared or not (is_above and is_exact):
            return None
        has_ones = biased or (shifted and scaled)
        filters |= {key: new for key, has in (("ones", has_ones), ("old", decays)) if has}
        read = {atom for i in path for atom in program.equations[i].invars if is_var(atom)}
        factors = program.depends_on(read - self._varying)
        paths = (leaf.path for leaf in self._parameters if leaf.in_var in factors)
        return _Readout(
            leaf, new, program.made_by(path), products, filters, tuple(dict.fromkeys(paths))
        )

    def _is_number(self, atom: Atom) -> bool:
        """Test whether all elements of an array are equal."""
        while (made := self._program.maker(atom)) is not None and made.primitive.name in _MOVES:
            atom = made.invars[0]
        if atom.aval.size == 1:
            return True
        value = self._constants.value(atom)
        return value is not None and bool(np.all(value == value.ravel()[:1]))


def _is_product(equation: Equation, data: Sequence[int]) -> bool:
    """Test whether an equation is a product of data and a weight."""
    if len(data) != 1 or not carries_derivative(equation.invars[data[0]]):
        return False
    spec = ETP_PRIMITIVE_SPECS.get(equation.primitive)
    if spec is not None:
        return spec.linear_in_input is True and spec.x_invar_index == data[0]
    return equation.primitive.name in PRODUCTS


# --- the rewritten step


def _run(traced: TracedModel, readouts: Sequence[_Readout], *values: Any) -> list[Any]:
    """Return the outputs of a step and the new filters, given its inputs and the filters."""
    program, made = traced.program, {readout.new: readout for readout in readouts}
    inputs, old = values[: len(program.in_vars)], iter(values[len(program.in_vars) :])
    known: dict[Var, Any] = {**program.constants, **dict(zip(program.in_vars, inputs, strict=True))}
    filters = {r: {source: next(old) for source in r.filters} for r in readouts}
    # ETP operations of readouts become ordinary operations.
    plain = {equation.outvars[0] for readout in readouts for equation, _ in readout.products}

    def rule(equation: Equation, operands: list[Any]) -> list[Any]:
        is_plain = not plain.isdisjoint(equation.outvars)
        results = [_product(equation, operands)] if is_plain else bind(equation, operands)
        known.update(zip(equation.outvars, results, strict=True))
        for readout in (made[var] for var in equation.outvars if var in made):
            after = _advance(program, readout, known, filters[readout])
            known[readout.new], filters[readout] = after
        return [known[var] for var in equation.outvars]

    outputs = evaluate_all(program.jaxpr, inputs, rule)
    return [*outputs, *(value for readout in readouts for value in filters[readout].values())]


def _product(equation: Equation, operands: Sequence[Any]) -> Any:
    if not is_marked(equation):
        return bind(equation, operands)[0]
    implementation = functools.partial(equation.primitive.implementation, **equation.params)
    jaxpr = trace_to_jaxpr(implementation, [*map(jax.typeof, operands)])
    return evaluate_inlined(jaxpr, operands, spell_out_broadcasts)[0]


def _advance(
    program: Program, readout: _Readout, known: Mapping[Var, Any], filters: Mapping[Any, Any]
) -> tuple[Any, dict[Any, Any]]:
    """Return the new value of a readout with its derivative, and the new filters."""
    old, value = readout.leaf.in_var, known[readout.new]
    outside = {var: value for var, value in known.items() if var not in readout.path}

    def after(before: Any, product: Callable[[Equation, int], Any]) -> Any:
        """Return the new value for another old value and other products."""
        products = {equation.outvars[0]: product(equation, x) for equation, x in readout.products}
        return evaluate(program, [readout.new], outside, {old: before, **products})[0]

    def product_of(equation: Equation, x: int, z: Any) -> Any:
        operands = [known[atom] if is_var(atom) else atom.val for atom in equation.invars]
        return _product(equation, [*operands[:x], z, *operands[x + 1 :]])

    def biases(equation: Equation, x: int) -> Any:
        out, z = equation.outvars[0].aval, known[equation.invars[x]]
        if not is_marked(equation):
            return jnp.zeros(out.shape, out.dtype)
        # The biases are the same for all samples: one is enough.
        one = z[:1] if ETP_PRIMITIVE_SPECS[equation.primitive].batched else z
        return jnp.broadcast_to(product_of(equation, x, jnp.zeros_like(one)), out.shape)

    def of_old(before: Any) -> Any:
        return after(before, lambda equation, x: known[equation.outvars[0]])

    zero = jnp.zeros_like(value)
    slope = jax.jvp(of_old, (zero,), (jnp.ones_like(zero),))[1]
    kappa = jax.lax.slice(slope, [0] * slope.ndim, [1] * slope.ndim).reshape(())
    fixed, new = jax.lax.stop_gradient(kappa), dict[Any, Any]()
    for source, before in filters.items():
        current = 1 if isinstance(source, str) else known[source]
        new[source] = jax.lax.broadcast(fixed.astype(before.dtype), before.shape) * before + current
    result = after(zero, lambda equation, x: product_of(equation, x, new[equation.invars[x]]))
    if "ones" in filters:
        result += (new["ones"] - 1) * after(zero, biases)
    if "old" in filters:
        before = with_derivative_of(known[old], filters["old"])
        new["old"] = jax.lax.broadcast(kappa, value.shape) * before
        result += new["old"]
        new["old"] = with_derivative_of(value, new["old"])
    return with_derivative_of(value, result), new
