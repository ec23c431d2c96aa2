"""A stream in parts, each of which follows from its number, and a learner for it."""

import dataclasses
from typing import Any

import brainstate
import jax.numpy as jnp
import numpy as np

import braintrace

DELAY, BATCH, INPUTS, UNITS = 3, 8, 2, 24
NOISE = 0.05
BEGINNING, NOT_COUNTED = 0.002, 0.1
"""Of samples and steps: how many begin anew, and how many do not count."""

NOT_FINITE, RESET = 1, 2
"""Of four parts, one has inputs that are not numbers; before another all samples begin anew."""


@dataclasses.dataclass(frozen=True)
class Part:
    """Inputs ``(T, BATCH, INPUTS)``, targets ``(T, BATCH)``, weights ``(T,)`` and flags."""

    inputs: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    begins: np.ndarray

    def since(self, step: int) -> "Part":
        """Return what follows on a step."""
        return Part(*(getattr(self, field.name)[step:] for field in dataclasses.fields(self)))


def part(number: int, steps: int) -> Part:
    """Return a part of the stream; the target is the first input of some steps before."""
    before, signs = (
        np.random.default_rng(seed).choice(np.array([-1, 1], np.float32), (steps, BATCH, INPUTS))
        for seed in (number, number + 1)
    )
    random = np.random.default_rng([number, 0])
    targets = np.concatenate([before[-DELAY:], signs])[:-DELAY, :, 0]
    if number % 4 == NOT_FINITE:
        signs[random.integers(steps, size=2), random.integers(BATCH, size=2)] = np.nan
    weights = (random.random(steps) >= NOT_COUNTED).astype(np.float32)
    return Part(signs, targets, weights, random.random((steps, BATCH)) < BEGINNING)


class Network(brainstate.nn.Module):
    """A cell and a readout, with noise on the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = braintrace.nn.GRUCell(INPUTS, UNITS)
        self.readout = brainstate.nn.Linear(UNITS, 1)

    def update(self, x: Any) -> Any:
        noise = NOISE * brainstate.random.randn(*x.shape)
        return self.readout(self.cell(x + noise))[..., 0]


def learner() -> braintrace.Learner:
    """Return a learner that is the same in every process."""
    brainstate.random.seed(0)
    return braintrace.compile(Network(), "d_rtrl", jnp.zeros((BATCH, INPUTS)), batch_size=BATCH)
