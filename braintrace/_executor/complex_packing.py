r"""The traces of two coupled states, as one array of complex numbers.

Two states of a group are coupled where one reads the other, position by position, in the next
step:

.. math::

    \epsilon'_a = D_{aa} \epsilon_a + D_{ac} \epsilon_c, \qquad
    \epsilon'_c = D_{ca} \epsilon_a + D_{cc} \epsilon_c.

An array that another one is computed from cannot be overwritten first, so that XLA copies traces
at every step: both where each reads the other, and one where it could do without any. As real and
imaginary part of :math:`z = \epsilon_a + i \epsilon_c` they are read and written together, once and
in place. The gradient is one product with ``z`` as well:

.. math::

    l_a \circ \epsilon_a + l_c \circ \epsilon_c = \mathrm{Re}\,[(l_a - i\, l_c) \circ z].

Of more than two states, each one in their order is packed with the next that is coupled to it; the
rest stay alone.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._etrace_op import PARTS_OF_COMPLEX, get_primitive_spec
from .._graph import ETraceGraph, Traces, TraceSpec, TraceSpecs
from .layout import TraceSite, trace_sites
from .zero import is_zero

BACKENDS = ("cpu", "gpu")
"""Where a complex number is read and written as one. Elsewhere its parts are apart anyway, and
packing them saves nothing."""


def coupled_states(site: TraceSite, states: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield pairs of coupled states among some, whose traces can be computed as complex numbers."""
    if not get_primitive_spec(site.relation.primitive).holomorphic:
        return
    left = [a for a in site.influence.reached if a in states]
    while left:
        a, *left = left
        for c in left:
            if not {(a, c), (c, a)}.isdisjoint(site.group.transition):
                left.remove(c)
                yield a, c
                break


def pack_specs(specs: TraceSpecs) -> TraceSpecs:
    """Return the specifications of traces with those of coupled states as pairs."""
    if jax.default_backend() not in BACKENDS:
        return specs
    found = dict(specs)
    for key, trace in specs.items():
        (first, *_) = jax.tree.leaves(trace) or [None]
        if first is not None and _can_share(trace, specs.get(first.packed_with)):
            (other, *_) = jax.tree.leaves(found.pop(first.packed_with))
            found[f"{key}+{other.state}"] = jax.tree.map(_as_complex, found.pop(key))
    return found


def _can_share(trace: Any, other: Any) -> bool:
    dtypes = {jnp.dtype(spec.dtype) for spec in jax.tree.leaves((trace, other))}
    return other is not None and len(dtypes) == 1 and dtypes <= PARTS_OF_COMPLEX


def _as_complex(spec: TraceSpec) -> TraceSpec:
    return dataclasses.replace(spec, dtype=jnp.result_type(spec.dtype, jnp.complex64))


def _key(site: TraceSite, a: int, c: int) -> str:
    return f"{site.key(a)}+{site.group.states[c].name}"


def _pack_two(traces: Traces, site: TraceSite, states: tuple[int, int]) -> None:
    real, imaginary = (traces.pop(site.key(a)) for a in states)
    traces[_key(site, *states)] = jax.tree.map(jax.lax.complex, real, imaginary)


def _packed_states(site: TraceSite, traces: Traces) -> list[tuple[int, int]]:
    every = itertools.combinations(site.influence.reached, 2)
    return [(a, c) for a, c in every if _key(site, a, c) in traces]


def kept_states(site: TraceSite, traces: Traces) -> tuple[int, ...]:
    """Return the states of a site whose traces are kept, alone or in a pair."""
    alone = (a for a in site.influence.reached if site.key(a) in traces)
    return tuple(sorted((*alone, *itertools.chain(*_packed_states(site, traces)))))


def kept_keys(site: TraceSite, traces: Traces) -> list[str]:
    """Return the keys of a site's traces, those of pairs among them."""
    alone = [site.key(a) for a in site.influence.reached if site.key(a) in traces]
    return alone + [_key(site, *states) for states in _packed_states(site, traces)]


def unpack(graph: ETraceGraph, traces: Traces) -> Traces:
    """Return the traces of single states; those known to be zero stay shapes."""
    found = dict(traces)
    for site in trace_sites(graph):
        for states in _packed_states(site, traces):
            pair = found.pop(_key(site, *states))
            for a, part in zip(states, (jnp.real, jnp.imag), strict=True):
                found[site.key(a)] = _part(part, pair)
    return found


def _part(part: Callable[[Any], Any], pair: Any) -> Any:
    if not is_zero(pair):
        return jax.tree.map(part, pair)
    return jax.tree.map(lambda leaf: jax.eval_shape(part, leaf), pair)


def pack_like(graph: ETraceGraph, traces: Traces, like: Traces) -> Traces:
    """Return the traces of single states, packed where other traces are."""
    found = dict(traces)
    for site in trace_sites(graph):
        for states in _packed_states(site, like):
            _pack_two(found, site, states)
    return {key: found[key] for key in like}


def factors_and_traces(
    site: TraceSite, signals: dict[int, jax.Array], traces: Traces
) -> Iterator[tuple[jax.Array, Any]]:
    """Yield every trace of a site with the factor that gives its part of the gradient.

    The factor of a pair is ``l_a - i l_c``; the real part of the product counts.

    Parameters
    ----------
    site
        A relation and a group.
    signals
        By state, in positions of the group; zero for those that are missing.
    traces
        Traces, pairs among them.
    """
    for a in site.influence.reached:
        if a in signals and site.key(a) in traces:
            yield signals[a], traces[site.key(a)]
    for states in _packed_states(site, traces):
        present = [signals[a] for a in states if a in signals]
        if present:
            trace = traces[_key(site, *states)]
            part = jnp.finfo(jax.tree.leaves(trace)[0].dtype).dtype
            dtype = jnp.result_type(*present, part)
            zero = jnp.zeros_like(present[0])
            real, imaginary = (signals.get(a, zero).astype(dtype) for a in states)
            yield jax.lax.complex(real, -imaginary), trace
