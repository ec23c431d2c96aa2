r"""Traces between chunks: specifications, known zeros, pairs in complex arrays, updates in place.

At the start of a sequence every trace is zero. If this is known, a trace is represented by its
shapes alone (``jax.ShapeDtypeStruct``). XLA does not remove a product with zeros, since zero times
infinity is not zero, but a term that is never written has no cost.

Two states of a group are coupled if one reads the other, elementwise, in the next step:

.. math::

    \epsilon'_a = D_{aa} \epsilon_a + D_{ac} \epsilon_c, \qquad
    \epsilon'_c = D_{ca} \epsilon_a + D_{cc} \epsilon_c.

An array that another update still reads cannot be overwritten, so XLA copies traces at every step:
both if each state reads the other, and otherwise one, although it needs no copy. As real and
imaginary part of :math:`z = \epsilon_a + i \epsilon_c`, both are read and written once, in place.
The gradient is also one product with ``z``, if the operation's rules multiply complex numbers like
real ones, as derived rules do:

.. math::

    l_a \circ \epsilon_a + l_c \circ \epsilon_c = Re\,[(l_a - i\, l_c) \circ z].

Without packing, a stream of adaptive neurons with a leaky readout takes 2.8 times as long, a stream
through an LRU of 128 units 1.6 times, and a sequence of four LRUs that continues from traces 1.3 to
1.4 times (`stream, ALIF batch 32` and others, CPU, 2026-11-25).

If there are more than two states, each state, in order, is packed with the next one that is coupled
to it; the others are not packed. Packing is invisible elsewhere: packed traces are a mapping of the
same keys to the same arrays. Only its leaves, which a program carries and overwrites, are complex.

XLA overwrites an array in place only if it knows that every other use of the array comes first;
otherwise it copies the array. When XLA decides this, optimization barriers have been removed, so
the order is enforced by an operand (an ordering token, see `ordering_token`).

If the trace of one state is computed from the previous trace of another, but not conversely, it is
computed first (`readers_first`): the trace of a filter before the two traces of the filtered
neurons. Relative time of a streaming step of adaptive neurons with a leaky readout, compared with
no filters (64 x 1024 weights, 32 samples): 2.6 with the filter last, 1.8 with the filter first.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from .._errors import OptionError
from .._etrace_op.rules import has_declared_terms
from .._graph.graph import TraceSpec, TraceSpecs, specs_of
from .._graph.method import Traces
from .._jax_kernels import runs_on_several_devices
from .._typing import PyTree
from .sites import TraceSite


def is_zero(trace: PyTree) -> bool:
    """Test whether a trace is represented by its shapes alone."""
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(trace))


def as_arrays(traces: PyTree) -> PyTree:
    """Return traces with arrays of zeros instead of shapes."""
    return jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype) if is_zero(leaf) else leaf, traces
    )


def examples(shapes: PyTree) -> PyTree:
    """Return zeros with given shapes, as example arguments for tracing.

    Each is a single NumPy zero, broadcast to the shape: it takes no memory, while JAX would compile
    a program for each shape.
    """

    def example(leaf: Any) -> Any:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            return jnp.zeros(leaf.shape, leaf.dtype)
        return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)

    return jax.tree.map(example, shapes)


def widened(trace: PyTree, dtype: DTypeLike) -> PyTree:
    """Return a trace in the promoted type of its dtype and ``dtype``."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.promote_types(leaf.dtype, dtype)), trace)


# --- from specifications


def stored_specs(specs: TraceSpecs, dtype: DTypeLike | None) -> TraceSpecs:
    """Return the specifications of the stored arrays.

    Parameters
    ----------
    specs
        Trace specifications of a method.
    dtype
        Floating-point dtype of stored traces; ``None``: the model's dtype.
    """

    def kept(spec: TraceSpec) -> TraceSpec:
        is_other = spec.takes_trace_dtype and jnp.issubdtype(spec.dtype, jnp.floating)
        return dataclasses.replace(spec, dtype=dtype) if is_other else spec

    return specs if dtype is None else jax.tree.map(kept, specs)


def starting_traces(specs: TraceSpecs) -> Traces:
    """Return the initial traces of a sequence; zero traces are given by their shapes."""

    def start(spec: TraceSpec) -> jax.Array | jax.ShapeDtypeStruct:
        if isinstance(spec.initial, (int, float)) and spec.initial == 0:
            return jax.ShapeDtypeStruct(spec.shape, spec.dtype)
        return jnp.broadcast_to(jnp.asarray(spec.initial, spec.dtype), spec.shape)

    return jax.tree.map(start, specs)


def outliving(specs: TraceSpecs) -> list[str]:
    """Return the keys of traces that a reset does not change."""
    return [k for k, s in specs.items() if isinstance(s, TraceSpec) and s.outlives_reset]


def reset_traces(specs: TraceSpecs, traces: Traces, flags: jax.Array) -> Traces:
    """Return traces that are reset where flags, one per sample or one for all, are true.

    They are selected, not multiplied by zero: they may be NaN. Traces that outlive a reset
    continue.

    Raises
    ------
    OptionError
        If samples that share an array are to be reset separately.
    """

    def chosen(spec: TraceSpec, trace: jax.Array) -> jax.Array:
        if spec.outlives_reset:
            return trace
        return jnp.where(_at_entries(spec, flags), spec.initial, trace)

    return pack_like(jax.tree.map(chosen, specs, unpack(traces)), traces)


def samples_with(
    test: Callable[[jax.Array], jax.Array], specs: TraceSpecs, traces: Traces, samples: int
) -> jax.Array:
    """Return the samples that have an entry in their traces that passes a test.

    Samples are tested one after the other, so no array is larger than the traces.

    Raises
    ------
    OptionError
        If samples share an array.
    """

    def of_sample(flags: jax.Array) -> jax.Array:
        def passes(spec: TraceSpec, trace: jax.Array) -> jax.Array:
            if spec.outlives_reset or not jnp.issubdtype(trace.dtype, jnp.inexact):
                return jnp.zeros((), bool)
            is_other = _at_entries(spec, ~flags)
            # The test stays in the loop: before it, XLA would store a flag for every entry.
            return jnp.any(test(jnp.where(is_other, 0, trace)))

        result = jax.tree.leaves(jax.tree.map(passes, specs, traces))
        return jnp.any(jnp.stack([jnp.zeros((), bool), *result]))

    if samples == 1:
        return of_sample(jnp.ones(1, bool))[None]
    return jax.lax.map(of_sample, jnp.eye(samples, dtype=bool))


def _at_entries(spec: TraceSpec, flags: jax.Array) -> jax.Array:
    """Return flags of samples, one for all or one for each, at the entries of a trace."""
    if spec.samples is not None:
        return spec.samples(flags)
    if flags.ndim == 0:
        return flags
    if "batch" not in spec.axes:
        raise OptionError(
            f"All samples share the trace '{spec.operand}' of shape {spec.shape}, so this "
            "algorithm cannot reset single samples. Give `reset` one value per step."
        )
    axis = spec.axes.index("batch")
    return flags.reshape([size if a == axis else 1 for a, size in enumerate(spec.shape)])


def size_in_bytes(specs: TraceSpecs) -> int:
    """Return the total size of the arrays."""
    return sum(spec.nbytes for spec in specs_of(specs))


# --- pairs in complex arrays


BACKENDS = ("cpu", "gpu")
"""Backends that store complex numbers as pairs. Others store the parts separately, so packing saves
nothing."""

PARTS = frozenset({jnp.dtype("float32"), jnp.dtype("float64")})
"""Possible dtypes of the parts of a complex number."""

Pairs: TypeAlias = tuple[tuple[str, str], ...]
"""Keys of traces that share an array."""


def coupled_states(site: TraceSite, states: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield pairs of coupled states, among some, whose traces can be multiplied as one."""
    left = [a for a in site.influence.reached if a in states]
    while left and has_declared_terms(site.relation.primitive):
        a, *left = left
        for c in left:
            if not {(a, c), (c, a)}.isdisjoint(site.group.transition):
                left.remove(c)
                yield a, c
                break


def pairs_of(specs: TraceSpecs) -> Pairs:
    """Return the keys of the traces that share a complex array, from their specifications."""
    if jax.default_backend() not in BACKENDS:
        return ()
    partners = {key: jax.tree.leaves(trace)[0].packed_with for key, trace in specs.items() if trace}
    pairs = ((key, other) for key, other in partners.items() if other in specs)
    return tuple(pair for pair in pairs if _can_share(*(specs[key] for key in pair)))


def _can_share(*traces: Any) -> bool:
    dtypes = {jnp.dtype(spec.dtype) for spec in jax.tree.leaves(traces)}
    return len(dtypes) == 1 and dtypes <= PARTS


@jax.tree_util.register_pytree_with_keys_class
class PackedTraces(Mapping[str, Any]):
    """Traces by key, some of which are the parts of complex arrays.

    Parameters
    ----------
    arrays
        Stored arrays, by the key of a trace or by the keys of two, the real one first; sorted.
    """

    def __init__(self, arrays: dict[tuple[str, ...], Any]) -> None:
        self.arrays = arrays

    @property
    def _places(self) -> dict[str, tuple[str, ...]]:
        return {key: keys for keys in self.arrays for key in keys}

    def __getitem__(self, key: str) -> Any:
        keys = self._places[key]
        if len(keys) == 1:
            return self.arrays[keys]
        part = jnp.real if key == keys[0] else jnp.imag
        return jax.tree.map(lambda leaf: _applied(part, leaf), self.arrays[keys])

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[tuple[str, ...], ...]]:
        """Return the stored arrays, and their keys."""
        return tuple(self.arrays.values()), tuple(self.arrays)

    def tree_flatten_with_keys(self) -> tuple[list[Any], tuple[tuple[str, ...], ...]]:
        """Return the same, with names for the messages of JAX."""
        named = [(jax.tree_util.DictKey("+".join(k)), tree) for k, tree in self.arrays.items()]
        return named, tuple(self.arrays)

    @classmethod
    def tree_unflatten(
        cls, keys: tuple[tuple[str, ...], ...], arrays: Iterable[Any]
    ) -> "PackedTraces":
        """Return packed traces of stored arrays."""
        return cls(dict(zip(keys, arrays, strict=True)))


def _applied(function: Any, *leaves: Any) -> Any:
    """Return a function of arrays, or the shape of its result if only shapes are given."""
    is_shape = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    return jax.eval_shape(function, *leaves) if is_shape else function(*leaves)


def pack(traces: Traces, pairs: Pairs) -> Traces:
    """Return traces with some pairs stored as one array."""
    pairs = tuple(pair for pair in pairs if traces.keys() >= set(pair))
    if not pairs:
        return traces
    packed = {key for pair in pairs for key in pair}
    arrays: dict[tuple[str, ...], Any] = {
        (key,): trace for key, trace in traces.items() if key not in packed
    }
    for pair in pairs:
        real, imaginary = (traces[key] for key in pair)
        join = functools.partial(_applied, jax.lax.complex)
        arrays[pair] = jax.tree.map(join, real, imaginary)
    return of_arrays(arrays)


def unpack(traces: Traces) -> Traces:
    """Return traces as a plain dict, with a separate array for each."""
    return dict(traces) if isinstance(traces, PackedTraces) else traces


def pack_like(traces: Traces, like: Traces) -> Traces:
    """Return traces packed like others."""
    pairs = tuple((keys[0], keys[1]) for keys in arrays_of(like) if len(keys) == 2)
    return pack({key: traces[key] for key in like}, pairs)


def of_site(site: TraceSite, traces: Traces) -> Traces:
    """Return the traces of one site in the same packed form."""
    own = {site.key(a) for a in site.influence.reached}
    return of_arrays({keys: trace for keys, trace in arrays_of(traces).items() if keys[0] in own})


def renamed(traces: Traces, name: Callable[[str], str | None]) -> Traces:
    """Return traces in the same packed form with new keys, without keys that map to None."""
    arrays = {}
    for keys, trace in arrays_of(traces).items():
        names = tuple(new for new in map(name, keys) if new is not None)
        if names:
            arrays[names] = trace
    return of_arrays(arrays)


def joined(parts: Iterable[Traces]) -> Traces:
    """Return the traces of several sites as one mapping, in the same packed form."""
    return of_arrays({keys: trace for part in parts for keys, trace in arrays_of(part).items()})


def arrays_of(traces: Traces) -> Mapping[tuple[str, ...], Any]:
    """Return the stored arrays of traces, packed or not, by the keys of their traces."""
    if isinstance(traces, PackedTraces):
        return traces.arrays
    return {(key,): trace for key, trace in traces.items()}


def of_arrays(arrays: Mapping[tuple[str, ...], Any]) -> Traces:
    """Return traces with given stored arrays, by the keys of their traces."""
    if any(len(keys) == 2 for keys in arrays):
        return PackedTraces(dict(sorted(arrays.items())))
    return {key: trace for (key,), trace in arrays.items()}


def factors_and_traces(
    site: TraceSite, signals: Mapping[int, jax.Array], traces: Traces
) -> Iterator[tuple[jax.Array, Any]]:
    """Yield every stored array of a site's traces, with the factor of its gradient.

    The factor of two states is ``l_a - i l_c``; the gradient is the real part of the product.

    Parameters
    ----------
    site
        A relation and a group.
    signals
        By state, per element of the group; missing signals are zero.
    traces
        Packed or not.
    """
    signal_of = {site.key(a): signals[a] for a in site.influence.reached if a in signals}
    arrays = arrays_of(traces)
    for key, signal in signal_of.items():
        if (key,) in arrays:
            yield signal, arrays[key,]
    for pair, trace in arrays.items():
        present = [signal_of[key] for key in pair if key in signal_of]
        if len(pair) == 2 and runs_on_several_devices() and not is_zero(trace):
            # Take the real part before sums over devices, so that all weights share one sum.
            for key, part in zip(pair, (jnp.real, jnp.imag), strict=True):
                if key in signal_of:
                    yield signal_of[key], jax.tree.map(part, trace)
        elif len(pair) == 2 and present:
            part = jnp.finfo(jax.tree.leaves(trace)[0].dtype).dtype
            dtype = jnp.result_type(*present, part)
            zero = jnp.zeros_like(present[0])
            real, imaginary = (signal_of.get(key, zero).astype(dtype) for key in pair)
            yield jax.lax.complex(real, -imaginary), trace


Keys: TypeAlias = tuple[str, ...]
"""The keys of the traces in one array."""


def ordering_token(first: PyTree) -> jax.Array | None:
    """Return an ordering token: a false flag that depends on some arrays.

    It would be true if some number were equal to itself and different from itself. On several
    devices it is a constant, since it would otherwise need a collective.
    """
    result = [leaf for leaf in jax.tree.leaves(first) if leaf.size]
    if not result:
        return None
    return jnp.asarray(False) if runs_on_several_devices() else _never(*result)


def _never(*first: jax.Array) -> jax.Array:
    return jnp.any(jnp.stack([(n != n) & (n == n) for n in map(_one_number, first)]))


def _one_number(array: jax.Array) -> jax.Array:
    """Return the first element of an array; no axis is reshaped, since it may be sharded."""
    corner = jax.lax.slice(array, (0,) * array.ndim, (1,) * array.ndim)
    return corner.reshape(())


def readers_first(
    arrays: Iterable[Keys], reads: Collection[tuple[str, str]]
) -> Iterator[tuple[Keys, list[str]]]:
    """Yield arrays in an order in which readers come before the arrays that they read.

    Arrays that read each other have no such order: one of them comes first.

    Parameters
    ----------
    arrays
        The keys of the traces in each array.
    reads
        Pairs of keys: a trace, and a trace that it is computed from.

    Yields
    ------
    keys, readers
        Keys of an array, and keys of the earlier traces that read it.
    """
    left, done = list(arrays), list[str]()
    while left:
        free = (keys for keys in left if not _readers(keys, reads, chain(*left)))
        keys = next(free, left[0])
        left.remove(keys)
        yield keys, _readers(keys, reads, done)
        done += keys


def _readers(keys: Keys, reads: Collection[tuple[str, str]], among: Iterable[str]) -> list[str]:
    """Return those of some traces, outside of an array, that read a trace in it."""
    return [key for key in among if key not in keys and any((key, own) in reads for own in keys)]


def ordered_after(first: Sequence[PyTree], traces: Traces) -> Traces:
    """Return unchanged traces that depend on other arrays; see `ordering_token`."""
    return depend_on(ordering_token(first), traces)


def depend_on(flag: jax.Array | None, traces: Traces) -> Traces:
    """Return unchanged traces that depend on a flag."""
    if flag is None:
        return traces
    return jax.tree.map(lambda leaf: jnp.where(flag, jnp.zeros_like(leaf), leaf), traces)


def unfused(product: jax.Array, factor: jax.Array) -> jax.Array:
    """Return a product of a factor with traces that XLA computes separately.

    XLA of jaxlib 0.10 on a CPU fuses a product into the sum over an axis that it is added to. If it
    knows that all entries of the other factor are equal, as in traces that the program has just
    reset, it then reads uninitialised memory. It does not fuse a selection.
    """
    return ordered_after([factor], product)
