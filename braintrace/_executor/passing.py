"""What rules that pass weights have in common: gradients go back through the steps themselves."""

import dataclasses
from typing import ClassVar

from .._graph import (
    Boundary,
    ETraceGraph,
    HiddenParamOpRelation,
    Records,
    Signal,
    Traces,
    Weights,
)


@dataclasses.dataclass(frozen=True)
class PassingTraces:
    """The parts of a `TraceMethod` that are the same for all rules with this boundary."""

    boundary: ClassVar[Boundary] = "passed"

    def carries(self, relation: HiddenParamOpRelation) -> bool:
        """Tell that traces are those of parameters, marked or not."""
        return False

    def check(self, graph: ETraceGraph) -> None:
        """Accept every operation that has a derivative."""

    def signal(self, graph: ETraceGraph, records: Records, signal: Signal) -> Signal:
        """Return the learning signals as they are."""
        return signal

    def gradient(
        self,
        graph: ETraceGraph,
        weights: Weights,
        records: Records,
        signal: Signal,
        before: Traces,
        after: Traces | None = None,
    ) -> tuple[Weights, Traces | None]:
        """Not called: the gradient goes back through the steps."""
        raise NotImplementedError
