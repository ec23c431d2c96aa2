"""Option ``window``: the number of steps that a gradient differentiates in full."""

import warnings
from typing import Literal, TypeAlias

from .._arguments import POSITIVE, check_option, level_of_user, one_of
from .._errors import OptionError

CHUNK: Literal["chunk"] = "chunk"
"""The window of ``vjp_method='multi-step'``: each chunk of a call."""

Window: TypeAlias = int | Literal["chunk"] | None
"""Number of steps that are differentiated in full; ``None``: the rule itself."""

WINDOW = POSITIVE.or_else(None)
VJP_METHOD = one_of("single-step", "multi-step")


def window_of_options(window: int | None, vjp_method: str) -> Window:
    """Return the window of an algorithm, from either spelling of the option.

    Raises
    ------
    OptionError
        For a value that is not accepted, or both spellings at once.
    """
    check_option("window", window, WINDOW)
    check_option("vjp_method", vjp_method, VJP_METHOD)
    if vjp_method == "single-step":
        return None if window is None else int(window)
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
