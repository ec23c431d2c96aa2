"""Values of ``brainstate.environ`` that a compiled step has read.

A step is traced once, so later changes of the environment (the time, whether the model is fitted)
have no effect on it. With other values, the step is traced again: another program shows that
``update`` reads them. Numbers may change at every call, as the time does. The first other number
under a key is therefore replaced by an unusable object, which fails if ``update`` reads it. If it
does not, all numbers under this key are accepted, as long as the other values are the same.
"""

import dataclasses
import enum
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from operator import is_
from types import NoneType
from typing import Any, TypeAlias

import brainstate
import jax
import numpy as np
import saiunit

from ..._arguments import level_of_user
from ..._errors import NotCompiledError, RecompilationWarning
from ..._jax import holds_tracers, is_tracer, leaves_of
from .attributes import BY_VALUE, part_of

Model: TypeAlias = brainstate.nn.Module

MOST_ACCEPTED = 32
"""Maximum number of environments that are known to be the same for a step."""

WHERE_AND_HOW = frozenset({"precision", "platform", "host_device_count"})
"""Keys of the device and precision of programs, which JAX handles."""

NUMBERS = (int, float, complex, np.generic, np.ndarray, jax.Array, saiunit.Quantity)

_MISSING = object()


@dataclasses.dataclass
class _Accepted:
    """Values of the environment with which the step is the same.

    Attributes
    ----------
    parts
        Comparable values by key; `NUMBERS` for numbers.
    numbers
        Comparable numbers by key.
    unread
        Keys of numbers that the step does not read.
    """

    parts: dict[str, Any]
    numbers: dict[str, Any]
    unread: set[str] = dataclasses.field(default_factory=set)


class Environment:
    """The environment of a compiled step.

    Parameters
    ----------
    again
        Traces the step of a model in the current environment; returns whether it is still the same,
        or raises if it reads an unusable value.
    """

    def __init__(self, again: Callable[[Model], bool]) -> None:
        self._again = again
        self._values = brainstate.environ.all()
        self._seen = self._values if all(map(_is_fixed, self._values.values())) else {}
        self._accepted = [_accepted(self._values)]

    def check(self, model: Model) -> Mapping[str, Any]:
        """Refuse to run the step of a model that reads a value which has changed since its trace.

        Returns
        -------
        mapping
            The current environment.

        Raises
        ------
        NotCompiledError
            If there is such a value.
        """
        now: Mapping[str, Any] = brainstate.environ.all()
        seen = self._seen
        if now.keys() == seen.keys() and all(map(is_, now.values(), map(seen.get, now))):
            return now
        if any(type(value) is _Unusable for value in now.values()):  # see `is_read`
            return now
        self._check(model, now)
        if all(map(_is_fixed, now.values())):
            self._seen = now
        return now

    def _check(self, model: Model, now: Mapping[str, Any]) -> None:
        own = _accepted(now)
        known = next((each for each in self._accepted if each.parts == own.parts), None)
        if known is None:
            if self._differs(model, now):
                raise self._error(now, own.parts.keys() | self._values.keys())
            if len(self._accepted) == MOST_ACCEPTED:
                self._warn(own.parts)
            self._accepted = [*self._accepted[:1], *self._accepted[1:][-MOST_ACCEPTED:], own]
            return
        for key, part in own.numbers.items():
            if key in known.unread or part == known.numbers.get(key):
                continue
            if is_read(key, lambda: self._again(model)) or self._differs(model, now):
                raise self._error(now, [key])
            known.unread.add(key)

    def _differs(self, model: Model, now: Mapping[str, Any]) -> bool:
        """Test whether the step differs now.

        Absent values that it cannot do without are those from before: no others can be meant.
        """
        restored: dict[str, Any] = {}
        while True:
            try:
                with brainstate.environ.context(**restored):
                    return not self._again(model)
            except Exception as error:  # the step may raise anything
                needed = self._values.keys() - now.keys() - restored.keys()
                key = next((key for key in needed if _is_missed(key, error)), None)
                if key is None:
                    return True
                restored[key] = self._values[key]

    def _warn(self, parts: Mapping[str, Any]) -> None:
        last = self._accepted[-1].parts
        names = [f"'{key}'" for key in parts if parts[key] != last.get(key, _MISSING)]
        warnings.warn(
            f"`update` has been traced for {MOST_ACCEPTED} values of {', '.join(names)} in "
            "`brainstate.environ`, to find out whether it reads them. Each time takes as long as "
            "an analysis of the model. Create such an object once.",
            RecompilationWarning,
            stacklevel=level_of_user(),
        )

    def _error(self, now: Mapping[str, Any], keys: Iterable[str]) -> NotCompiledError:
        both = {key: (self._values.get(key, _MISSING), now.get(key, _MISSING)) for key in keys}
        changed = {key: pair for key, pair in both.items() if not _are_equal(*pair)} or both
        told = ", or ".join(
            f"'{key}' of `brainstate.environ`, which was {_shown(then)} when the model was "
            f"compiled and is {_shown(value)} now"
            for key, (then, value) in sorted(changed.items())
            if key not in WHERE_AND_HOW
        )
        return NotCompiledError(
            f"`update` reads {told}. A compiled step does not see the change: pass the value as an "
            "argument of `update`, keep it in a State, or compile again."
        )


def _accepted(values: Mapping[str, Any]) -> _Accepted:
    others = {key: value for key, value in values.items() if key not in WHERE_AND_HOW}
    parts = {key: NUMBERS if is_number(value) else part_of(value) for key, value in others.items()}
    numbers = {key: _number(value) for key, value in others.items() if parts[key] is NUMBERS}
    return _Accepted(parts, numbers)


def _number(value: Any) -> Any:
    """Return the comparable part of a number; tracers must not outlive what traces them."""
    return object() if holds_tracers(value) else part_of(value)


def _is_missed(key: str, error: BaseException | None) -> bool:
    """Test whether an error, or one that has caused it, names an absent key."""
    while error is not None:
        if re.search(rf"\b{re.escape(key)}\b", str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def is_number(value: Any) -> bool:
    """Test whether a value is a number, or a container of numbers."""
    if value is None or isinstance(value, (bool, str)):
        return False
    return isinstance(value, NUMBERS) or any(
        isinstance(leaf, NUMBERS) and not isinstance(leaf, bool) for leaf in leaves_of(value)
    )


def _is_fixed(value: Any) -> bool:
    """Test whether an object cannot change in place; tracers must not outlive what traces them."""
    fixed = (NoneType, *BY_VALUE, type, enum.Enum, jax.Array, saiunit.Quantity)
    return isinstance(value, fixed) and not is_tracer(saiunit.get_mantissa(value))


def _are_equal(value: Any, old: Any) -> bool:
    if value is old:
        return True
    if type(old) is not type(value) or is_tracer(value) or is_tracer(old):
        return False
    return bool(part_of(value) == part_of(old))


def _shown(value: Any) -> str:
    return "not set" if value is _MISSING else str(value)


def is_read(key: str, trace: Callable[[], Any]) -> bool:
    """Test whether a function reads a value of the environment when it is traced."""
    try:
        with brainstate.environ.context(**{key: _Unusable()}):
            trace()
    except Exception:  # the function may raise anything
        return True
    return False


class _Unusable:
    """An object whose every operation raises an error."""

    def _refuse(self, *_: Any) -> Any:
        raise TypeError("a value of the environment is read")

    __class__ = property(_refuse)  # `isinstance` reads it
    __getattr__ = __str__ = __repr__ = __format__ = _refuse

    __bool__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __neg__ = __pow__ = _refuse
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _refuse
    __float__ = __int__ = __index__ = __len__ = __iter__ = __getitem__ = __hash__ = _refuse
