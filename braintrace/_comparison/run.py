"""Runs of one rule on the data of a comparison."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import brainstate
import jax
import saiunit

from .._algorithms import ETraceAlgorithm
from .._checks import is_quantity
from .._function_model import gradients_by_path
from .._learner import compile
from .._learner.driver import lower_call
from .._rules import Rule
from .._typing import Path, PyTree
from .workload import Workload


class RuleRun:
    """The gradient of a sequence by one rule, on a copy of the model.

    Parameters
    ----------
    work
        Model, data and loss.
    algorithm, options
        The rule and its options, for `braintrace.compile`.

    Attributes
    ----------
    learner
        The learner of the copy.
    """

    def __init__(
        self,
        work: Workload,
        algorithm: str | type[ETraceAlgorithm] | Rule,
        options: Mapping[str, Any],
    ) -> None:
        model = brainstate.graph.clone(work.model)
        self.learner = learner = compile(
            model,
            algorithm,
            *work.arguments,
            batch_size=work.batch_size,
            vmap=work.vmap,
            **options,
        )

        def step_fn(x: PyTree) -> PyTree:
            loss = work.step_fn(learner, x)
            return saiunit.get_mantissa(loss) if is_quantity(loss) else loss

        self._work, self._step_fn = work, step_fn

    def __call__(self, start: Mapping[Path, PyTree]) -> dict[Path, PyTree]:
        """Return the gradient from given values of the model's States, after a reset."""
        states = self.learner.algorithm.model.states()
        for path, value in start.items():
            states[path].value = value
        work = self._work
        found = self.learner.etrace_grad(work.xs, step_fn=self._step_fn, mask=work.mask)
        gradients = gradients_by_path(self.learner.algorithm.model, found)
        jax.block_until_ready(gradients)
        return gradients

    @property
    def traces(self) -> int:
        """Bytes of the traces."""
        carried = self.learner.report().carried_bytes
        assert carried is not None
        return carried

    def temp_bytes(self) -> int:
        """Return the temporary memory of the compiled program."""
        options = {"step_fn": self._step_fn, "mask": self._work.mask}
        lowered = lower_call(self.learner, "etrace_grad", self._work.xs, **options)
        return int(lowered.compile().memory_analysis().temp_size_in_bytes)
