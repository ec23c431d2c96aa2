"""The lazy evaluator: any variables of a program, some others held at given values.

``evaluate(program, targets, inputs, overrides, rules)`` runs the equations that the targets
need and no others. A variable in ``overrides`` has the given value, and nothing behind it
is looked at. An equation in ``rules`` is run by the given function instead.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .._jax import Atom, Var, bind, is_var
from .program import Program

Rule = Callable[[Any, list[Any]], list[Any]]
"""``(equation, operand values) -> output values``."""


def evaluate(
    program: Program,
    targets: Sequence[Atom],
    inputs: Mapping[Var, Any],
    overrides: Mapping[Var, Any] | None = None,
    rules: Mapping[int, Rule] | None = None,
    effects: bool = False,
) -> list[Any]:
    """Return the values of ``targets``.

    Parameters
    ----------
    program
        The program.
    targets
        Variables or literals of it.
    inputs
        Values of the program's inputs; those that the targets do not need may be missing.
    overrides
        Values that stand in for variables, inputs included.
    rules
        Functions that run single equations, by equation index.
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
    rules = rules or {}
    known: dict[Var, Any] = {**program.constants, **inputs, **(overrides or {})}
    extra = [i for i, e in enumerate(program.equations) if e.effects] if effects else []
    for index in _needed(program, targets, known, extra):
        equation = program.equations[index]
        operands = [known[a] if is_var(a) else a.val for a in equation.invars]
        results = rules.get(index, bind)(equation, operands)
        for var, value in zip(equation.outvars, results, strict=True):
            known.setdefault(var, value)
    return [known[t] if is_var(t) else t.val for t in targets]


def _needed(
    program: Program, targets: Sequence[Atom], known: Mapping[Var, Any], extra: Sequence[int]
) -> list[int]:
    needed = set(extra)
    operands = [atom for index in extra for atom in program.equations[index].invars]
    pending = [t for t in (*targets, *operands) if is_var(t) and t not in known]
    while pending:
        index = program.producer[pending.pop()]
        if index not in needed:
            needed.add(index)
            operands = program.equations[index].invars
            pending.extend(a for a in operands if is_var(a) and a not in known)
    return sorted(needed)
