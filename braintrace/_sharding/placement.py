"""Placement of a learner's arrays on a mesh, outside and inside of compiled programs.

Concrete arrays are moved to the devices; see `processes`. Tracers get a sharding constraint, with
two exceptions: `Explicit` axes, for which JAX determines the sharding, and axes that an enclosing
``shard_map`` has sharded already.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from .._core.products.complex_packing import arrays_of, of_arrays
from .._errors import OptionError, ShapeError
from .._graph import ETraceGraph, Records, Traces, TraceSpecs
from .._jax import is_tracer
from .._typing import Path, PyTree, path_name
from .division import Division, Names, sharding_on
from .layout import Layout, layout_of
from .processes import put


@dataclasses.dataclass(frozen=True, eq=False)
class Placement:
    """Placement of the arrays of a compiled model.

    Attributes
    ----------
    division, layout
        The mesh, and the sharded axes.
    """

    division: Division
    layout: Layout

    @functools.cached_property
    def _automatic_mesh(self) -> Mesh:
        return self.division.automatic

    @property
    def devices(self) -> int:
        """Number of devices."""
        return int(self.division.mesh.size)

    @property
    def _mesh(self) -> Mesh:
        return self._automatic_mesh

    def value(self, path: Path, value: PyTree) -> PyTree:
        """Place the value of a State of the model, or a pytree with its shapes."""
        leaves, tree = jax.tree.flatten(value)
        placed = [self.leaf(path, index, leaf) for index, leaf in enumerate(leaves)]
        return jax.tree.unflatten(tree, placed)

    def leaf(self, path: Path, index: int, leaf: Any) -> Any:
        """Place a leaf of the value of a State, or an array of its shape."""
        return self._placed(leaf, self.layout.leaves.get((path, index), ()))

    def whole(self, value: PyTree) -> PyTree:
        """Replicate a value on all devices."""
        return jax.tree.map(lambda leaf: self._placed(leaf, ()), value)

    def values(self, values: Mapping[Path, PyTree]) -> dict[Path, PyTree]:
        """Place the values of States of the model by path; see `value`."""
        return {path: self.value(path, value) for path, value in values.items()}

    def by_sample(self, tree: PyTree, axis: int) -> PyTree:
        """Shard arrays along an axis if its size is the batch size.

        The placement does not change any result.
        """

        def placed(leaf: Any) -> Any:
            shape = jnp.shape(leaf)
            is_batch = len(shape) > axis and shape[axis] == self.layout.samples
            names = (*[None] * axis, self.division.data) if is_batch else ()
            return self._placed(leaf, names)

        return jax.tree.map(placed, tree)

    def records(self, records: Records) -> Records:
        """Place residuals: their inputs on every device that has outputs of their samples."""
        samples, data = self.layout.samples, self.division.data

        def placed(leaf: Any) -> Any:  # several leading axes of an input are one axis here
            is_sharded = samples is not None and leaf.shape[1] % samples == 0
            return self._placed(leaf, (None, data) if is_sharded else ())

        x = {
            key: jax.tree.map(placed if key in self.layout.batched else self.whole, value)
            for key, value in records.x.items()
        }
        return dataclasses.replace(records, x=x)

    def traces(self, traces: Traces) -> Traces:
        """Place traces, in packed or unpacked form."""
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
    """Return the placement of the arrays of a compiled model.

    Parameters
    ----------
    graph, specs
        The compiled model, and the specifications of its stored traces.
    division
        The mesh.

    Raises
    ------
    ShapeError
        If the batch size is not a multiple of the number of parts.
    OptionError
        If the model has no batch axis, or the batch axis of a State is unknown.
    """
    samples = graph.batch.samples
    for path, reason in graph.batch.unclear.items() if division.data_parts > 1 else ():
        raise OptionError(
            f"The mesh axis '{division.data}' shards the batch over {division.data_parts} devices, "
            f"but the batch axis of State '{path_name(path)}' is unknown: {reason}. Create the "
            "State in `init_state`, with an axis of size `batch_size`."
        )
    if division.data_parts > 1 and samples is None:
        raise OptionError(
            f"The mesh axis '{division.data}' shards the batch over {division.data_parts} devices, "
            "but this model has no batch axis. Compile it with `batch_size`, or pass `data=None`."
        )
    if samples is not None and samples % division.data_parts:
        raise ShapeError(
            f"The batch of {samples} cannot be sharded over the {division.data_parts} devices of "
            f"the mesh axis '{division.data}': expected a multiple of {division.data_parts}."
        )
    return Placement(division, layout_of(graph, specs, division))


def _held(leaf: Any, names: Names, mesh: Mesh) -> Any:
    """Constrain the sharding of a tracer."""
    context = jax.sharding.get_abstract_mesh()
    if context.empty:
        return jax.lax.with_sharding_constraint(leaf, sharding_on(mesh, names))
    is_free = set(context.axis_names) - set(context.manual_axes)
    if not is_free or not set(mesh.axis_names) <= set(context.axis_names):
        return leaf
    kept = [name if name in is_free else None for name in names]
    return jax.lax.with_sharding_constraint(leaf, sharding_on(context, kept))
