"""A mesh of devices, and what its axes divide."""

import dataclasses
import math
from collections.abc import Sequence

from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

Names = tuple[str | None, ...]
"""Which axis of the mesh divides each axis of an array; ``None``: none does."""


@dataclasses.dataclass(frozen=True)
class Division:
    """A mesh of devices, and what its axes divide.

    Attributes
    ----------
    mesh
        The mesh.
    data, model
        The axes of it that divide samples and outputs; ``None``: these stay whole.
    """

    mesh: Mesh
    data: str | None
    model: str | None

    @property
    def data_parts(self) -> int:
        """Into how many parts samples are divided."""
        return 1 if self.data is None else int(self.mesh.shape[self.data])

    @property
    def model_parts(self) -> int:
        """Into how many parts outputs are divided."""
        return 1 if self.model is None else int(self.mesh.shape[self.model])

    @property
    def automatic(self) -> Mesh:
        """The same devices with axes along which XLA divides the work."""
        kinds = (AxisType.Auto,) * len(self.mesh.axis_names)
        return Mesh(self.mesh.devices, self.mesh.axis_names, axis_types=kinds)

    def __str__(self) -> str:
        used = [name for name in (self.data, self.model) if name is not None]
        sizes = " x ".join(f"{self.mesh.shape[name]} '{name}'" for name in used)
        return f"{math.prod(self.mesh.devices.shape)} devices, {sizes or 'none of them named'}"


def sharding_on(mesh: Mesh, names: Sequence[str | None]) -> NamedSharding:
    """Return a sharding whose specification is as short as it can be, so that equals are equal."""
    used = list(names)
    while used and used[-1] is None:
        used.pop()
    return NamedSharding(mesh, PartitionSpec(*used))
