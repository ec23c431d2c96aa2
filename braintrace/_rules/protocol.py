"""The protocol of a learning rule that is written with public names alone."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import jax

from .._arguments import did_you_mean, shown
from .._errors import OptionError
from .site import Site, Trace

Jacobian = Literal["none", "elementwise", "diagonal", "layered", "full"]
METHODS = ("init", "advance", "contract")


@runtime_checkable
class Rule(Protocol):
    r"""A learning rule of your own: what it carries from step to step, and the gradient of that.

    Give an instance to `compile`, or to some parameters by ``rules``. A rule is a frozen dataclass
    with the attribute ``jacobian`` and three pure functions. They are called for each `Site`, and
    once for each compilation, as ``jax.jit`` calls a function.

    .. math::

        E^t = \mathrm{advance}(E^{t-1}, J^t, x^t, F^t), \qquad
        \nabla w = \sum_t \mathrm{contract}(E^t, \mu^t)

    ========================  ========================================================
    ``jacobian``              ``J``, what a step carries from the old states to the new
    ========================  ========================================================
    ``'none'``                None
    ``'elementwise'``         each element of a state to the same element (`D_RTRL`)
    ``'diagonal'``            the same, with the diagonal of products (`SnAp`, ``n=1``)
    ``'layered'``             all to all in each layer (`OSTLRecurrent`)
    ``'full'``                all to all (`RTRL`)
    ========================  ========================================================

    With the first three, :math:`\mu^t` is the derivative of the loss of step ``t`` with respect to
    the states after it. With the last two, a step is differentiated itself, :math:`\mu^t` goes
    through it to the states before, and :math:`E^{t-1}` is contracted. With a ``window``, the
    Jacobian carries traces alone: each window is differentiated in full.

    Examples
    --------
    A trace that decays by a fixed factor, whatever the network remembers:

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
        """What `advance` is given of a step's Jacobian."""

    def init(self, site: Site, /) -> Trace:
        """Return the trace at the start of a sequence, in any pytree.

        Leaves are arrays with an axis of samples in front, or `TraceSpec`, such as those of
        `Site.zeros`.
        """

    def advance(self, site: Site, trace: Trace, J: Any, x: Any, F: Any, /) -> Trace:
        """Return the trace after one step, of the same structure, shapes and dtypes.

        ``x`` is the operation's input (None: it has none), and ``F`` the derivative of the new
        states with respect to its output. The form of ``J`` and ``F`` is in the guide; the products
        of a `Site` take them as they are.
        """

    def contract(self, site: Site, trace: Trace, mu: Any, /) -> Mapping[str, jax.Array]:
        """Return the gradient that derivatives of the loss by the states give each operand."""


def check_rule(rule: Any) -> None:
    """Refuse what is not a rule.

    Raises
    ------
    OptionError
        Naming the rule and what it lacks.
    """
    name, jacobian, known = type(rule).__name__, rule.jacobian, get_args(Jacobian)
    if not dataclasses.is_dataclass(rule) or not _is_hashable(rule):
        raise OptionError(
            f"The learning rule `{name}` is {shown(rule)}; expected a frozen dataclass with fields "
            "that can be hashed (numbers, strings, tuples, no arrays), as learners compare rules."
        )
    if not isinstance(jacobian, str) or jacobian not in known:
        near = did_you_mean(jacobian, known) if isinstance(jacobian, str) else ""
        raise OptionError(
            f"`jacobian` of the learning rule `{name}` is {shown(jacobian)}; {near}"
            f"expected one of {', '.join(map(repr, known))}."
        )


def rule_in_words(rule: Any) -> str:
    """Return the name of a rule with its options, which the traces of a learner belong to."""
    options = (f"{field.name}={getattr(rule, field.name)!r}" for field in dataclasses.fields(rule))
    return f"{type(rule).__name__}({', '.join(options)})"


def missing_of_rule(value: Any) -> str:
    """Return what a value lacks of a rule, in brackets; empty if it has nothing of one."""
    names = ("jacobian", *METHODS)
    missing = [name for name in names if not hasattr(value, name)]
    if len(missing) == len(names):
        return ""
    if isinstance(value, type):
        return f" (an instance of it, not the class `{value.__name__}`)"
    return f" (`{type(value).__name__}` has no {', '.join(f'`{name}`' for name in missing)})"


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True
