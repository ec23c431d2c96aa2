"""What the methods of a learner take: options, weights, sequences, a mask."""

import dataclasses
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Required, TypeAlias, TypedDict

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from .._algorithms import ETraceAlgorithm
from .._arguments import (
    BOOLEAN,
    POSITIVE,
    Kind,
    array_of,
    check_arrays,
    check_option,
    common_length,
    one_of,
    shown,
    type_of,
)
from .._errors import DtypeError, OptionError, ShapeError
from .._jax import is_tracer
from .._sharding import on_host
from .._typing import Path, PyTree

ALGORITHM = Kind(
    "an algorithm such as `braintrace.D_RTRL(model)`",
    lambda value: isinstance(value, ETraceAlgorithm),
)


REDUCTION = one_of("mean", "sum")
NONFINITE = one_of("ignore", "raise", "skip")
CHUNK_SIZE = POSITIVE.or_else("auto")
MEMORY_BUDGET = POSITIVE.or_else(None)


Gradients: TypeAlias = PyTree
"""A dict by the paths of parameters, or by the keys of ``weights``; of a `from_function` model a
pytree like its ``params``. Which one, the type of a learner does not tell."""


class WatchOptions(TypedDict, total=False):
    """How a method of a learner is watched."""

    progress: bool
    log_every: int | None
    on_log: Callable[[int, dict[str, Any]], Any] | None


class GradientOptions(TypedDict, total=False):
    """What `FunctionalLearner.grad` takes beside what decides on the type of its result."""

    step_fn: Required[Callable[..., PyTree]]
    mask: ArrayLike | None
    reduction: str
    chunk_size: int | str
    memory_budget: int | None
    unit_aware: bool
    reset: ArrayLike | None
    weights: Mapping[PyTree, brainstate.State] | None


class StreamOptions(TypedDict, total=False):
    """The same for `FunctionalLearner.online`."""

    step_fn: Required[Callable[..., PyTree]]
    update_fn: Callable[..., PyTree] | None
    optimizer: Any
    every: int
    mask: ArrayLike | None
    nonfinite: str
    unit_aware: bool
    reset: ArrayLike | None


class WatchedGradientOptions(GradientOptions, WatchOptions, total=False):
    """The same for `Learner.etrace_grad`."""


class WatchedStreamOptions(StreamOptions, WatchOptions, total=False):
    """The same for `Learner.etrace_online`."""


class SequenceOptions(WatchOptions, total=False):
    """The same for `Learner.etrace_evolve`."""

    chunk_size: int | str
    memory_budget: int | None
    reset: ArrayLike | None


@dataclasses.dataclass(frozen=True)
class Chosen:
    """The parameters that somebody wants gradients for.

    Attributes
    ----------
    items
        Paths in the model, by the user's keys.
    """

    items: tuple[tuple[Hashable, Path], ...]

    @property
    def paths(self) -> dict[Hashable, Path]:
        """The same as a dict."""
        return dict(self.items)


def chosen_among(parameters: Mapping[Path, brainstate.State], weights: PyTree) -> Chosen | None:
    """Return which of the parameters a user's dict of States has; ``None``: all.

    Raises
    ------
    OptionError
        If it is no dict, or has something else.
    """
    if weights is None:
        return None
    hint = "expected a dict of parameters of the model, some of `model.states(ParamState)`"
    if not isinstance(weights, Mapping):
        raise OptionError(f"`weights` is {shown(weights)}; {hint}.")
    paths = {id(state): path for path, state in parameters.items()}
    for key, state in weights.items():
        if id(state) not in paths:
            raise OptionError(f"`weights[{shown(key)}]` is {shown(state)}; {hint}.")
    return Chosen(tuple((key, paths[id(state)]) for key, state in weights.items()))


@dataclasses.dataclass(frozen=True)
class Options:
    """How a sequence is run, and what is returned of it; see `Learner.etrace_grad`.

    Raises
    ------
    OptionError
        For a value that is not accepted, or a budget where it would decide nothing.
    """

    reduction: str = "mean"
    chunk_size: int | str = "auto"
    memory_budget: int | None = None
    has_aux: bool = False
    unit_aware: bool = False
    every: int = 1
    nonfinite: str = "ignore"
    weights: Chosen | None = None
    return_outputs: bool = True
    return_value: bool = dataclasses.field(default=False, compare=False)  # the same is compiled

    def __post_init__(self) -> None:
        check_option("reduction", self.reduction, REDUCTION)
        check_option("chunk_size", self.chunk_size, CHUNK_SIZE)
        check_option("memory_budget", self.memory_budget, MEMORY_BUDGET)
        if self.memory_budget is not None and self.chunk_size != "auto":
            raise OptionError(
                f"`memory_budget` is {self.memory_budget} and `chunk_size` is {self.chunk_size}. A "
                "budget is for `chunk_size='auto'`, which it limits: leave out one of the two."
            )
        check_option("has_aux", self.has_aux, BOOLEAN)
        check_option("unit_aware", self.unit_aware, BOOLEAN)
        check_option("every", self.every, POSITIVE)
        check_option("nonfinite", self.nonfinite, NONFINITE)
        check_option("return_outputs", self.return_outputs, BOOLEAN)
        check_option("return_value", self.return_value, BOOLEAN)


PLAIN = Options()


def shapes_of(sequences: PyTree) -> list[PyTree]:
    """Return the types of all arrays of sequences.

    Raises
    ------
    DtypeError, OptionError
        If there is something else among them.
    """
    try:
        return [type_of(leaf) for leaf in jax.tree.leaves(sequences)]
    except (TypeError, ValueError, OverflowError):
        for index, sequence in enumerate(sequences):
            check_arrays(f"sequence {index}", sequence)
        raise


def length_of(sequences: PyTree) -> int:
    """Return the number of steps of sequences that a user gives.

    Raises
    ------
    DtypeError, OptionError, ShapeError
        If they are no sequences, or differ in length.
    """
    return common_length([aval.shape for aval in shapes_of(sequences)], "sequence")


def weights_of(mask: ArrayLike, steps: int, reduction: str) -> jax.Array:
    """Return a mask as real weights of the steps' losses.

    Raises
    ------
    DtypeError
        If it is not real.
    ShapeError
        If there is not one weight per step.
    OptionError
        If a weight is not finite, or the sum that a mean is divided by is too large.
    """
    given = array_of("mask", mask)
    is_real = any(jnp.issubdtype(given.dtype, kind) for kind in (bool, jnp.integer, jnp.floating))
    if not is_real:
        raise DtypeError(f"`mask` has dtype {given.dtype}; expected real weights.")
    weights = given.astype(jnp.result_type(float))
    if weights.shape != (steps,):
        raise ShapeError(
            f"`mask` has shape {weights.shape}; expected one weight per step, ({steps},)."
        )
    if is_tracer(weights):
        return weights
    values = on_host(weights)
    if not np.all(np.isfinite(values)):
        raise OptionError("`mask` has weights that are not finite (NaN or infinity).")
    with np.errstate(over="ignore"):
        total = np.sum(values)
    # XLA multiplies by the reciprocal, and takes one below the smallest normal number as zero.
    largest = 1 / np.finfo(values.dtype).tiny
    if reduction == "mean" and not abs(total) < largest:
        raise OptionError(
            f"`mask` has weights of sum {total}, by which a mean in {values.dtype} cannot be "
            f"divided: expected less than {largest:.1e}. Scale them down; only ratios matter."
        )
    return weights
