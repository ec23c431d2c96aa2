"""Stacks of ``braintrace.nn`` layers as people build them, with a plain readout."""

import dataclasses
import functools
from typing import Any

import brainstate
import jax

import braintrace

INPUTS, OUTPUTS = 64, 10


@dataclasses.dataclass(frozen=True)
class Layers:
    """Layers of one kind: the name of the cell in ``braintrace.nn``, and sizes."""

    cell: str
    layers: int
    hidden: int


class Model(brainstate.nn.Module):
    """Layers of one kind, and a readout that no ETP operation uses."""

    def __init__(self, stack: Layers) -> None:
        super().__init__()
        brainstate.random.seed(0)
        make, hidden = getattr(braintrace.nn, stack.cell), stack.hidden
        inputs = [INPUTS, *[hidden] * (stack.layers - 1)]
        self.layers = [make(size, hidden) for size in inputs]
        self.out = brainstate.nn.Linear(hidden, OUTPUTS)

    def update(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


@dataclasses.dataclass(frozen=True)
class StackTask:
    """A stack with the sequences that it learns.

    Attributes
    ----------
    stack
        Cells and sizes.
    steps, batch
        Length of a sequence, and number of sequences at a time.
    """

    stack: Layers
    steps: int
    batch: int

    @functools.cached_property
    def data(self) -> tuple[Any, Any]:
        """Inputs and targets, time first."""
        keys = jax.random.split(jax.random.key(1))
        shape = (self.steps, self.batch)
        return (
            jax.random.normal(keys[0], (*shape, INPUTS)),
            jax.random.normal(keys[1], (*shape, OUTPUTS)),
        )

    @functools.cached_property
    def learners(self) -> dict[str, Any]:
        """Learners that ways share."""
        return {}

    def model(self) -> Model:
        """Return a new model; its parameters are the same at every call."""
        return Model(self.stack)
