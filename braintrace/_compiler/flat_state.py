"""Flattened state: the hidden states of each sample as one vector.

Full-Jacobian rules need it. It includes the equations where parameters enter. A model whose samples
depend on each other, or that has no derivative, is refused.
"""

from collections.abc import Sequence

import jax.numpy as jnp

from .._errors import CompilationError
from .._graph.batch import Batch
from .._graph.flat_state import FlatState, Layer
from .._graph.traced_model import StateLeaf, TracedModel
from .._jax import is_var, source_line
from .backward_rules import nonlinear_uses
from .diagnose import untraced_states
from .grouped_step import GroupedStep
from .layers import HiddenStates
from .parameter_uses import new_vars, reached_by_parameters, uses_of_parameters
from .sample_axes import sample_axes_of


def flattened_state(
    step: GroupedStep,
    rule: str,
    batch: Batch,
    is_given: bool,
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
    layers
        The layers that the rule separates; empty: none.

    Raises
    ------
    CompilationError
        For a model whose gradient the rule could not follow exactly.
    """
    traced, analysis = step.traced, step.analysis
    leaves = _leaves(traced)
    _check_derivatives(step, leaves, rule)
    uses = list(uses_of_parameters(traced, analysis, leaves))
    axes = tuple(batch.axis(leaf) for leaf in leaves)
    # One sample is always correct: it contains all states, including states shared by all samples.
    is_one = batch.samples is None or (None in axes and not is_given)
    count = 1 if is_one else batch.samples or 1
    proof = sample_axes_of(traced, analysis, leaves, uses, count, axes)
    if proof.coupled is not None:
        raise CompilationError(
            f"`{rule}` follows each sample separately, but hidden state '{proof.coupled.name}' of "
            f"shape {proof.coupled.shape} depends on several of the {proof.count} samples (for "
            "example, a mean over the batch), or has no axis for them. Compute the coupling "
            "through `jax.lax.stop_gradient`, or use D_RTRL."
        )
    return FlatState(
        leaves=leaves,
        samples=proof.count,
        axes=proof.axes,
        uses=proof.uses,
        reached=reached_by_parameters(step, leaves, layers),
        layers=tuple(_layer(layer, leaves) for layer in layers),
    )


def _layer(states: HiddenStates, leaves: Sequence[StateLeaf]) -> Layer:
    members = tuple(leaf for leaf, _ in states)
    places = tuple(index for index, leaf in enumerate(leaves) if leaf in members)
    return Layer(members, tuple(var for _, var in states), places)


def _leaves(traced: TracedModel) -> tuple[StateLeaf, ...]:
    """Return the hidden states that a step reads and changes; without any, those it changes."""
    read = traced.program.depends_on(traced.program.out_atoms)
    changed = tuple(
        leaf
        for leaf in traced.leaves
        if leaf.kind == "hidden"
        and jnp.issubdtype(leaf.dtype, jnp.floating)
        and leaf.out_var is not None
        and is_var(leaf.out_var)
    )
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
    descendants = analysis.gradient_descendants(starts)
    for equation, operands in nonlinear_uses(analysis, new_vars(leaves)):
        if not descendants.isdisjoint(atom for atom in operands if is_var(atom)):
            raise CompilationError(
                f"`{rule}` sums gradients of many steps, but a `custom_vjp` "
                f"({source_line(equation)}) has a backward rule that is not proportional to the "
                "incoming gradient (it clips, for example). Change gradients after `etrace_grad` "
                "has returned them."
            )
