"""What happens inside a learner call while a sequence gradient is recorded."""

import dataclasses
from typing import Any

import jax

from .._algorithms import ETraceAlgorithm, read_arguments, read_states, unwrap, write_states
from .._executor import (
    Jacobians,
    Probes,
    Weights,
    recorded_step,
    restarted,
    restarted_probes,
    window_step,
)


@dataclasses.dataclass
class Recorder:
    """Stands in for the algorithm during one step of a recorded chunk.

    Attributes
    ----------
    algorithm
        The algorithm.
    weights
        Operands of the relations, fixed over the chunk.
    probes
        Zeros that are added to the hidden states, to be differentiated; ``None`` where the
        step is differentiated in full instead.
    restart
        Which samples have started anew before the step; ``None``: none.
    calls
        How often the step function has called the learner.
    records
        The Jacobians of the step.
    """

    algorithm: ETraceAlgorithm
    weights: Weights
    probes: Probes | None
    restart: jax.Array | None
    calls: int = 0
    records: Jacobians | None = None

    def __call__(self, *arguments: Any) -> Any:
        """Run one step, with the model's States read and written."""
        graph = self.algorithm.graph
        states = self.algorithm.states_of_step
        inputs = {
            **read_arguments(graph, unwrap(arguments)),
            **read_states(graph, states),
        }
        if self.probes is None:
            outputs, new_states, self.records = window_step(graph, inputs)
        else:
            probes = self.probes
            if self.restart is not None:
                probes = restarted_probes(graph, probes, self.restart)
            outputs, new_states, self.records = recorded_step(graph, inputs, self.weights, probes)
        if self.restart is not None:
            self.records = restarted(graph, self.records, self.restart)
        write_states(graph, states, new_states)
        self.calls += 1
        return jax.tree.unflatten(graph.traced.output_tree, outputs)
