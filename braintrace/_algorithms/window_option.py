"""Option ``window``: the number of steps that a gradient differentiates in full."""

import warnings
from typing import Literal, TypeAlias

from .._checks import check_choice, level_of_user
from .._errors import OptionError

CHUNK: Literal["chunk"] = "chunk"
"""The window of ``vjp_method='multi-step'``: each chunk of a call."""

Window: TypeAlias = int | Literal["chunk"] | None
"""Number of steps that are differentiated in full; ``None``: the rule itself."""


def window_of_options(window: int | None, vjp_method: str) -> Window:
    """Return the window of an algorithm, from either spelling of the option.

    Raises
    ------
    OptionError
        For a value that is not accepted, or both spellings at once.
    """
    check_choice("vjp_method", vjp_method, "single-step", "multi-step")
    if window is not None and window < 1:
        raise OptionError(f"`window` is {window}; expected a positive number of steps, or None.")
    if vjp_method == "single-step":
        return window
    if window is not None:
        raise OptionError(
            f"`window` is {window} and `vjp_method` is 'multi-step', the deprecated spelling of a "
            "window. Leave out `vjp_method`."
        )
    warnings.warn(
        "`vjp_method='multi-step'` is deprecated. Give the number of steps as `window`, to "
        "`compile` or to a call, instead of `chunk_size`.",
        DeprecationWarning,
        stacklevel=level_of_user(),
    )
    return CHUNK
