"""Values of ``brainstate.environ`` that a compiled step has read.

A step is traced once, so later changes of the environment (the time, whether the model is fitted)
have no effect on it. When a value changes, the step is traced again with it: another program shows
that ``update`` reads it. Numbers may change at every call, as the time does; therefore a number
that has changed is first replaced by an unusable object, which fails if ``update`` reads it. If it
does not, all numbers under this key are accepted.
"""

from collections.abc import Callable, Hashable, Mapping
from operator import is_
from typing import Any

import brainstate
import jax
import numpy as np
import saiunit

from ..._errors import NotCompiledError
from ..._jax import is_tracer

WHERE_AND_HOW = frozenset({"precision", "platform", "host_device_count"})
"""Keys of the device and precision of programs, which JAX handles."""

NUMBERS = (int, float, complex, np.generic, np.ndarray, jax.Array, saiunit.Quantity)

_MISSING = object()


class Environment:
    """The environment of a compiled step.

    Parameters
    ----------
    fingerprint
        Returns the fingerprint of the step.
    again
        Traces the step in the current environment, and returns its fingerprint now; raises if the
        step reads an unusable value.
    """

    def __init__(self, fingerprint: Callable[[], Hashable], again: Callable[[], Hashable]) -> None:
        self.fingerprint = fingerprint
        self._again = again
        self._values = self._seen = brainstate.environ.all()
        self._accepted: dict[str, list[Any]] = {}
        self._numbers: set[str] = set()

    def check(self) -> None:
        """Refuse to run a step that reads a value which has changed since its compilation.

        Raises
        ------
        NotCompiledError
            If there is such a value.
        """
        now, seen = brainstate.environ.all(), self._seen
        if now.keys() != seen.keys() or not all(map(is_, now.values(), map(seen.get, now))):
            self._check(now)
            if not any(map(is_tracer, now.values())):  # these must not outlive their transformation
                self._seen = now

    def _check(self, now: Mapping[str, Any]) -> None:
        both = {key: now.get(key, _MISSING) for key in {**self._values, **now}}
        new = {key: value for key, value in both.items() if not self._is_accepted(key, value)}
        read = {key: value for key, value in new.items() if self._reads(key, value)}
        if read:
            raise NotCompiledError(self._told(read))
        for key, value in new.items():
            if is_number(value):
                self._numbers.add(key)
            else:
                self._accepted.setdefault(key, []).append(value)

    def _is_accepted(self, key: str, value: Any) -> bool:
        if key in WHERE_AND_HOW or isinstance(value, _Unusable):  # see `is_read`
            return True
        if key in self._numbers and is_number(value):
            return True
        known = (self._values.get(key, _MISSING), *self._accepted.get(key, ()))
        return any(_are_equal(value, old) for old in known)

    def _reads(self, key: str, value: Any) -> bool:
        """Test whether the step reads a new value, where all others are as they were."""
        others = {
            each: old
            for each, old in self._values.items()
            if each != key and each not in WHERE_AND_HOW and not is_tracer(old)
        }
        with brainstate.environ.context(**others):
            return (is_number(value) and is_read(key, self._again)) or self._differs(value)

    def _differs(self, value: Any) -> bool:
        try:
            return self._again() != self.fingerprint()
        except Exception:  # a step that needs a value, and finds none, has the one from before
            return value is not _MISSING

    def _told(self, read: dict[str, Any]) -> str:
        then = ", ".join(_shown(self._values.get(key, _MISSING)) for key in read)
        now = ", ".join(map(_shown, read.values()))
        keys = ", ".join(f"'{key}'" for key in read)
        return (
            f"`update` reads {keys} of `brainstate.environ`, which was {then} when the model was "
            f"compiled and is {now} now. A compiled step does not see the change: pass the value "
            "as an argument of `update`, keep it in a State, or compile again."
        )


def is_number(value: Any) -> bool:
    """Test whether a value is a number, or a container of numbers."""
    if value is None or isinstance(value, (bool, str)):
        return False
    return isinstance(value, NUMBERS) or any(
        isinstance(leaf, NUMBERS) and not isinstance(leaf, bool) for leaf in jax.tree.leaves(value)
    )


def _are_equal(value: Any, old: Any) -> bool:
    if value is old:
        return True
    if type(old) is not type(value) or is_tracer(value) or is_tracer(old):
        return False
    return bool(np.all(old == value))


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

    def __getattr__(self, name: str) -> Any:
        raise TypeError("a value of the environment is read")

    def _refuse(self, *_: Any) -> Any:
        raise TypeError("a value of the environment is read")

    __bool__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __neg__ = __pow__ = _refuse
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _refuse
    __float__ = __int__ = __index__ = __len__ = __iter__ = __getitem__ = __hash__ = _refuse
