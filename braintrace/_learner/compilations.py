"""What a learner has compiled: found again, bounded, and counted."""

from __future__ import annotations

import dataclasses
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from .._arguments import level_of_user
from .._errors import OptionError, RecompilationWarning
from .._graph import ETraceGraph, SequenceRow
from .._runtime import Recent
from .._typing import PyTree
from .arguments import Chosen
from .chunks import Cuts
from .function_key import FunctionKey, FunctionKeys, line_of

MOST_KEPT = 32
"""How many drivers a learner keeps. One is a step function with shapes and options: programs go to
and fro between a few, while each holds executables of several megabytes, and what the function has
closed over."""

FOURTH = 4
"""The first compilation is needed, a second and third may be (training and validation, a shorter
last batch); from the fourth on it is a habit, and takes more time than all else."""


class Cutting(Protocol):
    """A sequence program, as far as a report asks for it."""

    @property
    def cuts(self) -> Cuts:
        """How sequences were cut into chunks."""
        ...


Driver = TypeVar("Driver", bound=Cutting)


class Features(NamedTuple):
    """What a driver is made for besides the user's functions.

    Attributes
    ----------
    method, options, weights
        The method that is called, its options, and the parameters that it differentiates.
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
    options: tuple[object, ...]
    weights: Chosen | None
    graph: ETraceGraph
    has_mask: bool = False
    reset_axes: int | None = None
    structure: PyTree = None
    slices: tuple[object, ...] = ()
    states: tuple[int, ...] = ()
    mesh: object = None
    placement: object = None


@dataclasses.dataclass(frozen=True)
class _Compiled(Generic[Driver]):
    features: Features
    driver: Driver
    lengths: set[int]


class Compilations(Generic[Driver]):
    """The drivers that one learner has compiled.

    A learner that is cloned or copied shares its attributes with the copy, which begins anew.

    Parameters
    ----------
    owner
        The learner.
    """

    def __init__(self, owner: object = None) -> None:
        self._owner = (lambda: None) if owner is None else weakref.ref(owner)
        self._kept: Recent[object, _Compiled[Driver]] = Recent(MOST_KEPT)
        self._keys = {name: FunctionKeys() for name in ("step_fn", "update_fn", "optimizer")}
        self._count_of_line: Recent[str, int] = Recent(MOST_KEPT)

    def is_of(self, learner: object) -> bool:
        """Tell whether it is this learner that has compiled all this."""
        return self._owner() is learner

    def __reduce__(self) -> tuple[type[Compilations[Any]], tuple[()]]:
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
        found = self._kept.get(key)
        if found is None:
            found = self._kept[key] = _Compiled(features, make(), set())
            # A function that counts how often it is traced is the same function afterwards.
            traced = (self._key(name, function) for name, function in functions.items())
            self._kept[(*traced, features)] = found
        else:
            self._kept.move_to_end(key)
        if functions and length not in found.lengths:
            found.lengths.add(length)
            self._count(line_of(functions["step_fn"]))
        return found.driver

    def sequences(self, graph: ETraceGraph) -> Iterator[SequenceRow]:
        """Yield how the methods have cut sequences for an analysed model."""
        for compiled in list(self._kept.values()):
            if compiled.features.graph is graph:
                for (_, from_zero), cut in compiled.driver.cuts.items():
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

    def _count(self, line: str) -> None:
        """Warn if one line of the user's code has been compiled often."""
        self._count_of_line[line] = count = self._count_of_line.get(line, 0) + 1
        if count == FOURTH:
            warnings.warn(
                f"`step_fn` of {line} is compiled for the fourth time, and each time takes as long "
                "as the first. A call compiles again if the code, the defaults or the closed-over "
                "values of `step_fn` or `update_fn` differ, or the length, shapes, dtypes or "
                "options. Define functions once, keep values that change in a State or pass them "
                "as a sequence, and pad sequences to a common length with `mask`.",
                RecompilationWarning,
                stacklevel=level_of_user(),
            )
