"""The `Rule` protocol: a learning rule written with public names only."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import jax

from ..._errors import OptionError
from .site import Site, Trace

Jacobian = Literal["none", "elementwise", "layered", "full"]


@runtime_checkable
class Rule(Protocol):
    r"""Protocol of a user-defined learning rule: its traces, and the gradient from them.

    Pass an instance to `compile`, or to some parameters by ``rules``. A rule is a frozen dataclass
    with the attribute ``jacobian`` and three pure functions. The functions are called for each
    `Site`, once per compilation, as under ``jax.jit``.

    .. math::

        E^t = \mathrm{advance}(E^{t-1}, J^t, x^t, F^t), \qquad
        \nabla w = \sum_t \mathrm{contract}(E^t, \mu^t)

    ========================  ========================================================
    ``jacobian``              ``J``, the derivative of the new states by the old ones
    ========================  ========================================================
    ``'none'``                None
    ``'elementwise'``         each element of a state to the same element (`D_RTRL`)
    ``'layered'``             all to all in each layer (`OSTLRecurrent`)
    ``'full'``                all to all (`RTRL`)
    ========================  ========================================================

    With the first two, :math:`\mu^t` is the derivative of the loss of step ``t`` with respect to
    the states after it. With the last two, each step is differentiated in full, :math:`\mu^t` is
    the derivative with respect to the states before it, and :math:`E^{t-1}` is contracted. With a
    ``window``, each window is differentiated in full, and the Jacobian is used only for traces.

    Examples
    --------
    A trace that decays by a fixed factor, for every network:

    >>> import braintrace, dataclasses, jax, jax.numpy as jnp
    >>> @dataclasses.dataclass(frozen=True)
    ... class Decaying:
    ...     decay: float
    ...     jacobian = "none"
    ...
    ...     def init(self, site):
    ...         return site.zeros()
    ...
    ...     def advance(self, site, trace, J, x, F):
    ...         return jax.tree.map(lambda E, new: self.decay * E + new, trace, site.outer(F, x))
    ...
    ...     def contract(self, site, trace, mu):
    ...         return site.contract(mu, trace)
    >>> xs = jnp.ones((3, 1, 2))
    >>> model = braintrace.nn.IndRNN(2, 3)
    >>> learner = braintrace.compile(model, Decaying(0.9), xs[0], batch_size=1)
    >>> gradients = learner.etrace_grad(xs, step_fn=lambda x: learner(x).sum())
    >>> gradients[("u",)].shape
    (3,)
    """

    @property
    def jacobian(self) -> str:
        """The part of a step's Jacobian that `advance` receives."""

    def init(self, site: Site, /) -> Trace:
        """Return the trace at the start of a sequence, in any pytree.

        Leaves are arrays whose first axis is the samples, or `TraceSpec`, such as the leaves of
        `Site.zeros`.
        """

    def advance(self, site: Site, trace: Trace, J: Any, x: Any, F: Any, /) -> Trace:
        """Return the trace after one step, with the same structure, shapes and dtypes.

        ``x`` is the operation's input (None if it has no input), and ``F`` the derivative of the
        new states with respect to its output. The page *Write a learning rule*
        explains ``J`` and ``F``; pass them unchanged to the products of a `Site`.
        """

    def contract(self, site: Site, trace: Trace, mu: Any, /) -> Mapping[str, jax.Array]:
        """Return the gradient of each operand from the derivatives of the loss by the states."""


def check_rule(rule: Any) -> None:
    """Refuse a value that is not a rule.

    Raises
    ------
    OptionError
        Naming the rule and the reason.
    """
    name, jacobian, known = type(rule).__name__, rule.jacobian, get_args(Jacobian)
    if not dataclasses.is_dataclass(rule):
        raise OptionError(
            f"The learning rule `{name}` is {rule!r}; expected a frozen dataclass with fields "
            "that can be hashed (numbers, strings, tuples, no arrays), as learners compare rules."
        )
    if jacobian not in known:
        raise OptionError(
            f"`jacobian` of the learning rule `{name}` is {jacobian!r}; expected one of "
            f"{', '.join(map(repr, known))}."
        )


def rule_in_words(rule: Any) -> str:
    """Return the name of a rule with its options as text; traces belong to this text."""
    options = (f"{field.name}={getattr(rule, field.name)!r}" for field in dataclasses.fields(rule))
    return f"{type(rule).__name__}({', '.join(options)})"
