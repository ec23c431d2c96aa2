"""Forms of traces between two programs: arrays, known zeros, or deferred.

Each form is a pytree, so JAX compiles a program for each, also inside a user's ``jit``: one that
starts from zeros has no product with old traces, and one that ends with deferred traces does not
compute them. Loops need a constant structure. In the body of a ``scan``, ``while_loop`` or
``cond``, all results are therefore arrays.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, TypeGuard

import jax

from .._graph import Traces


class Finish(Protocol):
    """Program that computes deferred traces; see `Program`."""

    def __call__(self, *arguments: Any, in_place: bool, done: list[Any]) -> None: ...


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Zero:
    """Traces that are zero: a pytree without leaves."""


@dataclasses.dataclass(frozen=True)
class Deferred:
    """Traces after a sequence, which a program of its own computes when they are read.

    Attributes
    ----------
    sources
        What this program reads: the operands, and the recorded values of the steps.
    before
        The traces before these steps.
    finish
        The program: ``(sources, before) -> traces``.
    is_double
        Whether 64-bit numbers were enabled in the call.
    """

    sources: Any
    before: "Traces | Zero"
    finish: Finish
    is_double: bool

    def compute(self, done: list[Traces], in_place: bool = False) -> Traces:
        """Return the traces; an interrupted computation continues with the same list."""
        if not done:
            with jax.enable_x64(self.is_double):
                self.finish(self.sources, self.before, in_place=in_place, done=done)
        return done[0]


jax.tree_util.register_dataclass(Deferred, ["sources", "before"], ["finish", "is_double"])

Form: TypeAlias = Traces | Zero | Deferred


def is_settled(form: Form) -> TypeGuard[Traces]:
    """Test whether traces are arrays."""
    return not isinstance(form, Zero | Deferred)


def settled(form: Form, zeros: Callable[[], Traces]) -> Traces:
    """Return traces as arrays.

    Parameters
    ----------
    form
        The traces.
    zeros
        Returns zero traces.
    """
    if isinstance(form, Zero):
        return zeros()
    return form.compute([]) if isinstance(form, Deferred) else form
