"""Options and other arguments of a learner's methods."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple, TypeAlias

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import saiunit
from jax.typing import ArrayLike

from .._checks import common_length, shown
from .._errors import OptionError, ShapeError
from .._jax import own_copy
from .._runtime.model_states import States
from .._typing import Path, PyTree

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


ARRAYS = (jax.Array, np.ndarray, np.generic, saiunit.Quantity, brainstate.State)

Gradients: TypeAlias = PyTree
"""A dict by the paths of parameters, or by the keys of ``weights``; for a `from_function` model a
pytree like its ``params``. The type of a learner does not determine which one."""


Chosen: TypeAlias = tuple[tuple[Hashable, Path], ...]
"""The parameters whose gradients are requested: pairs of the user's key and the path."""


def chosen_among(parameters: States, weights: PyTree) -> Chosen:
    """Return the parameters in a user's dict of States.

    Raises
    ------
    OptionError
        If it contains other values.
    """
    paths = {id(state): path for path, state in parameters.items()}
    for key, state in weights.items():
        if id(state) not in paths:
            raise OptionError(
                f"`weights[{shown(key)}]` is {shown(state)}; expected a parameter of the model, "
                "one of `model.states(ParamState)`."
            )
    return tuple((key, paths[id(state)]) for key, state in weights.items())


def flattened(sequences: PyTree) -> tuple[list[Any], PyTree]:
    """Return arrays, or their types, and the structure of sequences."""
    leaves, tree = jax.tree.flatten(sequences)
    return [leaf if isinstance(leaf, jax.Array) else jax.typeof(leaf) for leaf in leaves], tree


def of_numbers(sequences: PyTree) -> PyTree:
    """Return sequences of arrays; tables and NumPy arrays are copied, see `own_copy`."""
    if all(map(isinstance, jax.tree.leaves(sequences), itertools.repeat(jax.Array))):
        return sequences
    return jax.tree.map(lambda x: np.array(x) if _is_table(x) else own_copy(x), sequences)


def _is_table(leaf: Any) -> bool:
    """Test whether a leaf is not an array, but defines its conversion to one of numbers."""
    if isinstance(leaf, ARRAYS) or not hasattr(type(leaf), "__array__"):
        return False
    return np.asarray(leaf).dtype.kind in "biufc"


def length_of(sequences: PyTree) -> int:
    """Return the number of steps of a user's sequences.

    Raises
    ------
    ShapeError
        If they have no steps, or differ in length.
    """
    return common_length([aval.shape for aval in flattened(sequences)[0]], "sequence")


def weights_of(mask: ArrayLike, steps: int) -> jax.Array:
    """Return a mask as weights of the steps' losses.

    Raises
    ------
    ShapeError
        If it does not have one weight per step.
    """
    weights = jnp.asarray(mask, float)
    if weights.shape != (steps,):
        raise ShapeError(
            f"`mask` has shape {weights.shape}; expected one weight per step, ({steps},). For a "
            "weight of each sample, pass the weights as another sequence, and multiply the losses "
            "of the samples in `step_fn`."
        )
    return weights


class Request(NamedTuple):
    """A call of one of a learner's methods.

    Attributes
    ----------
    method
        Its name.
    sequences, options
        The user's arguments; see `Learner.etrace_grad`.
    chosen
        The parameters whose gradients are requested; ``None``: all.
    start
        Index of its first step in the user's call.
    """

    method: str
    sequences: tuple[PyTree, ...]
    options: Options
    chosen: Chosen | None = None
    start: int = 0


def request_of(
    parameters: States, method: str, sequences: tuple[PyTree, ...], options: Options
) -> Request:
    """Return a call of a method.

    Raises
    ------
    OptionError
        If its options select no parameters of the model, or not exactly one kind of update.
    """
    if method == "etrace_online":
        _check_updates(options)
    sequences = of_numbers(sequences)
    if options.weights is None:
        return Request(method, sequences, options)
    chosen = chosen_among(parameters, options.weights)
    return Request(method, sequences, options, chosen)


def _check_updates(options: Options) -> None:
    """Refuse options with no update, or with two.

    Raises
    ------
    OptionError
        If both ``update_fn`` and ``optimizer`` are given, or none.
    """
    if options.update_fn is None and options.optimizer is None:
        raise OptionError(
            "`update_fn` and `optimizer` are both None; expected one of them, which changes the "
            "parameters after a step."
        )
    if options.update_fn is not None and options.optimizer is not None:
        raise OptionError(
            f"Both `update_fn` and `optimizer` are given ({shown(options.optimizer)}); expected "
            "one of them. In an `update_fn`, call the optimizer there."
        )
