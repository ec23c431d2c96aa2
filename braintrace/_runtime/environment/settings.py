"""Values of ``brainstate.environ`` for which a step is compiled."""

import enum
from typing import Any

import brainstate


def settings() -> dict[str, Any]:
    """Return the flags and names of ``brainstate.environ``, such as ``fit=True``.

    A step is compiled for each combination. Numbers are not compared, since the time may change at
    every step: a step reads them when it is traced, as under ``jax.jit``.
    """
    compared = (bool, str, type, enum.Enum, type(None))
    return {k: v for k, v in brainstate.environ.all().items() if isinstance(v, compared)}
