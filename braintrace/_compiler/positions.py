"""Which elements reach which hidden position.

A walk starts at the new value of one hidden state, whose elements are its positions, and
carries the position ids backward through the equations (see `transfer`) to the outputs of the
marked operations and to the old hidden states. Where an operand reaches the state through
mixing of positions, that one use of it is *cut*: in the transition ``D`` and in ``Df`` its
value is held constant.

An element that an old state's element has moved to another position is mixing as well. It
is recognised with the *home* of a variable's elements: the position of the old hidden state
that they come from, carried forward.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from .._jax import Var, is_var, open_jaxpr
from .._jaxpr import Program, evaluate, program_of
from .._jaxpr.moves import NOWHERE, is_move, moved_operands, source_map
from .transfer import (
    CUT,
    ELEMENTWISE,
    MANY,
    MIXED,
    NONE,
    Contribution,
    Ids,
    carries_derivative,
    merge,
    transfer,
)

Marked = Callable[[Any], str | None]
"""Tells what a marked operation is to the walk: a ``'boundary'``, or an ``'identity'`` on its
first operand; ``None`` for any other equation."""


@dataclasses.dataclass(frozen=True)
class Cut:
    """One use of a variable that mixes positions: an equation and its operand."""

    equation: int
    operand: int


@dataclasses.dataclass(frozen=True, eq=False)
class Walk:
    """What a walk found.

    Attributes
    ----------
    ids
        Position ids of every variable that reaches the state position by position.
    cuts
        The uses of variables that are held constant.
    roots
        Variables at which a broadcast from fewer elements begins.
    passed
        Marked equations that the walk met and did not pass.
    """

    ids: Mapping[Var, Ids]
    cuts: tuple[Cut, ...]
    roots: tuple[Var, ...]
    passed: tuple[int, ...]


class Constants:
    """Values of the variables that depend on no input, computed when asked for."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._inputs = frozenset(program.in_vars)

    def __call__(self, atom: Any) -> np.ndarray | None:
        """Return the value of ``atom``, or ``None`` where it depends on an input."""
        if not is_var(atom):
            return np.asarray(atom.val)
        if self._inputs & self._program.depends_on([atom]):
            return None
        import jax

        with jax.ensure_compile_time_eval():
            return np.asarray(evaluate(self._program, [atom], {})[0])


def home_positions(
    program: Program, old_states: Sequence[Var], constant: Callable[[Any], np.ndarray | None]
) -> dict[Var, Ids]:
    """Carry the element numbers of old hidden states forward.

    Parameters
    ----------
    program
        The program.
    old_states
        Hidden states of one size. Element ``i`` of each is position ``i``.
    constant
        See `Constants`.

    Returns
    -------
    dict
        For every variable with elements that come from one position each: its positions,
        ``NONE`` for the other elements.
    """
    home: dict[Var, Ids] = {}
    for var in old_states:
        home[var] = np.arange(var.aval.size, dtype=np.int32).reshape(var.aval.shape)
    for equation in program.equations:
        known = [home.get(atom) if is_var(atom) else None for atom in equation.invars]
        if all(ids is None for ids in known):
            continue
        if equation.primitive.name in ELEMENTWISE and len(equation.outvars) == 1:
            _home_of_elementwise(equation, known, home)
        elif is_move(equation):
            _home_of_move(equation, known, home, constant)
    return home


def _home_of_elementwise(equation: Any, known: list[Ids | None], home: dict[Var, Ids]) -> None:
    (out,) = equation.outvars
    full = [ids for ids in known if ids is not None and ids.shape == out.aval.shape]
    if full:
        combined = full[0]
        for ids in full[1:]:
            combined = merge(combined, ids)
        home[out] = np.where(combined == MIXED, NONE, combined) if len(full) > 1 else combined


def _home_of_move(
    equation: Any,
    known: list[Ids | None],
    home: dict[Var, Ids],
    constant: Callable[[Any], np.ndarray | None],
) -> None:
    sources = source_map(equation, constant)
    if sources is None:
        return
    flat = [
        np.full(equation.invars[operand].aval.size, NONE, np.int32)
        if known[operand] is None
        else np.asarray(known[operand]).ravel()
        for operand in moved_operands(equation)
    ]
    table = np.concatenate([*flat, np.full(1, NONE, np.int32)])
    for out, source in zip(equation.outvars, sources, strict=True):
        home[out] = table[np.where(source == NOWHERE, len(table) - 1, source)]


def walk_back(
    program: Program,
    start: Mapping[Var, Ids],
    *,
    stops: frozenset[Var],
    home: Mapping[Var, Ids],
    marked: Marked,
    constant: Callable[[Any], np.ndarray | None],
    every_dtype: bool = False,
) -> Walk:
    """Carry position ids from new hidden states to everything that they depend on.

    Parameters
    ----------
    program
        The program.
    start
        Ids of the variables at which the walk starts.
    stops
        Variables behind which it does not look: new values of other groups.
    home
        See `home_positions`.
    marked
        See `Marked`. The operands of a boundary are not looked at.
    constant
        See `Constants`.
    every_dtype
        Follow variables that are not floating-point too: inside a function with a
        derivative of its own, a comparison may carry one.
    """
    received: dict[Var, list[tuple[Cut, Ids]]] = {}
    ids: dict[Var, Ids] = dict(start)
    cuts: list[Cut] = []
    roots: list[Var] = []
    passed: list[int] = []

    def settle(var: Var) -> None:
        if var in ids or var not in received:
            return
        settled, rejected = _settle(received.pop(var), home.get(var))
        cuts.extend(rejected)
        if settled is not None:
            ids[var] = settled

    def walk_body(body: Any, out_ids: Sequence[Ids | None]) -> list[Contribution]:
        return _walk_call(body, out_ids, marked)

    for index in range(len(program.equations) - 1, -1, -1):
        equation = program.equations[index]
        for var in equation.outvars:
            settle(var)
        out_ids = [None if var in stops else ids.get(var) for var in equation.outvars]
        if all(i is None for i in out_ids):
            continue
        role = marked(equation)
        if role == "boundary":
            passed.append(index)
            continue
        if role == "identity":
            contributions = [out_ids[0], *[None] * (len(equation.invars) - 1)]
        else:
            contributions = transfer(equation, out_ids, constant, walk_body)
        if _begins_fan_out(contributions, out_ids):
            roots.extend(equation.outvars)
        for operand, (atom, given) in enumerate(zip(equation.invars, contributions, strict=True)):
            if given is None or not (
                is_var(atom) if every_dtype else carries_derivative(atom)
            ):
                continue
            if given is CUT:
                cuts.append(Cut(index, operand))
            elif np.any(given != NONE):
                received.setdefault(atom, []).append((Cut(index, operand), given))
    for var in list(received):
        settle(var)
    reached = {var: found for var, found in ids.items() if var not in stops}
    return Walk(reached, tuple(sorted(set(cuts), key=_order)), tuple(roots), tuple(passed))


def _order(cut: Cut) -> tuple[int, int]:
    return cut.equation, cut.operand


def _begins_fan_out(contributions: Sequence[Contribution], out_ids: Sequence[Ids | None]) -> bool:
    before = any(ids is not None and np.any(ids == MANY) for ids in out_ids)
    after = any(isinstance(c, np.ndarray) and np.any(c == MANY) for c in contributions)
    return after and not before


def _settle(
    contributions: list[tuple[Cut, Ids]], home: Ids | None
) -> tuple[Ids | None, list[Cut]]:
    """Merge what a variable receives; reject uses that move a state to another position."""
    rejected = []
    settled: Ids | None = None
    for use, given in contributions:
        if home is not None and home is not given:
            if np.any((home != NONE) & (given != NONE) & (home != given)):
                rejected.append(use)
                continue
        settled = given if settled is None else merge(settled, given)
    return settled, rejected


def _walk_call(
    body: Any, out_ids: Sequence[Ids | None], marked: Marked
) -> list[Contribution]:
    """Carry ids through the body of a call; an input that is mixed anywhere is cut whole."""
    opened, _ = open_jaxpr(body)
    program = program_of(body)
    start: dict[Var, Ids] = {}
    for atom, ids in zip(opened.outvars, out_ids, strict=True):
        if is_var(atom) and ids is not None:
            start[atom] = merge(start[atom], ids) if atom in start else ids
    walk = walk_back(
        program,
        start,
        stops=frozenset(),
        home={},
        marked=marked,
        constant=Constants(program),
        every_dtype=True,
    )
    mixed = [program.equations[cut.equation].invars[cut.operand] for cut in walk.cuts]
    mixed += [a for i in walk.passed for a in program.equations[i].invars if is_var(a)]
    tainted = program.depends_on(mixed)
    return [CUT if var in tainted else walk.ids.get(var) for var in opened.invars]
