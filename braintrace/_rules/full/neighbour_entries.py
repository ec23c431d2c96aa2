"""SnAp-n sparsity pattern: the state scalars that each parameter entry reaches within n steps.

See `neighbours`. An entry belongs to an operand of a product (after a mask or a transpose), or to a
parameter that is used in another way. The pattern is constant: it is computed at compilation, and
is the same for all samples.
"""

import dataclasses
import functools
import weakref
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from ..._core.flat_state import flat_state_of, row_dtype
from ..._core.zero import unfused
from ..._graph import ETraceGraph, ParameterUse, Structure
from .product_uses import Product, products_of, shape_of_sample

MOST_NUMBERS = 2**22
"""Maximum size of outputs times entries for an exact pattern, if an entry has several outputs."""


@dataclasses.dataclass(frozen=True, eq=False)
class Entries:
    """The entries of one array of parameters, and its trace.

    Attributes
    ----------
    key, name
        Keys of the array among the operands, and of its trace among the traces.
    shape, dtype
        Shape of the array, dtype of the trace.
    kinds
        The kind of every entry: entries of one kind reach the same state scalars.
    reach
        The state scalars that each kind reaches, ``(kinds, scalars)``.
    outputs
        The output of a sample that every entry contributes to, if each contributes to only one.
    use
        The product that the array is an operand of; ``None``: it is a parameter.
    """

    key: str
    name: str
    shape: tuple[int, ...]
    dtype: jax.typing.DTypeLike
    kinds: np.ndarray
    reach: np.ndarray
    outputs: np.ndarray | None = None
    use: ParameterUse | None = None

    @functools.cached_property
    def pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """Pairs of an entry and a state scalar that it reaches, sorted."""
        entries, numbers = np.nonzero(self.reach[self.kinds])
        return entries, numbers


_known: weakref.WeakKeyDictionary[ETraceGraph, dict[int, list[Entries]]] = (
    weakref.WeakKeyDictionary()
)


def entries_of(graph: ETraceGraph, n: int) -> list[Entries]:
    """Return the arrays that have traces; the result is cached per model."""
    by_n = _known.setdefault(graph, {})
    if n not in by_n:
        by_n[n] = [*_of_products(graph, n), *_of_parameters(graph, n)]
    return by_n[n]


def _of_products(graph: ETraceGraph, n: int) -> list[Entries]:
    structure, result = _structure(graph), []
    for product in products_of(graph):
        reach = within(structure.of_outputs[product.key], structure.transition, n)
        joined = _outputs_of(product)
        for place in map(str, product.use.operands):
            atom = graph.operand_atoms[product.operand_key][place]
            own = joined[place]
            if own.ndim == 1:
                kinds, of_kinds, outputs = own, reach, own
            else:
                first = structure.of_outputs[product.key].astype(np.float32)
                reached = within(own.astype(np.float32) @ first > 0, structure.transition, n)
                (of_kinds, kinds), outputs = _by_kind(reached), None
            key, dtype = product.operand_key, jnp.promote_types(product.dtype, atom.aval.dtype)
            result.append(
                Entries(key, place, atom.aval.shape, dtype, kinds, of_kinds, outputs, product.use)
            )
    return result


def _of_parameters(graph: ETraceGraph, n: int) -> list[Entries]:
    structure, flat, result = _structure(graph), flat_state_of(graph), []
    leaves = {leaf.name: leaf for leaf in graph.traced.parameters}
    for name, first in structure.of_parameters.items():
        if not first.any():
            continue
        reach, kinds = _by_kind(within(first, structure.transition, n))
        dtype = jnp.promote_types(row_dtype(flat), leaves[name].dtype)
        result.append(Entries(name, "value", leaves[name].shape, dtype, kinds, reach))
    return result


def _structure(graph: ETraceGraph) -> Structure:
    structure = flat_state_of(graph).structure
    assert structure is not None
    return structure


def within(first: np.ndarray, transition: np.ndarray, n: int) -> np.ndarray:
    """Return the state scalars reached within ``n`` steps, given those of the first step."""
    reach, onward = first, transition.T.astype(np.float32)
    for _ in range(n - 1):
        further = reach | (reach.astype(np.float32) @ onward > 0)
        if np.array_equal(further, reach):
            break
        reach = further
    return reach


def _by_kind(reach: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct rows, and the index of the distinct row of every row."""
    rows, kinds = np.unique(reach, axis=0, return_inverse=True)
    return rows, kinds.reshape(-1)


def _outputs_of(product: Product) -> Mapping[str, np.ndarray]:
    """Return the outputs of one sample that the entries of each operand contribute to.

    For each operand: the output index of every entry, if each contributes to only one output;
    otherwise a boolean for every entry and output.
    """
    use, atoms = product.use, product.graph.operand_atoms[product.operand_key]
    outputs = int(np.prod(shape_of_sample(product.y_aval.shape, use.y_axis)))
    sizes = {name: int(np.prod(atom.aval.shape)) for name, atom in atoms.items()}
    own = [str(place) for place in use.operands]
    if not jnp.issubdtype(product.x_aval.dtype, jnp.inexact):  # a gather by data
        return {name: np.ones((sizes[name], outputs), bool) for name in own}
    is_real = not jnp.issubdtype(product.y_aval.dtype, jnp.complexfloating)

    def pulled(chosen: np.ndarray) -> dict[str, np.ndarray]:
        """Return the sum over chosen outputs for every entry, one row per choice."""
        with jax.ensure_compile_time_eval():
            x, y = (
                jnp.ones(of_one(aval.shape, axis), aval.dtype)
                for aval, axis in ((product.x_aval, use.x_axis), (product.y_aval, use.y_axis))
            )
            operands = {name: jnp.ones(a.aval.shape, a.aval.dtype) for name, a in atoms.items()}
            rows = jnp.asarray(chosen, y.dtype).reshape(len(chosen), *y.shape)
            result = jax.vmap(lambda row: product.gradients(operands, x, row))(rows)
        return {name: np.asarray(result[name]).reshape(len(chosen), -1) for name in own}

    # If an entry contributes to one output only, the sum over the outputs whose index has a given
    # binary digit is either the total or zero. The digits give the index.
    digits = np.arange(outputs) >> np.arange(max(1, outputs - 1).bit_length())[:, None] & 1
    sums = pulled(np.concatenate([np.ones((1, outputs), int), digits]))
    result = {}
    for name, (total, *parts) in sums.items():
        is_set = [part != 0 for part in parts]
        if is_real and all(
            np.all(~flags | (part == total)) for flags, part in zip(is_set, parts, strict=True)
        ):
            result[name] = sum(flags.astype(int) << i for i, flags in enumerate(is_set))
        elif outputs * sizes[name] > MOST_NUMBERS:
            result[name] = np.ones((sizes[name], outputs), bool)
        else:
            result[name] = pulled(np.eye(outputs))[name].T != 0
    return result


def of_one(shape: tuple[int, ...], axis: int | None) -> tuple[int, ...]:
    """Return the shape of an array of samples for a single sample."""
    return shape if axis is None else (*shape[:axis], 1, *shape[axis + 1 :])


@dataclasses.dataclass(frozen=True, eq=False)
class Move:
    """Propagation of the trace of one array by ``J``.

    Attributes
    ----------
    entries
        The entries of the trace.
    read, factors
        For every rank, the pair that each pair reads, and the index of its factor in ``J``; indices
        beyond the end mean none. ``None`` if every entry reaches every scalar: then it is one
        product.
    """

    entries: Entries
    read: np.ndarray | None = None
    factors: np.ndarray | None = None

    @staticmethod
    def of(entries: Entries, transition: np.ndarray) -> "Move":
        """Return the propagation for the structure of ``J``."""
        if entries.reach.all():
            return Move(entries)
        of_entry, of_number = entries.pairs
        starts = np.searchsorted(of_entry, np.arange(len(entries.kinds)))
        count, numbers = len(of_number), len(transition)
        ranks: list[list[np.ndarray]] = []
        for kind, reached in enumerate(entries.reach):
            own, offsets = np.flatnonzero(reached), starts[entries.kinds == kind]
            written, source = np.nonzero(transition[np.ix_(own, own)])
            rank = np.arange(len(written)) - np.searchsorted(written, written)
            for number in range(int(rank.max(initial=-1)) + 1):
                w, s = written[rank == number], source[rank == number]
                if number == len(ranks):
                    ranks.append([])
                places = (offsets[:, None] + w).ravel(), (offsets[:, None] + s).ravel()
                factor = np.tile(own[w] * numbers + own[s], len(offsets))
                ranks[number].append(np.stack([*places, factor]))
        read = np.full((len(ranks), count), count, np.int32)
        factors = np.full((len(ranks), count), numbers * numbers, np.int32)
        for number, result in enumerate(ranks):
            into, source, factor = np.concatenate(result, axis=1)
            read[number, into], factors[number, into] = source, factor
        return Move(entries, read, factors)

    def __call__(self, J: jax.Array, trace: jax.Array) -> jax.Array:
        """Return ``J eps`` of all samples."""
        samples = len(trace)
        if self.read is None or self.factors is None:
            old = trace.reshape(samples, len(self.entries.kinds), -1)
            return unfused(jnp.einsum("bqr,ber->beq", J, old), J).reshape(trace.shape)
        flat = J.reshape(samples, -1)

        def add(total: jax.Array, now: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            read, factor = now
            of_trace = trace.at[:, read].get(mode="fill", fill_value=0)
            of_J = flat.at[:, factor].get(mode="fill", fill_value=0)
            return total + of_J * of_trace, None

        return jax.lax.scan(add, jnp.zeros_like(trace), (self.read, self.factors))[0]
