"""Mesh of devices, with the mesh axes for samples and outputs."""

import dataclasses
import math
from collections.abc import Hashable, Sequence
from typing import Any

from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from .._checks import shown
from .._errors import OptionError

Names = tuple[str | None, ...]
"""Mesh axis over which each axis of an array is sharded; ``None``: not sharded."""


def check_axes(names: Sequence[Any], data: Any, model: Any) -> None:
    """Refuse axes for samples and outputs that a mesh with some names of axes does not have.

    Raises
    ------
    OptionError
        Naming the option.
    """
    for option, axis in {"data": data, "model": model}.items():
        is_axis = isinstance(axis, Hashable) and axis in names
        if axis is not None and not is_axis:
            raise OptionError(
                f"`{option}` is {shown(axis)}, and the mesh has the axes "
                f"{', '.join(map(repr, names))}: expected one of these, or None."
            )
    if data is not None and data == model:
        raise OptionError(
            f"`data` and `model` are both {data!r}: an axis of the mesh shards either samples or "
            "outputs."
        )


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
