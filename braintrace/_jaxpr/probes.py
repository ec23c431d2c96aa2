"""Taps: zeros added to values inside a program, for derivatives at these values."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from .._jax import Atom, Equation, Var, bind
from .evaluate import Rule, evaluate
from .program import Program

Place: TypeAlias = tuple[int, str, int]
"""``(index of an equation, 'in' or 'out', index of its operand or result)``."""


def evaluate_probed(
    program: Program,
    targets: Sequence[Atom],
    inputs: Mapping[Var, Any],
    probes: Mapping[Place, Any],
    rules: Mapping[int, Rule] | None = None,
    overrides: Mapping[Var, Any] | None = None,
) -> list[Any]:
    """Return the values of targets, with a value added at some places.

    Parameters
    ----------
    program, targets, inputs, overrides
        See `evaluate`.
    probes
        The added values, by place.
    rules
        Rules that run some equations in another way.
    """
    other_rules = rules or {}
    at: dict[int, dict[tuple[str, int], Any]] = {}
    for (equation, side, index), probe in probes.items():
        at.setdefault(equation, {})[side, index] = probe

    def rule_for(index: int, added: Mapping[tuple[str, int], Any]) -> Rule:
        def rule(equation: Equation, values: list[Any]) -> list[Any]:
            operands = [
                v + added["in", i] if ("in", i) in added else v for i, v in enumerate(values)
            ]
            by_rule = other_rules[index](equation, operands) if index in other_rules else None
            results = bind(equation, operands) if by_rule is None else by_rule
            return [
                r + added["out", i] if ("out", i) in added else r for i, r in enumerate(results)
            ]

        return rule

    probing = {index: rule_for(index, added) for index, added in at.items()}
    return evaluate(program, targets, inputs, overrides, {**other_rules, **probing})
