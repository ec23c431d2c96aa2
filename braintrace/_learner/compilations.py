"""What a learner has compiled: found again, bounded, and counted."""

from __future__ import annotations

import dataclasses
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from .._arguments import level_of_user
from .._errors import OptionError, RecompilationWarning
from .._graph import ETraceGraph, SequenceRow
from .._runtime import Recent
from .._typing import PyTree
from .arguments import Options
from .function_key import FunctionKey, FunctionKeys, printed

if TYPE_CHECKING:
    from .driver import Driver
    from .learner import Learner

MOST_KEPT = 32
"""How many drivers a learner keeps. One is a step function with shapes and options: programs go to
and fro between a few, while each holds executables of several megabytes, and what the function has
closed over."""

FOURTH = 4
"""The first compilation is needed, a second and third may be (training and validation, a shorter
last batch); from the fourth on it is a habit, and takes more time than all else."""


class Features(NamedTuple):
    """What a driver is made for besides the user's functions.

    Attributes
    ----------
    method, options
        The method that is called, and its options.
    graph
        The analysed model.
    has_mask, reset_axes
        Whether there is a mask, and the number of axes of ``reset``.
    structure, slices
        Of the sequences: their structure, and shape and dtype of one step of each.
    states
        Identities of the model's States.
    mesh
        What a ``shard_map`` around the call divides; ``None``: there is none.
    placement
        Where the arrays lie on a mesh of the learner's; ``None``: wherever they are.
    """

    method: str
    options: Options
    graph: ETraceGraph
    has_mask: bool = False
    reset_axes: int | None = None
    structure: PyTree = None
    slices: tuple[object, ...] = ()
    states: tuple[int, ...] = ()
    mesh: object = None
    placement: object = None

    def by_name(self) -> dict[str, object]:
        """Return them by the names that a reader knows."""
        compared = [field.name for field in dataclasses.fields(Options) if field.compare]
        return {
            "the driver": self.method,
            **{f"`{name}`": getattr(self.options, name) for name in compared},
            "whether there is a `mask`": self.has_mask,
            "the number of axes of `reset`": self.reset_axes,
            "the structure of the sequences": self.structure,
            "the slices of the sequences": self.slices,
            "the analysed model": self.graph,
            "the model's States": self.states,
            "the `shard_map` around it": self.mesh,
            "the mesh of the learner": self.placement,
        }


@dataclasses.dataclass(frozen=True)
class _Compiled:
    features: Features
    driver: Driver
    lengths: set[int]


class Compilations:
    """The drivers that one learner has compiled.

    A learner that is cloned or copied shares its attributes with the copy, which begins anew.

    Parameters
    ----------
    owner
        The learner.
    """

    def __init__(self, owner: Learner | None = None) -> None:
        self._owner = (lambda: None) if owner is None else weakref.ref(owner)
        self._kept: Recent[object, _Compiled] = Recent(MOST_KEPT)
        self._keys = {name: FunctionKeys() for name in ("step_fn", "update_fn", "optimizer")}
        self._of_line: Recent[str, list[_Note]] = Recent(MOST_KEPT)

    def is_of(self, learner: Learner) -> bool:
        """Tell whether it is this learner that has compiled all this."""
        return self._owner() is learner

    def __reduce__(self) -> tuple[type[Compilations], tuple[()]]:
        return Compilations, ()

    def find(
        self,
        functions: Mapping[str, Callable[..., PyTree]],
        features: Features,
        length: int,
        make: Callable[[], Driver],
    ) -> Driver:
        """Return what was compiled for functions and features, or compile it.

        Nothing is kept of functions that read values of a transformation around the call: these
        mean nothing after it.

        Parameters
        ----------
        functions
            The user's functions, by the names of the arguments.
        features
            What else it depends on.
        length
            Number of steps, for which JAX compiles once each.
        make
            Compiles.

        Raises
        ------
        OptionError
            If a function cannot be hashed.
        """
        keys = {name: self._key(name, function) for name, function in functions.items()}
        if any(key.holds_tracers for key in keys.values()):
            return make()  # a part of what somebody else is tracing, who compiles it
        key = (*keys.values(), features)
        if key not in self._kept:
            self._kept[key] = _Compiled(features, make(), set())
        found = self._kept[key]
        if keys and length not in found.lengths:
            found.lengths.add(length)
            self._count(keys, {**features.by_name(), "the number of steps": length})
        return found.driver

    def sequences(self, graph: ETraceGraph) -> Iterator[SequenceRow]:
        """Yield how the methods have cut sequences for an analysed model."""
        for compiled in list(self._kept.values()):
            if compiled.features.graph is graph:
                for (_, from_zero), cut in compiled.driver.body.cuts.items():
                    yield SequenceRow(
                        method=compiled.features.method,
                        steps=cut.steps,
                        from_zero=from_zero,
                        chunk_size=cut.length,
                        chunks=cut.count,
                        record_bytes=cut.record_bytes,
                        budget=cut.budget,
                    )

    def _key(self, name: str, function: Callable[..., PyTree]) -> FunctionKey:
        try:
            return self._keys[name](function)
        except TypeError as error:
            raise OptionError(
                f"`{name}` is a {type(function).__name__} that cannot be hashed, so that what is "
                "compiled for it would not be found again. Pass a function, or give its class a "
                "`__hash__`."
            ) from error

    def _count(self, keys: Mapping[str, FunctionKey], features: Mapping[str, object]) -> None:
        """Warn where one line of the user's has been compiled often."""
        line = keys["step_fn"].line
        if line not in self._of_line:
            self._of_line[line] = []
        noted = self._of_line[line]
        if len(noted) >= FOURTH:
            return
        noted.append(_note(keys, features))
        if len(noted) == FOURTH:
            warnings.warn(
                f"`step_fn` of {line} is compiled for the fourth time, which takes as long as "
                f"the first time. What differs is {_difference(noted)}. Define functions once, "
                "keep what changes in a State or give it as a sequence, and pad sequences to a "
                "common length with `mask`.",
                RecompilationWarning,
                stacklevel=level_of_user(),
            )


_Noted = tuple[tuple[int, str | None], ...]
"""Hashes, which keep nothing alive, and printed forms of what is short."""

_Note = dict[str, _Noted]


def _note(keys: Mapping[str, FunctionKey], features: Mapping[str, object]) -> _Note:
    note: _Note = {name: ((hash(value), printed(value)),) for name, value in features.items()}
    for name, key in keys.items():
        for label, part in key.parts:
            where = f"{label} of `{name}`"
            note[where] = (*note.get(where, ()), (hash(part), printed(part)))
    return note


def _difference(noted: list[_Note]) -> str:
    """Say what the last compilation does not share with the one before that is most like it."""
    *earlier, now = noted
    different = [
        {name: was.get(name) for name in {**was, **now} if was.get(name) != now.get(name)}
        for was in reversed(earlier)
    ]
    least = min(different, key=len)
    if not least:
        return f"nothing: it was given up for others, of which the last {MOST_KEPT} are kept"
    return ", ".join(name + _change(was, now.get(name)) for name, was in least.items())


def _change(was: _Noted | None, now: _Noted | None) -> str:
    texts = [None if note is None else note[0][1] for note in (was, now)]
    return "" if None in texts else f" ({texts[0]} then, {texts[1]} now)"
