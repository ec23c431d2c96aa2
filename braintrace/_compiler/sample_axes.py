"""Batch independence: a proof that samples are independent, and their axes.

Samples are independent if each element of a new state depends on the old state of one sample. The
proof is a flow of labels (`_jaxpr.dataflow`) through the program of the step's derivative. It
starts at the cotangents of new states, each labelled with its sample. All other inputs count as
constants: a product with one of them acts on each sample separately.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._errors import CompilationError
from .._etrace_op import ETP_PRIMITIVE_SPECS
from .._graph.flat_state import ParameterUse
from .._graph.traced_model import StateLeaf, TracedModel
from .._jax import Atom, Equation, Var, is_var, source_line, trace_to_jaxpr
from .._jaxpr import (
    TOP,
    Constants,
    Flow,
    Labels,
    Place,
    Question,
    Rule,
    carries_derivative,
    dot_letters,
    evaluate_probed,
    filled,
    flows_of_outputs,
    inlined,
    program_of,
)
from .analysis import Analysis
from .batch import follow, laid_out
from .binding_times import data_of
from .parameter_uses import new_vars


@dataclasses.dataclass(frozen=True, eq=False)
class SampleAxes:
    """Whether samples are independent, and the sample axes of parameter uses.

    Attributes
    ----------
    count, axes
        The number of samples, and their axis in each state.
    coupled
        A state that depends on several samples, or has no axis for them; ``None``: samples are
        independent.
    uses
        The uses of parameters, with the samples of their elements.
    """

    count: int
    axes: tuple[int | None, ...]
    coupled: StateLeaf | None = None
    uses: tuple[ParameterUse, ...] = ()


def sample_axes_of(
    traced: TracedModel,
    analysis: Analysis,
    leaves: Sequence[StateLeaf],
    uses: Sequence[ParameterUse],
    count: int,
    axes: tuple[int | None, ...],
) -> SampleAxes:
    """Test whether the samples along some axes of the states are independent."""
    if count == 1:
        of_one = tuple(_of_one_sample(analysis, leaves, use) for use in uses)
        return SampleAxes(1, (None,) * len(leaves), None, of_one)
    without = next((s for s, a in zip(leaves, axes, strict=True) if a is None), None)
    if without is not None:
        return SampleAxes(count, axes, without)
    jaxpr, places = _pulled_back(traced, analysis, leaves, uses)
    laid = [laid_out(s.shape, a, count) for s, a in zip(leaves, axes, strict=True)]
    starts = [*[None] * (len(jaxpr.jaxpr.invars) - len(leaves)), *laid]
    flows = flows_of_outputs(Question(Labels()), Constants(program_of(jaxpr)), starts)
    of_states = zip(leaves, flows, laid, strict=False)
    coupled = next((s for s, samples, own in of_states if not follow(samples, own)), None)
    if coupled is not None:
        return SampleAxes(count, axes, coupled)
    of_place = dict(zip(places, flows[len(leaves) :], strict=True))
    placed = tuple(_placed(analysis, use, of_place, laid, count) for use in uses)
    return SampleAxes(count, axes, None, placed)


def _of_one_sample(
    analysis: Analysis, leaves: Sequence[StateLeaf], use: ParameterUse
) -> ParameterUse:
    if use.kind == "product":
        return dataclasses.replace(use, samples=())
    if use.equation is None:
        shapes = [leaves[use.operands[0]].shape]
    else:
        invars = analysis.program.equations[use.equation].invars
        shapes = [invars[i].aval.shape for i in use.operands]
    return dataclasses.replace(use, samples=tuple(np.zeros(shape, np.int32) for shape in shapes))


def _placed(
    analysis: Analysis,
    use: ParameterUse,
    of_place: Mapping[Place, Flow],
    laid: Sequence[np.ndarray],
    count: int,
) -> ParameterUse:
    """Return a use with the samples of its elements."""
    if use.equation is None:
        return dataclasses.replace(use, samples=(laid[use.operands[0]],))
    equation = analysis.program.equations[use.equation]
    outputs = [of_place.get((use.equation, "out", i)) for i in range(len(equation.outvars))]
    if use.kind == "product" and outputs[0] is not None and use.x is not None:
        y_axis = _axis_of_samples(outputs[0], count)
        x_axis = None if y_axis is None else _axis_of_input(equation, use.x, y_axis)
        if x_axis is not None:
            return dataclasses.replace(use, x_axis=x_axis, y_axis=y_axis)
    elif use.kind == "elementwise":
        inside = _filled(
            (of_place.get((use.equation, "in", i)), equation.invars[i]) for i in use.operands
        )
        if not any(np.any(samples == TOP) for samples in inside):
            return dataclasses.replace(use, samples=inside)
    pairs = zip(outputs, equation.outvars, strict=True)
    samples = _filled((flow, var) for flow, var in pairs if carries_derivative(var))
    if any(np.any(s == TOP) for s in samples):
        raise CompilationError(
            f"In `{equation.primitive.name}` ({source_line(equation)}), one element of a "
            f"parameter-derived value reaches several of the {count} samples: an index "
            "gathers a row for all of them, a product uses the data of one, or an operation does "
            "not separate samples. Their gradients are summed there. Give each sample a separate "
            "value (`table[jnp.broadcast_to(index, batch)]`), or use D_RTRL."
        )
    return dataclasses.replace(use, kind="any", x=None, samples=samples)


def _filled(flows: Iterable[tuple[Flow, Atom]]) -> tuple[np.ndarray, ...]:
    return tuple(filled(Labels(), flow, atom.aval.shape) for flow, atom in flows)


def _axis_of_input(equation: Equation, x: int, y_axis: int) -> int | None:
    """Return the axis of a product's input that an axis of its result comes from."""
    params, name = equation.params, equation.primitive.name
    if name == "dot_general":
        letters = dot_letters(equation)
        letter = letters[2][y_axis]
        return None if letter in letters[1 - x] else letters[x].index(letter)
    if name == "conv_general_dilated":
        numbers = params["dimension_numbers"]
        alone = params["batch_group_count"] == 1
        return numbers.lhs_spec[0] if y_axis == numbers.out_spec[0] and alone else None
    batched = ETP_PRIMITIVE_SPECS[equation.primitive].batched
    return 0 if batched and y_axis == 0 else None


def _pulled_back(
    traced: TracedModel,
    analysis: Analysis,
    leaves: Sequence[StateLeaf],
    uses: Sequence[ParameterUse],
) -> tuple[Any, list[Place]]:
    """Return the vjp of the step as a jaxpr, and its places.

    It maps inputs and cotangents of new states to cotangents of old states and at ``places``.
    """
    program, new = analysis.program, new_vars(leaves)
    data = data_of(traced, analysis)
    places = list(_places(analysis, uses))
    shapes = [_aval_at(analysis, place) for place in places]

    def pulled(inputs: list[Any], cotangents: list[Any]) -> list[Any]:
        by_var = dict(zip(program.in_vars, inputs, strict=True))

        def states(old: list[Any], probes: list[Any]) -> list[Any]:
            values = {**by_var, **{s.in_var: v for s, v in zip(leaves, old, strict=True)}}
            at = dict(zip(places, probes, strict=True))
            return evaluate_probed(program, new, values, at, _samples_apart(analysis, data))

        zeros = [jnp.zeros(aval.shape, aval.dtype) for aval in shapes]
        _, pull = jax.vjp(states, [by_var[leaf.in_var] for leaf in leaves], zeros)
        old, probes = pull(cotangents)
        return [*old, *probes]

    count = len(program.in_vars)
    avals = [*(var.aval for var in program.in_vars), *(var.aval for var in new)]
    jaxpr = trace_to_jaxpr(lambda *v: pulled(list(v[:count]), list(v[count:])), avals)
    return inlined(jaxpr), places


def _places(analysis: Analysis, uses: Sequence[ParameterUse]) -> Iterator[Place]:
    for use in uses:
        if use.equation is None:
            continue
        for i, var in enumerate(analysis.program.equations[use.equation].outvars):
            if carries_derivative(var):
                yield use.equation, "out", i
        if use.kind == "elementwise":
            for i in use.operands:
                yield use.equation, "in", i


def _aval_at(analysis: Analysis, place: Place) -> Any:
    index, side, number = place
    equation = analysis.program.equations[index]
    return (equation.invars if side == "in" else equation.outvars)[number].aval


def _samples_apart(analysis: Analysis, data: set[Var]) -> dict[int, Rule]:
    """Return rules by which each sample of an ETP output depends on all of its input."""

    def rule(equation: Equation, values: list[Any]) -> list[Any]:
        place = ETP_PRIMITIVE_SPECS[equation.primitive].x_invar_index
        assert place is not None
        x, y = values[place], equation.outvars[0].aval
        total = x.sum(tuple(range(1, x.ndim))).astype(y.dtype)
        return [jnp.broadcast_to(total.reshape(-1, *[1] * (y.ndim - 1)), y.shape)]

    return {
        index: rule
        for index in analysis.roles
        if (spec := ETP_PRIMITIVE_SPECS.get(analysis.program.equations[index].primitive))
        is not None
        and spec.batched
        and spec.x_invar_index is not None
        and _rows_agree(analysis.program.equations[index], spec.x_invar_index, data)
    }


def _rows_agree(equation: Equation, x: int, data: set[Var]) -> bool:
    """Test whether an operation's input has all data, and the samples of its output."""
    x_atom: Atom = equation.invars[x]
    others = [atom for i, atom in enumerate(equation.invars) if i != x and is_var(atom)]
    return data.isdisjoint(others) and bool(
        x_atom.aval.shape[:1] == equation.outvars[0].aval.shape[:1]
    )


def _axis_of_samples(samples: np.ndarray, count: int) -> int | None:
    """Return the axis of an array that runs over the samples, or ``None``.

    Elements that depend on no sample fit any axis.
    """
    axes = (axis for axis, size in enumerate(samples.shape) if size == count)
    return next((a for a in axes if follow(samples, laid_out(samples.shape, a, count))), None)
