"""Marked regions: the products of one module, class or function become ETP operations.

`mark` only names a scope (`jax.named_scope`), which the equations of a jaxpr keep. The automatic
marks of the compiler (`braintrace._compiler.marks`) read it.
"""

import copy
import functools
import types
from collections.abc import Callable
from typing import Any, TypeVar

import jax

T = TypeVar("T")

SCOPE = "braintrace.mark"
"""The scope of a region, in which the compiler marks products."""

_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial, type(jax.jit(abs)))


def mark(x: T) -> T:
    """Mark the products of one module, module class or function.

    The weights of these products learn online, as if the module called the ETP operations itself
    (`matmul`, `conv`, `element_wise`). The rest of the model has only its own marks.

    Parameters
    ----------
    x
        A module of any library, its class, or a function. A class gives a subclass with the same
        name, arguments and parameter paths. A module gives a copy that has the same States and
        parameters; replace the module by it.

    Returns
    -------
    module, class or function
        The marked one.

    Examples
    --------
    >>> import brainstate
    >>> import jax.numpy as jnp
    >>> import braintrace
    >>> class Net(brainstate.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.drive = braintrace.mark(brainstate.nn.Linear(3, 4))
    ...         self.gain = brainstate.ParamState(jnp.ones(4))
    ...     def init_state(self, batch_size=None, **_):
    ...         self.h = brainstate.HiddenState(jnp.zeros((batch_size, 4)))
    ...     def update(self, x):
    ...         self.h.value = 0.9 * self.h.value + self.drive(x)
    ...         return self.h.value * self.gain.value
    >>> learner = braintrace.compile(Net(), "d_rtrl", jnp.ones((2, 3)), batch_size=2)
    >>> list(learner.graph.trace_specs)
    ['drive/weight@mm0>h', 'drive/weight@elemwise1>h']
    """
    marked: T
    if isinstance(x, type):
        marked = _marked_class(x)
    elif isinstance(x, _FUNCTIONS):
        marked = _marked_function(x)
    else:
        marked = copy.copy(x)
        # Modules of Equinox are frozen.
        object.__setattr__(marked, "__class__", _marked_class(type(x)))
    return marked


def _marked_class(module: type) -> Any:
    methods = {
        name: _marked_function(getattr(module, name))
        for name in ("update", "__call__")
        if hasattr(module, name)
    }
    names = ("__module__", "__qualname__", "__doc__")
    namespace = {name: getattr(module, name) for name in names} | methods
    return types.new_class(module.__name__, (module,), exec_body=lambda ns: ns.update(namespace))


def _marked_function(function: Callable[..., Any]) -> Any:
    @functools.wraps(function)
    def marked(*args: Any, **kwargs: Any) -> Any:
        with jax.named_scope(SCOPE):
            return function(*args, **kwargs)

    return marked
