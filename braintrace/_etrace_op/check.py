r"""Hold an author's rules against automatic differentiation of the implementation.

Two steps of a position-wise recurrence are enough to tell a right rule from a wrong one:
with random factors :math:`f^1, f^2, d` and signal :math:`l`, all shaped like the output,

.. math::
    \epsilon^1 = f^1 \otimes x^1, \quad \epsilon^2 = d\,\epsilon^1 + f^2 \otimes x^2, \quad
    \nabla w = l \cdot \epsilon^2

must be the VJP of the implementation, :math:`l d f^1` at :math:`x^1` plus :math:`l f^2` at
:math:`x^2`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import rules
from .primitive import ETPPrimitive, get_primitive_spec
from .validate import validate_rules


@dataclass(frozen=True)
class RuleCheck:
    """One line of a report.

    Attributes
    ----------
    rule, key : str
        Rule and trainable operand.
    deviation : float
        Largest difference from automatic differentiation, relative to its largest value.
    agrees : bool
        Whether that is round-off.
    note : str
        What went wrong where there are no numbers to compare.
    """

    rule: str
    key: str
    deviation: float
    agrees: bool
    note: str = ""


@dataclass(frozen=True)
class PrimitiveReport:
    """What `check_primitive` found; ``print`` shows it as a table."""

    primitive: str
    checks: tuple[RuleCheck, ...]

    @property
    def ok(self) -> bool:
        """Whether every rule agrees."""
        return all(check.agrees for check in self.checks)

    def __str__(self) -> str:
        rows = [("rule", "trainable", "relative deviation", "agrees")]
        for check in self.checks:
            answer = "yes" if check.agrees else f"NO  {check.note}".rstrip()
            rows.append((check.rule, check.key, f"{check.deviation:.1e}", answer))
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = [
            "  ".join(
                [*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]
            )
            for row in rows
        ]
        verdict = "all rules agree" if self.ok else "NOT all rules agree"
        return "\n".join([f"{self.primitive}: {verdict} with automatic differentiation", *lines])


def check_primitive(primitive: ETPPrimitive, *example_args: Any, **params: Any) -> PrimitiveReport:
    """Compare the rules of a primitive with automatic differentiation of its implementation.

    Parameters
    ----------
    primitive : ETPPrimitive
        With all four rules registered.
    *example_args : array
        Operands as for ``primitive.bind``; give axes different sizes, so that a transposed
        result cannot pass.
    **params
        Static parameters of the equation.

    Returns
    -------
    PrimitiveReport
        Prints as a table; ``.ok`` tells whether every rule agrees. Rules and keys as they
        are registered: ``xy_to_dw`` alone, then the trace (``yw_to_w`` with what `accumulate`
        and `contract` make of it) after one and after two steps.

    Raises
    ------
    PrimitiveError
        If rules are missing.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import braintrace
    >>> braintrace.check_primitive(
    ...     braintrace.etp_mm_p, jnp.ones((2, 3)), jnp.ones((3, 5)), has_bias=False).ok
    True
    """
    get_primitive_spec(primitive)
    problem = _Problem(primitive, tuple(jnp.asarray(arg) for arg in example_args), params)
    checks: list[RuleCheck] = []
    for rule, computed, expected in (
        ("shapes", problem.validate, problem.zero_gradients),
        ("xy_to_dw", problem.pulled_back, problem.expected_pull_back),
        ("yw_to_w, one step", problem.one_step, problem.expected_one_step),
        ("yw_to_w, two steps", problem.two_steps, problem.expected_two_steps),
    ):
        checks += _compare(rule, computed, expected())
    return PrimitiveReport(primitive.name, tuple(checks))


class _Problem:
    """Random inputs, factors and signals for one primitive, and both sides of each check."""

    def __init__(self, primitive: ETPPrimitive, operands: tuple, params: Mapping[str, Any]):
        spec = get_primitive_spec(primitive)
        self.primitive, self.params, self.operands = primitive, params, operands
        self.x_index = spec.x_invar_index
        layout = spec.resolve_trainable_invars(params)
        self.weight_indices = layout
        self.weights = {name: operands[index] for name, index in layout.items()}
        y = jax.eval_shape(lambda *values: primitive.implementation(*values, **params), *operands)
        keys = iter(jax.random.split(jax.random.key(0), 8))
        self.y = y
        self.f1, self.f2, self.d, self.signal = (_random(next(keys), y) for _ in range(4))
        x = None if self.x_index is None else operands[self.x_index]
        self.x1, self.x2 = (None if x is None else _random(next(keys), x) for _ in range(2))

    def autodiff(self, x: Any, cotangent: Any) -> dict:
        def forward(weights: dict) -> Any:
            values = list(self.operands)
            if self.x_index is not None:
                values[self.x_index] = x
            for name, index in self.weight_indices.items():
                values[index] = weights[name]
            return self.primitive.implementation(*values, **self.params)

        gradients = jax.vjp(forward, self.weights)[1](cotangent)[0]
        return {name: gradients[name] for name in self.weights}

    def validate(self) -> dict:
        x_var = None if self.x1 is None else _Variable(self.x1)
        weight_vars = {name: _Variable(weight) for name, weight in self.weights.items()}
        validate_rules(self.primitive, self.params, x_var, _Variable(self.y), weight_vars)
        return self.zero_gradients()

    def zero_gradients(self) -> dict:
        return {name: jnp.zeros_like(weight) for name, weight in self.weights.items()}

    def pulled_back(self) -> dict:
        x = None if self.x1 is None else jnp.stack([self.x1, self.x2])
        factors = jnp.stack([self.f1, self.f2])
        return rules.pull_back(self.primitive, self.params, x, factors, self.weights)

    def expected_pull_back(self) -> dict:
        return _add(self.autodiff(self.x1, self.f1), self.autodiff(self.x2, self.f2))

    def term(self, x: Any, factor: Any) -> dict:
        steps = None if x is None else x[None]
        return rules.accumulate(self.primitive, self.params, steps, factor[None], self.weights)

    def contracted(self, trace: dict) -> dict:
        return rules.contract(self.primitive, self.params, self.signal, trace, self.weights)

    def one_step(self) -> dict:
        return self.contracted(self.term(self.x1, self.f1))

    def expected_one_step(self) -> dict:
        return self.autodiff(self.x1, self.signal * self.f1)

    def two_steps(self) -> dict:
        first = self.term(self.x1, self.f1)
        decayed = rules.propagate(self.primitive, self.params, self.d, first)
        return self.contracted(_add(decayed, self.term(self.x2, self.f2)))

    def expected_two_steps(self) -> dict:
        through_first = self.autodiff(self.x1, self.signal * self.d * self.f1)
        return _add(through_first, self.autodiff(self.x2, self.signal * self.f2))


@dataclass(frozen=True)
class _Variable:
    aval: Any


def _random(key: Any, like: Any) -> Any:
    if not jnp.issubdtype(like.dtype, jnp.inexact):
        return like
    return jax.random.normal(key, like.shape, like.dtype)


def _add(left: dict, right: dict) -> dict:
    return {name: left[name] + right[name] for name in left}


def _compare(rule: str, computed: Callable[[], dict], expected: dict) -> list[RuleCheck]:
    try:
        result = computed()
    except Exception as error:
        return [RuleCheck(rule, name, np.inf, False, str(error)) for name in expected]
    return [_compare_arrays(rule, name, result.get(name), expected[name]) for name in expected]


def _compare_arrays(rule: str, key: str, computed: Any, expected: Any) -> RuleCheck:
    if computed is None or computed.shape != expected.shape:
        found = "nothing" if computed is None else f"shape {computed.shape}"
        return RuleCheck(rule, key, np.inf, False, f"expected shape {expected.shape}, got {found}")
    tolerance = min(1e3 * float(jnp.finfo(expected.dtype).eps), 0.05)
    wide = np.complex128 if jnp.iscomplexobj(expected) else np.float64
    computed, expected = np.asarray(computed).astype(wide), np.asarray(expected).astype(wide)
    scale = max(float(np.max(np.abs(expected), initial=0.0)), 1e-30)
    difference = float(np.max(np.abs(computed - expected), initial=0.0))
    deviation = difference / scale if difference else 0.0
    return RuleCheck(rule, key, deviation, deviation <= tolerance)
