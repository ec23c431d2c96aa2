"""Interpreter of jaxprs: a rule runs an equation, or the equation runs as it is.

A rule gets an equation and the values of its operands. It returns the values of the outputs, or
``None`` to run the equation as it is. There may be a rule for single equations, by index, or one
rule for all of them.

Evaluation under ``jax.make_jaxpr`` produces a new jaxpr: JAX writes the new equations, and
variables never have to be substituted by hand. Every rewriting of a jaxpr uses this.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeAlias, TypeVar

import jax
from jax.typing import ArrayLike

from .._jax import (
    OWN_DERIVATIVE,
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
    scan_counts,
    sub_jaxprs,
    trace_to_jaxpr,
)
from .program import Program

# ``(equation, operand values) -> output values``, or ``None`` to run it as it is.
Rule: TypeAlias = Callable[[Equation, list[ArrayLike]], Sequence[ArrayLike] | None]

# A rule for every equation, or rules for some of them by index.
Rules: TypeAlias = Rule | Mapping[int, Rule]


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
    >>> from braintrace._jaxpr.evaluate import evaluate
    >>> from braintrace._jaxpr.program import program_of
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
    _run_each(((index, program.equations[index]) for index in needed), known, rules)
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
    opened, constants = open_jaxpr(jaxpr)
    known = dict(zip(opened.constvars, constants, strict=True))
    known.update(zip(opened.invars, values, strict=True))
    _run_each(enumerate(opened.eqns), known, rules)
    return _values_of(opened.outvars, known)


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

    def run(equation: Equation, operands: list[ArrayLike]) -> Sequence[ArrayLike] | None:
        if equation.primitive.name in TRANSPARENT_CALLS:
            # JAX traces each of its library functions once, at the first call.
            is_library = caller is not None or runs_library_code(equation)
            inside = (caller or equation) if is_library else None
            return evaluate_inlined(call_body(equation), operands, rule, inside)
        equation = equation if caller is None else equation.replace(source_info=caller.source_info)
        results = None if rule is None else rule(equation, operands)
        return bind(equation, operands) if results is None else results

    return evaluate_all(jaxpr, values, run)


def inlined(jaxpr: AnyJaxpr, rule: Rule | None = None) -> ClosedJaxpr:
    """Return a jaxpr with its calls inlined; a rule may run its other equations.

    Examples
    --------
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from braintrace._jaxpr.evaluate import inlined
    >>> def rule(equation, operands):
    ...     return [jnp.cos(*operands)] if equation.primitive.name == "sin" else None
    >>> jaxpr = jax.make_jaxpr(lambda x: 2.0 * jax.jit(jnp.sin)(x))(0.0)
    >>> [equation.primitive.name for equation in inlined(jaxpr, rule).eqns]
    ['cos', 'mul']
    """
    avals = [var.aval for var in open_jaxpr(jaxpr)[0].invars]
    return trace_to_jaxpr(lambda *values: evaluate_inlined(jaxpr, values, rule), avals)


def _run_each(
    equations: Iterable[tuple[int, Equation]], known: dict[Var, ArrayLike], rules: Rules | None
) -> None:
    """Add the outputs of equations to ``known``, without replacing known values."""
    for index, equation in equations:
        rule = rules if rules is None or callable(rules) else rules.get(index)
        operands, results = _values_of(equation.invars, known), None
        if rule is not None:
            with at_source_of(equation):
                results = rule(equation, operands)
        if results is None:
            results = bind(equation, operands)
        for var, value in zip(equation.outvars, results, strict=True):
            known.setdefault(var, value)


def _values_of(atoms: Iterable[Atom], known: Mapping[Var, ArrayLike]) -> list[ArrayLike]:
    return [known[atom] if is_var(atom) else atom.val for atom in atoms]


# --- loops, branches and calls, rebuilt around other bodies by JAX's public functions

Value = TypeVar("Value")

# ``(body, values of its inputs) -> values of its outputs``.
RunBody: TypeAlias = Callable[[AnyJaxpr, list[ArrayLike]], Sequence[ArrayLike]]


@dataclasses.dataclass(frozen=True)
class Loop(Generic[Value]):
    """A ``scan``, with one value for each of its operands.

    Attributes
    ----------
    body
        Maps ``(*fixed, *carried, *a slice of each sequence)`` to
        ``(*carried, *a slice of each result)``.
    fixed, carried, sequences
        Loop-invariant operands, the carry before the first step, and operands that are read slice
        by slice.
    """

    body: AnyJaxpr
    fixed: list[Value]
    carried: list[Value]
    sequences: list[Value]


def loop_of(equation: Equation, operands: Sequence[Value]) -> Loop[Value]:
    """Return a ``scan``, its operands sorted by their role."""
    fixed, carried = scan_counts(equation)
    values, last = list(operands), fixed + carried
    return Loop(equation.params["jaxpr"], values[:fixed], values[fixed:last], values[last:])


def rebuilt(equation: Equation, operands: list[ArrayLike], run: RunBody) -> list[ArrayLike] | None:
    """Rebuild an equation around bodies that a function runs; return its outputs.

    Parameters
    ----------
    equation, operands
        The equation, and the values of its operands.
    run
        Runs a body.

    Returns
    -------
    list or None
        ``None`` for an equation that cannot be rebuilt.
    """
    name, params = equation.primitive.name, equation.params

    def function(*values: ArrayLike) -> list[ArrayLike]:
        (body,) = sub_jaxprs(equation)
        return list(run(body, list(values)))

    if name in ("remat2", "checkpoint"):
        options = {option: params[option] for option in ("policy", "prevent_cse")}
        return list(jax.checkpoint(function, **options)(*operands))
    if name in TRANSPARENT_CALLS:
        return function(*operands)
    if name in OWN_DERIVATIVE | {"cond", "while", "scan"}:
        bodies = {option: _with_bodies(value, run) for option, value in params.items()}
        return list(bind(equation.replace(params=bodies), operands))
    return None


def _with_bodies(value: Any, run: RunBody) -> Any:
    if isinstance(value, tuple):
        return tuple(_with_bodies(part, run) for part in value)
    if not isinstance(value, ClosedJaxpr):
        return value
    avals = [var.aval for var in value.jaxpr.invars]
    return trace_to_jaxpr(lambda *values: list(run(value, list(values))), avals)
