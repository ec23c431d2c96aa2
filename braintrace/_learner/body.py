"""What a driver runs: a pure function of values of States, for each of a learner's methods."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeAlias

import brainstate
import jax

from .._graph import Traces
from .._runtime import CarriedTraces, States, Take
from .._typing import PyTree
from .chunks import Cuts
from .options import Options
from .restart import Restarts

Arguments: TypeAlias = tuple[PyTree, jax.Array | None, Restarts]
"""``(sequences, mask, restarts)``, as every body takes them."""


@dataclasses.dataclass(frozen=True)
class Unfinished:
    """Traces after a sequence that are not computed unless somebody reads them.

    Attributes
    ----------
    sources
        What they are computed from.
    before
        The traces that they replace; ``None``: those from before the sequence.
    """

    sources: PyTree
    before: Traces | None


jax.tree_util.register_dataclass(Unfinished)

Found: TypeAlias = tuple[PyTree, list[PyTree], "Traces | Unfinished | None"]
"""What a body returns: results, new values of States, and traces, if it moves any."""

Given: TypeAlias = tuple[Traces | None, bool]
"""Traces that a body gets, and whether their buffers may be given away."""


def taken(held: CarriedTraces, take: Take) -> Given:
    """Return the traces, and whether their buffers may be given away."""
    return take()


def taken_unless_zero(held: CarriedTraces, take: Take) -> Given:
    """Return the same, and ``None`` for traces that are known to be zero."""
    return (None, True) if held.is_zero else take()


def not_taken(held: CarriedTraces, take: Take) -> Given:
    """Return no traces, for what moves none."""
    return None, False


@dataclasses.dataclass(frozen=True, eq=False)
class Body:
    """A pure function of values of States, and the States that these are of.

    Attributes
    ----------
    run
        ``(values, traces, sequences, mask, restarts) -> (results, written values, traces)``.
        Traces may be `Unfinished`, or None if none are moved.
    states
        Returns the States whose values it takes, given those of the model by path.
    written
        Returns of as many items those whose States are written.
    results
        Makes of results and options what the user gets.
    take
        How it gets the traces; see `taken`.
    replaces
        Tells for sequences whether it can write traces over those that it is given.
    finish
        ``(sources, before) -> traces`` of what is `Unfinished`.
    reads_initial
        Whether it reads the initial values of States also where no step has a flag.
    cuts
        How the sequences of each length were cut that it has been run on, from zero traces or not.
    check
        Refuses results of which nothing is to be stored; ``None``: nothing is looked at.
    """

    run: Callable[..., Found]
    states: Callable[[States], Sequence[brainstate.State]]
    written: Callable[[Sequence[PyTree]], Sequence[PyTree]]
    results: Callable[[PyTree, Options], PyTree] = lambda found, options: found
    take: Callable[[CarriedTraces, Take], Given] = taken
    replaces: Callable[[PyTree, Traces | None], bool] = lambda sequences, traces: True
    finish: Callable[[PyTree, Traces | None], Traces] | None = None
    reads_initial: bool = False
    cuts: Cuts = dataclasses.field(default_factory=dict)
    check: Callable[[PyTree], None] | None = None


def run_to_the_end(
    body: Body, values: list[PyTree], traces: Traces, *arguments: PyTree
) -> tuple[PyTree, list[PyTree], Traces | None]:
    """Run a body, and compute the traces that it has left unfinished."""
    results, written, after = body.run(values, traces, *arguments)
    if isinstance(after, Unfinished):
        assert body.finish is not None
        after = body.finish(after.sources, traces if after.before is None else after.before)
    return results, written, after
