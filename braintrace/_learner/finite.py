"""Numbers that are not finite: which parameter has them first, and which samples are spoiled."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import brainstate
import jax
import jax.numpy as jnp
import numpy as np

from .._errors import NonFiniteError, OptionError
from .._executor import samples_with as samples_of_traces_with
from .._executor import unpack
from .._graph import Batch, Traces
from .._jax import is_tracer
from .._sharding import on_host
from .._typing import Path, PyTree

if TYPE_CHECKING:
    from .._algorithms import ETraceAlgorithm


def first_not_finite(losses: jax.Array, gradients: PyTree) -> jax.Array:
    """Return the index of the first leaf that is not finite, their number for a loss, -1 for none.

    Parameters
    ----------
    losses
        One loss, or several.
    gradients
        A pytree; its leaves are counted.
    """
    leaves = [*jax.tree.leaves(gradients), losses]
    found = jnp.stack([_has_not_finite(leaf) for leaf in leaves])
    return jnp.where(jnp.any(found), jnp.argmax(found), -1).astype(jnp.int32)


def is_finite(
    has_mask: bool,
    results: tuple[jax.Array, PyTree, PyTree],
    states: Sequence[brainstate.State],
    values: list[PyTree],
) -> bool:
    """Tell whether losses, and the new values of States that outlive a sequence, are finite.

    Parameters
    ----------
    has_mask
        Whether there are steps without a loss: what these have spoiled shows in the other States.
    results
        Losses, and whatever else a stream returns.
    states, values
        The States that it writes, and their new values.
    """
    kept: list[PyTree] = []
    passing: list[PyTree] = []
    for state, value in zip(states, values, strict=True):
        (passing if isinstance(state, brainstate.ShortTermState) else kept).append(value)
    if not _all_finite(_inexact((results[0], kept))):
        return False
    return not (has_mask and _has_nan(_inexact(passing)))


def _has_not_finite(leaf: jax.Array) -> jax.Array:
    """Tell whether a number is not finite: times zero, every other one is zero, and so are sums.

    Rows are added up side by side, which takes a processor a fraction of the time.
    """
    sums = jnp.sum(leaf * jnp.zeros((), leaf.dtype), axis=0) if leaf.ndim > 1 else leaf
    return jnp.any(~jnp.isfinite(sums))


def _are_finite(leaves: list[jax.Array]) -> jax.Array:
    return ~jnp.any(jnp.stack([_has_not_finite(leaf) for leaf in leaves]))


_all_finite = jax.jit(_are_finite)


def _is_one_nan(leaves: list[jax.Array]) -> jax.Array:
    return jnp.any(jnp.stack([jnp.any(jnp.isnan(leaf)) for leaf in leaves]))


_any_nan = jax.jit(_is_one_nan)


def _has_nan(leaves: list[jax.Array]) -> bool:
    return bool(leaves) and bool(_any_nan(leaves))


def samples_with(
    algorithm: ETraceAlgorithm,
    is_bad: Callable[[jax.Array], jax.Array],
    values: dict[Path, PyTree],
    carried: Traces,
) -> jax.Array:
    """Return which samples have a state or a trace with a bad number.

    That is one flag for all of them where they cannot start anew one by one.

    Parameters
    ----------
    algorithm
        The algorithm.
    is_bad
        Tells for every number of an array whether it is bad.
    values
        Of its short-term States.
    carried
        Its traces, as they are carried.
    """
    traces, specs = unpack(carried), algorithm.compiled.trace_specs
    batch, samples = algorithm.graph.batch, algorithm.graph.batch.samples
    is_apart = algorithm.graph.whole is None or algorithm.graph.whole.samples == samples
    if samples is not None and is_apart and not batch.unclear:
        with contextlib.suppress(OptionError):  # they share a trace
            of_traces = samples_of_traces_with(is_bad, specs, traces, samples)
            of_states = _samples_of_states(batch, is_bad, values)
            return functools.reduce(jnp.logical_or, of_states, of_traces)
    leaves = _inexact((values, traces))
    return jnp.any(jnp.stack([jnp.any(is_bad(leaf)) for leaf in leaves]))


def _samples_of_states(
    batch: Batch, is_bad: Callable[[jax.Array], jax.Array], values: dict[Path, PyTree]
) -> Iterator[jax.Array]:
    """Yield which samples have a bad number in each leaf: all, in one that belongs to all."""
    for path, value in values.items():
        for index, leaf in enumerate(jax.tree.leaves(value)):
            if jnp.issubdtype(leaf.dtype, jnp.inexact):
                axis = batch.axis_at(path, index)
                others = tuple(a for a in range(leaf.ndim) if a != axis)
                yield jnp.any(is_bad(leaf), axis=others)


def is_not_finite(leaf: jax.Array) -> jax.Array:
    """Tell for every number whether it is not finite."""
    return ~jnp.isfinite(leaf)


def _inexact(tree: PyTree) -> list[jax.Array]:
    return [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]


def check_finite(losses: jax.Array, verdicts: jax.Array, names: list[str], every: int) -> None:
    """Refuse a stream in which a loss or a gradient is not finite.

    Parameters
    ----------
    losses
        Of every step.
    verdicts
        For every step, what `first_not_finite` says of it, or of its block.
    names
        Of the leaves of the gradients.
    every
        Length of a block.

    Raises
    ------
    NonFiniteError
        If there is one, or more.
    OptionError
        If the numbers are not there, inside a transformation.
    """
    if is_tracer(verdicts):
        raise OptionError(
            "`nonfinite='raise'` cannot look at numbers inside a transformation. Use 'skip' there, "
            "or call `etrace_online` outside."
        )
    by_step = on_host(verdicts)
    (bad,) = np.nonzero(by_step >= 0)
    if not bad.size:
        return
    start = int(bad[0])
    values = on_host(losses)
    block = values[start : start + every]
    (of_block,) = np.nonzero(~np.isfinite(block))
    step = start + int(of_block[0]) if of_block.size else start
    index = int(by_step[start])
    raise NonFiniteError(
        step, float(values[step]), names[index] if index < len(names) else None, len(block)
    )
