r"""The seam between the executor and an online learning rule.

Everything in which two rules differ is one `TraceMethod`. The executor runs steps, records of
them what the rule needs, and asks the rule for gradients and for the traces afterwards:

.. math::

    \epsilon^K = \mathrm{update}(\text{records}, \epsilon^0), \qquad
    \nabla w = \mathrm{gradient}(\text{records}, l, \epsilon^0).

Whatever makes, reports, resets, saves or checks traces reads their `TraceSpec`.
"""

import dataclasses
from collections.abc import Mapping, Set
from typing import Any, Literal, Protocol, TypeAlias

import jax

from .._etrace_op import SideBySide, as_one
from .graph import ETraceGraph
from .relation import HiddenParamOpRelation
from .trace_spec import Record, TraceSpecs

Weights: TypeAlias = dict[str, dict[str, jax.Array]]
"""Values of the trainable operands, by relation and name."""

Signal: TypeAlias = dict[str, Any]
"""Derivatives of the loss by the name of a state (see `probed_step`), time first: arrays, or what a
rule makes of them."""

Traces: TypeAlias = Mapping[str, Any]
"""Arrays in dicts with stable string keys, nested or not."""

Boundary = Literal["closed", "cut", "diagonal", "neighbours", "layered", "passed"]
"""What a marked weight is on the way back from a state to the states before the step."""

FOLLOWS_ALL: frozenset[Boundary] = frozenset({"neighbours", "layered", "passed"})
"""Rules of the whole state, which follow every parameter, marked or not; see `WholeState`."""


@dataclasses.dataclass(frozen=True)
class Records:
    """What steps have left for the traces: time first, where it is an array, except for `never`.

    A transition that is the same in every step may have a time axis of length 1.

    Attributes
    ----------
    x
        Inputs of the operations, by the first relation that has this input; some of them
        `SideBySide` for a method that needs ``"x in parts"``.
    D
        Blocks of the transition of each group, by position; see `transition_key`.
    Df
        Derivatives of a state's new value with respect to an operation's output, in its layout, by
        relation and state.
    inputs
        What each step was run on: the inputs of its program that are no parameters, in order.
    restart
        Which samples have started anew before each step; ``None``: none.
    silent
        Names of the states whose learning signal is known to be zero.
    has_mask
        Whether there are steps whose loss does not count, so that their signal is zero.
    never
        A flag that is not set and not known before everything else that reads the traces before
        the chunk has been computed; ``None``: nothing else does. Traces that are not read, nor
        overwritten, before it is known are overwritten in place.
    """

    x: dict[str, jax.Array | SideBySide]
    D: dict[str, jax.Array]
    Df: dict[str, jax.Array]
    inputs: tuple[jax.Array, ...] = ()
    restart: jax.Array | None = None
    silent: frozenset[str] = frozenset()
    has_mask: bool = False
    never: jax.Array | None = None

    @property
    def num_steps(self) -> int:
        """Length of the recorded chunk; 1 where no operation has a trace."""
        recorded = jax.tree.leaves((self.Df, self.inputs))
        return int(recorded[0].shape[0]) if recorded else 1

    @property
    def zeros_select(self) -> bool:
        """Whether a factor of zero is to leave nothing of what it meets in a trace, NaN or not."""
        return self.has_mask or self.restart is not None


jax.tree_util.register_dataclass(
    Records,
    data_fields=["D", "Df", "inputs", "never", "restart", "x"],
    meta_fields=["has_mask", "silent"],
)


def inputs_for(needs: Set[Record], inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return inputs of operations as a rule with these needs takes them."""
    if "x in parts" in needs:
        return dict(inputs)
    return {key: as_one(x) for key, x in inputs.items()}


class TraceMethod(Protocol):
    """An online learning rule: pure functions of a compiled model and arrays."""

    @property
    def needs(self) -> frozenset[Record]:
        """What is to be recorded of every step."""

    @property
    def boundary(self) -> Boundary:
        """What a marked weight is on the way back from a state.

        ``'cut'``: the end. ``'diagonal'``: ``D`` has what one product, marked or plain, passes from
        each position to itself. ``'neighbours'``: a plain weight, as far as there are traces; the
        graph has a `WholeState` with its `Structure`, operands are the parameters themselves, and
        learning signals are those of states as if none of them were computed from another.
        ``'passed'``: a plain weight, and such a graph; the gradient of a chunk is reverse mode
        through the chunk and `entry_gradient` of what arrives before it. ``'layered'``: the
        same, but the end on the way from a layer to what another one was before the step.
        ``'closed'``: a plain weight within the step, but no way leads to the states before it.
        """

    def carries(self, relation: HiddenParamOpRelation) -> bool:
        """Tell whether an ETP operation has traces: else its weights are plain ones.

        The gradient of those is that of each step, with the states before it held constant. A rule
        that passes weights carries none: it has traces of parameters.
        """

    def check(self, graph: ETraceGraph) -> None:
        """Raise a `PrimitiveError` where these traces cannot carry a model's operations."""

    def trace_specs(self, graph: ETraceGraph, every_state: bool) -> TraceSpecs:
        """Return what is carried from step to step.

        Parameters
        ----------
        graph
            The compiled model.
        every_state
            Also for the states that no later step reads position by position: a gradient that
            goes back through mixing reads those too.
        """

    def signal(self, graph: ETraceGraph, records: Records, signal: Signal) -> Signal:
        """Return what the rule makes of the learning signals of a recorded chunk."""

    def update(
        self, graph: ETraceGraph, weights: Weights, records: Records, traces: Traces
    ) -> Traces:
        """Return the traces after a recorded chunk of one step or more.

        Traces before it that are known to be zero may be given by their shapes (see
        `braintrace._executor.zero`), here and in `gradient`.
        """

    def gradient(
        self,
        graph: ETraceGraph,
        weights: Weights,
        records: Records,
        signal: Signal,
        before: Traces,
        after: Traces | None = None,
    ) -> tuple[Weights, Traces | None]:
        """Return the gradient of a recorded chunk, linear in the signal.

        Parameters
        ----------
        graph, weights
            The compiled model, and the operands of its relations.
        records, signal
            Of the chunk; the signals as `signal` has returned them.
        before
            Traces before the chunk.
        after
            Those after it, if they are known already, as they are for a single step.

        Returns
        -------
        gradients
            Of the operands.
        after
            The traces after the chunk where they come along, equal to those of `update`, else None.
        """

    def entry_gradient(
        self,
        graph: ETraceGraph,
        weights: Weights,
        mu: Signal,
        traces: Traces,
        zeros_select: bool = False,
    ) -> Weights:
        """Return the gradient that reaches the operands through the states before a window.

        Parameters
        ----------
        graph, weights
            The compiled model, and the operands of its relations.
        mu
            Derivative of the loss with respect to those states, by name and without a time axis;
            zero for the ones that are missing.
        traces
            Traces before the window, of every state in ``mu``.
        zeros_select
            Whether a ``mu`` of zero is to leave nothing of a trace, NaN or not: where samples may
            start anew in the window, or losses not count.
        """
