"""Options of the learner's methods: name, type, default and check of each in one place.

`Options` is the definition. The methods of a `Learner`, and their functional counterparts
read names, defaults and checks from it. Type checkers cannot read a
signature that is created at run time: the ``TypedDict`` classes repeat the types for them, and
determine which method accepts which options. A test compares both.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Required, TypedDict, TypeVar

import brainstate
from jax.typing import ArrayLike

from ..._arguments import (
    BOOLEAN,
    FUNCTION,
    POSITIVE,
    Kind,
    check_option,
    one_of,
    shown,
    wrong_names,
)
from ..._errors import OptionError
from ..._typing import PyTree
from ..state.optimizer import OPTIMIZER

REQUIRED = inspect.Parameter.empty
"""The default of a required option."""

Function = TypeVar("Function", bound=Callable[..., Any])


def _checked(kind: Kind) -> dict[str, Any]:
    """Return the metadata of an option that is checked, and that does not affect programs."""
    return {"kind": kind, "is_static": False}


def _static(kind: Kind) -> dict[str, Any]:
    """Return the metadata of an option that is checked, and for which programs are compiled."""
    return {"kind": kind, "is_static": True}


@dataclass(frozen=True, init=False, eq=False)
class Options:
    """The options of one call of a learner's method; see `Learner.etrace_grad`.

    Raises
    ------
    OptionError
        For a value that is not accepted, or two that exclude each other.
    """

    step_fn: Callable[..., PyTree] = REQUIRED
    optimizer: Any = field(default=None, metadata=_checked(OPTIMIZER))
    update_fn: Callable[..., PyTree] | None = None
    every: int = field(default=1, metadata=_static(POSITIVE))
    window: int | None = field(default=None, metadata=_static(POSITIVE.or_else(None)))
    mask: ArrayLike | None = None
    reduction: str = field(default="mean", metadata=_static(one_of("mean", "sum")))
    chunk_size: int | str | None = field(
        default="auto", metadata=_static(POSITIVE.or_else("auto").or_else(None))
    )
    memory_budget: int | None = field(default=None, metadata=_static(POSITIVE.or_else(None)))
    nonfinite: str = field(default="skip", metadata=_static(one_of("skip", "raise", "ignore")))
    has_aux: bool = field(default=False, metadata=_static(BOOLEAN))
    return_value: bool = field(default=False, metadata=_checked(BOOLEAN))  # same program
    unit_aware: bool = field(default=False, metadata=_static(BOOLEAN))
    reset: ArrayLike | None = None
    weights: Mapping[PyTree, brainstate.State] | None = None
    return_outputs: bool = field(default=True, metadata=_static(BOOLEAN))
    progress: bool = field(default=False, metadata=_checked(BOOLEAN))
    log_every: int | None = field(default=None, metadata=_checked(POSITIVE.or_else(None)))
    on_log: Callable[[int, dict[str, Any]], Any] | None = field(
        default=None, metadata=_checked(FUNCTION.or_else(None))
    )

    def __init__(self, **given: Any) -> None:
        vars(self).update(given)  # a default is an attribute of the class
        for name, value in given.items():
            option = FIELDS[name]
            if option.metadata and value is not option.default:
                check_option(name, value, option.metadata["kind"])
        if self.memory_budget is not None and self.length_of_chunk is not None:
            raise OptionError(
                f"`memory_budget` is {self.memory_budget} and `chunk_size` is {self.chunk_size}. "
                "A budget limits `chunk_size='auto'`: leave out one of the two."
            )
        if (self.log_every is None) != (self.on_log is None):
            raise OptionError(
                f"`log_every` is {self.log_every} and `on_log` is {shown(self.on_log)}: give both "
                "(a number of steps, and the function to call after them), or neither."
            )

    @property
    def length_of_chunk(self) -> int | None:
        """The number of steps of a chunk; ``None``: it is chosen."""
        return None if self.chunk_size in (None, "auto") else int(self.chunk_size)

    @property
    def functions(self) -> dict[str, Callable[..., PyTree]]:
        """The user's functions by name, for which programs are compiled."""
        if self.step_fn is REQUIRED:
            return {}
        functions = {"step_fn": self.step_fn}
        if self.update_fn is not None:
            functions["update_fn"] = self.update_fn
        if self.optimizer is not None:
            functions["optimizer"] = self.optimizer.update
        return functions

    @property
    def static(self) -> tuple[object, ...]:
        """The values, except functions, for which programs are compiled."""
        values: tuple[object, ...] = _static_values(self)
        return values

    @property
    def compiled(self) -> Options:
        """The options that a program depends on: without arrays, progress and logs."""
        names = ("step_fn", "optimizer", "update_fn", *_STATIC)
        return Options(**{name: getattr(self, name) for name in names})

    @property
    def is_logged(self) -> bool:
        """Whether the call shows its progress or is logged."""
        return self.progress or self.log_every is not None


FIELDS = {option.name: option for option in fields(Options)}
_WITH_KIND = [option for option in FIELDS.values() if option.metadata]
_STATIC = [option.name for option in _WITH_KIND if option.metadata["is_static"]]
_static_values = operator.attrgetter(*_STATIC)


# --- options of each method, for type checkers


class PredictOptions(TypedDict, total=False):
    """Options of `FunctionalLearner.predict`."""

    reset: ArrayLike | None


class SequenceOptions(PredictOptions, total=False):
    """Options of a sequence that is run in chunks."""

    chunk_size: int | str | None
    memory_budget: int | None


class EvolveOptions(SequenceOptions, total=False):
    """Options of `FunctionalLearner.evolve`."""

    return_outputs: bool


class LossOptions(PredictOptions, total=False):
    """Options of a sequence with a loss."""

    step_fn: Required[Callable[..., PyTree]]
    window: int | None
    mask: ArrayLike | None
    unit_aware: bool


class GradientOptions(LossOptions, SequenceOptions, total=False):
    """Options of `FunctionalLearner.grad`, except those that determine the type of its result."""

    reduction: str
    weights: Mapping[PyTree, brainstate.State] | None


class StreamOptions(LossOptions, total=False):
    """The same for `FunctionalLearner.online`."""

    optimizer: Any
    update_fn: Callable[..., PyTree] | None
    every: int
    nonfinite: str


class WatchOptions(TypedDict, total=False):
    """Options of the methods of a `Learner` that their functional counterparts do not have."""

    progress: bool
    log_every: int | None
    on_log: Callable[[int, dict[str, Any]], Any] | None


class WatchedGradientOptions(GradientOptions, WatchOptions, total=False):
    """Options of `Learner.etrace_grad`, except those that determine the type of its result."""


class WatchedStreamOptions(StreamOptions, WatchOptions, total=False):
    """The same for `Learner.etrace_online`."""


class WatchedSequenceOptions(SequenceOptions, WatchOptions, total=False):
    """The same for `Learner.etrace_evolve`."""


class WatchedPredictOptions(PredictOptions, WatchOptions, total=False):
    """Options of `Learner.predict`."""


# --- options of each method, at run time


METHODS = {
    "etrace_grad": frozenset({*GradientOptions.__annotations__, "has_aux", "return_value"}),
    "etrace_online": frozenset({*StreamOptions.__annotations__, "has_aux"}),
    "etrace_evolve": frozenset(EvolveOptions.__annotations__),
    "predict": frozenset(PredictOptions.__annotations__),
}
"""Names of the options of each method of a learner that runs sequences."""

WATCHED = {method: names.union(WatchOptions.__annotations__) for method, names in METHODS.items()}
"""The same with the options of a call that is logged while it runs."""


def takes(names: frozenset[str]) -> Callable[[Function], Function]:
    """Give a function of ``**options`` a signature with these options."""
    options = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=option.default, annotation=option.type
        )
        for name, option in FIELDS.items()
        if name in names
    ]

    def signed(function: Function) -> Function:
        signature = inspect.signature(function)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        signature = signature.replace(parameters=[*own, *options])
        function.__signature__ = signature  # type: ignore[attr-defined]  # of any function
        return function

    return signed


def options_of(
    method: str, given: Mapping[str, Any], names: Mapping[str, frozenset[str]] = METHODS
) -> Options:
    """Return the options of a call of a method.

    Raises
    ------
    TypeError
        For an option that the method does not have, or if a required one is missing.
    OptionError
        For a value that is not accepted.
    """
    taken = names[method]
    if not taken.issuperset(given) or ("step_fn" in taken and "step_fn" not in given):
        raise TypeError(f"`{method}` {complaint(given, taken)}")
    return Options(**given)


def complaint(given: Mapping[str, Any], taken: frozenset[str]) -> str | None:
    """Return the error in the names of options, as `wrong_names` does."""
    known = {name: option.default is REQUIRED for name, option in FIELDS.items() if name in taken}
    return wrong_names(given, known)
