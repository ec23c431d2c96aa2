"""Pairs of a weight and a number of the state that it reaches, which SnAp-n keeps traces of.

See `neighbours`. All of them are of one sample: the others have the same.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._etrace_op import get_primitive_spec, propagate
from .._graph.influence import NO_SLOT
from .active_outputs import trace_shapes
from .layout import TraceSite


def samples_of(site: TraceSite) -> int:
    """Return how many samples an operation tells apart."""
    return int(site.group.shape[0]) if get_primitive_spec(site.relation.primitive).batched else 1


def has_samples_first(site: TraceSite) -> bool:
    """Tell whether the outputs of an operation are those of one sample after the other."""
    samples, positions = samples_of(site), site.influence.positions.ravel()
    if positions.size % samples:
        return False
    own = np.repeat(np.arange(samples), positions.size // samples)
    units = site.group.num_positions // samples
    return bool(np.all((positions < 0) | (positions // units == own)))


@dataclasses.dataclass(frozen=True, eq=False)
class Pairs:
    """Entries of one array of an operation's traces, of a sample, with their neighbours.

    Attributes
    ----------
    size
        How many entries there are.
    outputs
        The element of the operation's output that each entry goes with.
    entries, numbers
        Of every pair, sorted.
    """

    size: int
    outputs: np.ndarray
    entries: np.ndarray
    numbers: np.ndarray


def reach_of(site: TraceSite, n: int) -> np.ndarray:
    """Return which numbers each output of an operation reaches within ``n`` steps."""
    group, samples = site.group, samples_of(site)
    assert group.dependence is not None
    units = group.num_positions // samples
    positions = site.influence.positions.reshape(samples, -1)[0]
    reach = np.zeros((positions.size, group.num_states * units), bool)
    for point in site.influence.injection_points:
        slots = np.arange(positions.size * samples) if point.slots is None else point.slots
        own = slots[(slots != NO_SLOT) & (slots < positions.size)]
        own = own[positions[own] >= 0]
        reach[own, point.state * units + positions[own]] = True
    for _ in range(n - 1):
        further = reach | (reach.astype(np.float32) @ group.dependence.T.astype(np.float32) > 0)
        if np.array_equal(further, reach):
            break
        reach = further
    return reach


def pairs_of(site: TraceSite, name: str, reach: np.ndarray) -> Pairs:
    """Return the pairs of one array."""
    y, shapes = site.relation.y_var.aval, trace_shapes(site.relation)
    batched, samples = get_primitive_spec(site.relation.primitive).batched, samples_of(site)

    def of_sample(shape: tuple[int, ...]) -> tuple[int, ...]:
        return (shape[0] // samples, *shape[1:]) if batched else shape

    with jax.ensure_compile_time_eval():
        # What a trace is multiplied by says which output it goes with.
        factor = np.arange(len(reach), dtype=np.float32).reshape(of_sample(y.shape))
        ones = {key: np.ones(of_sample(array.shape), np.float32) for key, array in shapes.items()}
        found = propagate(*site.operation, jnp.asarray(factor), jax.tree.map(jnp.asarray, ones))
        outputs = np.rint(np.asarray(found[name])).astype(int).ravel()
    entries, numbers = np.nonzero(reach[outputs])
    return Pairs(len(outputs), outputs, entries, numbers)


@dataclasses.dataclass(frozen=True, eq=False)
class Move:
    """How the trace of one array moves on.

    Attributes
    ----------
    site, pairs
        What it is a trace of.
    is_whole
        Whether every output reaches every number: then one product does it.
    read, factors
        For every rank the pair that each pair reads, and where its factor is in ``J``; beyond the
        end where there is none.
    enters
        By state, the pairs at which the operation's output enters.
    """

    site: TraceSite
    pairs: Pairs
    is_whole: bool
    read: np.ndarray
    factors: np.ndarray
    enters: dict[int, np.ndarray]

    @staticmethod
    def of(site: TraceSite, name: str, n: int) -> "Move":
        reach = reach_of(site, n)
        pairs, group = pairs_of(site, name, reach), site.group
        numbers, units = reach.shape[1], group.num_positions // samples_of(site)
        positions = site.influence.positions.reshape(samples_of(site), -1)[0]
        at = positions[pairs.outputs[pairs.entries]]
        enters = {
            a: np.flatnonzero(pairs.numbers == a * units + at) for a in range(group.num_states)
        }
        if reach.all():
            empty = np.zeros((0, 0), int)
            return Move(site, pairs, True, empty, empty, enters)
        assert group.dependence is not None
        starts = np.searchsorted(pairs.entries, np.arange(pairs.size))
        ranks: list[list[np.ndarray]] = []
        for output in np.unique(pairs.outputs):
            own = np.flatnonzero(reach[output])
            inside = group.dependence[np.ix_(own, own)]
            written, source = np.nonzero(inside)
            rank = np.arange(len(written)) - np.searchsorted(written, written)
            offsets = starts[pairs.outputs == output]
            for number in range(int(rank.max(initial=-1)) + 1):
                w, s = written[rank == number], source[rank == number]
                if number == len(ranks):
                    ranks.append([])
                ranks[number].append(
                    np.stack(
                        [
                            (offsets[:, None] + w).ravel(),
                            (offsets[:, None] + s).ravel(),
                            np.tile(own[w] * numbers + own[s], len(offsets)),
                        ]
                    )
                )
        count = len(pairs.entries)
        read = np.full((len(ranks), count), count, np.int32)
        factors = np.full((len(ranks), count), numbers * numbers, np.int32)
        for number, found in enumerate(ranks):
            into, source, factor = np.concatenate(found, axis=1)
            read[number, into], factors[number, into] = source, factor
        return Move(site, pairs, False, read, factors, enters)

    def __call__(
        self, J: jax.Array, trace: jax.Array, x: jax.Array, Df: dict[str, jax.Array]
    ) -> jax.Array:
        """Return ``J eps + F x`` of all samples."""
        samples = len(trace)
        if self.is_whole:
            old = trace.reshape(samples, self.pairs.size, -1)
            new = jnp.einsum("bqr,ber->beq", J, old).reshape(trace.shape)
        else:
            flat = J.reshape(samples, -1)

            def add(total: jax.Array, now: Any) -> Any:
                read, factor = now
                held = {"mode": "fill", "fill_value": 0}
                return total + flat.at[:, factor].get(**held) * trace.at[:, read].get(**held), None

            new = jax.lax.scan(add, jnp.zeros_like(trace), (self.read, self.factors))[0]
        for a, places in self.enters.items():
            key = self.site.key(a)
            if key in Df and places.size:
                entries = self.pairs.entries[places]
                sensitivity = Df[key].reshape(samples, -1)[:, self.pairs.outputs[entries]]
                new = new.at[:, places].add((sensitivity * x[:, entries]).astype(new.dtype))
        return new
