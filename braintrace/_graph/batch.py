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
        States with an unknown batch axis, by path, with the reason as the end of a sentence.
    """

    samples: int | None
    axes: Mapping[Path, Axes]
    unclear: Mapping[Path, str] = dataclasses.field(default_factory=dict)

    def axis(self, leaf: StateLeaf) -> int | None:
        """Return the batch axis of an input of the step; ``None``: it has none."""
        return self.axis_at(leaf.path, leaf.leaf)

    def axis_at(self, path: Path, index: int) -> int | None:
        """Return the batch axis of one leaf of a State's value; ``None``: it has none."""
        return self.axes[path][index] if path in self.axes else None

    def check(self, given: str, count: int, shapes: Mapping[Path, list[tuple[int, ...]]]) -> None:
        """Refuse flags per sample that do not fit the samples of the model.

        Parameters
        ----------
        given
            Description of the flags, for the message.
        count
            Number of flags.
        shapes
            Current shapes of the leaves of the States that are reset with a sequence.

        Raises
        ------
        ShapeError
            If the flags do not fit a State; the message names the first one.
        """
        for path, reason in self.unclear.items():
            raise ShapeError(
                f"{given}, but the batch axis of State '{path_name(path)}' is unknown: {reason}. "
                "Create the State in `init_state`, with an axis of size `batch_size`, or give "
                "one flag for all samples."
            )
        every = [
            (path, i, shape) for path, leaves in shapes.items() for i, shape in enumerate(leaves)
        ]
        if self.samples is None:
            # Prefer a State whose size equals the number of flags: the flags may be meant for it.
            path, _, shape = next((s for s in every if s[2][:1] == (count,)), every[0])
            raise ShapeError(
                f"{given}, but the model has no batch axis: `init_state` creates State "
                f"'{path_name(path)}' of shape {shape} without one. Compile with `batch_size` (or "
                "`vmap=True`), or give one flag for all."
            )
        for path, index, shape in every:
            axis = self.axis_at(path, index)
            if axis is not None and shape[axis : axis + 1] != (count,):
                raise ShapeError(
                    f"{given}, but State '{path_name(path)}' has shape {shape}: its batch axis "
                    f"{axis} does not have size {count}. Give one flag for each sample, or one "
                    "for all."
                )
