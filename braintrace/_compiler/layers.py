"""Layers: hidden groups that depend on each other over time, by any path."""

from collections.abc import Iterator, Sequence
from typing import TypeAlias

from .._graph.diagnostics import Diagnostic, quoted
from .._graph.traced_model import StateLeaf
from .._jax import Var
from .._jaxpr import components
from .grouped_step import GroupedStep, new_states

HiddenStates: TypeAlias = list[tuple[StateLeaf, Var]]
"""The states of a layer, with the variables of their new values."""


def layers_of(step: GroupedStep) -> list[HiddenStates]:
    """Return the layers of a step, each after those that it reads."""
    states = [list(new_states(group)) for group in step.groups]
    descendants = [
        step.graph.gradients.descendants_over_time(_nodes(group_states)) for group_states in states
    ]
    reads = [
        [
            number
            for number, of_group in enumerate(descendants)
            if not of_group.isdisjoint(_nodes(group_states))
        ]
        for group_states in states
    ]
    return [[state for number in layer for state in states[number]] for layer in components(reads)]


def about_layers(step: GroupedStep, layers: Sequence[HiddenStates]) -> Iterator[Diagnostic]:
    """Yield a diagnostic for each layer with memory of another layer."""
    for number, lower in enumerate(layers):
        for index in sorted(_following(step, layers, lower) - {number}):
            upper = layers[index]
            if any(leaf.in_var in step.analysis.program.readers for leaf, _ in upper):
                names = [[leaf.name for leaf, _ in layer] for layer in (lower, upper)]
                yield Diagnostic(
                    "info",
                    "truncated",
                    f"The memory of {quoted(names[1])} for earlier values of {quoted(names[0])} "
                    "is truncated in the gradient of the weights below: this rule follows each "
                    "layer separately. `RTRL` truncates nothing.",
                    (*names[0], *names[1]),
                )


def _following(step: GroupedStep, layers: Sequence[HiddenStates], start: HiddenStates) -> set[int]:
    """Return the layers that read the states of one, before a step or after it."""
    others = {var for layer in layers if layer is not start for _, var in layer}
    descendants = step.graph.gradients.descendants(_nodes(start), others)
    return {
        index
        for index, layer in enumerate(layers)
        if not descendants.isdisjoint(v for _, v in layer)
    }


def _nodes(layer: HiddenStates) -> set[Var]:
    """Return the states of a layer before and after the step."""
    return {leaf.in_var for leaf, _ in layer} | {var for _, var in layer}
