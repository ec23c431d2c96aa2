"""Drawing of trace images with Matplotlib."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from .._arguments import Kind, check_option, is_endless, shown
from .._errors import OptionError
from .._optional import optional_import


@dataclasses.dataclass(frozen=True)
class Panel:
    """One image.

    Attributes
    ----------
    title, across, up
        Title and labels of the axes.
    image
        Magnitudes ``(up, across)``.
    """

    title: str
    across: str
    up: str
    image: np.ndarray


def check_axes(name: str, value: Any) -> None:
    """Refuse a value that is neither Matplotlib axes nor ``None`` (a new figure).

    Raises
    ------
    OptionError
        If it is neither.
    """
    axes = optional_import("matplotlib.axes", "examples")
    kind = Kind("axes of Matplotlib", lambda v: v is None or isinstance(v, axes.Axes))
    check_option(name, value, kind.or_else(None))


def _each(axes: Any) -> list[Any]:
    """Return the axes of a nested arrangement as a list."""
    if isinstance(axes, np.ndarray) and axes.dtype == object:
        return list(axes.ravel())
    if is_endless(axes) or not isinstance(axes, (list, tuple)):
        return [axes]
    return [ax for part in axes for ax in _each(part)]


def draw_traces(panels: Sequence[Panel], axes: Any = None) -> list[Any]:
    """Draw every panel, and return the axes.

    Parameters
    ----------
    panels
        The images.
    axes
        Matplotlib axes, one for each panel, in any arrangement, or a single one; ``None``: the axes
        of a new figure.

    Raises
    ------
    OptionError
        If the numbers of axes and panels differ.
    """
    pyplot = optional_import("matplotlib.pyplot", "examples")
    if axes is None:
        size = (7.0, 0.6 + 2.0 * len(panels))
        _, axes = pyplot.subplots(len(panels), figsize=size, squeeze=False, layout="constrained")
    own = _each(axes)
    for ax in own:
        check_axes("axes", ax)
    if len(own) != len(panels):
        titles = ", ".join(f"'{panel.title}'" for panel in panels)
        raise OptionError(
            f"`axes` is {shown(axes)} with {len(own)} axes; expected one for each of {titles}."
        )
    for ax, panel in zip(own, panels, strict=True):
        image = ax.imshow(
            panel.image, aspect="auto", origin="lower", interpolation="nearest", cmap="magma"
        )
        image.set_clim(vmin=0)
        ax.set(title=panel.title, xlabel=panel.across, ylabel=panel.up)
        ax.figure.colorbar(image, ax=ax, label="|trace|")
    return own
