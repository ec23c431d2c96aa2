r"""Interface between `_core` and an online learning rule.

A `TraceMethod` contains every difference between two rules. `_core` runs steps and records the
residuals that the rule needs. Then the rule computes gradients and the next traces:

.. math::

    \epsilon^K = update(records, \epsilon^0), \qquad
    \nabla w = gradient(records, l, \epsilon^0).

All code that makes, reports, resets, saves or checks traces reads their `TraceSpec`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import jax

from .graph import ETraceGraph, Record, TraceSpecs
from .hidden_group import HiddenParamOpRelation

Weights: TypeAlias = dict[str, dict[str, jax.Array]]
"""Values of the trainable operands, by relation and name."""

Signal: TypeAlias = dict[str, jax.Array]
"""Derivatives of the loss by the name of a state (see `probed_step`), time first."""

Traces: TypeAlias = Mapping[str, Any]
"""Arrays in dicts with stable string keys, nested or not."""

Jacobian = Literal["none", "elementwise", "sparse", "layered", "full"]
"""The treatment of ETP operations on the path from old states to a state; see `TraceMethod`."""

FOLLOWS_ALL: frozenset[Jacobian] = frozenset({"sparse", "layered", "full"})
"""Full-Jacobian rules, which follow every parameter, marked or not; see `FlatState`."""


@dataclasses.dataclass(frozen=True)
class Records:
    """Residuals of the steps of a chunk, with a leading time axis except for `token`.

    Attributes
    ----------
    x
        Inputs of the operations, by the first relation that has this input.
    inputs
        The inputs of each step's program without parameters, in order.
    values
        Values that the local steps read, by name (see `braintrace._core.local_step`). Values that
        are the same in every step have a time axis of length 1.
    steps
        Number of steps.
    reset
        Flags of the samples that are reset before each step; ``None``: none.
    has_mask
        Whether some steps are masked, so that their learning signal is zero.
    token
        An ordering token: a flag that is always false. XLA cannot know it before all other readers
        of the traces before the chunk are computed; ``None``: no other readers. Traces that are
        neither read nor written before the token is known are updated in place.
    """

    x: dict[str, jax.Array]
    inputs: tuple[jax.Array, ...] = ()
    values: dict[str, jax.Array] = dataclasses.field(default_factory=dict)
    steps: int = 1
    reset: jax.Array | None = None
    has_mask: bool = False
    token: jax.Array | None = None

    @property
    def zeros_select(self) -> bool:
        """Whether a zero factor must remove NaN or infinity from a trace as well."""
        return self.has_mask or self.reset is not None


jax.tree_util.register_dataclass(
    Records,
    data_fields=["inputs", "values", "token", "reset", "x"],
    meta_fields=["has_mask", "steps"],
)


class Chunk(NamedTuple):
    """A recorded chunk.

    Attributes
    ----------
    graph, weights
        The compiled model, and the operands of its relations.
    records
        The residuals of its steps.
    """

    graph: ETraceGraph
    weights: Weights
    records: Records


Adjoints: TypeAlias = Mapping[int, Mapping[int, jax.Array]]
"""Derivatives by states per unit of each group, by its index and by state."""


class TraceMethod(Protocol):
    """An online learning rule: pure functions of a compiled model and arrays."""

    @property
    def needs(self) -> frozenset[Record]:
        """The residuals to record of every step."""

    @property
    def jacobian(self) -> Jacobian:
        """The treatment of ETP operations on the path from old states to a state.

        ``'elementwise'``: the path is truncated at each of them. ``'sparse'``: paths pass through,
        within the sparsity pattern of the traces. The graph has a `FlatState`
        with its `Structure`, operands are the parameters themselves, and learning signals are
        partial derivatives, as if no state depended on another. ``'full'``: paths pass through,
        with such a graph. The gradient of a chunk is reverse mode through the chunk, plus
        `carry_in_vjp` of the cotangent that reaches the states before it. ``'layered'``: the
        same, but paths from the old states of one layer to another layer are truncated.
        ``'none'``: paths pass through within the step, and none leads to the states before it.
        """

    @property
    def filters_readouts(self) -> bool:
        """Whether leaky readouts get filters, by which their gradients are exact."""
        return False

    def carries(self, relation: HiddenParamOpRelation) -> bool:
        """Test whether an ETP operation has traces; otherwise its weights are untraced.

        Untraced weights get the gradient of each step, with the states before it held constant. A
        full-Jacobian rule carries no operations: it has traces of parameters.
        """
        return True

    def check(self, graph: ETraceGraph) -> None:
        """Raise a `PrimitiveError` if the traces cannot carry an operation of the model."""
        return

    def trace_specs(self, graph: ETraceGraph, every_state: bool) -> TraceSpecs:
        """Return the arrays that the rule carries from step to step.

        Parameters
        ----------
        graph
            The compiled model.
        every_state
            Include the states that no later step reads elementwise: a gradient that passes back
            through coupling reads those too.
        """

    def fit(self, graph: ETraceGraph) -> "TraceMethod":
        """Return the method with what a compiled model needs."""
        return self

    def update(self, chunk: Chunk, traces: Traces) -> Traces:
        """Return the traces after a recorded chunk of one step or more.

        Traces before it that are known to be zero may be passed as shapes (see
        `braintrace._core.traces`), here and in `gradient`.
        """
        after = self.gradient(chunk, {}, traces)[1]
        assert after is not None  # a rule without this by-product has an `update` of its own
        return after

    def gradient(
        self, chunk: Chunk, signal: Signal, before: Traces, after: Traces | None = None
    ) -> tuple[Weights, Traces | None]:
        """Return the gradient of a recorded chunk, linear in the signal.

        Parameters
        ----------
        chunk, signal
            The chunk, and its learning signals.
        before
            Traces before the chunk.
        after
            Traces after it if they are already known, as for a single step.

        Returns
        -------
        gradients
            Gradients of the operands.
        after
            The traces after the chunk if they are a by-product, equal to the result of `update`;
            else None.
        """

    def carry_in_vjp(self, chunk: Chunk, mu: Signal, traces: Traces) -> Weights:
        """Return the gradient of the operands through the states before a window.

        Parameters
        ----------
        chunk
            The window, with or without its residuals.
        mu
            Derivative of the loss with respect to those states, by name and without a time axis;
            missing ones are zero.
        traces
            Traces before the window, of every state in ``mu``.
        """

    def late_gradient(
        self, chunk: Chunk, mu: Signal, before: Traces, after: Traces | None
    ) -> Weights:
        """Return `carry_in_vjp` of a step, the traces after which may be known."""
        return self.carry_in_vjp(chunk, mu, before)
