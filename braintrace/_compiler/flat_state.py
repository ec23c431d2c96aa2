"""Flattened state: the hidden states of each sample as one vector.

Full-Jacobian rules need it. It includes the equations where parameters enter. A model whose samples
depend on each other, or that has no derivative, is refused: samples are independent if each element
of an old state reaches the new states of one sample only. Labels show it that flow back through the
step from the new states, each labelled with its sample.
"""

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from .._checks import quoted
from .._errors import CompilationError
from .._etrace_op.registry import ETP_PRIMITIVE_SPECS
from .._graph.flat_state import FlatState, ParameterUse, Structure
from .._graph.report import Diagnostic
from .._graph.traced_model import Batch, StateLeaf, TracedModel
from .._jax import OWN_DERIVATIVE, Equation, Var, bind, is_var, source_line, trace_to_jaxpr
from .._jaxpr.dataflow import TOP, Dataflow, Flow, Labels, Sets, everything, filled, joined, spread
from .._jaxpr.primitives import IN_ORDER, MOVES, PRODUCTS, Constants
from .._jaxpr.program import carries_derivative, components, evaluate, inlined, program_of
from .analysis import (
    Analysis,
    BindingTime,
    alike,
    binding_times,
    labels_back,
    nonlinear_uses,
    through_derivative,
    times_of_inputs,
)
from .diagnostics import untraced_states
from .hidden_groups import GroupedStep, new_states, written
from .trace import follow, laid_out

HiddenStates: TypeAlias = list[tuple[StateLeaf, Var]]
"""The states of a layer, with the variables of their new values."""


def flattened_state(
    step: GroupedStep,
    rule: str,
    batch: Batch,
    is_given: bool,
    has_shared: bool,
    layers: Sequence[HiddenStates] = (),
) -> FlatState:
    """Return the flattened state of a step.

    Parameters
    ----------
    step
        The step.
    rule
        Name of the learning rule.
    batch, is_given
        The samples, and whether the user has given their number: they are independent then.
    has_shared
        Whether parameters may meet values that the samples of a step share: a time step, a counter.
    layers
        The layers that the rule separates; empty: none.

    Raises
    ------
    CompilationError
        For a model whose gradient the rule could not follow exactly.
    """
    traced, analysis = step.traced, step.analysis
    leaves = _leaves(step)
    _check_derivatives(step, leaves, rule)
    axes = tuple(batch.axis(leaf) for leaf in leaves)
    # One sample is always correct: it contains all states, including states shared by all samples.
    is_one = batch.samples is None or (None in axes and not is_given)
    count = 1 if is_one else batch.samples or 1
    if count == 1:
        axes = (None,) * len(leaves)
    shared = _shared_inputs(traced, leaves, count) if has_shared and count > 1 else set()
    flow = SampleFlow(traced, analysis, leaves, shared, count, axes)
    coupled = flow.coupled()
    if coupled is not None:
        raise CompilationError(
            f"`{rule}` follows each sample separately, but hidden state '{coupled.name}' of shape "
            f"{coupled.shape} depends on several of the {count} samples (for example, a mean over "
            "the batch), or has no axis for them. Compute the coupling through "
            "`jax.lax.stop_gradient`, or use D_RTRL."
        )
    return FlatState(
        leaves=leaves,
        samples=count,
        axes=axes,
        uses=tuple(flow.uses()),
        reached=_reached(step, leaves, layers),
        layers=tuple(map(tuple, layers)),
    )


def _shared_inputs(traced: TracedModel, leaves: Sequence[StateLeaf], count: int) -> set[Var]:
    own = {leaf.in_var for leaf in (*leaves, *traced.parameters)}
    own |= {leaf.in_var for leaf in traced.leaves if leaf.kind == "random"}
    inputs = traced.program.in_vars
    return {var for var in inputs if var not in own and count not in var.aval.shape}


def _leaves(step: GroupedStep) -> tuple[StateLeaf, ...]:
    """Return the states that parameters reach and a step reads; if it reads none, all of them."""
    traced = step.traced
    parameters = [leaf.in_var for leaf in traced.parameters]
    reached = step.descendants_over_time(parameters)
    read = traced.program.depends_on(traced.program.out_atoms)
    changed = tuple(leaf for leaf in written(traced, "hidden") if leaf.out_var in reached)
    return tuple(leaf for leaf in changed if leaf.in_var in read) or changed


def _check_derivatives(step: GroupedStep, leaves: Sequence[StateLeaf], rule: str) -> None:
    """Refuse paths to a state or output with no derivative, or a nonlinear one."""
    program, parameters = step.traced.program, step.traced.parameters
    for diagnostic in untraced_states(step, frozenset()):
        if diagnostic.level == "warning":
            raise CompilationError(
                f"`{rule}` follows every hidden state, so it refuses this model: {diagnostic}"
            )
    starts = [leaf.in_var for leaf in (*leaves, *parameters)]
    descendants = program.descendants(starts)
    for equation, operands in nonlinear_uses(program, new_vars(leaves)):
        if not descendants.isdisjoint(atom for atom in operands if is_var(atom)):
            raise CompilationError(
                f"`{rule}` sums gradients of many steps, but a `custom_vjp` "
                f"({source_line(equation)}) has a backward rule that is not proportional to the "
                "incoming gradient (it clips, for example). Change gradients after `etrace_grad` "
                "has returned them."
            )


def layers_of(step: GroupedStep) -> list[HiddenStates]:
    """Return the layers of a step, each after those that it reads."""
    states = [list(new_states(group)) for group in step.groups]
    nodes = [_nodes(own) for own in states]
    later = [step.descendants_over_time(own) for own in nodes]
    reads = [[i for i, found in enumerate(later) if not found.isdisjoint(own)] for own in nodes]
    return [[state for number in layer for state in states[number]] for layer in components(reads)]


def about_layers(step: GroupedStep, layers: Sequence[HiddenStates]) -> Iterator[Diagnostic]:
    """Yield a diagnostic for each layer with memory of another layer."""
    readers = step.analysis.program.readers
    for lower in layers:
        others = {var for layer in layers if layer is not lower for _, var in layer}
        following = step.analysis.program.descendants(_nodes(lower), others) & others
        for upper in layers:
            is_read = any(leaf.in_var in readers for leaf, _ in upper)
            if is_read and not following.isdisjoint(var for _, var in upper):
                names = [[leaf.name for leaf, _ in layer] for layer in (lower, upper)]
                yield Diagnostic(
                    "info",
                    "truncated",
                    f"The memory of {quoted(names[1])} for earlier values of {quoted(names[0])} "
                    "is truncated in the gradient of the weights below: this rule follows each "
                    "layer separately. `RTRL` truncates nothing.",
                    (*names[0], *names[1]),
                )


def _nodes(layer: HiddenStates) -> set[Var]:
    """Return the states of a layer before and after the step."""
    return {leaf.in_var for leaf, _ in layer} | {var for _, var in layer}


def _reached(
    step: GroupedStep, leaves: Sequence[StateLeaf], layers: Sequence[HiddenStates]
) -> dict[str, tuple[int, ...]]:
    """Return the states that each parameter reaches, in this step or a later one.

    Paths through the states of another layer do not count.
    """
    every = set(leaves)
    insides = [{leaf for leaf, _ in layer} for layer in layers] or [every]

    def reached_by(parameter: Var) -> Iterator[StateLeaf]:
        for inside in insides:
            outside = {var for leaf in every - inside for var in (leaf.in_var, leaf.out_var)}
            later = step.descendants_over_time([parameter], outside)
            yield from (leaf for leaf in inside if leaf.out_var in later)

    found = {leaf.name: {*reached_by(leaf.in_var)} for leaf in step.traced.parameters}
    numbers = {name: [n for n, s in enumerate(leaves) if s in own] for name, own in found.items()}
    return {name: tuple(own) for name, own in numbers.items() if own}


def new_vars(leaves: Sequence[StateLeaf]) -> list[Var]:
    """Return the new values of States."""
    return [leaf.out_var for leaf in leaves if leaf.out_var is not None]


class SampleFlow:
    """The samples whose new states each element of a step reaches.

    Parameters
    ----------
    traced, analysis, leaves
        The step, and its hidden states.
    shared
        Inputs that all samples share; parameter-derived values may depend on them.
    count, axes
        The number of samples, and their axis in each state; ``None``: a single sample.
    """

    def __init__(
        self,
        traced: TracedModel,
        analysis: Analysis,
        leaves: Sequence[StateLeaf],
        shared: set[Var],
        count: int,
        axes: Sequence[int | None],
    ) -> None:
        self._traced, self._analysis, self._leaves = traced, analysis, leaves
        inputs = dict(zip(traced.program.in_vars, times_of_inputs(traced), strict=True))
        inputs |= dict.fromkeys(shared, BindingTime.CONSTANT)
        times = binding_times(traced.program, [*inputs.values()])
        self._data = {var for var, time in times.items() if time is BindingTime.DATA}
        self._count = count
        self._of_shared = analysis.program.dependents_of(shared)
        self._axes = axes
        pairs = zip(leaves, axes, strict=True)
        self._of_states = [laid_out(leaf.shape, axis, count) for leaf, axis in pairs]
        starts: dict[Var, Flow] = {}
        for var, samples in zip(new_vars(leaves), self._of_states, strict=True):
            starts[var] = joined(Labels(), [starts.get(var), samples])
        found = labels_back(analysis, starts, special=self._back_through)
        self._reached, self._through = found

    def coupled(self) -> StateLeaf | None:
        """Return a state that depends on several samples, or has no axis for them."""
        for leaf, axis, own in zip(self._leaves, self._axes, self._of_states, strict=True):
            is_apart = self._count == 1 or axis is not None
            if not is_apart or not follow(self._reached.get(leaf.in_var), own):
                return leaf
        return None

    def uses(self) -> Iterator[ParameterUse]:
        """Yield the equations where parameter-derived values meet data."""
        program, new = self._analysis.program, new_vars(self._leaves)
        parameters = (leaf.in_var for leaf in self._traced.parameters)
        descendants = self._analysis.program.descendants(parameters)
        own, count = descendants - self._data, itertools.count()
        for index in program.making(self._analysis.program.ancestors(new) & descendants):
            equation = program.equations[index]
            read = [(i, atom) for i, atom in enumerate(equation.invars) if is_var(atom)]
            operands = [(i, a) for i, a in read if a in own and carries_derivative(a)]
            if operands and not self._data.isdisjoint(equation.outvars):
                key = f"{equation.primitive.name}{next(count)}"
                varies = any(atom in self._of_shared for _, atom in operands)
                yield self._use(key, index, tuple(i for i, _ in operands), varies)
        for number, var in enumerate(new):
            if var in own:
                place, varies = (number,), var in self._of_shared
                samples = (self._of_states[number],)
                key = f"state{next(count)}"
                yield ParameterUse(key, None, place, "elementwise", samples=samples, varies=varies)

    def _back_through(self, equation: Equation, results: Sequence[Flow]) -> list[Flow] | None:
        if self._count == 1:  # a single sample reaches itself
            return alike(equation, everything(Labels(), results))
        return self._through_batched(equation, results[0])

    def _through_batched(self, equation: Equation, samples: Flow) -> list[Flow] | None:
        """Return the samples that the operands of a batched ETP operation reach.

        Each sample of its output depends on that sample of its input, and on operands that samples
        share. The derivative says the same, and takes some milliseconds to trace.
        """
        spec = ETP_PRIMITIVE_SPECS.get(equation.primitive)
        if spec is None or spec.x_invar_index is None or not spec.batched or samples is None:
            return None
        x, y = equation.invars[spec.x_invar_index], equation.outvars[0]
        others = [atom for atom in equation.invars if atom is not x and is_var(atom)]
        if not self._data.isdisjoint(others) or x.aval.shape[:1] != y.aval.shape[:1]:
            return None
        flows = alike(equation, everything(Labels(), [samples]))
        rows = Labels().over(samples, range(1, samples.ndim))
        rows = rows.reshape(-1, *[1] * (len(x.aval.shape) - 1))
        flows[spec.x_invar_index] = np.broadcast_to(rows, x.aval.shape)
        return flows

    def _use(self, key: str, index: int, operands: tuple[int, ...], varies: bool) -> ParameterUse:
        """Return a use with the samples of its elements."""
        equation, flow_of = self._analysis.program.equations[index], self._through.get
        use = functools.partial(ParameterUse, key, index, operands, varies=varies)
        x = self._input_of_product(equation, operands)
        if x is not None and self._count == 1:
            return use("product", x)
        inside = _filled((flow_of((index, i)), equation.invars[i].aval.shape) for i in operands)
        if inside is not None:
            return use("elementwise", samples=inside)
        if x is not None:
            of_x, of_y = flow_of((index, x)), self._reached.get(equation.outvars[0])
            x_axis, y_axis = (_axis_of_samples(flow, self._count) for flow in (of_x, of_y))
            if x_axis is not None and y_axis is not None:
                return use("product", x, x_axis, y_axis)
        results = (var for var in equation.outvars if carries_derivative(var))
        samples = _filled((self._reached.get(var), var.aval.shape) for var in results)
        if samples is not None:
            return use("any", samples=samples)
        raise CompilationError(
            f"In `{equation.primitive.name}` ({source_line(equation)}), one element of a "
            f"parameter-derived value reaches several of the {self._count} samples: an index "
            "gathers a row for all of them, a product uses the data of one, or an operation does "
            "not separate samples. Their gradients are summed there. Give each sample a separate "
            "value (`table[jnp.broadcast_to(index, batch)]`), or use D_RTRL."
        )

    def _input_of_product(self, equation: Equation, operands: Sequence[int]) -> int | None:
        """Return the operand of a product with parameters that contains the samples."""
        read = enumerate(equation.invars)
        others = [i for i, atom in read if is_var(atom) and atom in self._data]
        if len(others) != 1 or others[0] in operands:
            return None
        spec, name = ETP_PRIMITIVE_SPECS.get(equation.primitive), equation.primitive.name
        if spec is not None:
            return others[0] if others[0] == spec.x_invar_index else None
        return others[0] if name in PRODUCTS and (name == "dot_general" or others[0] == 0) else None


def _filled(flows: Iterable[tuple[Flow, tuple[int, ...]]]) -> tuple[np.ndarray, ...] | None:
    """Return the samples of all elements of arrays; ``None``: one element has several."""
    samples = tuple(filled(Labels(), flow, shape) for flow, shape in flows)
    return None if any(np.any(own == TOP) for own in samples) else samples


def _axis_of_samples(samples: Flow, count: int) -> int | None:
    """Return the axis of an array that runs over the samples, or ``None``.

    Elements that depend on no sample fit any axis.
    """
    shape = () if samples is None else samples.shape
    axes = (axis for axis, size in enumerate(shape) if size == count)
    return next((a for a in axes if follow(samples, laid_out(shape, a, count))), None)


# --- sparsity of the Jacobian
#
# Sets of numbers flow forward through the program of a step, with ETP operations replaced by their
# implementations. They number elements of the first sample's old state, or entries of a parameter.
# Where the new state lacks a number, its derivative is zero. Sets do not pass constant zeros that a
# value is multiplied by, like those in the mask of a weight, nor the terms of a product that have
# such a weight.

Masks: TypeAlias = dict[Var, np.ndarray]
"""Flags of the elements of variables that are not zero in every step."""

MOST_FLAGS = 2**26
"""Largest number of flags of one variable; numbers that would have more flow part by part."""


def structure_of(traced: TracedModel, analysis: Analysis, flat: FlatState) -> Structure:
    """Return the sparsity pattern of a sample's new state."""
    constants = _plain_step(analysis, flat)
    masks = _masks_of(constants)
    axes = zip(flat.leaves, flat.axes, strict=True)
    samples = (laid_out(leaf.shape, axis, flat.samples) for leaf, axis in axes)
    firsts = [np.flatnonzero(own == 0) for own in samples]
    largest = max((v.aval.size for e in constants.program.equations for v in e.outvars), default=1)
    inputs = dict(zip(analysis.program.in_vars, constants.program.in_vars, strict=True))

    def reached_from(leaf: StateLeaf, elements: np.ndarray) -> np.ndarray:
        parts = np.array_split(elements, -(-elements.size * largest // MOST_FLAGS))
        var = inputs[leaf.in_var]
        every = [_dependence(constants, masks, var, part) for part in parts if part.size]
        of_first = [
            np.concatenate([rows[first] for rows, first in zip(part, firsts, strict=True)])
            for part in every
        ]
        return np.concatenate(of_first, axis=1)

    old = zip(flat.leaves, firsts, strict=True)
    transition = [reached_from(leaf, first) for leaf, first in old]
    of_parameters = {
        leaf.name: reached_from(leaf, np.arange(leaf.in_var.aval.size))
        for leaf in traced.parameters
        if leaf.name in flat.reached
    }
    return Structure(np.concatenate(transition, axis=1), of_parameters)


def _plain_step(analysis: Analysis, flat: FlatState) -> Constants:
    """Return the program from the inputs of a step to its new states, without ETP operations."""
    program, new = analysis.program, new_vars(flat.leaves)
    rules = dict.fromkeys(analysis.roles, _run_plainly)

    def run(*values: Any) -> list[Any]:
        inputs = dict(zip(program.in_vars, values, strict=True))
        return evaluate(program, new, inputs, rules=rules)

    jaxpr = trace_to_jaxpr(run, [var.aval for var in program.in_vars])
    return Constants(program_of(inlined(jaxpr)))


def _run_plainly(equation: Equation, operands: list[Any]) -> list[Any]:
    return [equation.primitive.implementation(*operands, **equation.params)]


def _dependence(
    constants: Constants, masks: Masks, start: Var, elements: np.ndarray
) -> list[np.ndarray]:
    """Return the dependence of each output's elements on some elements of one input."""
    lattice, aval = Sets(len(elements)), start.aval
    numbered = np.zeros((aval.size, len(elements)), bool)
    numbered[elements, np.arange(len(elements))] = True

    def special(equation: Equation, operands: Sequence[Flow]) -> list[Flow] | None:
        if equation.primitive.name in OWN_DERIVATIVE:
            return through_derivative(lattice, equation, operands)
        return _through_mask(lattice, masks, equation, operands)

    starts = {start: numbered.reshape(*aval.shape, -1)}
    flows: Any = Dataflow(constants, lattice, True, special).flows_from(starts)
    atoms = constants.program.out_atoms
    outputs = (filled(lattice, flows.get(a) if is_var(a) else None, a.aval.shape) for a in atoms)
    return [flow.reshape(-1, len(elements)) for flow in outputs]


def _masks_of(constants: Constants) -> Masks:
    """Return where values may be other than zero, of products with constants and their moves."""
    masks: Masks = {}
    for equation in constants.program.equations:
        name, var = equation.primitive.name, equation.outvars[0]
        if name == "mul":
            for atom in equation.invars:
                value = constants.value(atom)
                mask = masks.get(atom) if value is None else value != 0
                if mask is not None and not mask.all():
                    masks[var] = np.broadcast_to(masks.get(var, True) & mask, var.aval.shape)
        elif name in MOVES.keys() | IN_ORDER:
            known = [masks[atom] for atom in equation.invars if is_var(atom) and atom in masks]
            if len(equation.invars) == len(known) == 1:
                move = MOVES.get(name)  # other operations keep the shape
                masks[var] = move(equation.params, var.aval.shape, *known)[0] if move else known[0]
    return masks


def _through_mask(
    lattice: Sets, masks: Masks, equation: Equation, operands: Sequence[Flow]
) -> list[Flow] | None:
    """Follow a product with known zeros; ``None`` for any other equation."""
    name, var = equation.primitive.name, equation.outvars[0]
    followed = [(index, flow) for index, flow in enumerate(operands) if flow is not None]
    if name == "mul" and var in masks:
        flow = joined(lattice, [spread(lattice, flow, var.aval.shape) for _, flow in followed])
        return [None if flow is None else flow & masks[var][..., None]]
    if name != "dot_general" or len(followed) != 1:
        return None
    ((index, flow),) = followed
    other = equation.invars[1 - index]
    if not is_var(other) or other not in masks:
        return None

    def terms(numbers: jax.Array) -> jax.Array:
        operands = [masks[other], numbers] if index else [numbers, masks[other]]
        pairs = zip(operands, equation.invars, strict=True)
        return bind(equation, [jnp.asarray(v, atom.aval.dtype) for v, atom in pairs])[0]

    with jax.ensure_compile_time_eval():
        return [np.asarray(jax.vmap(terms, -1, -1)(flow)) > 0]
