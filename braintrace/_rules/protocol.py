r"""Protocol of a learning rule, and its sites: the places where it has a trace.

An ETP operation has a site for each hidden group that it reaches, with arrays in the layout of its
output. A full-Jacobian rule has one site: all hidden states of a sample as one vector, with all
parameters that reach them. Both have the same products with a trace :math:`E` of the shape of the
parameters, so one rule runs with every Jacobian:

.. math:: J E, \qquad F x, \qquad < \mu, E >.
"""

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, Protocol, TypeAlias, get_args, runtime_checkable

import jax

from .._errors import OptionError
from .._graph.graph import TraceSpec
from .._typing import PyTree

NO_OPERATION = (
    "With a `jacobian` of 'layered' or 'full' a site is all hidden states, not one operation. Use "
    "another `jacobian`, or `Site.zeros`."
)

Trace: TypeAlias = PyTree
"""The trace of one site: arrays in any pytree."""


@dataclasses.dataclass(frozen=True, eq=False)
class Site(abc.ABC):
    """The place of one trace of a `Rule`: an operation and hidden states that it reaches.

    An ETP operation has a site for each group of hidden states that it reaches. With a ``jacobian``
    of ``'layered'`` or ``'full'``, a model has a single site: all hidden states, and all parameters
    that reach them.

    Attributes
    ----------
    name
        The operation, its parameters and the line of the call, for messages.
    key
        Prefix of the names of its traces.
    relation
        Key of the operation in the report; ``None`` for all hidden states at once.
    states
        Names of the hidden states.
    samples
        Shape of an array with one number for each sample: ``(5,)``, or ``()`` without a batch.
    operands
        Arrays that have gradients, by the operation's names (``'weight'``, ``'bias'``), or
        parameters by path. In `Rule.init`, their shapes and dtypes.
    new_states
        In `Rule.advance` with a ``jacobian`` of ``'none'`` or ``'elementwise'``, the values of the
        states after the step, ``{state: array}`` in the layout of the operation's output; else
        empty.

    Notes
    -----
    The products take and return traces of the form of `zeros`. They are linear in each argument.

    Examples
    --------
    >>> import braintrace, dataclasses, jax.numpy as jnp
    >>> @dataclasses.dataclass(frozen=True)
    ... class LastStep:
    ...     jacobian = "none"
    ...
    ...     def init(self, site):
    ...         return site.zeros()
    ...
    ...     def advance(self, site, trace, J, x, F):
    ...         return site.outer(F, x)
    ...
    ...     def contract(self, site, trace, mu):
    ...         return site.contract(mu, trace)
    >>> x = jnp.ones((5, 2))
    >>> learner = braintrace.compile(braintrace.nn.IndRNN(2, 3), LastStep(), x, batch_size=5)
    >>> for name, trace in learner.functional().state().traces.items():
    ...     print(name, trace.shape)
    W/weight@mm1>h['h']['bias'] (5, 3)
    W/weight@mm1>h['h']['weight'] (5, 2, 3)
    u@elemwise0>h['h']['weight'] (5, 3)
    """

    name: str
    key: str
    relation: str | None
    states: tuple[str, ...]
    samples: tuple[int, ...]
    operands: Mapping[str, Any]
    new_states: Mapping[str, jax.Array] = dataclasses.field(default_factory=dict, kw_only=True)

    @abc.abstractmethod
    def zeros(self) -> Trace:
        """Return a trace of zeros for `Rule.init`: the derivative of the states by the operands.

        It is ``{state: {operand: leaf}}``, or for all hidden states ``{parameter: leaf}`` with
        leaves ``(samples, entries of the states, *shape)``. A leaf is a `TraceSpec`.
        """

    def input_zeros(self) -> Any:
        """Return zeros for `Rule.init` like the operation's input, to filter it; see `filtered`.

        The result is ``None``, an empty pytree, for an operation without an input.

        Raises
        ------
        PrimitiveError
            If the derivative of the operation is not linear in its input.
        """
        raise OptionError(NO_OPERATION)

    def output_zeros(self) -> dict[str, TraceSpec]:
        """Return zeros for `Rule.init` like ``F``, for every state."""
        raise OptionError(NO_OPERATION)

    def filtered(self, x_trace: Any, x: Any) -> Any:
        """Return ``x_trace + x``, a sum of inputs; for indices, a table of counts."""
        raise OptionError(NO_OPERATION)

    def pull_back(self, x_trace: Any, signal: jax.Array) -> dict[str, jax.Array]:
        """Return the gradient of each operand from a derivative of the output, summed over samples.

        ``x_trace`` replaces the input, and ``signal`` has the layout of the output.
        """
        raise OptionError(NO_OPERATION)

    @abc.abstractmethod
    def multiply(self, J: Any, trace: Trace) -> Trace:
        """Return ``J E``, the trace propagated by one step."""

    @abc.abstractmethod
    def outer(self, F: Any, x: Any) -> Trace:
        """Return ``F x``, the derivative of the new states with the old ones held constant."""

    @abc.abstractmethod
    def contract(self, mu: Any, trace: Trace) -> dict[str, jax.Array]:
        """Return ``<mu, E>``, the gradient of each operand, summed over samples."""


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
        new states with respect to its output. Pass ``J`` and ``F`` unchanged to the products of a
        `Site`: they have the entries that are not zero by the structure of the step. The section
        *Write a learning rule* of *One formula* explains them.
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
    if not dataclasses.is_dataclass(rule) or type(rule).__hash__ is None:
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
