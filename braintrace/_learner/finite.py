"""Non-finite numbers: the first parameter and the samples that have them."""

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
    """Return the index of the first non-finite leaf, the number of leaves for a loss, -1 for none.

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
    """Test whether losses, and the new values of States that outlive a sequence, are finite.

    Parameters
    ----------
    has_mask
        Whether there are masked steps: their non-finite values appear in the other States.
    results
        Losses, and other results of a stream.
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
    """Test for non-finite numbers: times zero, all other numbers and their sums are zero.

    Rows are summed elementwise, which takes a CPU a fraction of the time.
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
    """Return the samples that have a state or a trace with a bad number.

    The result is one flag for all samples if these cannot be reset separately.

    Parameters
    ----------
    algorithm
        The algorithm.
    is_bad
        Elementwise predicate of bad numbers.
    values
        Values of its short-term States.
    carried
        Its traces, in carried form.
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
    """Yield the samples with a bad number in each leaf; a shared leaf counts for all samples."""
    for path, value in values.items():
        for index, leaf in enumerate(jax.tree.leaves(value)):
            if jnp.issubdtype(leaf.dtype, jnp.inexact):
                axis = batch.axis_at(path, index)
                others = tuple(a for a in range(leaf.ndim) if a != axis)
                yield jnp.any(is_bad(leaf), axis=others)


def is_not_finite(leaf: jax.Array) -> jax.Array:
    """Return an elementwise mask of non-finite numbers."""
    return ~jnp.isfinite(leaf)


def _inexact(tree: PyTree) -> list[jax.Array]:
    return [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]


def check_finite(losses: jax.Array, verdicts: jax.Array, names: list[str], every: int) -> None:
    """Refuse a stream in which a loss or a gradient is not finite.

    Parameters
    ----------
    losses
        Losses of every step.
    verdicts
        Result of `first_not_finite` for every step, or for its block.
    names
        Names of the leaves of the gradients.
    every
        Length of a block.

    Raises
    ------
    NonFiniteError
        If there is one, or more.
    OptionError
        Inside a transformation, where the numbers are unknown.
    """
    if is_tracer(verdicts):
        raise OptionError(
            "`nonfinite='raise'` cannot check values inside a transformation. Use 'skip' there, "
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
