"""Samples that start anew between two steps: at once, or when a driver comes to it."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import brainstate
import jax
import jax.numpy as jnp

from .._arguments import flags_of
from .._brainstate import peek
from .._errors import OptionError, ShapeError
from .._executor import over_first_axis
from .._graph import TracedModel
from .._interrupts import uninterrupted
from .._typing import Path, path_name
from .carried_traces import CarriedTraces
from .companions import check_companions, note_companions
from .compiled_step import CompiledStep
from .model_states import States, write_by_path


def start_anew(now: Any, initial: Any, flags: jax.Array) -> Any:
    """Return values in which some samples, or all, are as at the start of a sequence."""

    def chosen(old: jax.Array, new: jax.Array) -> jax.Array:
        mixed = jnp.where(over_first_axis(flags, old.ndim), new, old)
        return mixed if mixed.dtype == old.dtype else mixed.astype(old.dtype)  # keys have no astype

    return jax.tree.map(chosen, now, initial)


def restart_samples(
    step: CompiledStep,
    states: States,
    traces: CarriedTraces,
    fresh: Mapping[Path, Any],
    flags: jax.Array,
) -> None:
    """Let samples start anew: write initial values to States, and zeros to the traces."""
    check_companions(traces, states, step.followed)
    now = {path: states[path].value for path in fresh}
    anew = {path: start_anew(now[path], value, flags) for path, value in fresh.items()}
    after = None if traces.is_zero else step.restart(traces.read(), flags)
    with uninterrupted:
        if after is not None:
            traces.leave(lambda: after)
        write_by_path(states, anew)
        if after is not None:
            note_companions(traces, states, step.followed)


def check_where(where: Any, values: Mapping[Path, Any], batch_size: int | None = None) -> jax.Array:
    """Return which samples are to start anew: one flag for all of them, or one per sample.

    Raises
    ------
    ShapeError
        If these are no booleans, or not one per entry of the first axis of every value.
    OptionError
        If there is a batch size as well.
    """
    if batch_size is not None:
        raise OptionError(
            f"`reset_state` got both `where` and `batch_size={batch_size}`. Samples start anew "
            "in the batch that there is: leave out one of the two."
        )
    shapes = "(batch,), one per sample, or a single one"
    flags = flags_of("where", where, shapes, lambda flags: flags.ndim <= 1)
    if flags.ndim == 1:
        check_first_axes(f"`where` has shape {flags.shape}, one flag per sample", flags, values)
    return flags


def check_first_axes(given: str, flags: Any, values: Mapping[Path, Any]) -> None:
    """Refuse flags of single samples where they are not the first axis of every State.

    Parameters
    ----------
    given
        What has been given, for the message.
    flags
        Booleans whose last axis is the batch.
    values
        Values of the short-term States by path.

    Raises
    ------
    ShapeError
        Naming the first State that they do not fit.
    """
    (size,) = flags.shape[-1:]
    for path, value in values.items():
        for shape in map(jnp.shape, jax.tree.leaves(value)):
            if shape[:1] != (size,):
                raise ShapeError(
                    f"{given}, but State '{path_name(path)}' has shape {shape}: its first axis is "
                    f"not the batch of {size}. Give one flag for all samples."
                )


class RequestedRestarts:
    """Restarts that are asked for while a driver runs the user's code, for it to carry out.

    A request is a State, so that it passes through ``cond`` and ``for_loop``. The States live as
    long as the algorithm: what the user has compiled himself writes to those that it was traced
    with. brainstate does not look into this object.

    Attributes
    ----------
    is_collecting
        Whether `reset_state` is to ask for a restart instead of carrying it out.
    """

    def __init__(self) -> None:
        self.is_collecting = False
        self._flags: dict[tuple[int, ...], brainstate.State] = {}

    @property
    def states(self) -> Iterable[brainstate.State]:
        """States that are all false, but while a driver runs the user's code."""
        return self._flags.values()

    def prepare(self, values: Mapping[Path, Any]) -> None:
        """Make the States, outside of what is traced with them.

        Parameters
        ----------
        values
            Values of the short-term States.
        """
        samples = number_of_samples(values)
        for shape in [(), *([] if samples is None else [(samples,)])]:
            if shape not in self._flags:
                with jax.ensure_compile_time_eval():
                    self._flags[shape] = brainstate.State(jnp.zeros(shape, bool))

    def ask(
        self,
        values: Mapping[Path, Any],
        traced: TracedModel,
        batch_size: int | None,
        where: Any,
        options: Mapping[str, Any],
    ) -> None:
        """Ask for a restart of all samples, or of some.

        Parameters
        ----------
        values, traced
            Values of the short-term States, and the model that they are of.
        batch_size, where, options
            What the user gives to `reset_state`.

        Raises
        ------
        OptionError, ShapeError
            If samples cannot start anew like that within a stream.
        """
        present = (None, traced.batch_size or number_of_samples(values))
        if options or batch_size not in present:
            given = ", ".join([f"batch_size={batch_size}", *options])
            raise OptionError(
                f"`reset_state({given})` in `update_fn`: within a stream, samples start anew with "
                "the values and the batch that there are. Call `reset_state()` or "
                "`reset_state(where=...)` there, and this one between the calls of "
                "`etrace_online`."
            )
        flags = jnp.ones((), bool) if where is None else check_where(where, values)
        state = self._flags[flags.shape]
        state.value = state.value | flags

    @contextlib.contextmanager
    def collected(self) -> Iterator[list[jax.Array]]:
        """Collect what is asked for inside, as flags that are there when it has ended."""
        # `value` would record that the State is read: a step without requests has none of them.
        before = {shape: peek(state) for shape, state in self._flags.items()}
        asked: list[jax.Array] = []
        self.is_collecting = True
        try:
            yield asked
        finally:
            self.is_collecting = False
        for shape, state in self._flags.items():
            if peek(state) is not before[shape]:
                asked.append(state.value)
                state.value = jnp.zeros(shape, bool)


def number_of_samples(values: Mapping[Path, Any]) -> int | None:
    """Return the size of the first axis that all values of States have, or ``None``."""
    shapes = {jnp.shape(leaf)[:1] for value in values.values() for leaf in jax.tree.leaves(value)}
    return shapes.pop()[0] if len(shapes) == 1 and () not in shapes else None
