"""Which elements reach which hidden position.

A walk starts at the new value of one hidden state, whose elements are its positions, and
carries the position ids backward through the equations (see `transfer`) to the outputs of the
marked operations and to the old hidden states. Where an operand reaches the state through
mixing of positions, that one use of it is *cut*: in the transition ``D`` and in ``Df`` its
value is held constant.

An element that an old state's element has moved to another position is mixing as well. It
is recognised by the *origin* of a variable's elements: the position of the old hidden state
that they come from, carried forward.
"""

import dataclasses
import functools
import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from .._graph import Cut
from .._jax import Var, is_var, open_jaxpr
from .._jaxpr import Program, program_of
from .derivative import Derivatives
from .loops import through_cond, through_scan, through_while
from .origin_position import Constants
from .transfer import (
    COPIES,
    CUT,
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
"""Tells what a marked operation is to the walk: a ``'opaque'``, or an ``'transparent'`` on its
first operand; ``None`` for any other equation."""


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
    shared
        Variables of which two uses reach different positions.
    weights_met
        Marked equations that the walk met and did not pass.
    states_met
        Variables behind which it did not look, and an equation that reads each.
    """

    ids: Mapping[Var, Ids]
    cuts: tuple[Cut, ...]
    roots: tuple[Var, ...]
    shared: tuple[Var, ...]
    weights_met: tuple[int, ...]
    states_met: tuple[tuple[int, Var], ...]


def walk_back(
    program: Program,
    start: Mapping[Var, Ids],
    *,
    stops: frozenset[Var],
    origin: Mapping[Var, Ids],
    likely: Callable[[], Mapping[Var, Ids]],
    marked: Marked,
    constant: Callable[[Any], np.ndarray | None],
    derivatives: Derivatives,
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
    origin
        See `origin_positions`.
    likely
        Gives the origin of variables made from several places of old states as well (see
        `least_moved_positions`): of uses that disagree, those count that agree with it.
    marked
        See `Marked`. The operands of an opaque operation are not looked at.
    constant, derivatives
        See `Constants` and `Derivatives`.
    """
    received: dict[Var, list[tuple[Cut, Ids]]] = {}
    ids: dict[Var, Ids] = dict(start)
    cuts: list[Cut] = []
    roots: list[Var] = []
    shared: list[Var] = []
    weights_met: list[int] = []
    states_met: list[tuple[int, Var]] = []

    def settle(var: Var) -> None:
        if var in ids or var not in received:
            return
        kept, rejected = _in_place(received.pop(var), origin.get(var))
        cuts.extend(use for use, _ in rejected)
        if not kept:
            return
        ids[var] = functools.reduce(merge, (given for _, given in kept))
        if var in stops:
            states_met.extend((use.equation, var) for use, _ in kept)
            return
        if ids[var] is kept[0][1]:  # all uses reach the same positions
            return
        conflict = _conflict(ids[var], kept)
        if not np.any(conflict):
            return
        agreeing, rejected = _in_place(kept, likely().get(var))
        if agreeing and rejected:
            cuts.extend(use for use, _ in rejected)
            kept = agreeing
            ids[var] = functools.reduce(merge, (given for _, given in kept))
            conflict = _conflict(ids[var], kept)
            if not np.any(conflict):
                return
        readers = [program.equations[use.equation] for use, _ in kept]
        if all(reader.primitive.name in COPIES for reader in readers):
            ids[var] = np.where(conflict, MANY, ids[var])
            roots.extend(out for reader in readers for out in reader.outvars)
        else:
            shared.append(var)

    def walk_body(body: Any, out_ids: Sequence[Ids | None]) -> list[Contribution]:
        return _walk_body(body, out_ids, marked, derivatives)

    for index in _backward(program, start, received):
        equation = program.equations[index]
        for var in equation.outvars:
            settle(var)
        out_ids = [None if var in stops else ids.get(var) for var in equation.outvars]
        if all(i is None for i in out_ids):
            continue
        role = marked(equation)
        contributions: list[Contribution]
        if role == "opaque":
            weights_met.append(index)
            continue
        if role == "transparent":
            contributions = [out_ids[0], *[None] * (len(equation.invars) - 1)]
        else:
            contributions = _through(equation, out_ids, constant, derivatives, walk_body)
        contributions = [
            given if carries_derivative(atom) else None
            for atom, given in zip(equation.invars, contributions, strict=True)
        ]
        if _begins_fan_out(contributions, out_ids):
            roots.extend(equation.outvars)
        for operand, (atom, given) in enumerate(zip(equation.invars, contributions, strict=True)):
            if given is None:
                continue
            if not isinstance(given, np.ndarray):
                cuts.append(Cut(index, operand))
            elif np.any(given != NONE):
                received.setdefault(atom, []).append((Cut(index, operand), given))
    for var in list(received):
        settle(var)
    reached = {var: found for var, found in ids.items() if var not in stops}
    in_order = tuple(sorted(set(cuts), key=_order))
    return Walk(
        reached, in_order, tuple(roots), tuple(shared), tuple(weights_met), tuple(states_met)
    )


def _backward(
    program: Program, start: Mapping[Var, Ids], received: Mapping[Var, Any]
) -> Iterator[int]:
    """Yield the equations that make what the walk has reached, the last of them first."""
    queued: set[int] = set()
    pending: list[int] = []

    def queue(reached: Iterable[Var]) -> None:
        for var in reached:
            index = program.producer.get(var)
            if index is not None and index not in queued:
                queued.add(index)
                heapq.heappush(pending, -index)

    queue(start)
    while pending:
        index = -heapq.heappop(pending)
        yield index
        queue(a for a in program.equations[index].invars if is_var(a) and a in received)


_LOOPS = {"cond": through_cond, "scan": through_scan, "while": through_while}


def _through(
    equation: Any,
    out_ids: Sequence[Ids | None],
    constant: Callable[[Any], np.ndarray | None],
    derivatives: Derivatives,
    walk_body: Any,
) -> list[Contribution]:
    loop = _LOOPS.get(equation.primitive.name)
    if loop is not None:
        return loop(equation, out_ids, walk_body)
    known = transfer(equation, out_ids, constant)
    return derivatives.back(equation, out_ids) if known is None else known


def _order(cut: Cut) -> tuple[int, int]:
    return cut.equation, cut.operand


def _begins_fan_out(contributions: Sequence[Contribution], out_ids: Sequence[Ids | None]) -> bool:
    made = [c for c in contributions if not any(c is ids for ids in out_ids)]
    after = any(isinstance(c, np.ndarray) and np.any(c == MANY) for c in made)
    return after and not any(ids is not None and np.any(ids == MANY) for ids in out_ids)


def _in_place(
    contributions: Sequence[tuple[Cut, Ids]], origin: Ids | None
) -> tuple[list[tuple[Cut, Ids]], list[tuple[Cut, Ids]]]:
    """Set apart the uses of a variable that move an old state to another position."""
    kept: list[tuple[Cut, Ids]] = []
    rejected: list[tuple[Cut, Ids]] = []
    for use, given in contributions:
        moved = origin is not None and np.any(
            (origin != NONE) & (given != NONE) & (origin != given)
        )
        (rejected if moved else kept).append((use, given))
    return kept, rejected


def _conflict(merged: Ids, contributions: Sequence[tuple[Cut, Ids]]) -> np.ndarray:
    """Return where uses of a variable reach different positions, each of them one."""
    return (merged == MIXED) & ~np.any([given == MIXED for _, given in contributions], axis=0)


def _walk_body(
    body: Any, out_ids: Sequence[Ids | None], marked: Marked, derivatives: Derivatives
) -> list[Contribution]:
    """Carry ids through a branch or loop body; an input that is mixed anywhere is cut whole."""
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
        origin={},
        likely=dict,
        marked=marked,
        constant=Constants(program),
        derivatives=derivatives,
    )
    mixed = [program.equations[cut.equation].invars[cut.operand] for cut in walk.cuts]
    mixed += [a for i in walk.weights_met for a in program.equations[i].invars if is_var(a)]
    tainted = program.depends_on(mixed)
    return [CUT if var in tainted else walk.ids.get(var) for var in opened.invars]
