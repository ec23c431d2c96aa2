"""What a model of the zoo is: a brainstate module, and what the compiler should find in it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import brainstate
import jax
import jax.numpy as jnp
import numpy as np

BATCH, INPUTS, H, OUTPUTS = 2, 3, 4, 2


@dataclass(frozen=True, eq=False)
class ZooModel:
    """One model.

    module: its class.
    relations: ``"parameters -> states"`` of every relation in program order; several groups are
        set apart by ``|``, states in alphabetical order.
    groups: the states of every hidden group in alphabetical order, ``"V, a"``.
    diagnostics: kinds of the diagnostics that the compiler gives.
    diagonal: every path from state to state is position by position, so D-RTRL equals BPTT.
    spiking: the module calls `marks.spike`.
    shape: of the input of one step.
    output: of the output of one step.
    canonical: {state: (function, inverse)} that bring states of one group into one layout.
    by_day: {learning rule: the paths of `zoo_runs.PATHS` on which it runs without `--nightly`}.
    """

    name: str
    module: Callable
    relations: tuple[str, ...]
    groups: tuple[str, ...]
    diagnostics: frozenset[str]
    diagonal: bool = False
    spiking: bool = False
    shape: tuple[int, ...] = (BATCH, INPUTS)
    output: tuple[int, ...] = (BATCH, OUTPUTS)
    canonical: dict = field(default_factory=dict)
    by_day: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def build(self):
        """A fresh model with its states initialised."""
        brainstate.random.seed(7)
        model = self.module()
        brainstate.nn.init_all_states(model, batch_size=BATCH)
        return model

    def named_groups(self):
        """{group: (state, ...)} for the oracles."""
        return {group: tuple(group.split(", ")) for group in self.groups}


MODELS: list[ZooModel] = []


def zoo(*relations, groups, diagnostics=(), **options):
    """Add the decorated module to the zoo, under its class's name."""

    def add(module):
        MODELS.append(
            ZooModel(
                name=module.__name__,
                module=module,
                relations=relations,
                groups=groups if isinstance(groups, tuple) else (groups,),
                diagnostics=frozenset(diagnostics),
                **options,
            )
        )
        return module

    return add


class Cell(brainstate.nn.Module):
    """A module whose weights and hidden states are declared by name and shape.

    weights: {name: shape, or a pytree of shapes}; drawn from one seeded generator.
    states: {name: shape of one sample}; the batch axis is put in front.
    gain: scale of the weight matrices.
    """

    weights: dict = {}
    states_of: dict = {}
    gain = 1.0

    def __init__(self):
        super().__init__()
        generator = np.random.default_rng(3)
        for name, shape in self.weights.items():
            drawn = jax.tree.map(lambda s: _draw(generator, s, self.gain), shape, is_leaf=_is_shape)
            setattr(self, name, brainstate.ParamState(drawn))

    def init_state(self, batch_size=None, **_):
        for name, shape in self.states_of.items():
            setattr(self, name, brainstate.HiddenState(start((batch_size, *shape))))


def start(shape):
    """Values of an initial state: not zero, so that the first step counts."""
    return jnp.asarray(np.linspace(-0.3, 0.5, int(np.prod(shape))).reshape(shape), float)


def _draw(generator, shape, gain):
    scale = gain / np.sqrt(np.prod(shape[:-1])) if len(shape) > 1 else 0.5
    return jnp.asarray(scale * generator.standard_normal(shape), float)


def _is_shape(value):
    return isinstance(value, tuple) and all(isinstance(n, int) for n in value)


REFUSED = {
    "LeakInInnerLoops": "`while` loop of unknown length",
    "DelayedRecurrence": "carries values that depend on weights",
    "DelayedSelfInhibition": "carries values that depend on weights",
    "FilteredReadout": "carries values that depend on weights",
}
