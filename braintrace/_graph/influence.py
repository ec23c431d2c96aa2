"""How the output of one ETP operation influences the positions of one hidden group.

Element ``u`` of ``y`` reaches position ``p(u)``, through a broadcast possibly several. The
positions of all elements form an array of slots of shape ``(fan-out, *y.shape)``. ``Df`` and
everything else that has "the shape of y" in the executor has the shape of these slots.
"""

import dataclasses
from typing import Literal

import numpy as np

from .._jax import Var

NO_SLOT = -1


@dataclasses.dataclass(frozen=True, eq=False)
class InjectionPoint:
    """One variable at which ``Df`` of one state is taken.

    Attributes
    ----------
    state
        Index ``a`` of the state in its group.
    var
        ``y`` itself, or the variable that it has been broadcast to.
    slots
        For every element of ``var`` the number of its slot, or `NO_SLOT`;
        ``None`` where they are in order.
    """

    state: int
    var: Var
    slots: np.ndarray | None


@dataclasses.dataclass(frozen=True, eq=False)
class InfluenceMap:
    """How one ``y`` reaches one hidden group.

    Attributes
    ----------
    group
        Index of the group in the graph.
    injection_points
        Where ``Df`` is taken.
    positions
        Position of every slot, or ``-1`` for one that is empty.
    kind
        ``'identity'``, ``'tiled'`` or ``'gather'``.
    tile
        For a tiled map: the shape, with ones, to which positions are reshaped before they
        are broadcast to the slots.
    reached
        States that ``y`` reaches, in this step or a later one.
    stored
        Those of them whose trace some later step, or its output, reads.
    mixed
        Whether some elements of ``y`` reach the group only by mixing of positions.
    """

    group: int
    injection_points: tuple[InjectionPoint, ...]
    positions: np.ndarray
    kind: Literal["identity", "tiled", "gather"]
    tile: tuple[tuple[int, ...], tuple[int, ...]] | None
    reached: tuple[int, ...]
    stored: tuple[int, ...]
    mixed: bool

    @property
    def fan_out(self) -> int:
        """Number of positions that one element of ``y`` reaches at most."""
        return int(self.positions.shape[0])

    @property
    def slot_shape(self) -> tuple[int, ...]:
        """Shape of an array in the layout of ``y``; the fan-out leads where there is one."""
        return self.positions.shape if self.fan_out > 1 else self.positions.shape[1:]

    @property
    def states(self) -> tuple[int, ...]:
        """States of the group that ``y`` reaches within the step."""
        return tuple(sorted({point.state for point in self.injection_points}))
