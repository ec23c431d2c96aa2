r"""Check of an operation's rules against automatic differentiation, for authors of operations.

Two steps of an elementwise recurrence distinguish a correct rule from a wrong one. With random
factors :math:`f^1, f^2, d` and signal :math:`l`, all shaped like the output,

.. math::
    \epsilon^1 = f^1 \otimes x^1, \quad \epsilon^2 = d\,\epsilon^1 + f^2 \otimes x^2, \quad
    \nabla w = l \cdot \epsilon^2

must be the VJP of the implementation, :math:`l d f^1` at :math:`x^1` plus :math:`l f^2` at
:math:`x^2`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from . import rules
from .primitive import ETPPrimitive
from .registry import Arrays, get_primitive_spec


class RuleCheck(NamedTuple):
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


class PrimitiveReport(NamedTuple):
    """Result of `check_primitive`; ``print`` shows it as a table."""

    primitive: str
    checks: tuple[RuleCheck, ...]

    @property
    def ok(self) -> bool:
        """Whether every rule agrees."""
        return all(check.agrees for check in self.checks)

    def __str__(self) -> str:
        verdict = "all rules agree" if self.ok else "NOT all rules agree"
        lines = [f"{self.primitive}: {verdict} with automatic differentiation"]
        for check in self.checks:
            agrees = "agrees" if check.agrees else f"NO  {check.note}".rstrip()
            lines.append(f"{check.rule:20}  {check.key:12}  {check.deviation:.1e}  {agrees}")
        return "\n".join(lines)


def check_primitive(primitive: ETPPrimitive, *example_args: Any, **params: Any) -> PrimitiveReport:
    """Compare the rules of a primitive with automatic differentiation.

    The reference is the derivative of the primitive's implementation. Compilation of a model does
    not check rules: a wrong one gives wrong gradients, or an error of JAX.

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
        then the trace (``yw_to_w`` and ``accumulate`` together) after one and after
        two steps, and whether samples of a ``batched`` primitive are independent.

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
    spec, generator = get_primitive_spec(primitive), np.random.default_rng(0)
    operands, place = list(map(jnp.asarray, example_args)), spec.x_invar_index
    layout = spec.resolve_trainable_invars(params)
    weights = {name: operands[index] for name, index in layout.items()}

    def run(x: Any, weights: Arrays) -> Any:
        values = dict(enumerate(operands)) | {layout[name]: w for name, w in weights.items()}
        values |= {} if place is None else {place: x}
        return primitive.implementation(*values.values(), **params)

    x = None if place is None else operands[place]
    y = jax.eval_shape(run, x, weights)
    x1, x2 = (None if x is None else _random(generator, x) for _ in range(2))
    f1, f2, decay, signal = (_random(generator, y) for _ in range(4))

    def vjp(x: Any, cotangent: Any) -> Arrays:
        (gradients,) = jax.vjp(lambda weights: run(x, weights), weights)[1](cotangent)
        return dict(gradients)

    def term(x: Any, factor: Any) -> Arrays:
        steps = None if x is None else x[None]
        return rules.accumulate(primitive, params, steps, factor[None], weights)

    def pulled() -> Arrays:
        steps = None if x is None else jnp.stack([x1, x2])
        return rules.pull_back(primitive, params, steps, jnp.stack([f1, f2]), weights)

    def after_one_step() -> Arrays:
        return rules.contract(primitive, params, signal, term(x1, f1), weights)

    def after_two_steps() -> Arrays:
        decayed = rules.propagate(primitive, params, decay, term(x1, f1))
        return rules.contract(primitive, params, signal, add(decayed, term(x2, f2)), weights)

    def add(first: Arrays, second: Arrays) -> Arrays:
        return {name: first[name] + second[name] for name in first}

    two_steps = add(vjp(x1, signal * decay * f1), vjp(x2, signal * f2))
    rows: list[tuple[str, Callable[[], Arrays], Arrays]] = [
        ("xy_to_dw", pulled, add(vjp(x1, f1), vjp(x2, f2))),
        ("yw_to_w, one step", after_one_step, vjp(x1, signal * f1)),
        ("yw_to_w, two steps", after_two_steps, two_steps),
    ]
    if spec.batched and x1 is not None:
        alone = jnp.concatenate([run(x1[i : i + 1], weights) for i in range(len(x1))])
        rows.append(("separate samples", lambda: {"y": run(x1, weights)}, {"y": alone}))
    checks = (check for row in rows for check in _compare(*row))
    return PrimitiveReport(primitive.name, tuple(checks))


def _random(generator: np.random.Generator, like: Any) -> Any:
    if not jnp.issubdtype(like.dtype, jnp.inexact):
        return like
    values = generator.normal(size=(2, *like.shape))
    is_complex = jnp.issubdtype(like.dtype, jnp.complexfloating)
    return jnp.asarray(values[0] + 1j * values[1] if is_complex else values[0], like.dtype)


def _compare(rule: str, run: Callable[[], Arrays], expected: Arrays) -> list[RuleCheck]:
    try:
        result = run()
    except Exception as error:
        return [RuleCheck(rule, name, np.inf, False, str(error)) for name in expected]
    return [_compare_arrays(rule, name, result.get(name), expected[name]) for name in expected]


def _compare_arrays(rule: str, key: str, result: Any, expected: Any) -> RuleCheck:
    found = None if result is None else (result.shape, result.dtype)
    if found != (expected.shape, expected.dtype):
        note = f"expected {expected.dtype} of shape {expected.shape}, got {found}"
        return RuleCheck(rule, key, np.inf, False, note)
    tolerance = min(1e3 * float(jnp.finfo(expected.dtype).eps), 0.05)
    wide = np.complex128 if jnp.iscomplexobj(expected) else np.float64
    result, expected = np.asarray(result).astype(wide), np.asarray(expected).astype(wide)
    scale = max(float(np.max(np.abs(expected), initial=0.0)), 1e-30)
    deviation = float(np.max(np.abs(result - expected), initial=0.0)) / scale
    return RuleCheck(rule, key, deviation, deviation <= tolerance)
