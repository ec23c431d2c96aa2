"""Uses of parameters for full-Jacobian rules, with the samples of their elements.

Samples are independent if each element of an old state reaches the new states of one sample only.
The proof is a flow of labels (`_jaxpr.dataflow`) back through the step. It starts at the new
states, each labelled with its sample.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from .._errors import CompilationError
from .._etrace_op import ETP_PRIMITIVE_SPECS
from .._graph.flat_state import ParameterUse, UseKind
from .._graph.traced_model import StateLeaf, TracedModel
from .._jax import Atom, Equation, Var, is_var, source_line
from .._jaxpr import (
    PRODUCTS,
    TOP,
    Flow,
    Labels,
    carries_derivative,
    dot_letters,
    everything,
    filled,
    flows_back,
    joined,
    spread,
)
from .._typing import Path
from .analysis import Analysis
from .batch import follow, laid_out


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
    analysis: Analysis,
    leaves: Sequence[StateLeaf],
    uses: Sequence[ParameterUse],
    data: set[Var],
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
    laid = [laid_out(s.shape, a, count) for s, a in zip(leaves, axes, strict=True)]
    starts = zip(new_vars(leaves), laid, strict=True)
    reached, through = _reached_samples(analysis, data, starts)
    of_states = zip(leaves, laid, strict=True)
    coupled = next((s for s, own in of_states if not follow(reached.get(s.in_var), own)), None)
    if coupled is not None:
        return SampleAxes(count, axes, coupled)
    placed = tuple(_placed(analysis, use, reached, through, laid, count) for use in uses)
    return SampleAxes(count, axes, None, placed)


def _reached_samples(
    analysis: Analysis, data: set[Var], starts: Iterable[tuple[Var, np.ndarray]]
) -> tuple[dict[Var, Flow], dict[tuple[int, int], Flow]]:
    """Return the sample that each element of a variable reaches, by any use and by each use."""
    program, reached, through = analysis.program, dict[Var, Flow](), dict[tuple[int, int], Flow]()
    for var, samples in starts:
        reached[var] = joined(Labels(), [reached.get(var), samples])
    for index in program.backward([*reached], reached):
        equation = program.equations[index]
        results = [reached.get(var) for var in equation.outvars]
        flows = _samples_of_input(equation, results[0], data) if index in analysis.roles else None
        if flows is None:
            flows = flows_back(Labels(), analysis.constants, equation, results)
        if flows is None:  # the dependence of elements is unknown
            one = everything(Labels(), results)
            flows = [
                one if one is None else spread(Labels(), one, a.aval.shape) for a in equation.invars
            ]
        for operand, (atom, flow) in enumerate(zip(equation.invars, flows, strict=True)):
            if flow is not None and carries_derivative(atom):
                through[index, operand] = flow
                reached[atom] = joined(Labels(), [reached.get(atom), flow])
    return reached, through


def _samples_of_input(equation: Equation, samples: Flow, data: set[Var]) -> list[Flow] | None:
    """Return the samples that the operands of an ETP operation reach; ``None``: as they flow.

    Each sample of the output of a batched operation depends on that sample of its input, and on
    operands without samples.
    """
    spec = ETP_PRIMITIVE_SPECS.get(equation.primitive)
    if spec is None or spec.x_invar_index is None or not spec.batched or samples is None:
        return None
    x, y = equation.invars[spec.x_invar_index], equation.outvars[0]
    others = [atom for atom in equation.invars if atom is not x and is_var(atom)]
    if not data.isdisjoint(others) or x.aval.shape[:1] != y.aval.shape[:1]:
        return None
    rows = Labels().over(samples, range(1, samples.ndim))
    flows: list[Flow] = [None] * len(equation.invars)
    flows[spec.x_invar_index] = np.broadcast_to(
        rows.reshape(-1, *[1] * (len(x.aval.shape) - 1)), x.aval.shape
    )
    return flows


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
    reached: Mapping[Var, Flow],
    through: Mapping[tuple[int, int], Flow],
    laid: Sequence[np.ndarray],
    count: int,
) -> ParameterUse:
    """Return a use with the samples of its elements."""
    if use.equation is None:
        return dataclasses.replace(use, samples=(laid[use.operands[0]],))
    equation = analysis.program.equations[use.equation]
    outputs = [reached.get(var) for var in equation.outvars]
    if use.kind == "product" and outputs[0] is not None and use.x is not None:
        y_axis = _axis_of_samples(outputs[0], count)
        x_axis = None if y_axis is None else _axis_of_input(equation, use.x, y_axis)
        if x_axis is not None:
            return dataclasses.replace(use, x_axis=x_axis, y_axis=y_axis)
    elif use.kind == "elementwise":
        inside = _filled((through.get((use.equation, i)), equation.invars[i]) for i in use.operands)
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


def _axis_of_samples(samples: np.ndarray, count: int) -> int | None:
    """Return the axis of an array that runs over the samples, or ``None``.

    Elements that depend on no sample fit any axis.
    """
    axes = (axis for axis, size in enumerate(samples.shape) if size == count)
    return next((a for a in axes if follow(samples, laid_out(samples.shape, a, count))), None)


def new_vars(leaves: Sequence[StateLeaf]) -> list[Var]:
    """Return the new values of States."""
    return [leaf.out_var for leaf in leaves if leaf.out_var is not None]


def uses_of_parameters(
    traced: TracedModel,
    analysis: Analysis,
    leaves: Sequence[StateLeaf],
    data: set[Var],
    shared: set[Var],
) -> Iterator[ParameterUse]:
    """Yield the equations where parameter-derived values meet data.

    Parameters
    ----------
    traced, analysis, leaves
        The step, and its hidden states.
    data
        The variables that depend on data of single samples.
    shared
        Inputs that all samples share; parameter-derived values may depend on them.
    """
    program, of_shared = analysis.program, analysis.program.dependents_of(shared)
    descendants = analysis.gradient_descendants(leaf.in_var for leaf in traced.parameters)
    ancestors = analysis.gradient_ancestors(new_vars(leaves))
    count = itertools.count()
    for index in analysis.program.making(ancestors & descendants):
        equation = program.equations[index]
        operands = tuple(
            i
            for i, atom in enumerate(equation.invars)
            if carries_derivative(atom) and atom in descendants and atom not in data
        )
        if operands and not data.isdisjoint(equation.outvars):
            key = f"{equation.primitive.name}{next(count)}"
            x = _input_of_product(equation, operands, data)
            kind: UseKind = "elementwise" if x is None else "product"
            atoms = [equation.invars[i] for i in operands]
            held_paths = _held_paths(traced, analysis, atoms)
            varies = not of_shared.isdisjoint(filter(is_var, atoms))
            size = sum(v.aval.size * v.aval.dtype.itemsize for v in equation.outvars)
            yield ParameterUse(
                key,
                index,
                operands,
                kind,
                x,
                held_paths=held_paths,
                output_bytes=int(size),
                varies=varies,
            )
    for number, var in enumerate(new_vars(leaves)):
        if var in descendants and var not in data:
            held_paths, varies = _held_paths(traced, analysis, [var]), var in of_shared
            kind, key = "elementwise", f"state{next(count)}"
            yield ParameterUse(key, None, (number,), kind, held_paths=held_paths, varies=varies)


def _held_paths(traced: TracedModel, analysis: Analysis, atoms: Sequence[Atom]) -> tuple[Path, ...]:
    ancestors = analysis.value_ancestors(atoms)
    held = (s for s in traced.leaves if s.kind != "parameter" and s.out_var is None)
    others = (leaf for leaf in held if leaf.in_var in ancestors)
    return tuple(dict.fromkeys(leaf.path for leaf in others))


def _input_of_product(equation: Equation, operands: tuple[int, ...], data: set[Var]) -> int | None:
    """Return the operand of a product with parameters that contains the samples."""
    others = [i for i, atom in enumerate(equation.invars) if is_var(atom) and atom in data]
    if len(others) != 1 or others[0] in operands:
        return None
    spec = ETP_PRIMITIVE_SPECS.get(equation.primitive)
    if spec is not None:
        return others[0] if others[0] == spec.x_invar_index else None
    is_plain = equation.primitive.name in PRODUCTS
    is_input = equation.primitive.name == "dot_general" or others[0] == 0
    return others[0] if is_plain and is_input else None
