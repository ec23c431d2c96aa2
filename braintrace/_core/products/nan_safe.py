r"""NaN-safe products: the result of a zero factor is zero.

A sample that is reset, or a step whose loss is masked, has a zero factor: a :math:`P^s` before the
reset, a learning signal :math:`\lambda^s`. The other factor may be NaN or infinite there (a padded
input, a state that has read it, its trace), and ``0 * NaN`` is NaN. These products select zeros
instead, if ``selects`` is true: for the signals of a chunk with a mask, and for traces also if
samples are reset. Without a mask, a non-finite step has a non-finite loss, and its gradient must
show that.
"""

import functools

import jax
import jax.numpy as jnp

from ..._etrace_op import Arrays, get_primitive_spec, propagate
from ..layout import TraceSite
from ..zero import as_arrays, is_zero
from .active_outputs import ActiveOutputs


def where_elements(
    site: TraceSite, active: ActiveOutputs, flags: jax.Array, trace: Arrays
) -> Arrays:
    """Return a trace with zeros for the elements of the group without a flag."""
    if is_zero(trace):
        return trace
    select = functools.partial(where_outputs, site)
    selected: Arrays = site.each_layer(select, active.pick(site.to_outputs(flags)), trace)
    return selected


def where_outputs(site: TraceSite, flags: jax.Array, trace: Arrays) -> Arrays:
    """Return a trace of one layer with zeros for the outputs without a flag."""
    entries = _entries(site, flags, trace)
    return {name: jnp.where(entries[name], leaf, 0) for name, leaf in trace.items()}


def which_entries(
    site: TraceSite, active: ActiveOutputs, positions: jax.Array, trace: Arrays
) -> Arrays:
    """Return the entries of a trace, possibly given by shapes, that belong to group elements."""
    of_layer, outputs = functools.partial(_entries, site), active.pick(site.to_outputs(positions))
    entries: Arrays = site.each_layer(of_layer, outputs, as_arrays(trace))
    return entries


def _entries(site: TraceSite, outputs: jax.Array, trace: Arrays) -> Arrays:
    """Return the entries of a trace of one layer that belong to some outputs.

    Only the rules of the operation define the output of each trace entry.
    """
    outputs = outputs.astype(site.relation.y_var.aval.dtype)
    ones = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, outputs.dtype), trace)
    result = propagate(*site.operation, outputs, ones)
    return {name: entry != 0 for name, entry in result.items()}


def times(factor: jax.Array, value: jax.Array, selects: bool) -> jax.Array:
    """Return the elementwise product; with ``selects``, it is zero where the factor is."""
    product = factor * value
    return jnp.where(factor == 0, 0, product) if selects else product


def finite_inputs(site: TraceSite, x: jax.Array | None, factor: jax.Array) -> jax.Array | None:
    """Return inputs that are finite where all factors of a step, or sample, are zero.

    Factors have the shape of the operation's outputs, time first like the inputs.
    """
    if x is None or not jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    lead = 2 if get_primitive_spec(site.relation.primitive).batched else 1
    counts = (factor != 0).any(tuple(range(lead, factor.ndim)))
    of_step = counts.reshape(*counts.shape, *(1,) * (x.ndim - lead))
    return jnp.where(of_step | jnp.isfinite(x), x, 0)
