"""Values of ``brainstate.environ`` that a compiled step has read.

A step is traced once, so later changes of the environment (the time, whether the model is fitted)
have no effect on it. When a value changes for the first time, the step is traced again with an
unusable object in its place, which shows whether ``update`` reads it.
"""

from collections.abc import Callable
from typing import Any

import brainstate
import numpy as np

from ..._errors import NotCompiledError
from ..._jax import is_tracer

WHERE_AND_HOW = frozenset({"precision", "platform", "host_device_count"})
"""Keys of the device and precision of programs, which JAX handles."""


class Environment:
    """The environment of a compiled step.

    Parameters
    ----------
    trace
        Traces the step again; raises if the step reads an unusable value.
    """

    def __init__(self, trace: Callable[[], Any]) -> None:
        self._trace = trace
        self._values = dict(brainstate.environ.all())
        self._unread: set[str] = set()

    def check(self) -> None:
        """Refuse to run a step that reads a value which has changed since its compilation.

        Raises
        ------
        NotCompiledError
            If there is such a value.
        """
        for key, value in brainstate.environ.all().items():
            settled = key in WHERE_AND_HOW or key in self._unread
            if settled or self._is_as_it_was(key, value):
                continue
            if self._reads(key):
                raise NotCompiledError(
                    f"`update` reads '{key}' of `brainstate.environ`, which was "
                    f"{self._values.get(key, 'not set')} when the model was compiled and is "
                    f"{value} now. A compiled step does not see the change: pass the value as an "
                    "argument of `update`, keep it in a State, or compile again."
                )
            self._unread.add(key)

    def _is_as_it_was(self, key: str, value: Any) -> bool:
        if key not in self._values:
            return False
        old = self._values[key]
        if old is value:
            return True
        if type(old) is not type(value) or is_tracer(value) or is_tracer(old):
            return False
        return bool(np.all(old == value))

    def _reads(self, key: str) -> bool:
        try:
            with brainstate.environ.context(**{key: _Unusable()}):
                self._trace()
        except Exception:  # the step may raise anything
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
