"""Options of the methods of a learner."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping
from typing import Any

import brainstate
from jax.typing import ArrayLike

from ..._errors import OptionError
from ..._typing import PyTree

CHOICES = {"reduction": ("mean", "sum"), "nonfinite": ("skip", "raise", "ignore")}
COUNTS = ("every", "window", "chunk_size", "memory_budget", "log_every")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Options:
    """The options of one call of a learner's method; see `Learner.etrace_grad`.

    Raises
    ------
    OptionError
        For an unknown word or a number below 1, or two options that exclude each other.
    """

    step_fn: Any = None
    optimizer: Any = None
    update_fn: Callable[..., PyTree] | None = None
    every: int = 1
    window: int | None = None
    mask: ArrayLike | None = None
    reduction: str = "mean"
    chunk_size: int | str | None = "auto"
    memory_budget: int | None = None
    checkpoint: bool = False
    nonfinite: str = "skip"
    has_aux: bool = False
    return_value: bool = False
    unit_aware: bool = False
    reset: ArrayLike | None = None
    weights: Mapping[PyTree, brainstate.State] | None = None
    return_outputs: bool = True
    progress: bool = False
    log_every: int | None = None
    on_log: Callable[[int, dict[str, Any]], Any] | None = None

    def __post_init__(self) -> None:
        for name, words in CHOICES.items():
            value = getattr(self, name)
            if value not in words:
                raise OptionError(f"`{name}` is {value!r}; expected one of {words}.")
        for name in COUNTS:
            value = getattr(self, name)
            if value not in (None, "auto") and operator.index(value) < 1:
                raise OptionError(f"`{name}` is {value}; expected a positive integer.")
        if self.memory_budget is not None and self.length_of_chunk is not None:
            raise OptionError(
                f"`memory_budget` is {self.memory_budget} and `chunk_size` is {self.chunk_size}. "
                "A budget limits `chunk_size='auto'`: leave out one of the two."
            )
        if (self.log_every is None) != (self.on_log is None):
            raise OptionError(
                f"`log_every` is {self.log_every} and `on_log` is {self.on_log}: give both "
                "(a number of steps, and the function to call after them), or neither."
            )

    @property
    def length_of_chunk(self) -> int | None:
        """The number of steps of a chunk; ``None``: it is chosen."""
        return None if self.chunk_size in (None, "auto") else int(self.chunk_size)

    @property
    def functions(self) -> list[Callable[..., PyTree]]:
        """The user's functions, for which programs are compiled."""
        update = None if self.optimizer is None else self.optimizer.update
        return [f for f in (self.step_fn, self.update_fn, update) if f is not None]

    @property
    def static(self) -> tuple[object, ...]:
        """The values, except functions, for which programs are compiled."""
        values: tuple[object, ...] = _static_values(self)
        return values

    @property
    def compiled(self) -> Options:
        """The options that a program depends on: without arrays, progress and logs."""
        return dataclasses.replace(self, **_NOT_COMPILED)

    @property
    def is_logged(self) -> bool:
        """Whether the call shows its progress or is logged."""
        return self.progress or self.log_every is not None


_NOT_COMPILED: dict[str, Any] = {
    **dict.fromkeys(("mask", "reset", "weights", "log_every", "on_log")),
    **dict.fromkeys(("return_value", "progress"), False),
}
_FUNCTIONS = ("step_fn", "optimizer", "update_fn")
_static_values = operator.attrgetter(
    *(f.name for f in dataclasses.fields(Options) if f.name not in {*_FUNCTIONS, *_NOT_COMPILED})
)
