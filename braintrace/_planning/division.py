"""Sharding of a planned learner over a mesh whose devices need not exist.

Samples are sharded over one axis of the mesh: each device runs the program for its samples. Outputs
are sharded over another axis, as in `braintrace.shard`.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh

from .._arguments import POSITIVE, check_option
from .._core.products.complex_packing import arrays_of
from .._errors import OptionError, ShapeError
from .._graph import ETraceGraph, Traces, TraceSpecs
from .._sharding import Layout, layout_of
from .._sharding.division import Division, Names, check_axes
from .._typing import PyTree

MODEL = "model"


@dataclasses.dataclass(frozen=True)
class Parts:
    """Numbers of parts into which samples and outputs are sharded."""

    data: int = 1
    model: int = 1

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.data * self.model

    def of_batch(self, batch_size: int | None) -> int | None:
        """Return the number of samples on each device.

        Raises
        ------
        ShapeError
            If the batch size is not a multiple of the number of parts.
        """
        if self.data == 1:
            return batch_size
        if batch_size is None or batch_size % self.data:
            raise ShapeError(
                f"`batch_size` is {batch_size}, which is not a multiple of {self.data} devices: "
                "use a multiple, or another mesh."
            )
        return batch_size // self.data

    def of_example(self, example: tuple[PyTree, ...], batch_size: int | None) -> tuple[PyTree, ...]:
        """Return the arguments of a step on one device; leading batch axes are sharded."""

        def of_leaf(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            if self.data == 1 or leaf.shape[:1] != (batch_size,):
                return leaf
            shape = (leaf.shape[0] // self.data, *leaf.shape[1:])
            return jax.ShapeDtypeStruct(shape, leaf.dtype)

        sharded: tuple[PyTree, ...] = jax.tree.map(of_leaf, example)
        return sharded

    def layout(self, graph: ETraceGraph, specs: TraceSpecs) -> Layout:
        """Return the axes along which outputs are sharded, for one device's samples."""
        return layout_of(graph, specs, self.of_model)

    @property
    def of_model(self) -> Division:
        """Division of the outputs, for a model with one device's samples."""
        mesh: Any = AbstractMesh((self.model,), (MODEL,))
        return Division(mesh, None, MODEL)


def parts_of(mesh: Any, data: str | None, model: str | None) -> Parts:
    """Return the parts of a mesh, from the names and lengths of its axes.

    Raises
    ------
    OptionError
        If it is not a mesh, or does not have the axis, or for a length that is no positive integer.
    """
    if mesh is None:
        return Parts()
    shape = mesh if isinstance(mesh, Mapping) else getattr(mesh, "shape", None)
    if not isinstance(shape, Mapping):
        raise OptionError(
            "`mesh` has no axes with names; expected a `jax.sharding.Mesh` or `AbstractMesh`, or a "
            "dict such as {'data': 8}."
        )
    check_axes(list(shape), data, model)
    for axis, length in shape.items():
        check_option(f"mesh[{axis!r}]", length, POSITIVE)
    return Parts(*(1 if axis is None else int(shape[axis]) for axis in (data, model)))


@dataclasses.dataclass(frozen=True)
class Array:
    """Shape and dtype of an array for one device's samples, and whether outputs are sharded."""

    shape: tuple[int, ...]
    dtype: Any
    is_sharded: bool = False


def arrays(tree: PyTree) -> list[Array]:
    """Return the leaves of a tree as arrays that are not sharded."""
    return [Array(tuple(leaf.shape), leaf.dtype) for leaf in jax.tree.leaves(tree)]


def arrays_of_state(path: Any, value: PyTree, layout: Layout) -> list[Array]:
    """Return the leaves of the value of a State."""
    return [
        dataclasses.replace(leaf, is_sharded=MODEL in layout.leaves.get((path, index), ()))
        for index, leaf in enumerate(arrays(value))
    ]


def arrays_of_traces(traces: Traces, layout: Layout) -> list[Array]:
    """Return the arrays of packed traces."""

    def of(names: Any, tree: PyTree) -> Iterable[Array]:
        if isinstance(names, dict):
            return [leaf for key, inner in tree.items() for leaf in of(names[key], inner)]
        return [dataclasses.replace(leaf, is_sharded=MODEL in names) for leaf in arrays(tree)]

    found = arrays_of(traces).items()
    return [leaf for keys, tree in found for leaf in of(layout.traces[keys[0]], tree)]


def sharded_sizes(arrays_and_names: Iterable[tuple[PyTree, Names]]) -> frozenset[int]:
    """Return the lengths of the axes along which arrays are sharded."""
    return frozenset(
        size
        for leaf, names in arrays_and_names
        for size, name in zip(leaf.shape, names, strict=False)
        if name == MODEL
    )


def size_of(aval: Any) -> int:
    """Return the bytes of an array."""
    if not jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return int(math.prod(aval.shape) * np.dtype(aval.dtype).itemsize)
    key = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), aval.dtype))
    return int(math.prod(aval.shape) * key.size * key.dtype.itemsize)
