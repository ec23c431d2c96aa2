r"""Hold an author's rules against automatic differentiation of the implementation.

Two steps of a position-wise recurrence are enough to tell a right rule from a wrong one:
with random factors :math:`f^1, f^2, d` and signal :math:`l`, all shaped like the output,

.. math::
    \epsilon^1 = f^1 \otimes x^1, \quad \epsilon^2 = d\,\epsilon^1 + f^2 \otimes x^2, \quad
    \nabla w = l \cdot \epsilon^2

must be the VJP of the implementation, :math:`l d f^1` at :math:`x^1` plus :math:`l f^2` at
:math:`x^2`.

A filter of inputs that has taken in :math:`x^1`, has grown by a factor :math:`c` and has taken in
:math:`x^2` must pull :math:`f^1` back to :math:`c` times what :math:`x^1` alone gives, plus what
:math:`x^2` gives. The factor is large: a rule that saturates shows then.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._arguments import array_of, named
from .._errors import PrimitiveError
from .._foreign import in_words
from .._tables import Table, as_html, as_text
from . import rules
from .primitive import ETPPrimitive, get_primitive_spec
from .registry import Arrays
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
        and `contract` make of it) after one and after two steps. ``filter of x`` is what
        ES_D_RTRL needs of operations with an input: ``xy_to_dw`` linear in ``x``, or an
        `InputFilter`.

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
        problem = _make_problem(primitive, tuple(operands), params)
        expected = problem.run(lambda p: [side(p) for _, _, side in p.checks])
        computed = _run_rules(problem)
        checks: list[RuleCheck] = []
        for (rule, _, _), result, wanted in zip(problem.checks, computed, expected, strict=True):
            checks += _compare(rule, result, {name: wanted[name] for name in problem.weights})
    return PrimitiveReport(primitive.name, tuple(_hinted(problem, check) for check in checks))


def _told(operands: Sequence[jax.Array]) -> str:
    return named([f"example_args[{index}]" for index in range(len(operands))], operands)


@dataclass(frozen=True)
class _Problem:
    """Both sides of each check, for one primitive and one set of random numbers.

    ``draws`` holds the arrays: the operands, the inputs ``x1, x2`` of two steps, ``x3`` that
    differs from ``x1`` in every element, the factors ``f1, f2``, the decay ``d`` and the
    ``signal``.
    """

    primitive: ETPPrimitive
    params: Mapping[str, Any]
    draws: dict[str, Any]

    @property
    def layout(self) -> dict[str, int]:
        return get_primitive_spec(self.primitive).resolve_trainable_invars(self.params)

    @property
    def weights(self) -> dict[str, Any]:
        return {name: self.draws["operands"][index] for name, index in self.layout.items()}

    @property
    def checks(self) -> tuple["_Check", ...]:
        return _CHECKS if self.draws["x1"] is None else (*_CHECKS, _FILTER_CHECK)

    def run(self, method: Callable[["_Problem"], Any]) -> Any:
        return jax.jit(lambda draws: method(replace(self, draws=draws)))(self.draws)

    def autodiff(self, x: str, cotangent: Any) -> Arrays:
        x_index = get_primitive_spec(self.primitive).x_invar_index

        def forward(weights: Arrays) -> Any:
            values = list(self.draws["operands"])
            if x_index is not None:
                values[x_index] = self.draws[x]
            for name, index in self.layout.items():
                values[index] = weights[name]
            return self.primitive.implementation(*values, **self.params)

        (gradients,) = jax.vjp(forward, self.weights)[1](cotangent)
        found: Arrays = gradients
        return found

    def validate(self) -> Arrays:
        x = self.draws["x1"]
        x_var = None if x is None else _Variable(x)
        weight_vars = {name: _Variable(weight) for name, weight in self.weights.items()}
        y_var = _Variable(self.draws["signal"])
        validate_rules(self.primitive, self.params, x_var, y_var, weight_vars)
        return self.zero_gradients()

    def zero_gradients(self) -> Arrays:
        return {name: jnp.zeros_like(weight) for name, weight in self.weights.items()}

    def pulled_back(self) -> Arrays:
        draws = self.draws
        xs = None if draws["x1"] is None else jnp.stack([draws["x1"], draws["x2"]])
        factors = jnp.stack([draws["f1"], draws["f2"]])
        return rules.pull_back(self.primitive, self.params, xs, factors, self.weights)

    def expected_pull_back(self) -> Arrays:
        first = self.autodiff("x1", self.draws["f1"])
        return _add(first, self.autodiff("x2", self.draws["f2"]))

    def term(self, x: str, factor: str) -> Arrays:
        steps = None if self.draws[x] is None else self.draws[x][None]
        factors = self.draws[factor][None]
        return rules.accumulate(self.primitive, self.params, steps, factors, self.weights)

    def contracted(self, signal: Any, trace: Arrays) -> Arrays:
        return rules.contract(self.primitive, self.params, signal, trace, self.weights)

    def one_step(self) -> Arrays:
        return self.contracted(self.draws["signal"], self.term("x1", "f1"))

    def expected_one_step(self) -> Arrays:
        return self.autodiff("x1", self.draws["signal"] * self.draws["f1"])

    def two_steps(self) -> Arrays:
        first = self.term("x1", "f1")
        decayed = rules.propagate(self.primitive, self.params, self.draws["d"], first)
        trace = _add(decayed, self.term("x2", "f2"))
        return self.contracted(self.draws["signal"], trace)

    def expected_two_steps(self) -> Arrays:
        draws = self.draws
        through_first = self.autodiff("x1", draws["signal"] * draws["d"] * draws["f1"])
        return _add(through_first, self.autodiff("x2", draws["signal"] * draws["f2"]))

    def filtered(self) -> Arrays:
        x1, x2 = self.draws["x1"], self.draws["x2"]
        taken_in = functools.partial(rules.add_to_filter, self.primitive, self.params)
        zero = rules.zero_filter(
            self.primitive, self.params, _Variable(x1), _Variable(self.draws["signal"])
        )
        kept = taken_in(GROWTH * taken_in(zero, x1), x2)
        factors = self.draws["f1"][None]
        return rules.pull_back_filtered(
            self.primitive, self.params, kept[None], factors, self.weights
        )

    def expected_filtered(self) -> Arrays:
        first, second, third = (self.autodiff(x, self.draws["f1"]) for x in ("x1", "x2", "x3"))

        def expected(name: str) -> Any:
            # What does not depend on the input, such as a bias, is not filtered either.
            is_free = jnp.all(first[name] == third[name])
            return jnp.where(is_free, first[name], GROWTH * first[name] + second[name])

        return {name: expected(name) for name in first}


_Check = tuple[str, Callable[[_Problem], Arrays], Callable[[_Problem], Arrays]]
"""Name of a check, what the rules give, what automatic differentiation gives."""

_CHECKS: tuple[_Check, ...] = (
    ("shapes", _Problem.validate, _Problem.zero_gradients),
    ("xy_to_dw", _Problem.pulled_back, _Problem.expected_pull_back),
    ("yw_to_w, one step", _Problem.one_step, _Problem.expected_one_step),
    ("yw_to_w, two steps", _Problem.two_steps, _Problem.expected_two_steps),
)
_FILTER_CHECK: _Check = ("filter of x", _Problem.filtered, _Problem.expected_filtered)
GROWTH = 100


def _make_problem(
    primitive: ETPPrimitive, operands: tuple[Any, ...], params: Mapping[str, Any]
) -> _Problem:
    y = jax.eval_shape(lambda *values: primitive.implementation(*values, **params), *operands)
    x_index = get_primitive_spec(primitive).x_invar_index
    x = None if x_index is None else operands[x_index]
    like = {"f1": y, "f2": y, "d": y, "signal": y, "x1": x, "x2": x}
    generator = np.random.default_rng(0)
    draws = {name: None if v is None else _random(generator, v) for name, v in like.items()}
    draws["x3"] = None if x is None else jnp.equal(draws["x1"], 0).astype(x.dtype)
    return _Problem(primitive, params, {**draws, "operands": operands})


@dataclass(frozen=True)
class _Variable:
    aval: Any


def _random(generator: np.random.Generator, like: Any) -> Any:
    if not jnp.issubdtype(like.dtype, jnp.inexact):
        return like
    values = generator.normal(size=(2, *like.shape))
    if jnp.issubdtype(like.dtype, jnp.complexfloating):
        return jnp.asarray(values[0] + 1j * values[1], like.dtype)
    return jnp.asarray(values[0], like.dtype)


def _add(left: Arrays, right: Arrays) -> Arrays:
    return {name: left[name] + right[name] for name in left}


def _run_rules(problem: _Problem) -> list[Any]:
    """Return each check's gradients, or the error of the rule that failed."""
    try:
        found: list[Any] = problem.run(lambda p: [side(p) for _, side, _ in p.checks])
        return found
    except Exception:  # which rule it was shows when each runs alone
        return [_run_or_error(problem, side) for _, side, _ in problem.checks]


def _run_or_error(problem: _Problem, side: Callable[[_Problem], Arrays]) -> Any:
    try:
        return problem.run(side)
    except Exception as error:
        return error


def _compare(rule: str, result: Any, expected: Arrays) -> list[RuleCheck]:
    if isinstance(result, Exception):
        return [RuleCheck(rule, name, np.inf, False, str(result)) for name in expected]
    return [_compare_arrays(rule, k, result.get(k), expected[k]) for k in expected]


def _hinted(problem: _Problem, check: RuleCheck) -> RuleCheck:
    has_filter = get_primitive_spec(problem.primitive).input_filter is not None
    if check.agrees or check.rule != _FILTER_CHECK[0] or has_filter:
        return check
    return replace(check, note="not linear in x: ES_D_RTRL needs an `input_filter`")


def _compare_arrays(rule: str, key: str, computed: Any, expected: Any) -> RuleCheck:
    if computed is None or computed.shape != expected.shape:
        found = "nothing" if computed is None else f"shape {computed.shape}"
        return RuleCheck(rule, key, np.inf, False, f"expected shape {expected.shape}, got {found}")
    if jnp.iscomplexobj(computed) and not jnp.iscomplexobj(expected):
        return RuleCheck(rule, key, np.inf, False, "expected real numbers, got complex ones")
    tolerance = min(1e3 * float(jnp.finfo(expected.dtype).eps), 0.05)
    wide = np.complex128 if jnp.iscomplexobj(expected) else np.float64
    computed, expected = np.asarray(computed).astype(wide), np.asarray(expected).astype(wide)
    scale = max(float(np.max(np.abs(expected), initial=0.0)), 1e-30)
    difference = float(np.max(np.abs(computed - expected), initial=0.0))
    deviation = difference / scale if difference else 0.0
    return RuleCheck(rule, key, deviation, deviation <= tolerance)
