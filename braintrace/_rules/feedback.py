"""D-RTRL for models whose readout sends errors back through a matrix of its own."""

import dataclasses

from .._errors import CompilationError
from .._etrace_op.dense import feedback_primitives
from .._graph.graph import ETraceGraph
from .d_rtrl import ParameterTraces


@dataclasses.dataclass(frozen=True)
class FeedbackTraces(ParameterTraces):
    """The traces of `D_RTRL`, for models with `feedback_matmul`."""

    def check(self, graph: ETraceGraph) -> None:
        """Refuse a model without this operation."""
        # In a leaky readout with a filter, a `feedback_matmul` is an ordinary operation.
        program = (graph.traced.unfiltered or graph.traced).program
        primitives = {equation.primitive for equation in program.equations}
        if primitives.isdisjoint(feedback_primitives()):
            raise CompilationError(
                "`RFLO` sends errors back through a matrix of the readout, but the model has no "
                "`feedback_matmul`. Compute the output with `braintrace.nn.FeedbackLinear` or "
                "`braintrace.feedback_matmul`, or use `D_RTRL`, which sends errors back through "
                "the weight of the readout."
            )
