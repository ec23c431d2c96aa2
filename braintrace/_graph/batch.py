"""Batch axes of States, and the number of samples."""

import dataclasses
from collections.abc import Mapping

from .._errors import ShapeError
from .._typing import Path, path_name
from .traced_model import StateLeaf

Axes = tuple[int | None, ...]
"""The batch axis of each leaf of a State's value; ``None``: all samples share the leaf."""


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """The batch axis of each State that is reset with a sequence.

    It is known from ``vmap=True``, or from the ``batch_size`` of ``init_state`` (see `batch_of` of
    the compiler).

    Attributes
    ----------
    samples
        Number of samples; ``None``: the model has no batch axis.
    axes
        The batch axes, by path of the State. A leaf without one is shared by all samples; it is
        reset when all of them are.
    unclear
        States with an unknown batch axis.
    """

    samples: int | None
    axes: Mapping[Path, Axes]
    unclear: tuple[Path, ...] = ()

    def axis(self, leaf: StateLeaf) -> int | None:
        """Return the batch axis of an input of the step; ``None``: it has none."""
        return self.axis_at(leaf.path, leaf.leaf)

    def axis_at(self, path: Path, index: int) -> int | None:
        """Return the batch axis of one leaf of a State's value; ``None``: it has none."""
        return self.axes[path][index] if path in self.axes else None

    def check(self, given: str, count: int) -> None:
        """Refuse flags per sample that do not fit the samples of the model.

        Parameters
        ----------
        given, count
            Description of the flags, for the message, and their number.

        Raises
        ------
        ShapeError
            If they do not fit.
        """
        for path in self.unclear:
            raise ShapeError(
                f"{given}, but the samples of State '{path_name(path)}' are unknown: none of its "
                "axes follows `batch_size`. Create it in `init_state` with an axis of this size, "
                "or give one flag for all samples."
            )
        if self.samples != count:
            raise ShapeError(
                f"{given}, but the States of the model are for {self.samples or 'no'} samples. "
                "Compile with `batch_size` (or `vmap=True`), or give one flag for all."
            )
