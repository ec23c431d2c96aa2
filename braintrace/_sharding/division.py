"""Mesh of devices, with the mesh axes for samples and outputs."""

import dataclasses
import math
from collections.abc import Sequence

from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

Names = tuple[str | None, ...]
"""Mesh axis over which each axis of an array is sharded; ``None``: not sharded."""


@dataclasses.dataclass(frozen=True)
class Division:
    """Mesh of devices, with the mesh axes for samples and outputs.

    Attributes
    ----------
    mesh
        The mesh.
    data, model
        Mesh axes over which samples and outputs are sharded; ``None``: they are replicated.
    """

    mesh: Mesh
    data: str | None
    model: str | None

    @property
    def data_parts(self) -> int:
        """Number of parts into which samples are sharded."""
        return 1 if self.data is None else int(self.mesh.shape[self.data])

    @property
    def model_parts(self) -> int:
        """Number of parts into which outputs are sharded."""
        return 1 if self.model is None else int(self.mesh.shape[self.model])

    @property
    def automatic(self) -> Mesh:
        """Mesh of the same devices with `Auto` axes, along which XLA shards the computation."""
        kinds = (AxisType.Auto,) * len(self.mesh.axis_names)
        return Mesh(self.mesh.devices, self.mesh.axis_names, axis_types=kinds)

    def __str__(self) -> str:
        used = [name for name in (self.data, self.model) if name is not None]
        sizes = " x ".join(f"{self.mesh.shape[name]} '{name}'" for name in used)
        return f"{math.prod(self.mesh.devices.shape)} devices, {sizes or 'none of them named'}"


def sharding_on(mesh: Mesh, names: Sequence[str | None]) -> NamedSharding:
    """Return a sharding with the shortest specification, so equal shardings compare equal."""
    used = list(names)
    while used and used[-1] is None:
        used.pop()
    return NamedSharding(mesh, PartitionSpec(*used))
