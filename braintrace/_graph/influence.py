"""Output-to-state index maps: the units that an ETP operation's outputs reach.

Element ``u`` of ``y`` reaches unit ``p(u)`` of a hidden group, or several units by a broadcast. The
units of all elements form an array of slots of shape ``(fan-out, *y.shape)``. In `_core`,
``Df`` and every other array with "the shape of y" has the shape of these slots.
"""

import dataclasses
from typing import Literal

import numpy as np

from .._jax import Var

NO_SLOT = -1


@dataclasses.dataclass(frozen=True, eq=False)
class InjectionPoint:
    """A tap: a variable at which ``Df`` of one state is taken.

    Attributes
    ----------
    state
        Index ``a`` of the state in its group.
    var
        ``y`` itself, or a variable that it is broadcast to.
    slots
        For every element of ``var``, the number of its slot, or `NO_SLOT`; ``None``: slots in
        order.
    """

    state: int
    var: Var
    slots: np.ndarray | None


@dataclasses.dataclass(frozen=True, eq=False)
class InfluenceMap:
    """The units of one hidden group that each element of ``y`` reaches.

    Attributes
    ----------
    group
        Index of the group in the graph.
    injection_points
        The taps at which ``Df`` is taken.
    positions
        Unit of every slot, or ``-1`` for an empty one.
    kind
        ``'identity'``, ``'tiled'`` or ``'gather'``.
    tile
        For a tiled map: the shape, with axes of size one, that units are reshaped to, and the shape
        that they are then broadcast to.
    reached
        States that ``y`` reaches, in this step or a later one.
    stored
        States of ``reached`` whose trace some later step, or its output, reads.
    mixed
        Whether some elements of ``y`` reach the group by coupling only.
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
        """Largest number of units that one element of ``y`` reaches."""
        return int(self.positions.shape[0])

    @property
    def slot_shape(self) -> tuple[int, ...]:
        """Shape of the slots; without the leading axis if the fan-out is one."""
        return self.positions.shape if self.fan_out > 1 else self.positions.shape[1:]

    @property
    def states(self) -> tuple[int, ...]:
        """States of the group that ``y`` reaches within the step."""
        return tuple(sorted({point.state for point in self.injection_points}))
