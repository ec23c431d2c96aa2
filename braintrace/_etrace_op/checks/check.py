"""Checks of an operation's rules against automatic differentiation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._arguments import array_of, named
from ..._errors import PrimitiveError
from ..._foreign import in_words
from ..._tables import Table, as_html, as_text
from ..primitive import ETPPrimitive, get_primitive_spec
from ..registry import Arrays
from .example import Example, make_example
from .overrides import overrides_of


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
        Whether the deviation is only round-off.
    note : str
        The error, if a rule returns nothing to compare.
    """

    rule: str
    key: str
    deviation: float
    agrees: bool
    note: str = ""


@dataclass(frozen=True)
class PrimitiveReport:
    """Result of `check_primitive`; ``print`` shows it as a table."""

    primitive: str
    checks: tuple[RuleCheck, ...]

    @property
    def ok(self) -> bool:
        """Whether every rule agrees."""
        return all(check.agrees for check in self.checks)

    def __str__(self) -> str:
        return as_text([self._table()])

    def _repr_html_(self) -> str:
        return as_html([self._table()])

    def _table(self) -> Table:
        verdict = "all rules agree" if self.ok else "NOT all rules agree"
        return Table(
            title=f"{self.primitive}: {verdict} with automatic differentiation",
            heads=("rule", "trainable", "relative deviation", "agrees"),
            rows=[
                (
                    check.rule,
                    check.key,
                    f"{check.deviation:.1e}",
                    "yes" if check.agrees else f"NO  {check.note}".rstrip(),
                )
                for check in self.checks
            ],
            indent="",
        )


def check_primitive(primitive: ETPPrimitive, *example_args: Any, **params: Any) -> PrimitiveReport:
    """Compare the rules of a primitive with automatic differentiation.

    The reference is the derivative of the primitive's implementation.

    Parameters
    ----------
    primitive : ETPPrimitive
        The primitive, its rules registered by hand or derived.
    *example_args : array
        Operands as for ``primitive.bind``; give axes different sizes, so that a transposed
        result cannot pass.
    **params
        Static parameters of the equation.

    Returns
    -------
    PrimitiveReport
        Prints as a table; ``.ok`` is true if every rule agrees. The rows are ``xy_to_dw`` alone,
        then the trace (``yw_to_w``, `accumulate` and `contract` together) after one and after two
        steps. ``filter of x`` checks the requirement of ES_D_RTRL for operations with an input:
        ``xy_to_dw`` linear in ``x``. A hand-written rule that could be derived
        has a separate row, such as ``accumulate, as derived``.

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
    operands = [
        array_of(f"example_args[{index}]", argument, "`check_primitive`: ")
        for index, argument in enumerate(example_args)
    ]
    with in_words(PrimitiveError, lambda: f"`{primitive}` fails for {_told(operands)}"):
        example = make_example(primitive, tuple(operands), params)
        expected = example.run(lambda e: [side(e) for _, _, side in _checks(e)])
        computed = _run_rules(example)
        checks: list[RuleCheck] = []
        for (rule, _, _), result, wanted in zip(_checks(example), computed, expected, strict=True):
            keys = sorted(wanted, key=[*example.weights, *wanted].index)
            checks += _compare(rule, result, {name: wanted[name] for name in keys})
    return PrimitiveReport(primitive.name, tuple(_hinted(example, check) for check in checks))


def _told(operands: Sequence[jax.Array]) -> str:
    return named([f"example_args[{index}]" for index in range(len(operands))], operands)


_Check = tuple[str, Callable[[Example], Arrays], Callable[[Example], Arrays]]
"""Name of a check, result of the rules, result of automatic differentiation."""

_CHECKS: tuple[_Check, ...] = (
    ("shapes", Example.validate, Example.zero_gradients),
    ("xy_to_dw", Example.pulled_back, Example.expected_pull_back),
    ("yw_to_w, one step", Example.one_step, Example.expected_one_step),
    ("yw_to_w, two steps", Example.two_steps, Example.expected_two_steps),
)
_FILTER_CHECK: _Check = ("filter of x", Example.filtered, Example.expected_filtered)


def _checks(example: Example) -> tuple[_Check, ...]:
    x = example.draws["x1"]
    overrides = overrides_of(example.spec, x is not None and jnp.issubdtype(x.dtype, jnp.inexact))
    by_hand = ((f"{rule}, as derived", *sides) for rule, sides in overrides.items())
    return (*_CHECKS, *(() if x is None else (_FILTER_CHECK,)), *by_hand)


def _run_rules(example: Example) -> list[Any]:
    """Return each check's gradients, or the error of the rule that failed."""
    try:
        results: list[Any] = example.run(lambda p: [side(p) for _, side, _ in _checks(p)])
        return results
    except Exception:  # separate runs show which rule failed
        return [_run_or_error(example, side) for _, side, _ in _checks(example)]


def _run_or_error(example: Example, side: Callable[[Example], Arrays]) -> Any:
    try:
        return example.run(side)
    except Exception as error:
        return error


def _compare(rule: str, result: Any, expected: Arrays) -> list[RuleCheck]:
    if isinstance(result, Exception):
        return [RuleCheck(rule, name, np.inf, False, str(result)) for name in expected]
    return [_compare_arrays(rule, k, result.get(k), expected[k]) for k in expected]


def _hinted(example: Example, check: RuleCheck) -> RuleCheck:
    if check.agrees or check.rule != _FILTER_CHECK[0]:
        return check
    return replace(check, note="not linear in x: ES_D_RTRL refuses it")


def _compare_arrays(rule: str, key: str, computed: Any, expected: Any) -> RuleCheck:
    if computed is None or computed.shape != expected.shape:
        actual = "nothing" if computed is None else f"shape {computed.shape}"
        return RuleCheck(rule, key, np.inf, False, f"expected shape {expected.shape}, got {actual}")
    if jnp.iscomplexobj(computed) and not jnp.iscomplexobj(expected):
        return RuleCheck(rule, key, np.inf, False, "expected real numbers, got complex ones")
    tolerance = min(1e3 * float(jnp.finfo(expected.dtype).eps), 0.05)
    wide = np.complex128 if jnp.iscomplexobj(expected) else np.float64
    computed, expected = np.asarray(computed).astype(wide), np.asarray(expected).astype(wide)
    scale = max(float(np.max(np.abs(expected), initial=0.0)), 1e-30)
    difference = float(np.max(np.abs(computed - expected), initial=0.0))
    deviation = difference / scale if difference else 0.0
    return RuleCheck(rule, key, deviation, deviation <= tolerance)
