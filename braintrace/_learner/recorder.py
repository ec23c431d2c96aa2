"""What happens inside a learner call while a sequence gradient is recorded."""

import dataclasses
from typing import Any

import jax

from .._algorithms import ETraceAlgorithm, read_arguments, read_states, unwrap, write_states
from .._errors import OptionError
from .._executor import (
    Jacobians,
    Probes,
    Weights,
    recorded_step,
    restarted,
    restarted_probes,
    window_step,
)
from .._typing import Path, path_name


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

    def __post_init__(self) -> None:
        self._left = self._traced_values()

    def __call__(self, *arguments: Any) -> Any:
        """Run one step, with the model's States read and written."""
        self.check_states()
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
        self._left = self._traced_values()
        self.calls += 1
        return jax.tree.unflatten(graph.traced.output_tree, outputs)

    def check_states(self) -> None:
        """Refuse traced hidden states that are not as the last step left them.

        Raises
        ------
        OptionError
            If something else has written one.
        """
        for path, leaves in self._traced_values().items():
            if any(now is not left for now, left in zip(leaves, self._left[path], strict=True)):
                raise OptionError(
                    f"`step_fn` writes the hidden State '{path_name(path)}' itself, which the "
                    "traces would not follow. Change it in the model's `update`; to start a new "
                    "sequence, use `reset`."
                )

    def _traced_values(self) -> dict[Path, list[Any]]:
        states = self.algorithm.states_of_step
        groups = self.algorithm.graph.traced_groups
        paths = dict.fromkeys(state.path for group in groups for state in group.states)
        return {path: jax.tree.leaves(states[path].value) for path in paths}
