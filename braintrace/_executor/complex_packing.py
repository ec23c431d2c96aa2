r"""The traces of two coupled states, as one array of complex numbers.

Two states of a group are coupled where one reads the other, position by position, in the next
step:

.. math::

    \epsilon'_a = D_{aa} \epsilon_a + D_{ac} \epsilon_c, \qquad
    \epsilon'_c = D_{ca} \epsilon_a + D_{cc} \epsilon_c.

An array that another one is computed from cannot be overwritten first, so that XLA copies traces
at every step: both where each reads the other, and one where it could do without any. As real and
imaginary part of :math:`z = \epsilon_a + i \epsilon_c` they are read and written together, once and
in place. The gradient is one product with ``z`` as well, as long as the operation's rules multiply
complex numbers like real ones:

.. math::

    l_a \circ \epsilon_a + l_c \circ \epsilon_c = \mathrm{Re}\,[(l_a - i\, l_c) \circ z].

Of more than two states, each one in their order is packed with the next that is coupled to it; the
rest stay alone. Nobody else has to know: packed traces are a mapping of the same keys to the same
arrays as others. Only its leaves, which a program carries and overwrites, are complex.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from .._etrace_op import product_with_trace
from .._graph import Traces, TraceSpecs
from .._jax import AnyJaxpr, Var, open_jaxpr, runs_on_several_devices, struct_of, sub_jaxprs
from .._jaxpr import program_of
from .._jaxpr.dataflow import Kind, kinds_of_outputs
from .active_outputs import trace_shapes
from .layout import TraceSite
from .zero import is_zero

BACKENDS = ("cpu", "gpu")
"""Where a complex number is read and written as one. Elsewhere its parts are apart anyway, and
packing them saves nothing."""

PARTS = frozenset({jnp.dtype("float32"), jnp.dtype("float64")})
"""What the parts of a complex number can be."""

Pairs: TypeAlias = tuple[tuple[str, str], ...]
"""Keys of traces that share an array."""


# --- which traces are packed


def coupled_states(site: TraceSite, states: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield pairs of coupled states, among some, whose traces can be multiplied as one."""
    left = [a for a in site.influence.reached if a in states]
    is_known = False
    while left:
        a, *left = left
        for c in left:
            if not {(a, c), (c, a)}.isdisjoint(site.group.transition):
                is_known = is_known or _multiplies_complex_numbers(site)
                if not is_known:
                    return
                left.remove(c)
                yield a, c
                break


def pairs_of(specs: TraceSpecs) -> Pairs:
    """Return the keys of the traces that are kept as one array, by what is known of them."""
    if jax.default_backend() not in BACKENDS:
        return ()
    partners = {key: jax.tree.leaves(trace)[0].packed_with for key, trace in specs.items() if trace}
    pairs = ((key, other) for key, other in partners.items() if other in specs)
    return tuple(pair for pair in pairs if _can_share(*(specs[key] for key in pair)))


def _can_share(*traces: Any) -> bool:
    dtypes = {jnp.dtype(spec.dtype) for spec in jax.tree.leaves(traces)}
    return len(dtypes) == 1 and dtypes <= PARTS


def _multiplies_complex_numbers(site: TraceSite) -> bool:
    """Tell whether an operation's rules multiply complex signals and traces like real ones.

    They do where the product is linear in both, and where no step conjugates a number or makes a
    real one of it, unless it is the real part of such a product already. What cannot be told
    counts as no.
    """
    relation = site.relation

    def product(signal: Any, trace: Any, weights: Any) -> Any:
        return product_with_trace(*site.operation, signal, trace, weights)

    factors = jax.tree.map(_as_complex, (struct_of(relation.y_var.aval), trace_shapes(relation)))
    weights = {name: struct_of(var.aval) for name, var in relation.trainable_vars.items()}
    try:
        closed = jax.make_jaxpr(product)(*factors, weights)
    except Exception:  # a rule that is for real numbers may raise anything
        return False
    entries, operands = (len(jax.tree.leaves(tree)) for tree in (factors[1], weights))
    of_signal = [Kind.LINEAR, *[Kind.FREE] * (entries + operands)]
    of_trace = [Kind.FREE, *[Kind.LINEAR] * entries, *[Kind.FREE] * operands]
    found = [*kinds_of_outputs(closed, of_signal), *kinds_of_outputs(closed, of_trace)]
    is_linear = {Kind.LINEAR, Kind.ZERO}.issuperset(found)
    program = program_of(closed)
    signal, *others = program.in_vars
    joined = program.dependents_of([signal]) & program.dependents_of(others[:entries])
    return is_linear and _stays_complex(closed, joined)


def _as_complex(array: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, jnp.result_type(array.dtype, jnp.complex64))


def _stays_complex(jaxpr: AnyJaxpr, joined: Collection[Var] = ()) -> bool:
    """Tell whether no number loses its imaginary part before it depends on both factors.

    ``joined`` has the variables that do.
    """
    for equation in open_jaxpr(jaxpr)[0].eqns:
        is_last = equation.primitive.name == "real" and equation.outvars[0] in joined
        if _takes_apart(equation) and not is_last:
            return False
        if not all(map(_stays_complex, sub_jaxprs(equation))):
            return False
    return True


def _takes_apart(equation: Any) -> bool:
    if equation.primitive.name == "conj":
        return True
    is_call = any(True for _ in sub_jaxprs(equation))
    makes_real = any(jnp.issubdtype(var.aval.dtype, jnp.floating) for var in equation.outvars)
    is_complex = (jnp.issubdtype(a.aval.dtype, jnp.complexfloating) for a in equation.invars)
    return makes_real and not is_call and any(is_complex)


# --- traces that are packed


@jax.tree_util.register_pytree_with_keys_class
class PackedTraces(Mapping[str, Any]):
    """Traces by key, some of which are the parts of complex arrays.

    Parameters
    ----------
    arrays
        What is kept, by the key of a trace or by those of two, the first of them real; sorted.
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
        """Return the arrays, and the keys that they have here."""
        return tuple(self.arrays.values()), tuple(self.arrays)

    def tree_flatten_with_keys(self) -> tuple[list[Any], tuple[tuple[str, ...], ...]]:
        """Return the same, with names for the messages of JAX."""
        named = [(jax.tree_util.DictKey("+".join(k)), tree) for k, tree in self.arrays.items()]
        return named, tuple(self.arrays)

    @classmethod
    def tree_unflatten(
        cls, keys: tuple[tuple[str, ...], ...], arrays: Iterable[Any]
    ) -> "PackedTraces":
        """Put arrays back where they have been taken from."""
        return cls(dict(zip(keys, arrays, strict=True)))


def _applied(function: Any, *leaves: Any) -> Any:
    """Return a function of arrays, or its shape if all that is known of them is their shapes."""
    is_shape = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    return jax.eval_shape(function, *leaves) if is_shape else function(*leaves)


def pack(traces: Traces, pairs: Pairs) -> Traces:
    """Return traces of which some pairs are kept as one array."""
    pairs = tuple(pair for pair in pairs if traces.keys() >= set(pair))
    if not pairs:
        return traces
    packed = {key for pair in pairs for key in pair}
    arrays: dict[tuple[str, ...], Any] = {
        (key,): trace for key, trace in traces.items() if key not in packed
    }
    for pair in pairs:
        real, imaginary = (traces[key] for key in pair)
        arrays[pair] = jax.tree.map(_joined, real, imaginary)
    return of_arrays(arrays)


def _joined(real: Any, imaginary: Any) -> Any:
    return _applied(jax.lax.complex, real, imaginary)


def unpack(traces: Traces) -> Traces:
    """Return traces of which every one has an array of its own, in a plain dict."""
    return dict(traces) if isinstance(traces, PackedTraces) else traces


def pack_like(traces: Traces, like: Traces) -> Traces:
    """Return traces packed as others are."""
    pairs = tuple((keys[0], keys[1]) for keys in arrays_of(like) if len(keys) == 2)
    return pack({key: traces[key] for key in like}, pairs)


def map_arrays(function: Callable[[Any], Any], site: TraceSite, traces: Traces) -> Traces:
    """Return traces with a function of every array of one site in its place."""
    own = {site.key(a) for a in site.influence.reached}
    arrays = {
        keys: function(trace) if keys[0] in own else trace
        for keys, trace in arrays_of(traces).items()
    }
    return of_arrays(arrays)


def of_site(site: TraceSite, traces: Traces) -> Traces:
    """Return the traces of one site, packed as they are."""
    own = {site.key(a) for a in site.influence.reached}
    return of_arrays({keys: trace for keys, trace in arrays_of(traces).items() if keys[0] in own})


def renamed(traces: Traces, name: Callable[[str], str | None]) -> Traces:
    """Return traces, packed as they are, by other keys; without those that have none."""
    arrays = {}
    for keys, trace in arrays_of(traces).items():
        names = tuple(new for new in map(name, keys) if new is not None)
        if names:
            arrays[names] = trace
    return of_arrays(arrays)


def joined(parts: Iterable[Traces]) -> Traces:
    """Return the traces of several sites as one mapping, packed as they are."""
    return of_arrays({keys: trace for part in parts for keys, trace in arrays_of(part).items()})


def arrays_of(traces: Traces) -> Mapping[tuple[str, ...], Any]:
    """Return the arrays of traces, packed or not, by the keys of what is in each."""
    if isinstance(traces, PackedTraces):
        return traces.arrays
    return {(key,): trace for key, trace in traces.items()}


def of_arrays(arrays: Mapping[tuple[str, ...], Any]) -> Traces:
    """Return traces that have some arrays, by the keys of what is in each."""
    if any(len(keys) == 2 for keys in arrays):
        return PackedTraces(dict(sorted(arrays.items())))
    return {key: trace for (key,), trace in arrays.items()}


def factors_and_traces(
    site: TraceSite, signals: Mapping[int, jax.Array], traces: Traces
) -> Iterator[tuple[jax.Array, Any]]:
    """Yield every array of a site's traces with the factor that gives its part of the gradient.

    The factor of two states is ``l_a - i l_c``; the real part of the product counts.

    Parameters
    ----------
    site
        A relation and a group.
    signals
        By state, in positions of the group; zero for those that are missing.
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
            # The real part is taken before sums over devices, which all weights then share.
            for key, part in zip(pair, (jnp.real, jnp.imag), strict=True):
                if key in signal_of:
                    yield signal_of[key], jax.tree.map(part, trace)
        elif len(pair) == 2 and present:
            part = jnp.finfo(jax.tree.leaves(trace)[0].dtype).dtype
            dtype = jnp.result_type(*present, part)
            zero = jnp.zeros_like(present[0])
            real, imaginary = (signal_of.get(key, zero).astype(dtype) for key in pair)
            yield jax.lax.complex(real, -imaginary), trace
