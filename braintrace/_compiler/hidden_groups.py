"""Hidden groups: the hidden states that are coupled position by position."""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .._jax import Atom, Var, is_var
from .._jaxpr import Program
from .._jaxpr.moves import is_move, moved_operands, source_map
from .._typing import Path
from .beyond import where_shaped_alike
from .derivative import Derivatives
from .home import Constants, home_positions
from .marked import role
from .positions import Cut, Walk, walk_back
from .trace import StateLeaf, TracedModel
from .transfer import CONSTANT, NONE, Ids, carries_derivative, spread_back

_FOREIGN = -9  # the home of old states that are not counted in the walk's positions


@dataclasses.dataclass(frozen=True, eq=False)
class HiddenGroup:
    """Hidden states that share positions and influence each other position by position.

    Attributes
    ----------
    index
        Place of the group in the graph.
    states
        The states ``a = 0 .. n-1``.
    new_vars
        Variable of each state's new value; everything downstream reads it there.
    layouts, old_layouts
        Position of every element of a state's new variable, and of its old value; ``None``
        where they are in order.
    shape
        Shape of the positions: that of the first state.
    transition
        Pairs ``(a, c)`` for which ``D[a, c]`` is not structurally zero.
    cuts
        For each state the uses of variables that mix positions and are held constant.
    read_by_output
        States whose value before the step the outputs of the step read.
    downstream
        States that no later step reads position by position, computed from the new values of the
        others (the ``h`` of an LSTM). Like an output, they see those values perturbed, so that
        the learning signal of the others has their part in it; their own ``D`` is zero.
    """

    index: int
    states: tuple[StateLeaf, ...]
    new_vars: tuple[Var, ...]
    layouts: tuple[Ids | None, ...]
    old_layouts: tuple[Ids | None, ...]
    shape: tuple[int, ...]
    transition: tuple[tuple[int, int], ...]
    cuts: tuple[tuple[Cut, ...], ...]
    read_by_output: tuple[int, ...]
    downstream: tuple[int, ...]

    @property
    def paths(self) -> tuple[Path, ...]:
        """Paths of the group's states."""
        return tuple(state.path for state in self.states)

    @property
    def num_states(self) -> int:
        """Number ``n`` of states in the group."""
        return len(self.states)

    @property
    def num_positions(self) -> int:
        """Number of positions, batch included."""
        return int(np.prod(self.shape))

    @property
    def read_states(self) -> tuple[int, ...]:
        """States that some state of the group reads, position by position, in the next step."""
        return tuple(sorted({c for _, c in self.transition}))


@dataclasses.dataclass(frozen=True, eq=False)
class _Candidate:
    """A hidden state that the step writes: where its new value is, and its positions there.

    ``ids`` are the positions of the new variable's elements, ``old_ids`` of the old value's.
    """

    leaf: StateLeaf
    var: Var
    ids: Ids
    old_ids: Ids

    @property
    def new_vars(self) -> tuple[Var, ...]:
        """The variables that hold the state's new value."""
        joined = self.leaf.joined_var
        return (self.var,) if joined is None else (self.var, joined)


def find_hidden_groups(
    traced: TracedModel, every_state: bool
) -> tuple[list[HiddenGroup], list[list[Walk]]]:
    """Group the hidden states of a model.

    Parameters
    ----------
    traced
        The step.
    every_state
        Whether all states are to have traces, also those that no later step reads.

    Returns
    -------
    groups
        In the order in which their first state is computed within the step.
    walks
        For every group, the walk back from each of its states.
    """
    program = traced.program
    facts = _Facts(program, Constants(program), Derivatives())
    candidates = _with_common_positions(facts, _candidates(traced, facts.constant))
    homes = _Homes(facts, candidates)

    def walk(candidate: _Candidate, stops: frozenset[Var]) -> Walk:
        return _walk(facts, candidate, stops, homes.of_size(candidate.ids.size))

    first = [walk(candidate, frozenset()) for candidate in candidates]
    groups: list[HiddenGroup] = []
    walks: list[list[Walk]] = []
    new_vars = Counter(var for candidate in candidates for var in candidate.new_vars)
    every_new = frozenset(new_vars)
    behind_output = program.depends_on(_seen_by_losses(traced), every_new, CONSTANT)
    boundaries = frozenset(e.primitive.name for e in program.equations if role(e) == "boundary")
    for members in _connected(candidates, first):
        inside = [candidates[i] for i in members]
        own = Counter(var for candidate in inside for var in candidate.new_vars)
        stops = every_new.difference(var for var, count in own.items() if count == new_vars[var])
        group_walks = [walk(candidate, stops) for candidate in inside]
        is_read = [c.leaf.in_var in behind_output for c in inside]
        downstream: tuple[int, ...] = ()
        if len(inside) > 1 and not every_state:
            downstream = _downstream(program, inside, group_walks, is_read, every_new, boundaries)
        for a in downstream:
            others = stops | own.keys() - set(inside[a].new_vars)
            walked = walk(inside[a], others)
            group_walks[a] = _without_held_cuts(program, walked, others, boundaries)
        groups.append(_group(len(groups), inside, group_walks, is_read, downstream))
        walks.append(group_walks)
    return groups, walks


def _seen_by_losses(traced: TracedModel) -> list[Atom]:
    """Return what a loss can read besides hidden states: outputs, and States that are written."""
    written = [leaf.out_var for leaf in traced.leaves if leaf.kind == "other"]
    return [*traced.output_atoms, *(atom for atom in written if atom is not None)]


def _downstream(
    program: Program,
    members: Sequence[_Candidate],
    walks: Sequence[Walk],
    is_read: Sequence[bool],
    every_new: frozenset[Var],
    boundaries: frozenset[str],
) -> tuple[int, ...]:
    """Return the states that nothing reads any more but the rest of the step.

    The last are looked at first: a state may be read by others that are downstream themselves.
    """
    if any(member.leaf.joined_var is not None for member in members):
        return ()
    old = {member.leaf.in_var for member in members}
    found: list[int] = []
    for a in reversed(range(len(members))):
        own = members[a]
        upstream = {m.var for c, m in enumerate(members) if c != a and c not in found}
        last = max((program.producer.get(var, -1) for var in upstream), default=-1)
        is_carried = is_read[a] or any(_reaches(walk, own.leaf.in_var) for walk in walks)
        feeds_upstream = program.dependents_of([own.var], last) & upstream
        stops = every_new - {own.var}
        reads_old = program.depends_on([own.var], stops, CONSTANT | boundaries) & old
        if upstream and not (is_carried or feeds_upstream or reads_old):
            found.append(a)
    return tuple(reversed(found))


def _without_held_cuts(
    program: Program, walk: Walk, held: frozenset[Var], boundaries: frozenset[str]
) -> Walk:
    """Leave out cuts of values that do not change with the held ones: they cost nothing."""

    def costs(cut: Cut) -> bool:
        operand = program.equations[cut.equation].invars[cut.operand]
        behind = program.depends_on([operand], held, boundaries)
        made = (program.equations[program.producer[v]] for v in behind if v in program.producer)
        return any(role(e) == "boundary" for e in made) or any(
            v not in held and v not in program.producer for v in behind
        )

    return dataclasses.replace(walk, cuts=tuple(filter(costs, walk.cuts)))


@dataclasses.dataclass(frozen=True, eq=False)
class _Facts:
    """A program, and what has been found out about its equations."""

    program: Program
    constant: Constants
    derivatives: Derivatives

    def home(self, starts: Mapping[Var, Ids], last: int | None = None) -> dict[Var, Ids]:
        return home_positions(self.program, starts, self.constant, last, where_shaped_alike)


def _walk(
    facts: _Facts, candidate: _Candidate, stops: frozenset[Var], home: Mapping[Var, Ids]
) -> Walk:
    return walk_back(
        facts.program,
        {candidate.var: candidate.ids},
        stops=stops,
        home=home,
        marked=role,
        constant=facts.constant,
        derivatives=facts.derivatives,
    )


def _with_common_positions(facts: _Facts, candidates: list[_Candidate]) -> list[_Candidate]:
    """Give the positions of coupled states the same numbers, also where one is transposed."""
    found = list(candidates)
    owner = {candidate.leaf.in_var: c for c, candidate in enumerate(candidates)}
    placed: set[int] = set()
    for first in range(len(found)):
        pending = [] if first in placed else [first]
        placed.add(first)
        while pending:
            a = pending.pop()
            own = candidates[a]
            # The walk looks at nothing that is computed after the state.
            last = facts.program.producer[own.var]
            home = facts.home({own.leaf.in_var: own.old_ids}, last)
            walk = _walk(facts, own, frozenset(), home)
            for var, ids in walk.ids.items():
                c = owner.get(var, a)
                if c in placed or not _is_permutation(ids, own.ids.size):
                    continue
                old_ids = found[a].old_ids.ravel()[ids]
                new_ids = old_ids.ravel()[candidates[c].ids]
                found[c] = dataclasses.replace(candidates[c], ids=new_ids, old_ids=old_ids)
                placed.add(c)
                pending.append(c)
    return found


def _is_permutation(ids: Ids, size: int) -> bool:
    return ids.size == size and bool(np.array_equal(np.sort(ids.ravel()), np.arange(size)))


def _candidates(traced: TracedModel, constant: Constants) -> list[_Candidate]:
    found: list[_Candidate] = []
    taken: set[Var] = set()
    for leaf in traced.leaves:
        if leaf.kind != "hidden" or leaf.out_var is None or not carries_derivative(leaf.out_var):
            continue
        # The states of a `HiddenGroupState` are put together from variables of their own shape.
        shape = None if leaf.component is None else leaf.shape
        var, ids = _resolve(traced.program, leaf.out_var, taken, constant, shape)
        in_order = np.arange(ids.size, dtype=np.int32).reshape(leaf.shape)
        found.append(_Candidate(leaf, var, ids, in_order))
        taken.add(var)
    producer = traced.program.producer
    return sorted(found, key=lambda candidate: producer.get(candidate.var, -1))


def _resolve(
    program: Program,
    var: Var,
    taken: set[Var],
    constant: Constants,
    shape: tuple[int, ...] | None,
) -> tuple[Var, Ids]:
    """Look behind reshapes and the like for the variable that the model itself reads.

    A model that writes ``h.reshape(...)`` to a State and goes on with ``h`` reads the new
    state at ``h``. With a ``shape``, it is one of that shape, its elements in order.
    """
    size = var.aval.size
    current, ids = var, np.arange(size, dtype=np.int32).reshape(var.aval.shape)
    resolved = current, ids
    while True:
        equation = (
            program.equations[program.producer[current]] if current in program.producer else None
        )
        step = None if equation is None else _unmove(equation, ids, size, constant)
        if step is None:
            return resolved
        current, ids = step
        complete = ids.size == size and not np.any(ids == NONE)
        if shape is not None:
            in_order = np.array_equal(ids.ravel(), np.arange(size))
            complete = complete and in_order and current.aval.shape == shape
        if complete and current not in taken and current in program.producer:
            resolved = current, ids


def _unmove(equation: Any, ids: Ids, size: int, constant: Constants) -> tuple[Var, Ids] | None:
    """Follow a move to the one operand that holds all positions."""
    if not is_move(equation) or len(equation.outvars) != 1:
        return None
    sources = source_map(equation, constant)
    if sources is None:
        return None
    operands = [equation.invars[operand] for operand in moved_operands(equation)]
    sizes = [atom.aval.size for atom in operands]
    received = spread_back(sources[0], ids, sum(sizes))
    for atom, piece in zip(operands, np.split(received, np.cumsum(sizes)[:-1]), strict=True):
        positions = piece[piece >= 0]
        if is_var(atom) and len(positions) == size and len(np.unique(positions)) == size:
            return atom, piece.reshape(atom.aval.shape)
    return None


class _Homes:
    """Home positions for walks from states of each size: all of them count from old states."""

    def __init__(self, facts: _Facts, candidates: Sequence[_Candidate]) -> None:
        self._facts = facts
        self._candidates = candidates
        self._cache: dict[int, Mapping[Var, Ids]] = {}

    def of_size(self, size: int) -> Mapping[Var, Ids]:
        if size not in self._cache:
            same = {c.leaf.in_var: c.old_ids for c in self._candidates if c.ids.size == size}
            home = self._facts.home(same)
            for candidate in self._candidates:
                if candidate.ids.size != size:
                    foreign = np.full(candidate.leaf.shape, _FOREIGN, np.int32)
                    home[candidate.leaf.in_var] = foreign
            self._cache[size] = home
        return self._cache[size]


def _reaches(walk: Walk, var: Var) -> bool:
    ids = walk.ids.get(var)
    return ids is not None and bool(np.any(ids >= 0))


def _connected(candidates: Sequence[_Candidate], walks: Sequence[Walk]) -> list[list[int]]:
    """Return the connected components of the coupling, in order of their first member.

    A state is coupled to those of its size that it reads, old or new, position by position. The
    states of one `HiddenGroupState` are one group in any case.
    """
    owner = {var: i for i, c in enumerate(candidates) for var in (c.leaf.in_var, c.var)}
    first_of = {c.leaf.path: i for i, c in reversed([*enumerate(candidates)])}
    group_of = [first_of[candidate.leaf.path] for candidate in candidates]
    for a, walk in enumerate(walks):
        for var in walk.ids:
            c = owner.get(var, a)
            same_size = candidates[a].ids.size == candidates[c].ids.size
            if group_of[a] != group_of[c] and same_size and _reaches(walk, var):
                old, new = sorted((group_of[a], group_of[c]), reverse=True)
                group_of = [new if g == old else g for g in group_of]
    members: dict[int, list[int]] = {}
    for i, group in enumerate(group_of):
        members.setdefault(group, []).append(i)
    return [members[first] for first in sorted(members)]


def _group(
    index: int,
    members: Sequence[_Candidate],
    walks: Sequence[Walk],
    is_read: Sequence[bool],
    downstream: tuple[int, ...],
) -> HiddenGroup:
    def layout(ids: Ids) -> Ids | None:
        return None if np.array_equal(ids.ravel(), np.arange(ids.size)) else ids

    return HiddenGroup(
        index=index,
        states=tuple(m.leaf for m in members),
        new_vars=tuple(m.var for m in members),
        layouts=tuple(layout(m.ids) for m in members),
        old_layouts=tuple(layout(m.old_ids) for m in members),
        shape=members[0].leaf.shape,
        transition=tuple(
            (a, c)
            for a, walk in enumerate(walks)
            for c, member in enumerate(members)
            if _reaches(walk, member.leaf.in_var)
        ),
        cuts=tuple(walk.cuts for walk in walks),
        read_by_output=tuple(a for a, found in enumerate(is_read) if found),
        downstream=downstream,
    )
