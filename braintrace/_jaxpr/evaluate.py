"""The interpreter of jaxprs: every equation as it is, or as a rule runs it.

A rule is asked about an equation and the values of its operands, and returns the values of its
outputs, or ``None`` where the equation is to be run as it is. Rules are given for single
equations, by index, or one for all of them.

Evaluated under ``jax.make_jaxpr``, the result is a new jaxpr: JAX writes the new equations, and
no variable ever has to be substituted by hand. That is how a jaxpr is rewritten.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

from jax.typing import ArrayLike

from .._jax import (
    TRANSPARENT_CALLS,
    AnyJaxpr,
    Atom,
    ClosedJaxpr,
    Equation,
    Var,
    at_source_of,
    bind,
    call_body,
    is_var,
    open_jaxpr,
    runs_library_code,
    trace_to_jaxpr,
    with_source_of,
)
from .program import Program

Rule: TypeAlias = Callable[[Equation, list[ArrayLike]], Sequence[ArrayLike] | None]
"""``(equation, operand values) -> output values``, or ``None`` to run it as it is."""

Rules: TypeAlias = Rule | Mapping[int, Rule]
"""A rule for every equation, or rules for some of them by index."""

RunEquation: TypeAlias = Callable[[int, Equation, list[ArrayLike]], Iterable[ArrayLike]]
"""``(index, equation, operand values) -> output values``."""


def evaluate(
    program: Program,
    targets: Sequence[Atom],
    inputs: Mapping[Var, ArrayLike],
    overrides: Mapping[Var, ArrayLike] | None = None,
    rules: Rules | None = None,
    effects: bool = False,
) -> list[ArrayLike]:
    """Return the values of ``targets``, running no equations but those that they need.

    Parameters
    ----------
    program
        The program.
    targets
        Variables or literals of it.
    inputs
        Values of the program's inputs; those that the targets do not need may be missing.
    overrides
        Values that stand in for variables, inputs included; nothing behind them is looked at.
    rules
        How equations are run.
    effects
        Also run the equations that have an effect (a print, a check).

    Examples
    --------
    >>> import jax
    >>> from braintrace._jaxpr import evaluate, program_of
    >>> program = program_of(jax.make_jaxpr(lambda x: (x + 1.0) * 3.0)(0.0))
    >>> (x,), (total,) = program.in_vars, program.equations[0].outvars
    >>> evaluate(program, program.out_atoms, {x: 1.0}, overrides={total: 5.0})
    [Array(15., dtype=float32, weak_type=True)]
    """
    known: dict[Var, ArrayLike] = {**program.constants, **inputs, **(overrides or {})}
    extra = [i for i, e in enumerate(program.equations) if e.effects] if effects else []
    read = [*targets, *(atom for index in extra for atom in program.equations[index].invars)]
    computed = program.depends_on(read, known) - known.keys()
    needed = sorted({*program.making(computed), *extra})
    _run_each(((index, program.equations[index]) for index in needed), known, _by_rules(rules))
    return _values_of(targets, known)


def evaluate_all(jaxpr: AnyJaxpr, values: Sequence[ArrayLike], rules: Rules) -> list[ArrayLike]:
    """Return the values of a jaxpr's outputs, running every equation in order.

    Parameters
    ----------
    jaxpr
        The jaxpr. An open one must have no constants.
    values
        One value per input.
    rules
        How equations are run.
    """
    return interpret(jaxpr, values, _by_rules(rules))


def evaluate_inlined(
    jaxpr: AnyJaxpr,
    values: Sequence[ArrayLike],
    rule: Rule | None = None,
    caller: Equation | None = None,
) -> list[ArrayLike]:
    """Return the same so that calls leave no trace of themselves: their bodies are run.

    Parameters
    ----------
    jaxpr, values
        The jaxpr, and its inputs.
    rule
        How equations are run that are no plain calls, inside of calls as well.
    caller
        The equation whose source line all of these get; ``None``: each keeps its own.
    """

    def run(_: int, equation: Equation, operands: list[ArrayLike]) -> Iterable[ArrayLike]:
        if caller is not None:
            equation = with_source_of(equation, caller)
        if equation.primitive.name not in TRANSPARENT_CALLS:
            return _by_rule(rule, equation, operands)
        # JAX traces a function of its own once, wherever it is called first.
        is_library = caller is not None or runs_library_code(equation)
        inside = equation if is_library else None
        return evaluate_inlined(call_body(equation), operands, rule, inside)

    return interpret(jaxpr, values, run)


def inlined(jaxpr: AnyJaxpr, rule: Rule | None = None) -> ClosedJaxpr:
    """Return a jaxpr without calls, its equations run by a rule; see `evaluate_inlined`.

    Examples
    --------
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from braintrace._jaxpr import inlined
    >>> def rule(equation, operands):
    ...     return [jnp.cos(*operands)] if equation.primitive.name == "sin" else None
    >>> jaxpr = jax.make_jaxpr(lambda x: 2.0 * jax.jit(jnp.sin)(x))(0.0)
    >>> [equation.primitive.name for equation in inlined(jaxpr, rule).eqns]
    ['cos', 'mul']
    """
    avals = [var.aval for var in open_jaxpr(jaxpr)[0].invars]
    return trace_to_jaxpr(lambda *values: evaluate_inlined(jaxpr, values, rule), avals)


def interpret(jaxpr: AnyJaxpr, values: Sequence[ArrayLike], run: RunEquation) -> list[ArrayLike]:
    """Return the values of a jaxpr's outputs, its equations run in order by a function.

    Parameters
    ----------
    jaxpr
        The jaxpr. An open one must have no constants.
    values
        One value per input.
    run
        Runs an equation.
    """
    opened, constants = open_jaxpr(jaxpr)
    known = dict(zip(opened.constvars, constants, strict=True))
    known.update(zip(opened.invars, values, strict=True))
    _run_each(enumerate(opened.eqns), known, run)
    return _values_of(opened.outvars, known)


def _run_each(
    equations: Iterable[tuple[int, Equation]], known: dict[Var, ArrayLike], run: RunEquation
) -> None:
    """Add the outputs of equations to what is known; what is known stays as it is."""
    for index, equation in equations:
        results = run(index, equation, _values_of(equation.invars, known))
        for var, value in zip(equation.outvars, results, strict=True):
            known.setdefault(var, value)


def _values_of(atoms: Iterable[Atom], known: Mapping[Var, ArrayLike]) -> list[ArrayLike]:
    return [known[atom] if is_var(atom) else atom.val for atom in atoms]


def _by_rules(rules: Rules | None) -> RunEquation:
    if rules is None or callable(rules):
        return lambda _, equation, operands: _by_rule(rules, equation, operands)
    return lambda index, equation, operands: _by_rule(rules.get(index), equation, operands)


def _by_rule(
    rule: Rule | None, equation: Equation, operands: list[ArrayLike]
) -> Sequence[ArrayLike]:
    if rule is not None:
        with at_source_of(equation):
            results = rule(equation, operands)
        if results is not None:
            return results
    return bind(equation, operands)
