"""Restarts of samples that are asked for in advance."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import brainstate
import jax
import jax.numpy as jnp

from .._brainstate import peek
from .._errors import OptionError
from .._graph import TracedModel
from .._typing import Path
from .restart import check_where


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
        samples = _number_of_samples(values)
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
        present = (None, traced.batch_size or _number_of_samples(values))
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


def _number_of_samples(values: Mapping[Path, Any]) -> int | None:
    """Return the size of the first axis that all values of States have, or ``None``."""
    shapes = {jnp.shape(leaf)[:1] for value in values.values() for leaf in jax.tree.leaves(value)}
    return shapes.pop()[0] if len(shapes) == 1 and () not in shapes else None
