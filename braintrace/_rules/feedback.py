"""D-RTRL for models whose readout sends errors back through its weight, or through a matrix."""

import dataclasses

from .._errors import CompilationError
from .._etrace_op.dense import feedback_primitives
from .._graph.graph import ETraceGraph
from .late import LateTraces


@dataclasses.dataclass(frozen=True)
class FeedbackTraces(LateTraces):
    """The traces of `D_RTRL`, for models with or without `feedback_matmul`.

    Attributes
    ----------
    rule
        Name of the rule for messages.
    is_random
        Whether errors pass through the matrix of a `feedback_matmul`.
    """

    rule: str
    is_random: bool = True

    def check(self, graph: ETraceGraph) -> None:
        """Refuse a model with the other kind of feedback."""
        # In a leaky readout with a filter, a `feedback_matmul` is an ordinary operation.
        program = (graph.traced.unfiltered or graph.traced).program
        primitives = {equation.primitive for equation in program.equations}
        has_matrix = not primitives.isdisjoint(feedback_primitives())
        if self.is_random and not has_matrix:
            raise CompilationError(
                f"`{self.rule}` sends errors back through a matrix of the readout, but the model "
                "has no `feedback_matmul`. Compute the output with "
                "`braintrace.nn.FeedbackLinear` or `braintrace.feedback_matmul`, or use `D_RTRL`, "
                "which sends errors back through the weight of the readout."
            )
        if has_matrix and not self.is_random:
            raise CompilationError(
                f"`{self.rule}` sends errors back through weights, but the model has a "
                "`feedback_matmul`. Use `braintrace.nn.Linear` or `braintrace.matmul` there, or "
                "`feedback='random'`."
            )
