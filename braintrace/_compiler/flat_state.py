"""Flattened state: the hidden states of each sample as one vector.

Full-Jacobian rules need it. It includes the equations where parameters enter. A model whose samples
depend on each other, or that has no derivative, is refused.
"""

from collections.abc import Iterator, Sequence
from typing import TypeAlias

from .._errors import CompilationError
from .._graph.flat_state import FlatState
from .._graph.report import Diagnostic, quoted
from .._graph.traced_model import Batch, StateLeaf, TracedModel
from .._jax import Var, is_var, source_line
from .._jaxpr.program import components
from .analysis import nonlinear_uses
from .findings import untraced_states
from .hidden_groups import GroupedStep, new_states
from .hidden_states import written
from .sample_axes import SampleFlow, new_vars

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
    traced, analysis = step.traced, step.analysis
    for diagnostic in untraced_states(step, frozenset()):
        if diagnostic.level == "warning":
            raise CompilationError(
                f"`{rule}` follows every hidden state, so it refuses this model: {diagnostic}"
            )
    starts = [leaf.in_var for leaf in (*leaves, *traced.parameters)]
    descendants = analysis.program.descendants(starts)
    for equation, operands in nonlinear_uses(analysis, new_vars(leaves)):
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
