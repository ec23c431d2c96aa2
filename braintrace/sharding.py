"""Sharding of a learner: samples are sharded over one axis of a mesh of devices.

The batch axes of states, traces, residuals and arguments are sharded. Parameters and all other
arrays stay as the user has sharded them, or are replicated. XLA partitions the rest of a program.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ._core.traces import arrays_of, of_arrays
from ._errors import OptionError, ShapeError
from ._graph.graph import ETraceGraph, TraceSpec, TraceSpecs
from ._graph.method import Traces
from ._jax import is_tracer, is_whole
from ._typing import Path, PyTree


class DataAxis(NamedTuple):
    """A mesh, and its axis over which samples are sharded."""

    mesh: Mesh
    name: str

    def __str__(self) -> str:
        return f"{self.mesh.size} devices, the batch over {self.mesh.shape[self.name]}"


@dataclasses.dataclass(frozen=True, eq=False)
class Placement:
    """Placement of the arrays of a compiled model.

    Attributes
    ----------
    data
        The mesh, and its axis for samples.
    samples
        Batch size; ``None``: no batch axis.
    leaves
        Batch axes of the leaves of States, by path and index; ``None``: no batch axis.
    axes_of_traces
        Batch axes of the traces, in their structure; -1: none.
    """

    data: DataAxis
    samples: int | None
    leaves: Mapping[tuple[Path, int], int | None]
    axes_of_traces: Mapping[str, Any]

    @property
    def devices(self) -> int:
        """Number of devices."""
        return int(self.data.mesh.size)

    def leaf(self, path: Path | None, index: int, leaf: Any) -> Any:
        """Place a leaf of the value of a State; ``None``: a State outside of the model."""
        axis = None if path is None else self.leaves.get((path, index))
        return self._placed(leaf, -1 if axis is None else axis)

    def value(self, path: Path | None, value: PyTree) -> PyTree:
        """Place the value of a State; see `leaf`."""
        leaves, tree = jax.tree.flatten(value)
        return jax.tree.unflatten(tree, [self.leaf(path, i, x) for i, x in enumerate(leaves)])

    def by_sample(self, tree: PyTree, axis: int) -> PyTree:
        """Shard arrays along an axis if its size is the batch size."""

        def placed(leaf: Any) -> Any:
            size = jnp.shape(leaf)[axis : axis + 1]
            return self._placed(leaf, axis if size == (self.samples,) else -1)

        return jax.tree.map(placed, tree)

    def traces(self, traces: Traces) -> Traces:
        """Place traces, in packed or unpacked form; shapes become zeros."""
        axes, arrays = self.axes_of_traces, arrays_of(traces)
        return of_arrays(
            {k: jax.tree.map(self._placed, tree, axes[k[0]]) for k, tree in arrays.items()}
        )

    def _placed(self, leaf: Any, axis: int) -> Any:
        """Shard a leaf along an axis; -1: replicate it, if it is not on the mesh."""
        mesh, name = self.data
        if is_tracer(leaf):
            return leaf if axis < 0 else _constrained(leaf, axis, self.data)
        names = () if axis < 0 else (*[None] * axis, name)
        sharding = NamedSharding(mesh, PartitionSpec(*names))
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jnp.zeros(leaf.shape, leaf.dtype, device=sharding)
        held = getattr(leaf, "sharding", None)
        if isinstance(held, NamedSharding) and held.device_set == sharding.device_set:
            is_there = axis < 0 or tuple(held.spec)[axis : axis + 1] == (name,)
            return leaf if is_there else _put(leaf, sharding)
        return _put(leaf, sharding)


def placement_of(graph: ETraceGraph, specs: TraceSpecs, data: DataAxis) -> Placement:
    """Return the placement of the arrays of a compiled model with stored traces.

    Raises
    ------
    ShapeError, OptionError
        If the batch size is not a multiple of the number of parts, or the model has no batch.
    """
    samples, parts = graph.batch.samples, data.mesh.shape[data.name]
    if parts > 1 and samples is None:
        raise OptionError(
            f"The mesh axis '{data.name}' shards the batch over {parts} devices, but this model "
            "has no batch axis: compile it with `batch_size`."
        )
    if samples is not None and samples % parts:
        raise ShapeError(
            f"The batch of {samples} cannot be sharded over the {parts} devices of the mesh axis "
            f"'{data.name}': expected a multiple of {parts}."
        )

    def axis_of(spec: TraceSpec) -> int:
        if samples is None or "batch" not in spec.axes:
            return -1
        axis = spec.axes.index("batch")
        return axis if spec.shape[axis] % samples == 0 else -1

    leaves = {(leaf.path, leaf.leaf): graph.batch.axis(leaf) for leaf in graph.traced.leaves}
    return Placement(data, samples, leaves, jax.tree.map(axis_of, specs))


def _constrained(leaf: Any, axis: int, data: DataAxis) -> Any:
    """Constrain one axis of a tracer, unless a ``shard_map`` has already sharded it."""
    context = jax.sharding.get_abstract_mesh()
    if not context.empty and data.name not in {*context.axis_names} - {*context.manual_axes}:
        return leaf
    names = [PartitionSpec.UNCONSTRAINED] * leaf.ndim
    names[axis] = data.name
    mesh = data.mesh if context.empty else context
    return jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, PartitionSpec(*names)))


def _put(leaf: Any, sharding: NamedSharding) -> jax.Array:
    """Move an array to a sharding; a host array is equal in all processes."""
    if sharding.is_fully_addressable or not is_whole(leaf):
        return jax.device_put(leaf, sharding)
    if jnp.issubdtype(getattr(leaf, "dtype", None), jax.dtypes.prng_key):
        data = _put(jax.random.key_data(leaf), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    whole = np.asarray(leaf, jnp.result_type(leaf))
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])
