"""Arrays of a learner where a mesh has them: put there, or held there inside of what is compiled.

An array is put on the devices; see `processes`. What is traced is constrained, but for
`Explicit` axes, along which JAX says by itself where everything lies, and for the axes that a
``shard_map`` around it has divided already.
"""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh

from .._errors import OptionError, ShapeError
from .._executor.complex_packing import arrays_of, of_arrays
from .._graph import ETraceGraph, Records, Traces, TraceSpecs
from .._jax import is_tracer
from .._typing import Path, PyTree, path_name
from .division import Division, Names, sharding_on
from .layout import Layout, layout_of
from .processes import put

_automatic = contextvars.ContextVar("automatic", default=False)


@contextlib.contextmanager
def automatic_axes() -> Iterator[None]:
    """Put arrays on `Auto` axes inside: a learner computes on these."""
    token = _automatic.set(True)
    try:
        yield
    finally:
        _automatic.reset(token)


@dataclasses.dataclass(frozen=True, eq=False)
class Placement:
    """Where the arrays of a compiled model lie.

    Attributes
    ----------
    division, layout
        The mesh, and what it divides.
    """

    division: Division
    layout: Layout

    @functools.cached_property
    def _automatic_mesh(self) -> Mesh:
        return self.division.automatic

    @property
    def devices(self) -> int:
        """How many devices there are."""
        return int(self.division.mesh.size)

    @property
    def _mesh(self) -> Mesh:
        return self._automatic_mesh if _automatic.get() else self.division.mesh

    def value(self, path: Path, value: PyTree) -> PyTree:
        """Return the value of a State of the model, or of something shaped like it."""
        leaves, tree = jax.tree.flatten(value)
        placed = [self.leaf(path, index, leaf) for index, leaf in enumerate(leaves)]
        return jax.tree.unflatten(tree, placed)

    def leaf(self, path: Path, index: int, leaf: Any) -> Any:
        """Return a leaf of the value of a State, or an array of its shape."""
        return self._placed(leaf, self.layout.leaves.get((path, index), ()))

    def whole(self, value: PyTree) -> PyTree:
        """Return a value all of which is on every device."""
        return jax.tree.map(lambda leaf: self._placed(leaf, ()), value)

    def values(self, values: Mapping[Path, PyTree]) -> dict[Path, PyTree]:
        """Return the values of States of the model by path; see `value`."""
        return {path: self.value(path, value) for path, value in values.items()}

    def by_sample(self, tree: PyTree, axis: int) -> PyTree:
        """Return arrays that are divided along an axis if that has the size of the batch.

        The placement does not change any result.
        """

        def placed(leaf: Any) -> Any:
            shape = jnp.shape(leaf)
            is_batch = len(shape) > axis and shape[axis] == self.layout.samples
            names = (*[None] * axis, self.division.data) if is_batch else ()
            return self._placed(leaf, names)

        return jax.tree.map(placed, tree)

    def records(self, records: Records) -> Records:
        """Return records whose inputs are on every device that has outputs of their samples."""
        samples, data = self.layout.samples, self.division.data

        def placed(leaf: Any) -> Any:  # several leading axes of an input count as one
            is_divided = samples is not None and leaf.shape[1] % samples == 0
            return self._placed(leaf, (None, data) if is_divided else ())

        x = {
            key: jax.tree.map(placed if key in self.layout.batched else self.whole, value)
            for key, value in records.x.items()
        }
        return dataclasses.replace(records, x=x)

    def traces(self, traces: Traces) -> Traces:
        """Return traces, packed as they are or not."""
        names, arrays = self.layout.traces, arrays_of(traces)
        return of_arrays({keys: self._tree(names[keys[0]], tree) for keys, tree in arrays.items()})

    def _tree(self, names: Any, tree: PyTree) -> PyTree:
        if isinstance(names, dict):
            return {key: self._tree(names[key], inner) for key, inner in tree.items()}
        return self._placed(tree, names)

    def _placed(self, leaf: Any, names: Names) -> Any:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jnp.zeros(leaf.shape, leaf.dtype, device=sharding_on(self._mesh, names))
        if is_tracer(leaf):
            return _held(leaf, names, self._automatic_mesh)
        sharding = sharding_on(self._mesh, names)
        is_there = isinstance(leaf, jax.Array) and leaf.sharding == sharding
        return leaf if is_there else put(leaf, sharding)


def placement_of(graph: ETraceGraph, specs: TraceSpecs, division: Division) -> Placement:
    """Return where the arrays of a compiled model lie.

    Parameters
    ----------
    graph, specs
        The compiled model, and what is known of the traces that are kept.
    division
        The mesh.

    Raises
    ------
    ShapeError
        If the batch is no multiple of the number of parts.
    OptionError
        If the model has no batch, or the batch axis of a State is not known.
    """
    samples = graph.batch.samples
    for path, reason in graph.batch.unclear.items() if division.data_parts > 1 else ():
        raise OptionError(
            f"The mesh axis '{division.data}' divides the batch into {division.data_parts} parts, "
            f"and the batch axis of State '{path_name(path)}' is not known: {reason}. Make the "
            "State in `init_state`, with an axis of the size of its `batch_size`."
        )
    if division.data_parts > 1 and samples is None:
        raise OptionError(
            f"The mesh axis '{division.data}' divides the batch into {division.data_parts} parts, "
            "and this model has no batch axis. Compile it with `batch_size`, or pass `data=None`."
        )
    if samples is not None and samples % division.data_parts:
        raise ShapeError(
            f"The batch of {samples} cannot be divided into the {division.data_parts} parts of the "
            f"mesh axis '{division.data}': expected a multiple of {division.data_parts}."
        )
    return Placement(division, layout_of(graph, specs, division))


def _held(leaf: Any, names: Names, mesh: Mesh) -> Any:
    """Return what is traced, held where it is to lie."""
    context = jax.sharding.get_abstract_mesh()
    around = jax.typeof(leaf).sharding.mesh
    kinds = {*(context.axis_types or ()), *(around.axis_types or ())}
    if AxisType.Explicit in kinds:
        is_here = not context.empty and set(mesh.axis_names) <= set(context.explicit_axes)
        return jax.sharding.reshard(leaf, sharding_on(context, names)) if is_here else leaf
    if context.empty:
        return jax.lax.with_sharding_constraint(leaf, sharding_on(mesh, names))
    is_free = set(context.axis_names) - set(context.manual_axes)
    if not is_free or not set(mesh.axis_names) <= set(context.axis_names):
        return leaf
    kept = [name if name in is_free else None for name in names]
    return jax.lax.with_sharding_constraint(leaf, sharding_on(context, kept))
