"""Interpreter of jaxprs: a rule runs an equation, or the equation runs as it is.

A rule gets an equation and the values of its operands. It returns the values of the outputs, or
``None`` to run the equation as it is. There may be a rule for single equations, by index, or one
rule for all of them.

Evaluation under ``jax.make_jaxpr`` produces a new jaxpr: JAX writes the new equations, and
variables never have to be substituted by hand. Every rewriting of a jaxpr uses this.
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
    """Return the values of ``targets``, running only the equations that they need.

    Parameters
    ----------
    program
        The program.
    targets
        Variables or literals of it.
    inputs
        Values of the program's inputs; inputs that the targets do not need may be missing.
    overrides
        Values that replace variables, inputs included; ancestors of these variables are not needed.
    rules
        Rules that run equations.
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
        Rules that run equations.
    """
    return interpret(jaxpr, values, _by_rules(rules))


def evaluate_inlined(
    jaxpr: AnyJaxpr,
    values: Sequence[ArrayLike],
    rule: Rule | None = None,
    caller: Equation | None = None,
) -> list[ArrayLike]:
    """Return the values of a jaxpr's outputs, with calls inlined.

    Parameters
    ----------
    jaxpr, values
        The jaxpr, and its inputs.
    rule
        The rule for equations that are not calls, also inside of calls.
    caller
        The equation whose source line all equations get; ``None``: each keeps its own.
    """

    def run(_: int, equation: Equation, operands: list[ArrayLike]) -> Iterable[ArrayLike]:
        if caller is not None:
            equation = with_source_of(equation, caller)
        if equation.primitive.name not in TRANSPARENT_CALLS:
            return _by_rule(rule, equation, operands)
        # JAX traces each of its library functions once, at the first call.
        is_library = caller is not None or runs_library_code(equation)
        inside = equation if is_library else None
        with at_source_of(equation):
            return evaluate_inlined(call_body(equation), operands, rule, inside)

    return interpret(jaxpr, values, run)


def inlined(jaxpr: AnyJaxpr, rule: Rule | None = None) -> ClosedJaxpr:
    """Return a jaxpr with its calls inlined; a rule may run its other equations.

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
    """Return the values of a jaxpr's outputs; a function runs its equations in order.

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
    """Add the outputs of equations to ``known``, without replacing known values."""
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
