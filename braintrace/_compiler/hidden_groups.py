"""Hidden groups: the hidden states that are coupled position by position."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from .._graph import HiddenGroup
from .._graph.hidden_group import Cut
from .._graph.marked import role
from .._graph.traced_model import StateLeaf, TracedModel
from .._jax import Atom, Var
from .._jaxpr import Program
from .candidates import Candidate, candidates_of
from .common_positions import CommonPositions
from .delay_lines import find_delay_lines
from .derivative import Derivatives
from .opaque_calls import opaque_where_shaped_alike
from .origin_position import Constants, least_moved_positions, origin_positions
from .positions import Walk, walk_back
from .transfer import CONSTANT, Ids

_ELSEWHERE = -9  # the origin of old states that do not share the walk's positions


def find_hidden_groups(
    traced: TracedModel,
    every_state: bool,
    outputs: Sequence[StateLeaf],
    derivatives: Derivatives,
) -> tuple[list[HiddenGroup], list[list[Walk]]]:
    """Group the hidden states of a model.

    Parameters
    ----------
    traced
        The step.
    every_state
        Whether all states are to have traces, also those that no later step reads.
    outputs
        States that count as outputs of the step; they are in no group.
    derivatives
        See `Derivatives`.

    Returns
    -------
    groups
        In the order in which their first state is computed within the step.
    walks
        For every group, the walk back from each of its states.
    """
    program = traced.program
    facts = _Facts(program, Constants(program), derivatives)
    candidates = candidates_of(traced, outputs, facts.constant)
    placed = _Placed(facts, candidates)
    groups: list[HiddenGroup] = []
    walks: list[list[Walk]] = []
    new_vars = Counter(var for candidate in candidates for var in candidate.new_vars)
    every_new = frozenset(new_vars)
    behind_output = program.depends_on(_seen_by_losses(traced, outputs), every_new, CONSTANT)
    opaque = frozenset(e.primitive.name for e in program.equations if role(e) == "opaque")
    lines = frozenset() if every_state else find_delay_lines(program, candidates, behind_output)
    for members in _connected(placed, lines):
        inside, origin = placed.together(members)
        own = Counter(var for candidate in inside for var in candidate.new_vars)
        stops = every_new.difference(var for var, count in own.items() if count == new_vars[var])
        group_walks = [_walk(facts, candidate, stops, origin) for candidate in inside]
        is_read = [c.leaf.in_var in behind_output for c in inside]
        downstream: tuple[int, ...] = ()
        if len(inside) > 1 and not every_state:
            downstream = _downstream(program, inside, group_walks, is_read, every_new, opaque)
        for a in downstream:
            others = stops | own.keys() - set(inside[a].new_vars)
            walked = _walk(facts, inside[a], others, origin)
            group_walks[a] = _without_held_cuts(program, walked, others, opaque)
        is_line = lines.issuperset(members)
        groups.append(_group(len(groups), inside, group_walks, is_read, downstream, is_line))
        walks.append(group_walks)
    return groups, walks


def _seen_by_losses(traced: TracedModel, outputs: Sequence[StateLeaf]) -> list[Atom]:
    """Return what a loss can read besides hidden states: outputs, and States that are written."""
    written = [leaf.out_var for leaf in traced.leaves if leaf.kind == "other" or leaf in outputs]
    return [*traced.output_atoms, *(atom for atom in written if atom is not None)]


def _downstream(
    program: Program,
    members: Sequence[Candidate],
    walks: Sequence[Walk],
    is_read: Sequence[bool],
    every_new: frozenset[Var],
    opaque: frozenset[str],
) -> tuple[int, ...]:
    """Return the states that nothing reads any more but the rest of the step.

    Another state of the step may read one: its own derivatives go through that to what the one is
    computed from. The last are looked at first: a state may be computed from others that are
    downstream themselves, but not from them alone.
    """
    if any(member.leaf.joined_var is not None for member in members):
        return ()
    old = {member.leaf.in_var for member in members}
    found: list[int] = []
    for a in reversed(range(len(members))):
        own = members[a]
        upstream = {m.var for c, m in enumerate(members) if c != a and c not in found}
        is_carried = is_read[a] or any(_reaches(walk, own.leaf.in_var) for walk in walks)
        stops = every_new - {own.var}
        reads_old = program.depends_on([own.var], stops, CONSTANT | opaque) & old
        reads_new = program.depends_on([own.var], stops) & upstream
        if reads_new and not (is_carried or reads_old):
            found.append(a)
    return tuple(reversed(found))


def _without_held_cuts(
    program: Program, walk: Walk, held: frozenset[Var], opaque: frozenset[str]
) -> Walk:
    """Leave out cuts of values that do not change with the held ones: they cost nothing."""

    def costs(cut: Cut) -> bool:
        operand = program.equations[cut.equation].invars[cut.operand]
        behind = program.depends_on([operand], held, opaque)
        made = (program.equations[program.producer[v]] for v in behind if v in program.producer)
        return any(role(e) == "opaque" for e in made) or any(
            v not in held and v not in program.producer for v in behind
        )

    return dataclasses.replace(walk, cuts=tuple(filter(costs, walk.cuts)))


@dataclasses.dataclass(frozen=True, eq=False)
class _Facts:
    """A program, and what has been found out about its equations."""

    program: Program
    constant: Constants
    derivatives: Derivatives


class _Origin:
    """Where the elements of variables come from, counted from some old states."""

    def __init__(self, facts: _Facts, states: Sequence[Candidate], last: int | None = None) -> None:
        starts = {candidate.leaf.in_var: candidate.old_ids for candidate in states}
        self._arguments = (facts.program, starts, facts.constant, last, opaque_where_shaped_alike)

    @functools.cached_property
    def certain(self) -> dict[Var, Ids]:
        """Where they come from one place each."""
        return origin_positions(*self._arguments)

    @functools.cached_property
    def likely(self) -> dict[Var, Ids]:
        """See `least_moved_positions`."""
        return least_moved_positions(*self._arguments)


def _walk(facts: _Facts, candidate: Candidate, stops: frozenset[Var], origin: _Origin) -> Walk:
    return walk_back(
        facts.program,
        {candidate.var: candidate.ids},
        stops=stops,
        origin=origin.certain,
        likely=lambda: origin.likely,
        marked=role,
        constant=facts.constant,
        derivatives=facts.derivatives,
    )


class _Placed:
    """The hidden states with the positions that some of them have in common."""

    def __init__(self, facts: _Facts, raw: Sequence[Candidate]) -> None:
        self.facts, self.raw = facts, raw
        self.common = CommonPositions(raw, self._reached)
        self._found: dict[tuple[int, ...], tuple[list[Candidate], _Origin]] = {}

    def _reached(self, state: int) -> Mapping[Var, Ids]:
        own = self.raw[state]
        # The walk looks at nothing that is computed after the state.
        origin = _Origin(self.facts, [own], last=self.facts.program.producer[own.var])
        return _walk(self.facts, own, frozenset(), origin).ids

    def together(self, members: tuple[int, ...]) -> tuple[list[Candidate], _Origin]:
        """Return some states at their common positions, and the origin of what is made of them."""
        if members not in self._found:
            inside = self.common.of(members)
            origin = _Origin(self.facts, inside)
            for i, candidate in enumerate(self.raw):
                if i not in members:
                    elsewhere = np.broadcast_to(np.int32(_ELSEWHERE), candidate.leaf.shape)
                    origin.certain[candidate.leaf.in_var] = elsewhere
            self._found[members] = inside, origin
        return self._found[members]


def _reaches(walk: Walk, var: Var) -> bool:
    ids = walk.ids.get(var)
    return ids is not None and bool(np.any(ids >= 0))


def _connected(placed: _Placed, apart: frozenset[int]) -> list[tuple[int, ...]]:
    """Return the connected components of the coupling, in order of their first member.

    A state is coupled to those at its positions that it reads, old or new, position by position.
    The states of one `HiddenGroupState` are one group in any case. What those ``apart`` read
    does not couple them.
    """
    leaves = [candidate.leaf for candidate in placed.raw]
    names = [i if leaf.component is None else leaf.path for i, leaf in enumerate(leaves)]
    group_of = [names.index(name) for name in names]
    for a, c in (pair for pair in _coupled(placed) if pair[0] not in apart):
        old, new = sorted((group_of[a], group_of[c]), reverse=True)
        group_of = [new if g == old else g for g in group_of]
    members: dict[int, list[int]] = {}
    for i, group in enumerate(group_of):
        members.setdefault(group, []).append(i)
    return [tuple(members[first]) for first in sorted(members)]


def _coupled(placed: _Placed) -> Iterator[tuple[int, int]]:
    """Yield states ``(a, c)`` with positions in common of which ``a`` reads ``c`` there."""
    for together in placed.common.sets():
        if len(together) == 1:
            continue
        inside, origin = placed.together(together)
        owner = {c.leaf.in_var: i for i, c in zip(together, inside, strict=True)}
        owner |= {c.var: i for i, c in zip(together, inside, strict=True)}
        for a, candidate in zip(together, inside, strict=True):
            walk = _walk(placed.facts, candidate, frozenset(), origin)
            yield from ((a, c) for var, c in owner.items() if c != a and _reaches(walk, var))


def _group(
    index: int,
    members: Sequence[Candidate],
    walks: Sequence[Walk],
    is_read: Sequence[bool],
    downstream: tuple[int, ...],
    delay_line: bool,
) -> HiddenGroup:
    size = int(np.prod(members[0].shape))

    def layout(ids: Ids) -> Ids | None:
        return None if np.array_equal(ids.ravel(), np.arange(size)) else ids

    return HiddenGroup(
        index=index,
        states=tuple(m.leaf for m in members),
        new_vars=tuple(m.var for m in members),
        layouts=tuple(layout(m.ids) for m in members),
        old_layouts=tuple(layout(m.old_ids) for m in members),
        shape=members[0].shape,
        transition=tuple(
            (a, c)
            for a, walk in enumerate(walks)
            for c, member in enumerate(members)
            if _reaches(walk, member.leaf.in_var)
        ),
        cuts=tuple(walk.cuts for walk in walks),
        read_by_output=tuple(a for a, found in enumerate(is_read) if found),
        downstream=downstream,
        delay_line=delay_line,
    )
