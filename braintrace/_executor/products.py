r"""Products whose other factor may be anything where one of them is zero.

A sample that starts anew, or a step whose loss does not count, has a factor of zero: a
:math:`P^s` before the restart, a learning signal :math:`\lambda^s`. What it is multiplied by may be
NaN or infinite there (a padded input, the state that has read it, its trace), and
``0 * NaN`` is NaN. Such a factor selects: it is zero whatever the other one is.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp

from .._etrace_op import Arrays, SideBySide, get_primitive_spec, propagate
from .._graph import Records
from .active_outputs import ActiveOutputs
from .layout import TraceSite
from .zero import as_arrays, is_zero

Input: TypeAlias = jax.Array | SideBySide | None
"""The inputs of an operation, if it has any."""


@dataclasses.dataclass(frozen=True)
class Products:
    """How factors are multiplied.

    Attributes
    ----------
    times
        ``(factor, value) -> product``, element by element.
    inputs
        ``(site, x, factor) -> x``, for a product of an operation's inputs with factors of the shape
        of its outputs, time first in both.
    trace
        ``(site, active, factor, trace) -> trace``, for a product of a trace with a factor per
        position of the group.
    """

    times: Callable[[jax.Array, jax.Array], jax.Array]
    inputs: Callable[[TraceSite, Input, jax.Array], Input]
    trace: Callable[[TraceSite, ActiveOutputs, jax.Array, Arrays], Arrays]


def where_kept(site: TraceSite, active: ActiveOutputs, kept: jax.Array, trace: Arrays) -> Arrays:
    """Return a trace with zeros for the positions of the group that are not kept."""
    if is_zero(trace):
        return trace
    select = functools.partial(where_slots, site)
    selected: Arrays = site.each_layer(select, active.pick(site.to_slots(kept)), trace)
    return selected


def where_slots(site: TraceSite, kept: jax.Array, trace: Arrays) -> Arrays:
    """Return a trace of one layer with zeros for the outputs that are not kept."""
    entries = _entries(site, kept, trace)
    return {name: jnp.where(entries[name], leaf, 0) for name, leaf in trace.items()}


def which_entries(
    site: TraceSite, active: ActiveOutputs, positions: jax.Array, trace: Arrays
) -> Arrays:
    """Return which entries of a trace, which may be given by its shapes, belong to positions."""
    of_layer, slots = functools.partial(_entries, site), active.pick(site.to_slots(positions))
    entries: Arrays = site.each_layer(of_layer, slots, as_arrays(trace))
    return entries


def _entries(site: TraceSite, slots: jax.Array, trace: Arrays) -> Arrays:
    """Return which entries of a trace of one layer belong to some outputs.

    The rules alone know which output an entry of a trace belongs to.
    """
    slots = slots.astype(site.relation.y_var.aval.dtype)
    ones = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, slots.dtype), trace)
    found = propagate(*site.operation, slots, ones)
    return {name: entry != 0 for name, entry in found.items()}


def _times(factor: jax.Array, value: jax.Array) -> jax.Array:
    return jnp.where(factor == 0, 0, factor * value)


def _inputs(site: TraceSite, x: Input, factor: jax.Array) -> Input:
    """Return inputs that are finite wherever all factors of a step, or sample, are zero."""
    lead = 2 if get_primitive_spec(site.relation.primitive).batched else 1
    counts = (factor != 0).any(tuple(range(lead, factor.ndim)))

    def finite(x: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return x
        of_step = counts.reshape(*counts.shape, *(1,) * (x.ndim - lead))
        return jnp.where(of_step | jnp.isfinite(x), x, 0)

    found: Input = jax.tree.map(finite, x)
    return found


def _trace(site: TraceSite, active: ActiveOutputs, factor: jax.Array, trace: Arrays) -> Arrays:
    return where_kept(site, active, factor != 0, trace)


PLAIN = Products(operator.mul, lambda site, x, factor: x, lambda site, active, factor, trace: trace)
SELECTING = Products(_times, _inputs, _trace)


def products_of_gradient(records: Records) -> Products:
    """Return how the signals of a recorded chunk are multiplied.

    Without a mask, a step that is not finite has a loss that is not either, and its gradient is
    right to say so.
    """
    return SELECTING if records.has_mask else PLAIN


def products_of_traces(records: Records) -> Products:
    """Return how the traces before and after a recorded chunk are multiplied."""
    return SELECTING if records.zeros_select else PLAIN
