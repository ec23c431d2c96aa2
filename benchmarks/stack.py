"""Stacks of ``braintrace.nn`` layers as people build them, with a plain readout."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import brainstate
import jax
import jax.numpy as jnp

import braintrace

from . import oracles, stack_oracles
from .stack_oracles import Layers
from .subjects import ALPHA, RANDOM, matmul_rounding

INPUTS, OUTPUTS = 64, 10
TOLERANCE = 1e-3
"""Largest deviation: a unit of relu that round-off moves across zero counts or does not."""


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

    @functools.cached_property
    def _expected(self) -> dict[tuple[str, bool], Any]:
        return {}

    def expected(self, algorithm: str, carrying: bool = False) -> Any:
        """Return the gradient of the sequence; carrying on, of the same sequence once more."""
        key = (algorithm, carrying)
        if key not in self._expected:
            gradient = {
                "bptt": stack_oracles.bptt(self.stack),
                "rtrl": stack_oracles.bptt(self.stack),
                "d_rtrl": stack_oracles.d_rtrl(self.stack),
                "es_d_rtrl": stack_oracles.es_d_rtrl(self.stack, ALPHA),
            }[algorithm]
            data, mask = self.data, jnp.ones(self.steps)
            if carrying:
                data = jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf]), data)
                mask = jnp.concatenate([jnp.zeros(self.steps), mask])
            states = self.model().states(brainstate.ParamState)
            parameters = {path: state.value for path, state in states.items()}
            self._expected[key] = jax.jit(gradient)(parameters, *data, mask)
        return self._expected[key]

    def deviation(self, algorithm: str, carrying: bool = False) -> Callable[[Any], float] | None:
        """Return what tells how far gradients are from the oracle, if there is one."""
        if algorithm in RANDOM:
            return None
        return lambda found: oracles.deviation(
            _flat(found), _flat(self.expected(algorithm, carrying))
        )

    @property
    def tolerance(self) -> float:
        """Largest deviation from the oracle."""
        return max(TOLERANCE, 30 * matmul_rounding())


def _flat(gradients: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_flatten_with_path(dict(gradients))[0]
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
