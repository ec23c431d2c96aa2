"""Kinds of the options of a learner's methods."""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from ._checks import shown as shown
from ._errors import OptionError


@dataclasses.dataclass(frozen=True)
class Kind:
    """The accepted values of an option, and their printed form."""

    words: str
    accepts: Callable[[Any], bool]

    def or_else(self, value: Any) -> "Kind":
        """Return the kind that accepts one more value, such as None or 'auto'."""
        accepts = self.accepts
        return Kind(
            f"{self.words} or {value!r}",
            lambda other: (
                other is value or (isinstance(other, str) and other == value) or accepts(other)
            ),
        )


def one_of(*choices: str) -> Kind:
    """Return the kind of a choice among some strings."""
    listed = ", ".join(map(repr, choices[:-1])) + f" or {choices[-1]!r}"
    return Kind(listed, lambda value: isinstance(value, str) and value in choices)


BOOLEAN = Kind("True or False", lambda value: isinstance(value, (bool, np.bool_)))
POSITIVE = Kind(
    "a positive integer",
    lambda v: isinstance(v, (int, np.integer)) and not isinstance(v, bool) and bool(v >= 1),
)
FUNCTION = Kind("a function", callable)


def check_option(name: str, value: Any, kind: Kind) -> None:
    """Refuse an option that is not of its kind."""
    if not kind.accepts(value):
        raise OptionError(f"`{name}` is {shown(value)}; expected {kind.words}.")


def wrong_names(given: Collection[str], known: Mapping[str, bool]) -> str:
    """Return what is wrong with the names of given options, as the end of a sentence."""
    unknown = [name for name in given if name not in known]
    missing = [name for name, is_needed in known.items() if is_needed and name not in given]
    faults = [f"does not accept `{name}`" for name in unknown]
    return " and ".join([*faults, *(f"needs `{name}`" for name in missing)])
